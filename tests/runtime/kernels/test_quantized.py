"""int8 keys and values: quantisation, and attention that reads them directly."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.runtime.kernels import attend, attend_quantized, dequantize, pack, quantize, unpack
from headwise.runtime.kernels.native import build
from tests.closeness import assert_close

CLOSE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float64: 1e-12}


def test_a_number_is_within_half_a_scale_of_its_code() -> None:
    states = torch.randn(2, 3, 50, 16) * torch.logspace(-6, 6, 50)[:, None]
    codes, scale = quantize(states)
    assert codes.dtype == torch.int8
    assert scale.shape == (2, 3, 50)
    assert (codes.abs().amax(-1) == 127).all()
    error = (dequantize(codes, scale, torch.float64) - states.double()).abs()
    assert (error <= scale[..., None].double() * 0.5000001).all()


def test_zeros_stay_zeros_and_what_is_no_number_is_seen() -> None:
    states = torch.randn(1, 1, 3, 8)
    states[0, 0, 0] = 0
    states[0, 0, 1, 2] = float("nan")
    states[0, 0, 2, 2] = float("inf")
    codes, scale = quantize(states)
    back = dequantize(codes, scale, torch.float32)
    assert (back[0, 0, 0] == 0).all()
    assert back[0, 0, 1:].isnan().any(-1).all()


def test_what_is_packed_is_unpacked_wherever_it_lies() -> None:
    states = torch.randn(2, 3, 9, 12).bfloat16()
    codes, scale = quantize(states)
    room = torch.zeros(2, 3, 20, 16, dtype=torch.int8)
    room[:, :, 4:13] = pack(states)
    for packed in (pack(states), room[:, :, 4:13]):
        a, b = unpack(packed)
        assert torch.equal(a, codes)
        assert torch.equal(b, scale)
    with pytest.raises(ArgumentError, match="head_dim = 10: must be a multiple of 4"):
        pack(torch.zeros(1, 1, 1, 10))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("seed", range(30))
@torch.inference_mode()
def test_it_is_attention_to_what_codes_stand_for(compiled: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(build, "built", lambda: build.Build(None, None, "none here"))
    pick, noise = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=noise)

    dtype = pick.choice(list(CLOSE))
    B, K, S, T = pick.choice([1, 3]), pick.choice([1, 2, 5]), pick.choice([1, 1, 2, 9, 70]), pick.choice([1, 64, 333])
    H, D, V = K * pick.choice([1, 3, 8]), pick.choice([64, 128, 20]), pick.choice([64, 32, 12])
    query = normal(B, H, S, D).to(dtype)
    packed = [pack(normal(B, K, T, width)) for width in (D, V)]
    mask = pick.choice([None, torch.rand(B, T, generator=noise) < 0.6])
    is_causal = pick.random() < 0.5
    window = pick.choice([None, 5]) if is_causal else None
    key, value = (unpack(one) for one in packed)
    out = attend_quantized(query, key, value, mask, is_causal, window=window)
    wide = [dequantize(*one, torch.float64) for one in (key, value)]
    exact = attend(query.double(), *wide, mask, is_causal=is_causal, window=window, backend="reference")
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() <= CLOSE[dtype] * max(1.0, float(exact.abs().max()))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"heads": 3}, "key heads = 2: must divide the 3 query heads"),
        ({"width": 32}, "key shape = .*: must be"),
        ({"tokens": 5}, "value shape = .*: must be"),
        ({"window": 2}, "window = 2: must be at least 1, and is_causal true with it"),
        ({"scales": 8}, r"key scales = 'torch.float32 \[1, 2, 8\]': must be torch.float32 \[1, 2, 9\]"),
        ({"codes": torch.int16}, "key codes = torch.int16: must be int8"),
    ],
)
def test_what_does_not_go_together_is_refused(change: dict[str, Any], rule: str) -> None:
    query = torch.randn(1, change.get("heads", 4), 1, change.get("width", 16))
    key, value = quantize(torch.randn(1, 2, 9, 16)), quantize(torch.randn(1, 2, change.get("tokens", 9), 16))
    key = key[0].to(change.get("codes", torch.int8)), key[1][..., : change.get("scales", 9)]
    with pytest.raises(ArgumentError, match=rule):
        attend_quantized(query, key, value, window=change.get("window"))


def test_gradients_go_by_torch() -> None:
    query = torch.randn(1, 4, 2, 16, requires_grad=True)
    key, value = (quantize(torch.randn(1, 2, 9, 16)) for _ in range(2))
    (grad,) = torch.autograd.grad(attend_quantized(query, key, value, is_causal=True).square().sum(), query)
    wide = [dequantize(*one, torch.float32) for one in (key, value)]
    exact = torch.autograd.grad(attend(query, *wide, is_causal=True, backend="reference").square().sum(), query)[0]
    assert_close(grad, exact, 1e-5)
