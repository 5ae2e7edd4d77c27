"""Work side by side on threads of this process, each with its share of torch's own threads.

The operations of a small layer are too short to be divided among many cores: whole windows of a text keep more of
them busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, islice
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

WORKERS = 2
"""The number of items that are worked on at a time. Each needs memory of its own."""


class _Settings:
    """Those of torch's settings that each thread has for itself, as the calling thread has them."""

    def __init__(self) -> None:
        self._has_gradients, self._is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def entered(self) -> ExitStack:
        """A block with these settings, for another thread."""
        is_cast, dtype = self._autocast
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._is_inference))
            stack.enter_context(torch.set_grad_enabled(self._has_gradients))
            stack.enter_context(torch.autocast("cpu", dtype, enabled=is_cast))
            return stack.pop_all()


def side_by_side(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield the result of each item, in their order, while the next ones are worked on.

    With a single thread of torch, a single item, a GPU as the default device, or a mode that watches torch's
    operations, items are worked on one after another in the caller's thread. Otherwise up to `WORKERS` + 1 results
    are in memory, and until the last one torch has that share of its threads elsewhere in the process too.

    For example ``sum(side_by_side(lambda window: loss(window), range(16)))``.

    Args:
        function: computes a result of an item, in a thread of its own; it changes nothing that another call reads.
        items: the items, which are taken in the caller's thread.
    """
    threads, remaining = torch.get_num_threads(), iter(items)
    is_watched = torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0
    first = [] if threads < WORKERS or is_watched else list(islice(remaining, WORKERS))
    if len(first) < WORKERS:
        yield from map(function, chain(first, remaining))
        return
    settings, share = _Settings(), threads // WORKERS

    def work(item: Item) -> Result:
        with settings.entered():
            return function(item)

    waiting: deque[Future[Result]] = deque()
    try:
        torch.set_num_threads(share)
        with ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(share,)) as pool:
            try:
                for item in chain(first, remaining):
                    waiting.append(pool.submit(work, item))
                    if len(waiting) > WORKERS:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()
    finally:
        torch.set_num_threads(threads)
