"""The time that is left, from what stages were expected to take and how fast they are."""

from __future__ import annotations

import pytest

from headwise.progress import ShowsTimeLeft, TimeLeft, silent


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_at_the_start_the_expected_time_is_left() -> None:
    assert TimeLeft({"first": 20.0, "second": 80.0}, Clock()).seconds() == 100


@pytest.mark.parametrize("pace", [0.5, 1.0, 3.0])
def test_on_a_machine_of_another_speed_the_measured_pace_counts(pace: float) -> None:
    clock = Clock()
    left = TimeLeft({"first": 20.0, "second": 80.0}, clock)
    for done in range(5):
        clock.now = 100 + pace * 20 * done / 4
        left.update("first", done, 4)
    assert left.seconds() == pytest.approx(80 * pace)
    for done in range(5):
        clock.now = 100 + pace * (20 + 80 * done / 4)
        left.update("second", done, 4)
        assert left.seconds() == pytest.approx(80 * pace * (1 - done / 4))


def test_the_first_steps_are_not_trusted_alone() -> None:
    """A stage that begins slowly does not multiply the time that is left."""
    clock = Clock()
    left = TimeLeft({"first": 20.0, "second": 80.0}, clock)
    clock.now += 10
    left.update("first", 1, 20)  # ten times as slow as expected
    assert left.seconds() < 2 * 100


def test_a_stage_that_is_skipped_is_finished_and_others_are_ignored() -> None:
    clock = Clock()
    left = TimeLeft({"first": 20.0, "second": 80.0}, clock)
    left.update("another", 1, 2)
    assert left.seconds() == 100
    left.update("second", 0, 4)
    clock.now += 0.001  # a resumed run has the first stage already
    assert left.seconds() < 80
    left.update("second", 4, 4)
    assert left.seconds() == 0


def test_a_function_does_not_ask_for_an_estimate() -> None:
    assert not isinstance(silent, ShowsTimeLeft)
