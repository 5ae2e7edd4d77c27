from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.runtime.kernels import Backend, attend, attend_with_weights, choose_backend
from headwise.runtime.kernels.native import built
from tests.backends import EXACT, SERVING
from tests.by_hand import attend_by_rows, may_attend
from tests.closeness import assert_close

PREFILL = "fused" if built().library is not None else "sdpa"
FEW_TOKENS_CHOICE = "packed" if built().library is None else "fused"
HOLDING_WEIGHTS: tuple[Backend, ...] = ("auto", "reference", "packed")


@dataclass
class Problem:
    """Random tensors and the arguments `attend` is called with."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None

    @property
    def kept(self) -> Tensor:
        B, H, S, _ = self.query.shape
        return may_attend(self.mask, self.is_causal, (B, H, S, self.key.shape[2]))

    def by_hand(self) -> Tensor:
        return attend_by_rows(self.query, self.key, self.value, self.kept, self.scale)

    def attend(self, backend: Backend) -> Tensor:
        return attend(
            self.query,
            self.key,
            self.value,
            self.mask,
            is_causal=self.is_causal,
            scale=self.scale,
            backend=backend,
        )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    B, K, group = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    S, T, D, V = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["none", "padding", "full"]))
    if kind == "none":
        mask = None
    else:
        whole = (B, T) if kind == "padding" else (B, K * group, S, T)
        kept_dims = [(kind == "padding" and d == 1) or draw(st.booleans()) for d in range(len(whole))]
        size = [n if kept else 1 for n, kept in zip(whole, kept_dims, strict=True)]
        mask = torch.rand(size, generator=generator) < draw(st.sampled_from([0.3, 0.7]))
        mask = mask.to(draw(st.sampled_from([torch.bool, torch.int64])))

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    return Problem(
        query=random(B, K * group, S, D),
        key=random(B, K, T, D),
        value=random(B, K, T, V),
        mask=mask,
        is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3, 2.0])),
    )


def gradients(loss: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradients of the loss; zeros for inputs that were not used, such as when every row is empty."""
    if not loss.requires_grad:
        return tuple(torch.zeros_like(tensor) for tensor in inputs)
    return torch.autograd.grad(loss, inputs, materialize_grads=True)


def random_problem(seed: int, dtype: torch.dtype, *, S: int = 70, T: int = 150, **kwargs: Any) -> Problem:
    """A problem large enough that blocked kernels have several blocks."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    arguments: dict[str, Any] = {"mask": None, "is_causal": False, "scale": None, **kwargs}
    return Problem(query=random(2, 4, S, 64), key=random(2, 2, T, 64), value=random(2, 2, T, 48), **arguments)


@pytest.mark.parametrize("backend", EXACT)
@settings(max_examples=200, deadline=None)
@given(problem=problems())
def test_every_backend_is_the_definition(backend: Backend, problem: Problem) -> None:
    out = problem.attend(backend)
    assert out.dtype == torch.float64
    assert_close(out, problem.by_hand(), 1e-12, largest_of=problem.value)
    empty = ~problem.kept.any(-1)
    assert (out[empty] == 0).all()


@pytest.mark.parametrize("backend", EXACT)
@settings(max_examples=80, deadline=None)
@given(problem=problems())
def test_every_backends_gradients_are_the_definitions(backend: Backend, problem: Problem) -> None:
    inputs = (problem.query, problem.key, problem.value)
    for tensor in inputs:
        tensor.requires_grad_()
    out, expected = problem.attend(backend), problem.by_hand()
    probe = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape)
    actual = gradients((out * probe).sum(), inputs)
    wanted = gradients((expected * probe).sum(), inputs)
    largest = max(grad.abs().max().item() for grad in wanted)
    for got, want in zip(actual, wanted, strict=True):
        assert got.isfinite().all()
        assert (got - want).abs().max().item() <= 1e-12 * max(largest, 1.0)


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_with_nothing_to_attend_to(backend: Backend, dtype: torch.dtype, is_causal: bool) -> None:
    problem = random_problem(1, dtype, T=70, is_causal=is_causal)
    problem.mask = torch.rand(2, 1, 70, 70, generator=torch.Generator().manual_seed(2)) < 0.5
    problem.mask[0, :, 3:40] = False
    for tensor in (problem.query, problem.key, problem.value):
        tensor.requires_grad_()
    out = problem.attend(backend)
    assert (out[0, :, 3:40] == 0).all()
    # Not only are the gradients finite: nothing on the way to them is NaN.
    with torch.autograd.set_detect_anomaly(True):
        problem.attend(backend).square().sum().backward()
    for tensor in (problem.query, problem.key, problem.value):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        assert tensor.grad.abs().max() > 0
    assert problem.query.grad is not None
    assert (problem.query.grad[0, :, 3:40] == 0).all()


@pytest.mark.parametrize("backend", SERVING)
def test_nothing_at_all_to_attend_to(backend: Backend) -> None:
    problem = random_problem(3, torch.float32, T=9, mask=torch.zeros(2, 9, dtype=torch.bool))
    assert (problem.attend(backend) == 0).all()


@pytest.mark.parametrize("backend", SERVING)
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("S", "T"), [(70, 70), (70, 150), (70, 40), (1, 150)])
def test_rounding_of_narrow_dtypes(
    backend: Backend, dtype: torch.dtype, relative: float, is_causal: bool, padded: bool, S: int, T: int
) -> None:
    problem = random_problem(4, dtype, S=S, T=T, is_causal=is_causal)
    if padded:
        problem.mask = torch.arange(T) >= torch.tensor([[0], [T // 3]])
    out = problem.attend(backend)
    assert out.dtype == dtype
    if dtype == torch.bfloat16 and (backend == "packed" or S == 1):
        # packed keeps the scores themselves in the input's dtype, as eager attention does: it reads less.
        relative *= 2
    assert_close(out, problem.by_hand(), relative)


@pytest.mark.parametrize("backend", SERVING)
@pytest.mark.parametrize("S", [1, 70])
@pytest.mark.parametrize("is_causal", [False, True])
def test_strided_inputs(backend: Backend, S: int, is_causal: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    # Heads last (as projections give them), every second dim, a slice of a longer cache, one key for all rows.
    query = torch.randn(2, S, 4, 32, generator=generator).transpose(1, 2)[..., ::2]
    cache = torch.randn(1, 2, 200, 16, generator=generator).expand(2, -1, -1, -1)
    key, value = cache[:, :, 10:100], cache[:, :, 20:110, 3:10]
    mask = (torch.rand(2, 1, 1, 180, generator=generator) < 0.8)[..., ::2]
    for tensor in (query, key, value, mask):
        assert not tensor.is_contiguous()
    problem = Problem(query, key, value, mask, is_causal, None)
    assert_close(problem.attend(backend), problem.by_hand(), 1e-5)


@pytest.mark.parametrize("backend", HOLDING_WEIGHTS)
@settings(max_examples=80, deadline=None)
@given(problem=problems())
def test_weights_sum_to_one_and_give_the_output(backend: Backend, problem: Problem) -> None:
    out, weights = attend(
        problem.query,
        problem.key,
        problem.value,
        problem.mask,
        is_causal=problem.is_causal,
        scale=problem.scale,
        backend=backend,
        return_weights=True,
    )
    kept = problem.kept
    assert weights.shape == kept.shape
    assert (weights[~kept] == 0).all()
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), kept.any(-1).double(), rtol=0, atol=1e-14)
    group = problem.query.shape[1] // problem.key.shape[1]
    values = torch.stack([problem.value[:, h // group] for h in range(problem.query.shape[1])], dim=1)
    assert_close(out, weights @ values, 1e-12, largest_of=values)
    assert_close(out, problem.by_hand(), 1e-12, largest_of=values)


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("S", [4, 60])
def test_dropout_drops_its_share_and_scales_the_rest(backend: Backend, S: int) -> None:
    p, T = 0.25, 64
    generator = torch.Generator().manual_seed(6)
    query, key = (torch.randn(4, n, s, 16, generator=generator, dtype=torch.float64) for n, s in ((8, S), (2, T)))
    # With the identity for values the output is the weights themselves, also where the backend never has them.
    value = torch.eye(T, dtype=torch.float64).expand(4, 2, T, T)
    whole = attend(query, key, value, backend="reference")
    torch.manual_seed(7)
    dropped = attend(query, key, value, dropout_p=p, backend=backend)
    kept = dropped != 0
    share, count = 1 - kept.double().mean().item(), kept.numel()
    assert abs(share - p) < 5 * (p * (1 - p) / count) ** 0.5
    assert_close(dropped[kept], whole[kept] / (1 - p), 1e-12)
    assert not torch.equal(attend(query, key, value, dropout_p=p, backend=backend), dropped)


@pytest.mark.parametrize("backend", HOLDING_WEIGHTS)
def test_returned_weights_are_those_after_dropout(backend: Backend) -> None:
    problem = random_problem(8, torch.float64, T=30)
    torch.manual_seed(9)
    out, weights = attend(
        problem.query, problem.key, problem.value, dropout_p=0.5, backend=backend, return_weights=True
    )
    assert 0.4 < (weights == 0).double().mean().item() < 0.6
    assert_close(out, weights @ problem.value.repeat_interleave(2, dim=1), 1e-12)


@pytest.mark.parametrize(
    ("shape", "weights", "backend", "reason"),
    [
        (
            (32, 8, 1, 8192, 128),
            False,
            FEW_TOKENS_CHOICE,
            "few new tokens (1): reading 8 key–value heads once takes most of the time",
        ),
        (
            (128, 1, 1, 4096, 576),
            False,
            FEW_TOKENS_CHOICE,
            "few new tokens (1): reading 1 key–value heads once takes most of the time",
        ),
        ((128, 1, 64, 4096, 576), False, PREFILL, "64 new tokens: blocked softmax"),
        ((8, 8, 512, 512, 64), False, PREFILL, "512 new tokens: blocked softmax, no 512 × 512 scores held"),
        ((8, 8, 512, 512, 64), True, "packed", "the weights are requested, and only packed and reference compute"),
    ],
)
def test_auto_says_what_it_chose(shape: tuple[int, ...], weights: bool, backend: str, reason: str) -> None:
    H, K, S, T, D = shape
    choice = choose_backend((1, H, S, D), (1, K, T, D), return_weights=weights)
    assert choice.backend == backend
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("H", "K", "S", "T"), [(4, 2, 1, 50), (64, 1, 1, 50), (4, 4, 33, 33), (4, 2, 40, 50), (4, 2, 16, 50)]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_auto_is_its_choice_bit_for_bit(H: int, K: int, S: int, T: int, is_causal: bool) -> None:
    generator = torch.Generator().manual_seed(10)
    query = torch.randn(2, H, S, 24, generator=generator)
    key, value = torch.randn(2, 2, K, T, 24, generator=generator)
    chosen = choose_backend(query.shape, key.shape).backend
    assert chosen != "auto"
    out = attend(query, key, value, is_causal=is_causal)
    assert torch.equal(out, attend(query, key, value, is_causal=is_causal, backend=chosen))


def zeros(*size: int) -> Tensor:
    return torch.zeros(size)


@pytest.mark.parametrize("backend", SERVING)
@pytest.mark.parametrize(
    ("query", "key", "value", "kwargs", "message"),
    [
        (
            (2, 4, 8),
            (2, 4, 3, 8),
            (2, 4, 3, 8),
            {},
            "query shape = (2, 4, 8): must be [batch, heads, tokens, head_dim]",
        ),
        (
            (2, 4, 3, 8),
            (4, 3, 8),
            (2, 4, 3, 8),
            {},
            "key shape = (4, 3, 8): must be [batch, heads, tokens, head_dim]",
        ),
        ((2, 4, 3, 8), (2, 4, 3, 8), (3, 8), {}, "value shape = (3, 8): must be [batch, heads, tokens, head_dim]"),
        ((2, 4, 3, 8), (2, 4, 5, 6), (2, 4, 5, 6), {}, "key shape = (2, 4, 5, 6): must be [2, K, T, 8] to match"),
        ((2, 4, 3, 8), (1, 4, 5, 8), (1, 4, 5, 8), {}, "key shape = (1, 4, 5, 8): must be [2, K, T, 8] to match"),
        ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 4, 8), {}, "value shape = (2, 2, 4, 8): must be [2, 2, 5, V] to match"),
        ((2, 4, 3, 8), (2, 2, 5, 8), (2, 4, 5, 8), {}, "value shape = (2, 4, 5, 8): must be [2, 2, 5, V] to match"),
        ((2, 4, 3, 8), (2, 3, 5, 8), (2, 3, 5, 8), {}, "key heads = 3: must divide the 4 query heads"),
        ((2, 2, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8), {}, "key heads = 4: must divide the 2 query heads"),
        (
            (2, 4, 3, 8),
            (2, 2, 5, 8),
            (2, 2, 5, 8),
            {"enable_gqa": False},
            "key heads = 2: must be 4 without enable_gqa",
        ),
        (
            (2, 4, 3, 8),
            (2, 4, 5, 8),
            (2, 4, 5, 8),
            {"dropout_p": 1.0},
            "dropout_p = 1.0: must be at least 0 and below",
        ),
        ((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8), {"dropout_p": -0.1}, "dropout_p = -0.1: must be at least 0 and"),
        (
            (2, 4, 3, 8),
            (2, 4, 5, 8),
            (2, 4, 5, 8),
            {"attn_mask": zeros(2, 5)},
            "attention_mask dtype = 'torch.float32': must be bool or 0/1 integers, True = attend",
        ),
        (
            (2, 4, 3, 8),
            (2, 4, 5, 8),
            (2, 4, 5, 8),
            {"attn_mask": zeros(2, 3, 5).bool()},
            "attention_mask shape = (2, 3, 5): must be [2, 5] or broadcast to [B, H, S, T] = [2, 4, 3, 5]",
        ),
        (
            (2, 4, 3, 8),
            (2, 4, 5, 8),
            (2, 4, 5, 8),
            {"attn_mask": zeros(3, 5).bool()},
            "attention_mask shape = (3, 5): a 2-D mask is padding, [batch, keys] = [2, 5]",
        ),
    ],
)
def test_refusals(
    backend: Backend,
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    kwargs: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        attend(zeros(*query), zeros(*key), zeros(*value), **kwargs, backend=backend)


@pytest.mark.parametrize("backend", HOLDING_WEIGHTS)
def test_attend_with_weights_is_attend_asked_for_the_weights(backend: Backend) -> None:
    problem = random_problem(10, torch.float64, T=30)
    tensors = problem.query, problem.key, problem.value
    out, weights = attend_with_weights(*tensors, is_causal=True, scale=0.3, backend=backend)
    pair = attend(*tensors, is_causal=True, scale=0.3, backend=backend, return_weights=True)
    assert isinstance(pair, tuple)
    assert torch.equal(out, pair[0])
    assert torch.equal(weights, pair[1])
    with pytest.raises(ArgumentError, match="backend = 'sdpa': never holds the weights"):
        attend_with_weights(*tensors, backend="sdpa")


def test_choose_backend_knows_its_keywords() -> None:
    with pytest.raises(TypeError, match=r"^choose_backend\(\) got an unexpected keyword argument 'colour'"):
        choose_backend((1, 2, 1, 16), (1, 2, 1, 16), colour="red")  # type: ignore[call-arg]


def test_an_unknown_backend_is_refused() -> None:
    x = zeros(1, 1, 2, 4)
    with pytest.raises(ArgumentError, match="backend = 'fast': must be one of auto, reference, sdpa, packed"):
        attend(x, x, x, backend="fast")  # type: ignore[arg-type]


def test_sdpa_has_no_weights_to_return() -> None:
    x = zeros(1, 1, 2, 4)
    message = "backend = 'sdpa': never holds the weights; use reference, packed or auto"
    with pytest.raises(ArgumentError, match=message):
        attend(x, x, x, backend="sdpa", return_weights=True)


@pytest.mark.parametrize("seed", range(40))
def test_sdpa_by_parts_is_the_reference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.runtime.kernels.sdpa._QUERIES", 7)
    pick, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    B, K, S, T = 2, 2, pick.randint(1, 30), pick.randint(1, 40)
    H = K * pick.choice([1, 3])
    query, key, value = (
        torch.randn(B, h, n, 8, generator=noise, dtype=torch.float64) for h, n in ((H, S), (K, T), (K, T))
    )
    for tensor in (query, key, value):
        tensor.requires_grad_()
    shapes = [None, (B, T), (B, 1, 1, T), (1, H, S, 1), (B, 1, S, T)]
    shape = pick.choice(shapes)
    mask = None if shape is None else torch.rand(shape, generator=noise) < 0.7
    is_causal = pick.random() < 0.7
    window = pick.choice([None, 1, 4, 20]) if is_causal else None
    grads = []
    for backend in ("sdpa", "reference"):
        out = attend(query, key, value, mask, is_causal=is_causal, window=window, backend=backend)
        grads.append((out, *torch.autograd.grad(out.square().sum(), (query, key, value))))
    for ours, exact in zip(*grads, strict=True):
        assert (ours - exact).abs().max() < 1e-12
