"""Work side by side on threads of this process, each with its share of torch's own threads.

The operations of a small layer are too short to be divided among many cores: whole windows of a text, or whole
solutions, keep more of them busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

WORKERS = 2
"""The number of items that are worked on at a time. Each needs memory of its own."""


def side_by_side(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield the result of each item, in their order, while the next ones are worked on.

    What one thread of torch cannot be divided into, and what a GPU computes, is done one after another. Items are
    taken in the caller's thread. Results do not depend on which item is finished first.

    For example ``sum(side_by_side(lambda window: loss(window), range(16)))``.

    Args:
        function: computes a result of an item, in a thread of its own; it changes nothing that another call reads.
        items: the items.
    """
    threads = torch.get_num_threads()
    if threads < WORKERS or torch.get_default_device().type != "cpu":
        yield from map(function, items)
        return
    has_gradients, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    share = threads // WORKERS

    def work(item: Item) -> Result:
        # Each thread has settings of its own.
        with torch.inference_mode(is_inference), torch.set_grad_enabled(has_gradients):
            return function(item)

    waiting: deque[Future[Result]] = deque()
    try:
        torch.set_num_threads(share)
        with ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(share,)) as pool:
            try:
                for item in items:
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
