"""The time that is left."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headwise.base.progress import TimedProgress, TimeLeft, untimed


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_starts_at_what_is_expected_and_runs_down_between_reports() -> None:
    clock = Clock()
    left = TimeLeft({"first": 10, "second": 90}, clock)
    assert left.seconds == 100
    left.report("first", 0, 5)
    assert left.seconds == 100
    clock.now += 1.5
    assert left.seconds == 98.5
    clock.now += 1000
    assert left.seconds == 0


@given(
    pace=st.floats(0.1, 10),
    stages=st.lists(st.tuples(st.floats(1, 1000), st.integers(1, 50)), min_size=1, max_size=4),
)
def test_a_steady_pace_is_learnt(pace: float, stages: list[tuple[float, int]]) -> None:
    """Whatever the error of the expectation is, what is left behind half of the work is off by a tenth of that."""
    clock = Clock()
    expected = {str(number): seconds for number, (seconds, _) in enumerate(stages)}
    left, total, done = TimeLeft(expected, clock), sum(expected.values()), 0.0
    for number, (seconds, steps) in enumerate(stages):
        for step in range(steps):
            left.report(str(number), step, steps)
            true = pace * (total - done)
            if done >= total / 2:
                assert abs(left.seconds / true - 1) <= 0.1 * abs(1 / pace - 1) + 1e-6
            clock.now += pace * seconds / steps
            done += seconds / steps
        left.report(str(number), steps, steps)
    assert left.seconds <= 1e-6 * total


def test_a_run_that_goes_on_has_less_left_and_the_same_pace() -> None:
    clock = Clock()
    left = TimeLeft({"measuring": 50, "converting": 100}, clock)
    left.report("other", 1, 2)
    assert left.seconds == 150
    clock.now += 7  # while it was found out what is finished
    left.report("converting", 60, 100)
    assert left.seconds == 40
    for step in range(61, 100):
        clock.now += 1
        left.report("converting", step, 100)
        assert abs(left.seconds - (100 - step)) < 1e-9


def test_a_part_of_a_larger_work_expects_nothing() -> None:
    told: list[tuple[object, ...]] = []

    class Timed:
        def __call__(self, *step: object) -> None:
            told.append(step)

        def expect(self, seconds: object) -> None:
            raise AssertionError

    assert isinstance(Timed(), TimedProgress)
    assert not isinstance(untimed(Timed()), TimedProgress)
    untimed(Timed())("converting", 1, 2)
    assert told == [("converting", 1, 2)]


def test_a_stage_without_steps_is_finished() -> None:
    left = TimeLeft({"a": 5}, Clock())
    left.report("a", 0, 0)
    assert left.seconds == 0
    assert TimeLeft({}).seconds == 0
