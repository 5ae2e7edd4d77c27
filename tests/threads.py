from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

import pytest
import torch

Result = TypeVar("Result")


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Layers this small gain nothing from threads, and on a busy machine waiting for them is all the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    """Work is then done side by side, on any machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(threads)


def interleaved(call: Callable[[], Result], other: Callable[[], object], *functions: Any) -> Iterator[Result]:
    """Results of a call, with another one made before one of the lines of some functions: of each in its turn.

    The other call then sees, and changes, what a thread would that runs while the first one waits at that line.
    """
    codes, place = {function.__code__ for function in functions}, 0
    is_over = False
    while not is_over:
        line = itertools.count()

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal is_over
            if frame.f_code not in codes:
                return None
            if event == "line" and next(line) == place:  # noqa: B023  # each round calls its own
                is_over = False
                other()
            return trace

        is_over, before = True, sys.gettrace()
        sys.settrace(trace)
        try:
            result = call()
        finally:
            sys.settrace(before)
        if not is_over:
            yield result
        place += 1
