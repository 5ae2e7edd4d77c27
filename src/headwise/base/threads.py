"""Work side by side on threads of this process, each with its share of torch's own threads.

The operations of a small layer are too short to be divided among many cores: whole windows of a text keep more of
them busy.

Results come in the order of the items, and sums are made in the caller's thread, so that they do not depend on which
item is finished first. Solutions of layers, which take the most memory, are made one at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

WORKERS = 2
"""The number of items that are worked on at a time. Each needs memory of its own."""


class Workers:
    """Threads that work side by side; see `workers`.

    Args:
        pool: the threads; None where all is done in the caller's.
    """

    def __init__(self, pool: ThreadPoolExecutor | None) -> None:
        self._pool = pool

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield the result of each item, in their order, while the next ones are worked on.

        Up to `WORKERS` + 1 results are in memory.

        For example ``sum(workers.map(lambda window: loss(window), range(16)))``.

        Args:
            function: computes a result of an item, in a thread of its own; it changes nothing that other calls read.
            items: the items, which are taken in the caller's thread.
        """
        if self._pool is None:
            yield from map(function, items)
            return
        is_inference, has_gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        is_cast, cast_dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

        def work(item: Item) -> Result:
            # Each thread has settings of its own.
            cast = torch.autocast("cpu", cast_dtype, enabled=is_cast)
            with torch.inference_mode(is_inference), torch.set_grad_enabled(has_gradients), cast:
                return function(item)

        waiting: deque[Future[Result]] = deque()
        try:
            for item in items:
                waiting.append(self._pool.submit(work, item))
                if len(waiting) > WORKERS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute on so many threads within a block.

    For example ``with torch_threads(1): …`` around operations that are too short to be divided.

    Args:
        count: the number of threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def workers() -> Iterator[Workers]:
    """Threads that work side by side within a block.

    With a single thread of torch, a GPU as the default device, or a mode that watches torch's operations, all is done
    in the caller's thread. Otherwise torch has a part of its threads within the block, elsewhere in the process too.

    For example ``with workers() as threads: losses = list(threads.map(loss, windows))``.
    """
    share = _share()
    if share == 0:
        yield Workers(None)
        return
    pool = ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(share,))
    with torch_threads(share), pool:
        yield Workers(pool)


def _share() -> int:
    """The number of torch's threads that each worker has; 0 where all is done in the caller's thread."""
    is_watched = torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0
    return 0 if is_watched else torch.get_num_threads() // WORKERS


def map_in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield the result of each item, in their order, while the next ones are worked on; see `Workers.map`.

    A single item is worked on in the caller's thread, on all of torch's threads.

    For example ``sum(map_in_threads(lambda window: loss(window), range(16)))``.

    Args:
        function: computes a result of an item, in a thread of its own; it changes nothing that another call reads.
        items: the items, which are taken in the caller's thread.
    """
    remaining = iter(items)
    first = list(islice(remaining, WORKERS)) if _share() else []
    if len(first) < WORKERS:
        yield from map(function, chain(first, remaining))
        return
    with workers() as threads:
        yield from threads.map(function, chain(first, remaining))
