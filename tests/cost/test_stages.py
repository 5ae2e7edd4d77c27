from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from headwise.cost import attended_pairs
from headwise.cost.stages import Core, Linear, PerHead, Vector

maybe_window = st.none() | st.integers(1, 40)
new_tokens, past_tokens = st.integers(1, 24), st.integers(0, 24)


def counted(S: int, T: int, window: int | None) -> int:
    """The mask, cell by cell: query row i stands at position T − S + i and sees the last ``window`` keys up to it."""
    return sum(
        key <= T - S + row and (window is None or key > T - S + row - window) for row in range(S) for key in range(T)
    )


@given(new_tokens, past_tokens, maybe_window)
def test_pairs_are_the_cells_of_the_bottom_right_mask(S: int, past: int, window: int | None) -> None:
    assert attended_pairs(S, S + past, causal=True, window=window) == counted(S, S + past, window)


@given(new_tokens, past_tokens, maybe_window)
def test_without_a_mask_every_pair_counts(S: int, past: int, window: int | None) -> None:
    assert attended_pairs(S, S + past, causal=False, window=window) == S * (S + past)


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_causal_is_the_closed_form(S: int, past: int) -> None:
    T = S + past
    assert attended_pairs(S, T, causal=True) == S * (T - S) + S * (S + 1) // 2


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_a_window_over_a_whole_prompt_is_the_closed_form(window: int, more: int) -> None:
    S = window + more
    assert attended_pairs(S, S, causal=True, window=window) == window * S - window * (window - 1) // 2


@given(new_tokens, past_tokens, maybe_window)
def test_a_prompt_in_chunks_sees_what_the_whole_prompt_sees(S: int, past: int, window: int | None) -> None:
    T = S + past
    whole = attended_pairs(T, T, causal=True, window=window)
    first = attended_pairs(past, past, causal=True, window=window) if past else 0
    assert first + attended_pairs(S, T, causal=True, window=window) == whole


def test_a_linear_stage_runs_over_new_tokens_or_all() -> None:
    stage = Linear("proj", 3, 5, bias=True)
    assert stage.parameters == 20
    assert stage.macs(2, 7, 11) == 2 * 7 * 15
    assert dataclasses.replace(stage, over="total").macs(2, 7, 11) == 2 * 11 * 15


def test_the_other_stages() -> None:
    assert PerHead("absorb", 4, 3, 5).macs(2, 7, 11) == 2 * 7 * 4 * 15
    assert PerHead("absorb", 4, 3, 5).parameters == 0
    assert Vector("norm", 9).parameters == 9
    assert Vector("norm", 9).macs(2, 7, 11) == 0
    assert Core(4, 3, 5).macs_per_pair() == 4 * 8
    assert Core(4, 3, 5).parameters == 0
