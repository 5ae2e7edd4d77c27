"""Kernels of other libraries behind `attend`: the calls that they get, and those that they do not."""

from __future__ import annotations

import random
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.runtime.kernels import attend, choose_backend
from headwise.runtime.kernels.mask import Scoring
from headwise.runtime.kernels.sdpa import attend_flash, why_not_flash

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.mark.parametrize("seed", range(30))
def test_flex_is_the_definition(seed: int) -> None:
    pick, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    B, K, S, T = 2, 2, pick.choice([1, 5, 130]), pick.choice([1, 40, 150])
    H, D = K * pick.choice([1, 3]), pick.choice([16, 24])
    query, key, value = (torch.randn(B, n, m, D, generator=noise) for n, m in ((H, S), (K, T), (K, T)))
    shape = pick.choice([None, None, (B, T), (1, H, 1, T), (B, 1, S, T), (B, H, S, 1)])
    mask = None if shape is None else torch.rand(shape, generator=noise) < 0.7
    is_causal = pick.random() < 0.6
    window = pick.choice([None, 1, 30]) if is_causal else None
    out = attend(query, key, value, mask, is_causal=is_causal, window=window, backend="flex")
    exact = attend(
        *(x.double() for x in (query, key, value)), mask, is_causal=is_causal, window=window, backend="reference"
    )
    assert (out.double() - exact).abs().max() <= 1e-5 * max(1.0, float(exact.abs().max()))


def test_flex_refuses_dropout_and_weights() -> None:
    x = torch.randn(1, 2, 3, 16)
    with pytest.raises(ArgumentError, match="backend = 'flex': has no dropout"):
        attend(x, x, x, dropout_p=0.1, backend="flex")
    with pytest.raises(ArgumentError, match="backend = 'flex': never holds the weights"):
        attend(x, x, x, backend="flex", return_weights=True)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Something with flash-attn's signature and conventions, where the package itself cannot be."""
    asked: list[dict[str, Any]] = []

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        asked.append(options)
        left, right = options["window_size"]
        assert right == (-1 if left == -1 else 0)
        out = attend(
            *(x.transpose(1, 2) for x in (q, k, v)),
            is_causal=options["causal"],
            scale=options["softmax_scale"],
            window=None if left == -1 else left + 1,
            backend="reference",
        )
        return out.transpose(1, 2)

    module = types.ModuleType("flash_attn")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr("headwise.runtime.kernels.sdpa.has_flash", lambda: True)
    return asked


@pytest.mark.parametrize("window", [None, 5])
def test_flash_is_asked_in_its_own_layout(flash: list[dict[str, Any]], window: int | None) -> None:
    query, key, value = torch.randn(2, 6, 4, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    out = attend_flash(query, key, value, Scoring(None, True, 0.3, window), 0.0)
    exact = attend(query, key, value, is_causal=True, window=window, scale=0.3, backend="reference")
    assert (out - exact).abs().max() < 1e-6
    assert flash[0]["window_size"] == ((-1, -1) if window is None else (4, 0))


def test_flash_is_taken_where_it_serves(flash: list[dict[str, Any]]) -> None:
    prompt, keys = (1, 32, 600, 128), (1, 8, 900, 128)
    choice = choose_backend(prompt, keys, dtype=torch.bfloat16, device="cuda")
    assert choice.backend == "flash"
    assert choose_backend(prompt, keys, dtype=torch.bfloat16, device="cuda", has_mask=True).backend == "sdpa"
    assert choose_backend(prompt, keys, dtype=torch.bfloat16, device="cuda", value_dim=64).backend == "sdpa"
    assert choose_backend(prompt, keys, dtype=torch.float32, device="cuda").backend == "sdpa"
    wide = (1, 128, 600, 576)
    assert choose_backend(wide, (1, 1, 900, 576), dtype=torch.bfloat16, device="cuda").backend == "sdpa"
    x = torch.randn(1, 2, 3, 16).bfloat16()
    with pytest.raises(
        ArgumentError, match="backend = 'flash': cannot compute this call: it is for CUDA GPUs, not cpu"
    ):
        attend(x, x, x, backend="flash")


def test_flash_that_is_not_there_says_so() -> None:
    if why_not_flash(torch.bfloat16, torch.device("cuda"), 64, 64) is None:
        pytest.skip("it is there")
    x = torch.randn(1, 2, 3, 16)
    with pytest.raises(
        ArgumentError, match="cannot compute this call: flash-attn is not installed; use another, or auto"
    ):
        attend(x, x, x, backend="flash")
