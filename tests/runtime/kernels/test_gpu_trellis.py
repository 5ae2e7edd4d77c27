"""The GPU kernels of trellis codes, run on the CPU by Triton's interpreter, against float64."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwise.runtime.attention.rope import rotate
from headwise.runtime.kernels.gpu import (
    ChannelLayout,
    attend_trellis,
    decode_trellis,
    encode_windows,
    why_not_trellis,
)
from headwise.runtime.kernels.gpu import trellis as calls
from headwise.runtime.kernels.mask import Scoring
from headwise.runtime.kernels.native.abi import TURN
from headwise.runtime.kernels.pages import Pages
from headwise.runtime.quantization import TransformCode
from headwise.runtime.quantization.transform_code import SINKS, channel_layout
from headwise.runtime.quantization.trellis import decode, encode, tables
from tests.runtime.kernels.test_affine import reference
from tests.runtime.kernels.test_coded import CLOSE, Case, draw, random_code
from tests.runtime.kernels.test_gpu_codes import moved
from tests.runtime.kernels.test_heads import decoded
from tests.runtime.kernels.test_heads import random_code as random_code_of_heads
from tests.runtime.kernels.test_split import DEVICE

with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
PAGE = 32


def layout_of(code: TransformCode, rotation: tuple[Tensor, Tensor], frequency: Tensor) -> ChannelLayout:
    turn = (rotation[0][:TURN, frequency], rotation[1][:TURN, frequency]) if len(frequency) else None
    return channel_layout(code.to(torch.device(DEVICE)), turn, frequency.to(DEVICE))


def attended(case: Case, *, has_sums: bool, pages: Pages | None = None) -> Tensor:
    """The kernel's output."""
    rotation = case.tables(max(case.codes.shape[2], TURN, 256), torch.float32)
    layout = layout_of(case.code, rotation, case.frequency)
    tensors = (moved(x) for x in (case.query, case.codes, case.wide, case.first))
    mask = None if case.mask is None else moved(case.mask)
    tables = (rotation[0].to(DEVICE), rotation[1].to(DEVICE))
    scoring = Scoring(mask, case.is_causal, case.scale)
    return attend_trellis(*tensors, layout, tables, scoring, has_sums=has_sums, pages=pages).cpu()


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
    monkeypatch.setattr(calls, "part_count", lambda *_: 1 + seed % 3)
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


def in_pages(codes: Tensor, lengths: Tensor, noise: torch.Generator) -> tuple[Tensor, Pages]:
    """Codes ``[B, 1, T, bytes]`` in pages of any order that are otherwise full of 255."""
    each = [-(-int(length) // PAGE) for length in lengths]
    order = torch.randperm(sum(each) + 2, generator=noise).int()
    cache = torch.full((len(order), 1, PAGE, codes.shape[-1]), 255, dtype=torch.uint8)
    table = torch.full((len(each), max(each)), -1, dtype=torch.int32)
    taken = iter(order)
    for row, (length, count) in enumerate(zip(lengths.tolist(), each, strict=True)):
        for page in range(count):
            table[row, page] = next(taken)
            tokens = codes[row, 0, page * PAGE : min((page + 1) * PAGE, length)]
            cache[int(table[row, page]), 0, : len(tokens)] = tokens
    return moved(cache), Pages(moved(table), moved(lengths.int()))


@with_triton
@pytest.mark.parametrize("seed", range(3))
def test_latents_in_pages_are_read_by_their_table(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_PARTS_OF_PAGES", 3)
    pick, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    rank, rotary, lengths = 20, (0, 6, 16)[seed], torch.tensor([5, 70, 33, 1][: 2 + seed])
    code, B, T = random_code(pick, noise, rank, rotary), 2 + seed, int(lengths.max())
    codes = torch.randint(0, 256, (B, 1, T, code.token_bytes), generator=noise, dtype=torch.uint8)
    codes[..., 0] = (codes[..., 0] & 0x77) + 1
    query, wide = torch.randn(B, 3, 1, rank + rotary, generator=noise), torch.randn(B, SINKS, rank + rotary)
    angles, frequency = torch.rand(8, dtype=torch.float64, generator=noise), torch.arange(rotary // 2)
    first = torch.zeros(B, dtype=torch.int64)
    seen = (torch.arange(T) < lengths[:, None])[:, None, None]
    case = Case(query, codes, wide.bfloat16(), first, code, rank, angles, frequency, seen, False, 0.1)
    cache, pages = in_pages(codes, lengths, noise)
    paged = replace(case, codes=cache, mask=None, is_causal=True)
    out = attended(paged, has_sums=False, pages=pages)
    torch.testing.assert_close(out.double(), case.expected(), atol=1e-5, rtol=1e-5)


@with_triton
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("K", "G", "S", "D", "V", "P", "window"),
    [(2, 3, 1, 20, 16, 20, None), (1, 4, 2, 16, 33, 6, 5), (3, 1, 1, 24, 8, 0, None), (2, 2, 3, 34, 34, 34, 40)],
)
def test_heads_are_attention_to_the_decoded_values(
    K: int, G: int, S: int, D: int, V: int, P: int, window: int | None, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_PARTS_OF_PAGES", 2)
    monkeypatch.setattr(calls, "part_count", lambda *_: 2)
    pick, noise = random.Random(D), torch.Generator().manual_seed(D)
    code, lengths = random_code_of_heads(pick, noise, K, D, V), torch.tensor([67, 9] if paged else [67, 67])
    codes = torch.randint(0, 256, (2, 1, 67, code.token_bytes), generator=noise, dtype=torch.uint8)
    codes[..., 0] = (codes[..., 0] & 0x77) + 1
    wide, first = torch.randn(2, SINKS, code.width, generator=noise).bfloat16(), torch.tensor([0, 0 if paged else 3])
    query = torch.randn(2, K * G, S, D, generator=noise)
    angles = torch.arange(128)[:, None] * torch.rand(8, generator=noise, dtype=torch.float64)
    frequency = torch.randint(0, 8, (P // 2,), generator=noise)
    cos, sin = angles.cos(), angles.sin()
    layout = layout_of(code, (cos.float(), sin.float()), frequency)
    assert layout.first_part == K * D
    given, pages = in_pages(codes, lengths, noise) if paged else (moved(codes), None)
    tensors = (moved(query), given, moved(wide), moved(first))
    tables = (cos.float().to(DEVICE), sin.float().to(DEVICE))
    scoring = Scoring(None, True, 0.2, window)
    out = attend_trellis(*tensors, layout, tables, scoring, pages=pages).cpu()
    for row, T in enumerate(lengths.tolist()):
        own = slice(row, row + 1)
        whole = decoded(code, codes[own, :, :T], wide[own], first[own])
        keys, values = (
            torch.unflatten(part, -1, (K, -1)).transpose(1, 2) for part in whole.split_with_sizes(code.parts, -1)
        )
        turned = rotate(keys[..., :P], cos[None, :T, frequency], sin[None, :T, frequency], interleaved=False)
        late = torch.arange(T) > torch.arange(T - S, T)[:, None] - (window or T)
        options = (late[None, None], True, 0.2)
        expected = reference(query[own], torch.cat((turned, keys[..., P:]), -1), values, options)
        torch.testing.assert_close(out[own].double(), expected, atol=1e-5, rtol=1e-5)


@with_triton
@pytest.mark.parametrize("heads", [False, True])
def test_tokens_of_any_place_are_decoded(heads: bool) -> None:
    pick, noise = random.Random(1), torch.Generator().manual_seed(1)
    code = random_code_of_heads(pick, noise, 2, 20, 33) if heads else random_code(pick, noise, 70, 6)
    cache = torch.randint(0, 256, (5, 1, PAGE, code.token_bytes + 3), generator=noise, dtype=torch.uint8)
    frequency = torch.arange(10 if heads else 3)
    turns = torch.zeros(TURN, 10)
    slots = torch.randint(0, 5 * PAGE, (23,), generator=noise)
    layout = layout_of(code, (turns, turns), frequency)
    out = decode_trellis(moved(cache), moved(slots * cache.shape[-1]), layout, torch.float32).cpu()
    rows = cache.flatten(0, 2)[slots, : code.token_bytes]
    torch.testing.assert_close(out, code.decode(rows), rtol=1e-6, atol=1e-6)


@with_triton
@pytest.mark.parametrize(("n", "W", "rows"), [(1, 1, 1), (2, 12, 1), (3, 9, 2)])
def test_codes_are_the_best_ones(n: int, W: int, rows: int) -> None:
    noise = torch.Generator().manual_seed(int(torch.randint(2**30, ())))
    values = torch.randn(n, W, generator=noise)
    weights, gains = (0.1 + torch.rand(size, generator=noise) for size in ((W,), (n, W)))
    bits = (1 + (torch.randperm(W, generator=noise) % 8)).to(torch.uint8)
    starts = torch.randint(0, 256, (n,), generator=noise).to(torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "_MEMORY", rows * 128 * W)  # several launches
        given = (values, weights * gains.square(), bits, tables(), starts)
        windows = encode_windows(*(moved(x) for x in given)).cpu()
    levels = tables()[bits.long(), windows.long()]
    wanted, codes = encode(values, weights, bits, starts, gains)
    assert codes is not None
    assert torch.equal(wanted, decode(codes, bits, starts))
    costs = [((x - values).double().square() * weights * gains.square()).sum(-1) for x in (levels, wanted)]
    torch.testing.assert_close(*costs, rtol=1e-5, atol=1e-6)
    before = torch.cat((starts[:, None], windows[:, :-1]), -1).long()  # every window goes on from the one before
    assert torch.equal(windows.long() >> bits.long(), before & (255 >> bits.long()))


def test_what_it_cannot_read_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("headwise.runtime.kernels.gpu.split.has_triton", lambda: True)
    x = torch.zeros(1, 1, 64)
    assert why_not_trellis(x, (x, x), None, (512,)) is None
    assert why_not_trellis(x, (x, x), None, (64, 513)) == "what is cached is 513 wide, and it takes 512 at most"
    assert "float64" in str(why_not_trellis(x.double(), (x, x), None, (512,)))
