"""The losses of healing against their formulas in float64."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise.conversion.healing import cross_entropy, divergence, divergence_from_top, hidden_error, objective


@pytest.fixture(scope="module", autouse=True)
def few_positions_at_once() -> Iterator[None]:
    """Most inputs here are then computed in several pieces, and some in one."""
    with mock.patch.object(objective, "_NUMBERS", 1 << 11):
        yield


def formula(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    own, other = (F.log_softmax(x / temperature, -1) for x in (logits, teacher))
    return (other.exp() * (other - own)).sum(-1).mean() * temperature**2


@given(st.integers(1, 600), st.integers(2, 40), st.sampled_from([0.5, 1.0, 2.0, 7.0]), st.integers(0, 99))
def test_the_divergence_and_its_gradient_are_the_formulas(
    positions: int, vocabulary: int, temperature: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, teacher = torch.randn(2, positions, vocabulary, generator=generator, dtype=torch.float64) * 3
    one, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (mine := divergence(one, teacher, temperature)).backward()
    (theirs := formula(other, teacher, temperature)).backward()
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)


def test_the_gradient_follows_a_weight_of_the_loss() -> None:
    logits, teacher = torch.randn(2, 5, 7, dtype=torch.float64)
    logits.requires_grad_()
    (3 * divergence(logits, teacher)).backward()
    thrice = logits.grad
    logits.grad = None
    divergence(logits, teacher).backward()
    assert thrice is not None
    assert logits.grad is not None
    torch.testing.assert_close(thrice, 3 * logits.grad)


def test_equal_logits_lose_nothing_and_others_do() -> None:
    logits = torch.randn(9, 11)
    assert abs(float(divergence(logits, logits))) < 1e-7
    assert float(divergence(logits, torch.randn(9, 11))) > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_compared_in_float32(dtype: torch.dtype) -> None:
    logits, teacher = torch.randn(2, 300, 50).to(dtype)
    expected = formula(logits.double(), teacher.double(), 1.0)
    assert float(divergence(logits, teacher)) == pytest.approx(float(expected), rel=1e-5)


def test_cross_entropy_is_the_cost_of_the_text() -> None:
    logits, targets = torch.randn(6, 9), torch.tensor([0, 8, 3, 3, 1, 2])
    expected = -logits.double().log_softmax(-1)[torch.arange(6), targets].mean()
    assert float(cross_entropy(logits, targets)) == pytest.approx(float(expected), rel=1e-5)


def test_the_error_of_hidden_states_is_a_part_of_the_teachers_variance() -> None:
    teacher = tuple(torch.randn(2, 50, 8) * scale for scale in (1.0, 30.0))
    assert float(hidden_error(teacher, teacher)) == 0
    means = tuple(layer.mean().expand_as(layer) for layer in teacher)
    assert float(hidden_error(means, teacher)) == pytest.approx(1, rel=0.01)
    halves = tuple(layer / 2 for layer in teacher)
    assert float(hidden_error(halves, teacher)) == pytest.approx(0.25, rel=0.01)


@given(st.integers(1, 300), st.integers(3, 30), st.integers(0, 99))
def test_from_the_likeliest_tokens_all_others_count_as_one(positions: int, vocabulary: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, teacher = torch.randn(2, positions, vocabulary, generator=generator, dtype=torch.float64) * 2
    log_probs, tokens = teacher.log_softmax(-1).topk(2)
    log_rest = (1 - log_probs.exp().sum(-1, keepdim=True)).log()
    one, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (mine := divergence_from_top(one, tokens, log_probs, log_rest)).backward()
    own, known = other.softmax(-1).gather(-1, tokens), log_probs.exp()
    rest, own_rest = 1 - known.sum(-1), 1 - own.sum(-1)
    expected = ((known * (log_probs - own.log())).sum(-1) + rest * (rest / own_rest).log()).mean()
    expected.backward()
    torch.testing.assert_close(mine, expected.detach(), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-8, atol=1e-10)
    assert float(mine.detach()) <= float(divergence(logits, teacher)) + 1e-9


def test_all_tokens_are_the_whole_divergence() -> None:
    logits, teacher = torch.randn(2, 20, 9, dtype=torch.float64)
    log_probs, tokens = teacher.log_softmax(-1).topk(9)
    nothing = torch.full((20, 1), -torch.inf, dtype=torch.float64)
    torch.testing.assert_close(divergence_from_top(logits, tokens, log_probs, nothing), divergence(logits, teacher))


def test_a_model_that_is_sure_gets_a_finite_gradient() -> None:
    """In float32 one less the probability of what it is sure of is nothing but rounding."""
    logits = torch.full((3, 50), -40.0)
    logits[:, 7] = 40.0
    logits.requires_grad_()
    teacher = torch.randn(3, 50)
    log_probs, tokens = teacher.log_softmax(-1).topk(4)
    log_rest = teacher.log_softmax(-1).scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    (loss := divergence_from_top(logits, tokens, log_probs, log_rest)).backward()
    assert loss.isfinite()
    assert logits.grad is not None
    assert float(logits.grad.abs().max()) <= 1
