"""The GPU kernel for few new tokens, run on the CPU by Triton's interpreter, against the float64 definition."""

from __future__ import annotations

import importlib.util
import random

import pytest
import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.runtime.kernels import as_bool_mask, attend, choose_backend, sdpa
from headwise.runtime.kernels.gpu import attend_split, why_not_split
from headwise.runtime.kernels.gpu.split import part_count, tile_of
from headwise.runtime.kernels.mask import Scoring
from tests.runtime.kernels.test_fused import CLOSE, Case, draw

with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(*tensors: Tensor | None) -> list[Tensor | None]:
    """Move views with their strides, and with the memory between the tokens."""
    if DEVICE == "cpu":
        return list(tensors)
    return [
        None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE).copy_(x)
        for x in tensors
    ]


def small(seed: int) -> Case | None:
    """A problem small enough for an interpreter."""
    case = draw(seed)
    B, H, S, D = case.query.shape
    fits = D <= 576 and B * H * S * case.key.shape[2] <= 6000 and B * H * S <= 400
    return case if fits else None


@with_triton
@pytest.mark.parametrize("part", range(6))
def test_it_is_the_definition(part: int) -> None:
    cases = 0
    for seed in range(200 * part, 200 * (part + 1)):
        if (case := small(seed)) is None:
            continue
        B, H, S, D = case.query.shape
        T = case.key.shape[2]
        mask = None if case.mask is None else as_bool_mask(case.mask, (B, H, S, T))
        window = case.window if case.window is not None and case.window < T else None
        scale = D**-0.5 if case.scale is None else case.scale
        parts = random.Random(seed).choice([1, 2, 3, 7])
        query, key, value, mask_on_device = on_device(case.query, case.key, case.value, mask)
        out = attend_split(
            query, key, value, Scoring(mask_on_device, case.is_causal, scale, window), parts=parts
        ).cpu()
        expected = case.expected()
        largest = max(expected.abs().max().item(), case.value.nan_to_num(0).abs().max().item() * 0.05)
        assert out.dtype == case.query.dtype
        assert (out.double() - expected).abs().max().item() <= CLOSE[out.dtype] * largest, seed
        assert (out[~case.seen.any(-1)] == 0).all(), seed
        if (cases := cases + 1) == 8:
            break
    assert cases >= 4


@with_triton
@pytest.mark.parametrize("dtype", list(CLOSE))
def test_a_latent_is_read_once_and_gives_the_same(dtype: torch.dtype) -> None:
    latent = torch.randn(1, 1, 70, 576).to(DEVICE, dtype)
    query = torch.randn(1, 16, 1, 576).to(DEVICE, dtype)
    shared = attend(query, latent, latent[..., :512], is_causal=True, backend="split")
    apart = attend(query, latent, latent[..., :512].clone(), is_causal=True, backend="split")
    exact = attend(query.double(), latent.double(), latent[..., :512].double(), backend="reference")
    for made in (shared, apart):
        assert (made.double() - exact).abs().max() <= CLOSE[dtype] * exact.abs().max()


@with_triton
def test_no_keys_give_zeros_and_no_queries_an_empty_output() -> None:
    x = torch.randn(2, 2, 3, 16, device=DEVICE)
    allowed = torch.zeros(2, 3, dtype=torch.bool, device=DEVICE)
    assert (attend(x, x, x, allowed, backend="split") == 0).all()
    assert attend(x[:, :, :0], x, x, backend="split").shape == (2, 2, 0, 16)


def test_parts_keep_the_gpu_busy_and_are_no_smaller_than_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert part_count(8, 100_000, torch.device("cpu")) == 1
    processors = type("Properties", (), {"multi_processor_count": 100})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: processors)
    gpu = torch.device("cuda")
    assert part_count(8, 100_000, gpu) == 50
    assert part_count(8, 1000, gpu) == 7
    assert part_count(8, 100, gpu) == 1
    assert part_count(1000, 100_000, gpu) == 1
    assert part_count(1, 100_000, gpu, programs=1) == 100


@pytest.mark.parametrize("available", [99 << 10, 163 << 10, 227 << 10])
def test_tiles_fit_the_memory_of_a_program(available: int) -> None:
    for numbers in (32, 128, 256, 512, 576, 1600):
        for size in (2, 4):
            tile = tile_of(numbers, size, available)
            assert tile.tokens >= 16
            if tile.stages > 1:
                assert tile.stages * tile.tokens * numbers * size <= available
    assert tile_of(576, 2, 227 << 10) == (64, 8, 3)


def test_what_it_cannot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 2, 3, 16)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        ArgumentError, match=r"backend = 'split': cannot compute this call: (it is for CUDA GPUs|triton is not inst)"
    ):
        attend(x, x, x, backend="split")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("headwise.runtime.kernels.gpu.split.has_triton", lambda: True)
    cpu = torch.device("cpu")
    assert why_not_split(torch.float32, cpu, 64) is None
    assert why_not_split(torch.float64, cpu, 64) is not None
    assert why_not_split(torch.float32, cpu, 577) == "heads are 577 wide, and it takes 576 at most"
    assert why_not_split(torch.float32, cpu, 64, needs_grad=True) == "it has no backward pass"
    with pytest.raises(ArgumentError, match="has no dropout"):
        attend(x, x, x, dropout_p=0.1, backend="split")
    with pytest.raises(ArgumentError, match="never holds the weights"):
        attend(x, x, x, backend="split", return_weights=True)
    with pytest.raises(ArgumentError, match="of one dtype"):
        attend(x, x.bfloat16(), x, backend="split")


def test_auto_takes_it_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.runtime.kernels.gpu.split.has_triton", lambda: True)
    few, many, keys = (1, 32, 1, 128), (1, 32, 64, 128), (1, 8, 4096, 128)
    choice = choose_backend(few, keys, device="cuda")
    assert choice.backend == "split"
    assert "reading 8 key–value heads once takes most of the time, its parts at once" in choice.reason
    assert choose_backend(many, keys, dtype=torch.bfloat16, device="cuda").backend == "sdpa"
    monkeypatch.setattr(sdpa, "_capability", lambda _: (7, 5))  # torch would copy keys for every head
    assert choose_backend(few, keys, dtype=torch.bfloat16, device="cuda").backend == "split"
    monkeypatch.setattr(sdpa, "_capability", lambda _: (9, 0))
    # Torch's own kernel takes one query of 16 bits as well.
    assert choose_backend(few, keys, dtype=torch.bfloat16, device="cuda").backend == "sdpa"
    assert choose_backend(few, keys, dtype=torch.bfloat16, device="cuda", has_mask=True).backend == "split"
    assert choose_backend(few, keys, dtype=torch.bfloat16, device="cuda", value_dim=64).backend == "split"
    wide = (1, 16, 1, 576), (1, 1, 4096, 576)
    assert choose_backend(*wide, dtype=torch.bfloat16, device="cuda", value_dim=512).backend == "split"
    assert choose_backend(*wide, device="cuda", value_dim=512).backend == "packed"
    assert choose_backend(few, keys, device="cuda", needs_grad=True).backend == "packed"
    monkeypatch.setattr("headwise.runtime.kernels.gpu.split.has_triton", lambda: False)
    assert choose_backend(few, keys, device="cuda").backend == "packed"
