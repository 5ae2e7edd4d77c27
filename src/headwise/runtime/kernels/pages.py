"""Where the tokens of sequences lie in a paged cache."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Pages(NamedTuple):
    """Where the tokens of a batch of sequences lie, in pages of a cache ``[all pages, 1, tokens of a page, bytes]``.

    Attributes:
        table: int32 ``[B, most pages]``, the pages of each sequence in their order; behind its end anything.
        lengths: int32 ``[B]``, the tokens of each sequence.
    """

    table: Tensor
    lengths: Tensor
