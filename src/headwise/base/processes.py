"""Collective operations of the processes that ``torchrun`` starts; in a single process they do nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

WAIT = timedelta(days=2)
"""How long a process waits for another, which may be solving a large layer. The end of a process closes its
connection, so that the others notice at once."""

Result = TypeVar("Result")
Writer = TypeVar("Writer", bound=AbstractContextManager[object])


def process_index() -> int:
    """The number of this process; process 0 writes the results of all."""
    return dist.get_rank() if _are_several() else 0


def process_count() -> int:
    """The number of processes."""
    return dist.get_world_size() if _are_several() else 1


def my_windows(count: int) -> range:
    """This process's consecutive share of ``count`` windows; each window belongs to one process."""
    return range(process_index() * count // process_count(), (process_index() + 1) * count // process_count())


def all_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor over all processes, in place.

    Args:
        tensor: a tensor that has one shape and dtype in all processes; float64 for Gram matrices, to lose no digits.
    """
    if _are_several():
        dist.all_reduce(tensor)
    return tensor


def barrier() -> None:
    """Wait until all processes have called this."""
    if _are_several():
        dist.barrier()


def on_main_process(work: Callable[[], Result]) -> Result | None:
    """Let the first process do something that the others wait for, such as writing a file that they read.

    Returns:
        What it returned, in the first process; None in the others.
    """
    result = work() if process_index() == 0 else None
    barrier()
    return result


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A temporary folder that all processes share until the end of the block."""
    with TemporaryDirectory() if process_index() == 0 else nullcontext() as folder:
        names = [folder]
        if _are_several():
            dist.broadcast_object_list(names)
        assert names[0] is not None
        yield Path(names[0])
        barrier()  # other processes may still use its files


@contextmanager
def entered_first(writer: Writer) -> Iterator[Writer]:
    """Enter a writer's context in the first process only.

    The others begin the block once the writer has its folder, and leave it once the folder is in its place.
    """
    with writer if process_index() == 0 else nullcontext():
        barrier()
        yield writer
        barrier()  # other processes may still use its files
    barrier()


def _are_several() -> bool:
    return dist.is_available() and dist.is_initialized()
