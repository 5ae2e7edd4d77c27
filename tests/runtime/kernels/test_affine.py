"""Attention to keys and values in integer codes, against their decoded values in float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from headwise.costs.formulas.target import GROUPS
from headwise.runtime.kernels.mask import Scoring
from headwise.runtime.kernels.native import built
from headwise.runtime.kernels.native.calls import AffineRows, KeyBlocks, attend_affine
from headwise.runtime.kernels.reference import attend_reference
from headwise.runtime.quantization.groups import GroupCode, KiviCode
from tests.runtime.kernels.test_coded import CLOSE, draw_mask

pytestmark = pytest.mark.skipif(built().library is None, reason=f"no compiled kernel: {built().reason}")

WIDTHS = [1, 7, 16, 20, 33, 48, 64, 64, 80, 128, 160, 256]


def group_code(pick: random.Random, width: int) -> GroupCode:
    """A code with a group that fits."""
    groups = [group for group in GROUPS if width <= group or width % group == 0]
    return GroupCode(pick.choice([2, 3, 4, 4, 8]), pick.choice(groups)) if groups else GroupCode(4, 128)


def in_memory(rows: Tensor, pick: random.Random) -> Tensor:
    """The same rows with other bytes behind them, of which floats are NaN."""
    room = rows.shape[2] + pick.choice([0, 0, 5])
    memory = rows.new_full((*rows.shape[:2], room, rows.shape[3]), 0xFF)
    memory[:, :, : rows.shape[2]] = rows
    return memory[:, :, : rows.shape[2]]


def poison(rows: Tensor, hidden: Tensor) -> None:
    """Fill the rows ``[B, K, T, bytes]`` of hidden tokens ``[B, T]`` with bytes of which floats are NaN."""
    rows.masked_fill_(hidden[:, None, :, None], 0xFF)


def states_of(noise: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random numbers, some channels larger than others and not around zero."""
    width = shape[-1]
    size = torch.rand(width, generator=noise) + 0.1
    return ((torch.randn(shape, generator=noise) + torch.randn(width, generator=noise)) * size).to(dtype)


def check(seed: int) -> None:
    """Draw a case of any shape and format, and compare."""
    pick, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    B, K, G, S = (
        pick.choice([1, 1, 2]),
        pick.choice([1, 2, 3]),
        pick.choice([1, 3, 4, 5, 8]),
        pick.choice([1, 1, 2, 8]),
    )
    T = max(S, pick.choice([1, 2, 17, 31, 63, 64, 65, 127, 130, 200]))
    dtype = pick.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    D, V = pick.choice([(width, width) for width in WIDTHS] + [(pick.choice(WIDTHS), pick.choice(WIDTHS))])
    query = torch.randn(B, S, K * G, D, generator=noise).transpose(1, 2).to(dtype)
    keys, values = (states_of(noise, (B, K, T, width), dtype) for width in (D, V))
    mask = draw_mask(pick, noise, (B, K * G, S, T))
    options = (mask, pick.random() < 0.6, pick.choice([1.0, 0.3, -0.3]) / D**0.5)
    hidden = torch.zeros(B, T, dtype=torch.bool)
    if mask is not None and mask.shape[1:3] == (1, 1):
        hidden = ~mask[:, 0, 0].expand(B, T)
    block = pick.choice([16, 32, 64, 128])
    if pick.random() < 0.4 and (block >= V or V % block == 0):
        out, expected = with_blocks(pick, query, keys, values, KiviCode(pick.choice([2, 3, 4]), block, 3), options)
    else:
        key_code, value_code = group_code(pick, D), group_code(pick, V)
        rows = [in_memory(c.encode(x), pick) for c, x in ((key_code, keys), (value_code, values))]
        wide = [
            code.decode(part, width, torch.float64)
            for code, part, width in zip((key_code, value_code), rows, (D, V), strict=True)
        ]
        for part in rows:
            poison(part, hidden)
        key, value = (
            AffineRows(part, width, code.bits, code.groups(width))
            for code, part, width in zip((key_code, value_code), rows, (D, V), strict=True)
        )
        out, expected = attend_affine(query, key, value, Scoring(*options)), reference(query, *wide, options)
        values = wide[1]
    largest = max(expected.abs().max().item(), values.double().abs().max().item() * 0.05)
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max().item() <= CLOSE[dtype] * largest, seed
    seen = allowed(options[0], options[1], (B, K * G, S, T)).any(-1)
    assert (out[~seen] == 0).all(), seed


def with_blocks(
    pick: random.Random,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    code: KiviCode,
    options: tuple[Tensor | None, bool, float],
) -> tuple[Tensor, Tensor]:
    """The output and what is expected, with keys in blocks and the latest tokens as they are."""
    D, V, N = keys.shape[3], values.shape[3], code.coded(keys.shape[2])
    rows, scales = code.encode_keys(keys[:, :, :N])
    rows, value_rows = in_memory(rows, pick), in_memory(code.values.encode(values[:, :, :N]), pick)
    out = attend_affine(
        query,
        AffineRows(rows, D, code.bits, 0),
        AffineRows(value_rows, V, code.bits, code.values.groups(V)),
        Scoring(*options),
        blocks=KeyBlocks(scales, code.block),
        late=(keys[:, :, N:], values[:, :, N:]),
    )
    wide_keys = torch.cat((code.decode_keys(rows, scales, torch.float64), keys[:, :, N:].double()), 2)
    wide_values = torch.cat((code.values.decode(value_rows, V, torch.float64), values[:, :, N:].double()), 2)
    return out, reference(query, wide_keys, wide_values, options)


def allowed(mask: Tensor | None, is_causal: bool, shape: tuple[int, int, int, int]) -> Tensor:
    """``[B, H, S, T]``, True where a query sees a token."""
    S, T = shape[2:]
    seen = torch.ones(shape, dtype=torch.bool)
    if mask is not None:
        seen = seen & mask
    return seen & (torch.arange(T - S, T)[:, None] >= torch.arange(T)) if is_causal else seen


def reference(query: Tensor, keys: Tensor, values: Tensor, options: tuple[Tensor | None, bool, float]) -> Tensor:
    """The output in float64."""
    mask = allowed(options[0], options[1], (*query.shape[:3], keys.shape[2]))
    groups = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
    return attend_reference(query.double(), keys, values, mask, options[2], 0.0)[0]


def of_bits(bits: int) -> tuple[list[AffineRows], list[Tensor], Tensor]:
    """Keys and values of 48 channels in codes of so many bits, what they stand for in float64, and queries."""
    noise = torch.Generator().manual_seed(bits)
    code, query = GroupCode(bits, 16), torch.randn(1, 4, 1, 48, generator=noise)
    rows = [code.encode(states_of(noise, (1, 2, 48, 48), torch.float32)) for _ in range(2)]
    states = [code.decode(part, 48, torch.float64) for part in rows]
    return [AffineRows(part, 48, bits, 3) for part in rows], states, query


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_every_number_of_bits_are_read(bits: int) -> None:
    (key, value), states, query = of_bits(bits)
    expected = reference(query, *states, (None, False, 0.1))
    out = attend_affine(query, key, value, Scoring(None, False, 0.1))
    assert (out - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("part", range(10))
def test_it_is_attention_to_the_decoded_values(part: int) -> None:
    for seed in range(250 * part, 250 * (part + 1)):
        check(seed)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("place", ["keys", "values"])
@pytest.mark.parametrize("odd", [float("inf"), float("nan"), -float("inf"), 1e8])
def test_what_a_code_cannot_hold_is_no_number(bits: int, place: str, odd: float) -> None:
    torch.manual_seed(0)
    code, states = GroupCode(bits, 32), {"keys": torch.randn(1, 1, 70, 64), "values": torch.randn(1, 1, 70, 64)}
    states[place][0, 0, 20, 40] = odd
    key, value = (AffineRows(code.encode(x), 64, bits, 2) for x in states.values())
    out = attend_affine(torch.randn(1, 3, 1, 64), key, value, Scoring(None, False, 0.1))
    is_nan = out.isnan()
    assert is_nan[..., 32:].all()
    assert is_nan[..., :32].all() == (place == "keys")
    mask = torch.arange(70) != 20
    out = attend_affine(torch.randn(1, 3, 1, 64), key, value, Scoring(mask[None, None, None], False, 0.1))
    assert not out.isnan().any()
