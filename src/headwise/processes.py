"""Several processes on one conversion, as ``torchrun`` starts them; alone, each of these does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

Writer = TypeVar("Writer", bound=AbstractContextManager[object])


def process_index() -> int:
    """The number of this process; the first, 0, writes what all have computed."""
    return dist.get_rank() if _are_several() else 0


def process_count() -> int:
    """How many processes there are."""
    return dist.get_world_size() if _are_several() else 1


def my_windows(count: int) -> range:
    """This process's share of ``count`` windows: consecutive ones, and all processes' together are all of them."""
    return range(process_index() * count // process_count(), (process_index() + 1) * count // process_count())


def all_sum(tensor: Tensor) -> Tensor:
    """The sum of all processes' tensors, in place; Gram matrices are to be summed in float64."""
    if _are_several():
        dist.all_reduce(tensor)
    return tensor


def barrier() -> None:
    """Wait until all processes are here."""
    if _are_several():
        dist.barrier()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that all processes have, for as long as the block takes."""
    with TemporaryDirectory() if process_index() == 0 else nullcontext() as folder:
        names = [folder]
        if _are_several():
            dist.broadcast_object_list(names)
        assert names[0] is not None
        yield Path(names[0])
        barrier()  # the others may still be at its files


@contextmanager
def first_enters(writer: Writer) -> Iterator[Writer]:
    """The first process writes; the others begin once it has the folder, and end once the folder is in its place."""
    with writer if process_index() == 0 else nullcontext():
        barrier()
        yield writer
    barrier()


def _are_several() -> bool:
    return dist.is_available() and dist.is_initialized()
