"""Several processes on one conversion, as ``torchrun`` starts them; alone, each of these does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist
from torch import Tensor

from headwise.checkpoints import FolderWriter


def rank() -> int:
    """This process's number; the first writes what all have made."""
    return dist.get_rank() if _is_shared() else 0


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if _is_shared() else 1


def my_windows(count: int) -> range:
    """The windows this process takes: consecutive ones, all processes' together every one of ``count``."""
    return range(rank() * count // world_size(), (rank() + 1) * count // world_size())


def all_sum(tensor: Tensor) -> Tensor:
    """The sum of all processes' tensors, in place; of Gram matrices it is to be of float64, like they are."""
    if _is_shared():
        dist.all_reduce(tensor)
    return tensor


def barrier() -> None:
    """Wait until all processes are here."""
    if _is_shared():
        dist.barrier()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that all processes have, for as long as the block takes."""
    with TemporaryDirectory() if rank() == 0 else nullcontext() as made:
        named = [made]
        if _is_shared():
            dist.broadcast_object_list(named)
        assert named[0] is not None
        yield Path(named[0])
        barrier()  # the others may still be at its files


@contextmanager
def first_enters(writer: FolderWriter) -> Iterator[FolderWriter]:
    """The first process writes; the others begin once it has the folder, and end once the folder is in its place."""
    with writer if rank() == 0 else nullcontext():
        barrier()
        yield writer
    barrier()


def _is_shared() -> bool:
    return dist.is_available() and dist.is_initialized()
