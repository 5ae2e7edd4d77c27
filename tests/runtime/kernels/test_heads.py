"""Attention to keys and values of heads in trellis codes, against their decoded values in float64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwise.runtime.attention.rope import rotate
from headwise.runtime.kernels.mask import Scoring
from headwise.runtime.kernels.native import built
from headwise.runtime.kernels.native.abi import TURN
from headwise.runtime.kernels.native.calls import attend_trellis
from headwise.runtime.kernels.pages import Pages
from headwise.runtime.quantization import TransformCode
from headwise.runtime.quantization.transform_code import SINKS, blocks, trellis_layout
from tests.closeness import assert_close
from tests.runtime.kernels.test_affine import allowed, reference
from tests.runtime.kernels.test_coded import CLOSE, draw_mask
from tests.runtime.kernels.test_coded import random_code as latent_code

pytestmark = pytest.mark.skipif(built().library is None, reason=f"no compiled kernel: {built().reason}")

FREQUENCIES = 8


def random_code(pick: random.Random, noise: torch.Generator, K: int, D: int, V: int) -> TransformCode:
    """Draw a code of any bits."""
    sections, width = (D,) * K + (V,) * K, K * (D + V)
    bits = tuple(pick.randint(1, 8) for _ in blocks(sections))
    offset, scale = torch.randn(width, generator=noise), torch.rand(width, generator=noise) + 0.05
    return TransformCode(offset, scale, bits, sections, (K * D, K * V))


def decoded(code: TransformCode, codes: Tensor, wide: Tensor, first: Tensor) -> Tensor:
    """``[B, T, W]`` in float64, with the values of first tokens in their place."""
    values = code.decode(codes[:, 0], torch.float64)
    for row, slot in enumerate(first.tolist()):
        count = min(SINKS, values.shape[1] - slot)
        values[row, slot : slot + count] = wide[row, :count].double()
    return values


def check(seed: int) -> None:
    """Draw a case of any shape, with other bytes behind its codes, and compare."""
    pick, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    B, K, G, S = pick.choice([1, 1, 2]), pick.choice([1, 2, 3]), pick.choice([1, 3, 4, 8]), pick.choice([1, 1, 2, 8])
    T = max(S, pick.choice([1, 2, 4, 17, 63, 64, 65, 127, 130, 200]))
    dtype = pick.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    D, V = pick.choice([8, 16, 20, 34, 48, 64, 64, 128]), pick.choice([1, 16, 20, 33, 64, 64, 128])
    P = pick.choice([D, D, 0, min(D, 6), min(D, 32)])
    code = random_code(pick, noise, K, D, V)
    room = T + pick.choice([0, 0, 5])
    memory = torch.randint(0, 256, (B, 1, room, code.token_bytes), generator=noise, dtype=torch.uint8)
    memory[..., 0] = (memory[..., 0] & 0x77) + 1  # gains that numbers of float16 can hold
    codes, wide = memory[:, :, :T], torch.randn(B, SINKS, code.width, generator=noise).bfloat16()
    first = torch.randint(0, T, (B,), generator=noise) if pick.random() < 0.5 else torch.zeros(B, dtype=torch.int64)
    query = torch.randn(B, S, K * G, D, generator=noise).transpose(1, 2).to(dtype)
    mask = draw_mask(pick, noise, (B, K * G, S, T))
    options = (mask, pick.random() < 0.6, pick.choice([0.2, 0.05, 1.0, -0.1]) / D)
    angles = torch.arange(max(T, TURN))[:, None] * torch.rand(FREQUENCIES, generator=noise, dtype=torch.float64)
    cos, sin, frequency = angles.cos(), angles.sin(), torch.randint(0, FREQUENCIES, (P // 2,), generator=noise)
    turn = (cos[:TURN, frequency].float(), sin[:TURN, frequency].float()) if P else None
    layout = trellis_layout(code, turn)
    factor = pick.choice([1.0, 1.0, 0.5, 1.35]) if P else 1.0  # scaled RoPE multiplies its rotations
    tables = (cos.float() * factor, sin.float() * factor)
    out = attend_trellis(query, codes, wide, first, layout, tables, frequency, Scoring(*options))

    whole = decoded(code, codes, wide, first)
    keys, values = (
        torch.unflatten(part, -1, (K, -1)).transpose(1, 2) for part in whole.split_with_sizes(code.parts, -1)
    )
    turned = rotate(keys[..., :P], cos[None, :T, frequency], sin[None, :T, frequency], interleaved=False)
    expected = reference(query, torch.cat((turned * factor, keys[..., P:]), -1), values, options)
    largest = max(expected.abs().max().item(), values.abs().max().item() * 0.05)
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max().item() <= CLOSE[dtype] * largest, seed
    assert (out[~allowed(mask, options[1], (B, K * G, S, T)).any(-1)] == 0).all(), seed


@pytest.mark.parametrize("part", range(10))
def test_it_is_attention_to_the_decoded_values(part: int) -> None:
    for seed in range(200 * part, 200 * (part + 1)):
        check(seed)


def in_pages(codes: Tensor, lengths: Tensor, tokens: int, noise: torch.Generator) -> tuple[Tensor, Pages]:
    """Codes ``[B, 1, T, bytes]`` in pages of so many tokens in any order; whatever is behind a sequence is 255."""
    (B, _, T, size), spare = codes.shape, 3
    count = -(-T // tokens)
    table = torch.randperm(B * count, generator=noise).view(B, count)
    pages = torch.full((B * count, 1, tokens, size + spare), 255, dtype=torch.uint8)
    slots = torch.arange(T)
    for row, length in enumerate(lengths.tolist()):
        own = slots[:length]
        pages[table[row, own // tokens], 0, own % tokens, :size] = codes[row, 0, :length]
    return pages[..., :size], Pages(table.int(), lengths.int())


@pytest.mark.parametrize("tokens", [1, 5, 64, 256])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("is_latent", [False, True])
def test_codes_in_pages_are_read_as_those_in_a_row(tokens: int, is_latent: bool, window: int | None) -> None:
    pick, noise = random.Random(tokens), torch.Generator().manual_seed(tokens)
    B, T, K, D = 3, 200, 2, 48
    code = latent_code(pick, noise, 33, 32) if is_latent else random_code(pick, noise, K, D, D)
    codes = torch.randint(0, 256, (B, 1, T, code.token_bytes), generator=noise, dtype=torch.uint8)
    codes[..., 0] = (codes[..., 0] & 0x77) + 1
    new = pick.choice([1, 2, 30])  # more rows than are computed at a time
    query = torch.randn(B, 6, new, 65 if is_latent else D, generator=noise)
    wide, first = torch.randn(B, SINKS, code.width, generator=noise).bfloat16(), torch.zeros(B, dtype=torch.int64)
    lengths, scoring = torch.tensor([T, 30, 130]), Scoring(None, True, 0.05, window)
    frequency = torch.randint(0, FREQUENCIES, (16 if is_latent else D // 2,), generator=noise)
    angles = torch.arange(T)[:, None] * torch.rand(FREQUENCIES, generator=noise)
    cos, sin = angles.cos(), angles.sin()
    layout = trellis_layout(code, (cos[:TURN, frequency], sin[:TURN, frequency]))
    others = layout, (cos, sin), frequency, scoring
    pages, table = in_pages(codes, lengths, tokens, noise)
    together = attend_trellis(query, pages, wide, first, *others, pages=table)
    for row, length in enumerate(lengths.tolist()):
        own = slice(row, row + 1)
        alone = attend_trellis(query[own], codes[own, :, :length], wide[own], first[own], *others)
        assert_close(together[own], alone, 1e-5)  # threads may share tokens out otherwise


@pytest.mark.parametrize("is_latent", [False, True])
def test_a_first_token_is_read_by_its_own_code(is_latent: bool) -> None:
    pick, noise = random.Random(4), torch.Generator().manual_seed(4)
    B, T, K, D = 3, 130, 2, 48
    draw = (lambda: latent_code(pick, noise, 33, 32)) if is_latent else (lambda: random_code(pick, noise, K, D, D))
    code, own = draw(), draw()
    size = max(code.token_bytes, own.token_bytes)
    codes = torch.randint(0, 256, (B, 1, T, size), generator=noise, dtype=torch.uint8)
    codes[..., 0] = (codes[..., 0] & 0x77) + 1
    query = torch.randn(B, 6, 2, 65 if is_latent else D, generator=noise)
    first, rows = torch.tensor([0, 70, 129]), torch.arange(B)
    wide = own.decode(codes[rows, 0, first, None, : own.token_bytes], torch.bfloat16)
    frequency = torch.randint(0, FREQUENCIES, (16 if is_latent else D // 2,), generator=noise)
    angles = torch.arange(T)[:, None] * torch.rand(FREQUENCIES, generator=noise)
    cos, sin = angles.cos(), angles.sin()
    layout = trellis_layout(code, (cos[:TURN, frequency], sin[:TURN, frequency]))
    others = (cos, sin), frequency, Scoring(torch.arange(T) >= first[:, None, None, None], True, 0.05)
    given = attend_trellis(query, codes, wide, first, layout, *others)
    read = replace(layout, first=trellis_layout(own, None))
    assert torch.equal(attend_trellis(query, codes, wide[:, :0], first, read, *others), given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_latent", [False, True])
def test_a_query_of_zeros_attends_to_all_tokens_alike(is_latent: bool, dtype: torch.dtype) -> None:
    pick, noise, T = random.Random(5), torch.Generator().manual_seed(5), 70
    code = latent_code(pick, noise, 33, 32) if is_latent else random_code(pick, noise, 2, 32, 32)
    codes = torch.randint(0, 256, (1, 1, T, code.token_bytes), generator=noise, dtype=torch.uint8)
    wide, first = torch.empty(1, 0, code.width).bfloat16(), torch.tensor([0])
    frequency = torch.arange(16) % FREQUENCIES
    angles = torch.arange(T)[:, None] * torch.rand(FREQUENCIES, generator=noise)
    cos, sin = angles.cos(), angles.sin()
    layout = trellis_layout(code, (cos[:TURN, frequency], sin[:TURN, frequency]))
    query = torch.zeros(1, 4, 1, 65 if is_latent else 32, dtype=dtype)
    out = attend_trellis(query, codes, wide, first, layout, (cos, sin), frequency, Scoring(None, True, 0.1))
    values = code.decode(codes[0, 0]).mean(0)
    of_heads = [values[:33]] * 4 if is_latent else [values[64 + 32 * (head // 2) :][:32] for head in range(4)]
    expected = torch.stack(of_heads)
    assert (out[0, :, 0].float() - expected).abs().max() <= CLOSE[dtype] * expected.abs().max()


@pytest.mark.parametrize("bias", [3, 30, 300, 3000])
@pytest.mark.parametrize("seed", range(4))
def test_keys_far_from_zero_lose_no_more_than_in_bfloat16(seed: int, bias: float) -> None:
    """Biases make keys many times as large as what tells them apart."""
    noise = torch.Generator().manual_seed(seed)
    K, G, D, T = 2, 4, 64, 150
    width = 2 * K * D
    biased = torch.rand(width, generator=noise) < 0.1
    biased[K * D :] = False
    offset = torch.randn(width, generator=noise) * bias * biased
    scale = torch.rand(width, generator=noise) + 0.05
    code = TransformCode(offset, scale, (4,) * (width // 16), (D,) * (2 * K), (K * D, K * D))
    codes = torch.randint(0, 256, (1, 1, T, code.token_bytes), generator=noise, dtype=torch.uint8)
    codes[..., 0] = (codes[..., 0] & 0x77) + 1
    wide, first = torch.randn(1, SINKS, width, generator=noise).bfloat16(), torch.zeros(1, dtype=torch.int64)
    query = torch.randn(1, K * G, 1, D, generator=noise)
    small = torch.unflatten(biased[: K * D], 0, (K, 1, 1, D)).expand(K, G, 1, D).reshape(1, K * G, 1, D)
    query = torch.where(small, query / bias, query).bfloat16()
    angles = torch.arange(T)[:, None] * 1e4 ** (-torch.arange(D // 2, dtype=torch.float64) / (D // 2))
    cos, sin, frequency = angles.cos(), angles.sin(), torch.arange(D // 2)
    layout = trellis_layout(code, (cos[:TURN].float(), sin[:TURN].float()))
    options = (None, True, D**-0.5)
    out = attend_trellis(query, codes, wide, first, layout, (cos.float(), sin.float()), frequency, Scoring(*options))

    whole = decoded(code, codes, wide, first)
    keys, values = (
        torch.unflatten(part, -1, (K, D)).transpose(1, 2) for part in whole.split_with_sizes(code.parts, -1)
    )
    keys = rotate(keys, cos[None], sin[None], interleaved=False)
    expected = reference(query, keys, values, options)
    rounded = reference(query, keys.bfloat16().double(), values, options)
    loss, usual = ((result.double() - expected).square().mean().sqrt() for result in (out, rounded))
    assert loss < usual + expected.square().mean().sqrt() / 512  # the result is rounded to bfloat16 too
