"""Items that are worked on side by side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headwise.base.threads import WORKERS, map_in_threads
from tests.threads import four_threads

__all__ = ["four_threads"]


def test_results_come_in_order_from_threads_with_their_share() -> None:
    def square(number: int) -> tuple[int, int, int]:
        time.sleep(0.02 if number % 2 == 0 else 0)  # the second is finished before the first
        return number**2, torch.get_num_threads(), threading.get_ident()

    results = [*map_in_threads(square, range(7))]
    assert [result[0] for result in results] == [number**2 for number in range(7)]
    assert {result[1] for result in results} == {4 // WORKERS}
    assert threading.get_ident() not in {result[2] for result in results}
    assert torch.get_num_threads() == 4


def test_so_many_are_worked_on_at_a_time() -> None:
    meeting = threading.Barrier(WORKERS, timeout=60)
    assert [*map_in_threads(lambda _: meeting.wait() < WORKERS, range(2 * WORKERS))] == [True] * 2 * WORKERS


def test_items_are_taken_as_they_are_needed_and_in_the_callers_thread() -> None:
    taken: list[tuple[int, int]] = []

    def items() -> Iterator[int]:
        for number in range(100):
            taken.append((number, threading.get_ident()))
            yield number

    results = map_in_threads(lambda number: number, items())
    assert next(results) == 0
    assert len(taken) == WORKERS + 1
    assert {thread for _, thread in taken} == {threading.get_ident()}
    results.close()
    assert torch.get_num_threads() == 4


def settings() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad, torch.enable_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.float16)],
    ids=["no_grad", "enable_grad", "inference_mode", "autocast"],
)
def test_settings_of_threads_are_the_callers(mode: Callable[[], AbstractContextManager[object]]) -> None:
    with mode():
        assert [*map_in_threads(lambda _: settings(), range(2))] == [settings()] * 2


def test_what_a_mode_watches_stays_in_the_callers_thread() -> None:
    with FlopCounterMode(display=False) as counter:
        results = [*map_in_threads(lambda size: torch.ones(size, size) @ torch.ones(size, size), (2, 3))]
    assert counter.get_total_flops() == 2 * (2**3 + 3**3)
    assert len(results) == 2


def test_a_single_item_has_all_threads() -> None:
    assert [*map_in_threads(lambda _: (torch.get_num_threads(), threading.get_ident()), [1])] == [
        (4, threading.get_ident())
    ]
    assert [*map_in_threads(lambda item: item, [])] == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_of_an_item_is_the_callers(error: type[BaseException]) -> None:
    begun: list[int] = []

    def fail(number: int) -> int:
        begun.append(number)
        if number == 1:
            raise error("one")
        return number

    with pytest.raises(error, match="one"):
        list(map_in_threads(fail, range(1000)))
    assert len(begun) < 10
    assert torch.get_num_threads() == 4


def test_what_cannot_be_divided_is_done_in_the_callers_thread() -> None:
    torch.set_num_threads(1)
    assert [*map_in_threads(lambda _: threading.get_ident(), range(3))] == [threading.get_ident()] * 3
    torch.set_num_threads(4)
    with torch.device("meta"):  # the default device is no CPU
        assert [*map_in_threads(lambda _: threading.get_ident(), range(3))] == [threading.get_ident()] * 3
