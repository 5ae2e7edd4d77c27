from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.costs.formulas import attended_pairs
from headwise.costs.formulas.stages import KERNELS, Call, Core, Kernel, Linear, Product, Size, Vector

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


CALL = Call(batch=Size(2), new=Size(7), source=Size(5), total=Size(11), pairs=Size(60))


@pytest.mark.parametrize(("over", "tokens"), [("new", 14), ("source", 10), ("total", 22), ("call", 2)])
def test_a_stage_is_done_for_the_tokens_it_is_over(over: Any, tokens: int) -> None:
    assert CALL.count(over) == tokens
    assert Linear("proj", 3, 5, over=over).forward_flops(CALL, "unfused") == 2 * tokens * 15
    assert Product("absorb", 13, 7, over=over).forward_flops(CALL, "unfused") == 2 * tokens * 13


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_linear_stage(kernel: Kernel) -> None:
    stage = Linear("proj", 3, 5)
    assert (stage.parameters, Linear("proj", 3, 5, bias=True).parameters) == (15, 20)
    forward = 2 * 14 * 15
    assert Linear("proj", 3, 5, bias=True).forward_flops(CALL, kernel) == forward
    # Without a gradient of the layer's input only the weight's is computed; inner projections always have both.
    assert stage.backward_flops(CALL, kernel, input_gradient=True) == 2 * forward
    assert stage.backward_flops(CALL, kernel, input_gradient=False) == forward
    inner = Linear("proj", 3, 5, reads="inner")
    assert inner.backward_flops(CALL, kernel, input_gradient=False) == 2 * forward


@pytest.mark.parametrize("kernel", KERNELS)
def test_products_and_vectors(kernel: Kernel) -> None:
    product, vector = Product("absorb", 13, 7), Vector("norm", 9)
    assert (product.parameters, vector.parameters) == (0, 9)
    assert product.forward_flops(CALL, kernel) == 2 * 14 * 13
    for wanted in (False, True):
        assert product.backward_flops(CALL, kernel, input_gradient=wanted) == 4 * 14 * 13
        assert vector.backward_flops(CALL, kernel, input_gradient=wanted) == 0
    assert vector.forward_flops(CALL, kernel) == 0


@given(st.integers(1, 9), st.integers(1, 99), st.integers(1, 99))
def test_the_core_forward_and_backward(heads: int, D: int, V: int) -> None:
    core, scores, width = Core(heads, D, V), 2 * heads * 60, max(D, V)
    assert core.parameters == 0
    assert core.forward_flops(CALL, "unfused") == 2 * scores * (D + V)
    assert core.backward_flops(CALL, "unfused", input_gradient=False) == 4 * scores * (D + V)
    # A fused kernel's backward has the scores' product a second time; a padded one has all at one width.
    assert core.forward_flops(CALL, "fused") == 2 * scores * (D + V)
    assert core.backward_flops(CALL, "fused", input_gradient=False) == 2 * scores * (3 * D + 2 * V)
    assert core.forward_flops(CALL, "padded") == 4 * scores * width
    assert core.backward_flops(CALL, "padded", input_gradient=False) == 10 * scores * width
    assert core.softmax_flops(CALL) == 5 * scores
    never = dataclasses.replace(core, can_fuse=False)
    assert never.forward_flops(CALL, "fused") == core.forward_flops(CALL, "unfused")
    assert never.backward_flops(CALL, "fused", input_gradient=True) == 4 * scores * (D + V)
