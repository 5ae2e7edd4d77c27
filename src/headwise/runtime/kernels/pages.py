"""Where the tokens of sequences lie in a paged cache."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Pages(NamedTuple):
    """Where the tokens of a batch of sequences lie, in pages of a cache ``[all pages, 1, tokens of a page, bytes]``.

    Kernels read the pages that it names, and check no number: that each is one of the cache's, and that the table has
    room for the lengths, is for the engine that keeps the table.

    Attributes:
        table: int32 ``[B, most pages]``, the pages of each sequence in their order; behind its end anything.
        lengths: int32 ``[B]``, the tokens of each sequence.
    """

    table: Tensor
    lengths: Tensor
