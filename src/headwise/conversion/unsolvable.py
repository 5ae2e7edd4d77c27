"""Weights of sizes that nothing can be solved for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headwise.checkpoints import Checkpoint
from headwise.errors import CheckpointError


@contextmanager
def refuse_unsolvable(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn a decomposition that does not converge into one line: the source's numbers leave the range of float64.

    Args:
        checkpoint: the source.

    Raises:
        CheckpointError: in the place of torch's own error.
    """
    try:
        yield
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, and not in its list
        rule = "are so large or so small that matrices made of them cannot be decomposed"
        raise CheckpointError("weights", str(checkpoint.path), rule) from None
