"""Refuse weights whose matrices cannot be decomposed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headwise.errors import CheckpointError
from headwise.models.checkpoints import Checkpoint


@contextmanager
def refuse_unsolvable(checkpoint: Checkpoint) -> Iterator[None]:
    """Refuse weights by name where a decomposition does not converge: their products leave the range of float64.

    Args:
        checkpoint: the source.

    Raises:
        CheckpointError: torch raised a ``LinAlgError`` in the block.
    """
    try:
        yield
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, and not in its list
        rule = "are so large or so small that matrices made of them cannot be decomposed"
        raise CheckpointError("weights", str(checkpoint.path), rule) from None
