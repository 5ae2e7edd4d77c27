"""The GPU kernel for latents in trellis codes, run on the CPU by Triton's interpreter, against float64."""

from __future__ import annotations

import importlib.util
import random

import pytest
import torch

from headwise.runtime.kernels.gpu import attend_latents, why_not_latents
from headwise.runtime.kernels.gpu import codes as latents
from headwise.runtime.kernels.mask import Scoring
from headwise.runtime.kernels.native.abi import TURN
from headwise.runtime.quantization import SINKS
from headwise.runtime.quantization.transform_code import latent_layout
from tests.runtime.kernels.test_coded import CLOSE, Case, draw, random_code
from tests.runtime.kernels.test_gpu_codes import moved
from tests.runtime.kernels.test_split import DEVICE

with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def attended(case: Case, *, has_sums: bool) -> torch.Tensor:
    """The kernel's output."""
    T, P = case.codes.shape[2], case.code.width - case.rank
    tables = case.tables(max(T, TURN), torch.float32)
    turn = (tables[0][:TURN, case.frequency], tables[1][:TURN, case.frequency]) if P else None
    layout = latent_layout(case.code.to(DEVICE), turn, case.frequency.to(DEVICE))
    query, codes, wide, first = (moved(x) for x in (case.query, case.codes, case.wide, case.first))
    mask = None if case.mask is None else moved(case.mask)
    rotation = (tables[0].to(DEVICE), tables[1].to(DEVICE))
    options = (mask, case.is_causal, case.scale)
    return attend_latents(query, codes, wide, first, layout, rotation, Scoring(*options), has_sums=has_sums).cpu()


def small(seed: int) -> bool:
    """Whether a problem is small enough for an interpreter."""
    B, H, S, _ = draw(seed).query.shape
    return B * H * S <= 100


@with_triton
@pytest.mark.parametrize("seed", [seed for seed in range(50) if small(seed)])
def test_it_is_attention_to_the_decoded_values(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(draw(seed), seed, monkeypatch)


@with_triton
def test_wide_latents_are_read_likewise(monkeypatch: pytest.MonkeyPatch) -> None:
    pick, noise, rank, rotary, T = random.Random(0), torch.Generator().manual_seed(0), 500, 64, 37
    code = random_code(pick, noise, rank, rotary)
    codes = torch.randint(0, 256, (2, 1, T, code.token_bytes), generator=noise, dtype=torch.uint8)
    codes[..., 0] = (codes[..., 0] & 0x77) + 1
    query = torch.randn(2, 3, 2, rank + rotary, generator=noise)
    wide, first = torch.randn(2, SINKS, rank + rotary, generator=noise).bfloat16(), torch.tensor([0, 5])
    angles, frequency = torch.rand(40, dtype=torch.float64, generator=noise), torch.arange(32)
    case = Case(query, codes, wide, first, code, rank, angles, frequency, None, True, 0.01)
    compare(case, 1, monkeypatch)


def compare(case: Case, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the kernel's output to attention to decoded values in float64."""
    monkeypatch.setattr(latents, "part_count", lambda *_: 1 + seed % 3)
    expected, values = case.expected(), case.values()[..., : case.rank].abs().max().item()
    with monkeypatch.context() as inner:  # what the kernel leaves unwritten would be seen
        inner.setattr(torch, "empty", lambda *size, **kind: torch.full(size, torch.nan, **kind))
        out = attended(case, has_sums=seed % 2 == 1)
    if seed % 2:
        assert torch.equal(out[..., -1], case.seen().any(-1).to(out.dtype))
        out = out[..., :-1]
    largest = max(expected.abs().max().item(), values * 0.05)
    assert out.dtype == case.query.dtype
    assert (out.double() - expected).abs().max().item() <= CLOSE[out.dtype] * largest
    assert (out[~case.seen().any(-1)] == 0).all()


def test_what_it_cannot_read_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("headwise.runtime.kernels.gpu.split.has_triton", lambda: True)
    x = torch.zeros(1, 1, 64)
    assert why_not_latents(x, (x, x), None, 512) is None
    assert why_not_latents(x, (x, x), None, 513) == "latents are 513 wide, and it takes 512 at most"
    assert "float64" in str(why_not_latents(x.double(), (x, x), None, 512))
