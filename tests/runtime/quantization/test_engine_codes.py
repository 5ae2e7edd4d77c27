"""Engines' own caches beside what the engines stored, and what every code of one promises.

engine_codes.json has rows that MLX-LM, optimum-quanto, vLLM's Triton kernels and SGLang stored of the keys in it; the
command that made it and the versions are in it too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headwise.hf
from headwise.errors import ArgumentError
from headwise.runtime.hf import HeadwiseCache
from headwise.runtime.quantization.engine_code import EngineCode
from headwise.runtime.quantization.formats import ENGINE_FORMATS, LLAMA_CPP, EngineFormat, parse_format
from headwise.runtime.quantization.vllm import levels_of_normal
from tests.closeness import assert_close
from tests.tiny_families import save_family

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "engine_codes.json").read_text())
FORMATS = [f"{engine}:{name}" for engine, names in ENGINE_FORMATS.items() if engine != LLAMA_CPP for name in names]
SIDES = [(spelling, side) for spelling in FORMATS for side in ("keys", "values")]

FITTING = {"mlx": 64, "transformers": 64, "sglang:fp4": 16, "vllm:int4": 2}
"""What the width of a head must be a multiple of."""

OFF = {
    "mlx:4": 0.15, "mlx:8": 0.02, "transformers:quanto4": 0.1, "transformers:quanto2": 0.36, "sglang:fp4": 0.34,
    "vllm:int8_per_token_head": 0.004, "vllm:int4_per_token_head": 0.14,
}  # fmt: skip
"""How far numbers may be off, over the largest of their block: about a step, or half of one."""


def code_of(spelling: str, side: str) -> EngineCode:
    form = parse_format(spelling)
    assert isinstance(form, EngineFormat)
    return form.keys if side == "keys" else form.values


def fits(spelling: str, side: str, width: int) -> bool:
    multiple = next((size for start, size in FITTING.items() if spelling.startswith(start)), 1)
    is_turbo_key = side == "keys" and spelling.endswith("_nc")
    return width % multiple == 0 and not (is_turbo_key and width & (width - 1))


def widths(spelling: str, side: str) -> list[int]:
    return [width for width in (32, 64, 80, 96, 128, 192, 256) if fits(spelling, side, width)]


def states(seed: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(1, 2, 20, width, generator=generator)
    drawn *= 10 ** torch.empty(1, 2, 20, 1).uniform_(-1, 2, generator=generator)
    drawn[0, 0, 1], drawn[0, 0, 2] = 1.0, drawn[0, 0, 2].abs()
    return drawn


@pytest.mark.parametrize("engine", RECORDED["engines"])
def test_rows_are_those_of_the_engine(engine: str) -> None:
    hexes = RECORDED["keys"]
    keys = torch.tensor(list(bytes.fromhex("".join(hexes))), dtype=torch.uint8).view(torch.bfloat16).view(6, 64)
    assert (keys[0] == 0).all()
    assert (keys[2] >= 0).all()
    for name, rows in RECORDED["engines"][engine]["rows"].items():
        cache, side = name.split("/")
        own = code_of(f"{engine}:{cache}", side).encode(keys[None, None].float())
        assert [bytes(row.tolist()).hex() for row in own[0, 0]] == rows, name


def test_every_engine_is_recorded() -> None:
    recorded = {f"{engine}:{key}" for engine, made in RECORDED["engines"].items() for key in made["rows"]}
    floats = {"vllm:fp8/keys", "sglang:fp8/keys", "vllm:turboquant_k8v4/keys"}  # which torch rounds
    alike = {spelling for spelling in FORMATS if "turboquant" not in spelling}
    wanted = {f"{spelling}/{side}" for spelling, side in SIDES if side == "keys" or spelling not in alike}
    assert recorded == wanted - floats


@pytest.mark.parametrize(("spelling", "side"), SIDES)
def test_rows_have_as_many_bytes_as_they_say(spelling: str, side: str) -> None:
    code = code_of(spelling, side)
    for width in widths(spelling, side):
        rows = code.encode(states(1, width))
        assert rows.dtype == torch.uint8
        assert rows.shape == (1, 2, 20, code.token_bytes(width))
        assert code.decode(rows, width, torch.bfloat16).dtype == torch.bfloat16
        rounded = code.as_read(code.stored(states(1, width)), width)
        assert rounded.dtype == torch.float32


@pytest.mark.parametrize(("spelling", "side"), SIDES)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_numbers_are_near_what_is_read(spelling: str, side: str, seed: int) -> None:
    code = code_of(spelling, side)
    for width in widths(spelling, side):
        turned = code.turned(states(seed, width))
        off = (code.as_read(code.stored(turned), width) - turned).abs()
        if "fp8" in spelling or (side, spelling) == ("keys", "vllm:turboquant_k8v4"):
            inside = turned.abs() <= 448
            assert (off <= turned.abs() / 16 + 2**-10)[inside].all()
        elif "turboquant" in spelling and side == "keys":
            ends = off.square().sum(-1).sqrt() / turned.square().sum(-1).sqrt()
            assert ends[0, 1].mean() < (0.13 if spelling.endswith("4bit_nc") else 0.24)
        else:
            block = code.block(width)
            largest = torch.unflatten(turned.abs(), -1, (-1, block)).amax(-1).repeat_interleave(block, -1)
            if spelling == "vllm:int4_per_token_head":  # zero is one of its codes: numbers of one sign are cut
                has_both = (turned.amin(-1) < -largest[..., 0] / 5) & (turned.amax(-1) > largest[..., 0] / 5)
                assert has_both.float().mean() > 0.9
                off, largest = off[has_both], largest[has_both]
            part = OFF.get(spelling, 0.15 if "3bit" in spelling else 0.07)
            assert (off <= part * largest + 1e-6).all(), (width, float((off / largest).max()))


@pytest.mark.parametrize(("spelling", "side"), SIDES)
def test_zeros_stay_zeros(spelling: str, side: str) -> None:
    code = code_of(spelling, side)
    for width in widths(spelling, side):
        zeros = torch.zeros(1, 1, 3, width)
        assert (code.decode(code.encode(zeros), width, torch.float32) == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("spelling", "side"), SIDES)
def test_what_is_no_number_becomes_none(spelling: str, side: str, bad: float) -> None:
    code = code_of(spelling, side)
    for width in widths(spelling, side):
        drawn = states(3, width)
        good = code.decode(code.encode(drawn), width, torch.float32)
        drawn[0, 1, 4, 5] = bad
        read = code.decode(code.encode(drawn), width, torch.float32)
        assert not read[0, 1, 4, 5].isfinite()
        assert torch.equal(read[0, :, :4], good[0, :, :4])
        assert torch.equal(read[0, 0], good[0, 0])


@pytest.mark.parametrize(("spelling", "side"), SIDES)
def test_turning_keeps_products_and_is_undone(spelling: str, side: str) -> None:
    code = code_of(spelling, side)
    for width in widths(spelling, side):
        a, b = states(1, width).double(), states(2, width).double()
        assert_close((code.turned(a) * code.turned(b)).sum(-1), (a * b).sum(-1), 1e-12)
        assert_close(code.turned_back(code.turned(a)), a, 1e-12)
        assert code.interleaved() == code


@pytest.mark.parametrize(("spelling", "side"), SIDES)
def test_losses_fall_with_the_keys_and_have_derivatives(spelling: str, side: str) -> None:
    code, width = code_of(spelling, side), 64
    keys = (5 * states(4, width)[0]).requires_grad_()
    queries = torch.ones(2, width // code.block(width))
    loss = code.loss(keys, queries)
    assert loss.shape == (2,)
    loss.sum().backward()
    assert keys.grad is not None
    assert keys.grad.isfinite().all()
    assert (code.loss(keys / 2, queries) < loss).all()


@pytest.mark.parametrize(
    ("spelling", "width", "words"),
    [
        ("mlx:4", 96, "groups of 64 channels, which do not divide the 96"),
        ("transformers:quanto2", 32, "groups of 64 channels, which do not divide the 32"),
        ("sglang:fp4", 40, "groups of 16 channels, which do not divide the 40"),
        ("vllm:int4_per_token_head", 33, "pairs of channels"),
        ("vllm:turboquant_4bit_nc", 96, "a power of two"),
    ],
)
def test_heads_that_do_not_fit_are_refused_in_one_line(spelling: str, width: int, words: str) -> None:
    for ask in (lambda code: code.token_bytes(width), lambda code: code.encode(torch.zeros(1, 1, 1, width))):
        with pytest.raises(ArgumentError, match=words) as refused:
            ask(code_of(spelling, "keys"))
        assert refused.value.value == spelling
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("spelling", FORMATS)
def test_spellings(spelling: str) -> None:
    assert str(parse_format(spelling)) == spelling
    engine, name = spelling.split(":")
    for wrong in (f"{spelling}/{name}", spelling.upper(), f"{engine}:", f"{engine}:{name}0", name):
        if wrong != "fp8":
            with pytest.raises(ArgumentError, match=f"must be {engine}: with|an engine's own"):
                parse_format(wrong)


def test_floats_beyond_the_largest_saturate_in_vllm_and_become_none_in_sglang() -> None:
    numbers = torch.tensor([[[[448.0, 460.0, -464.0, 465.0, -1e4, 2.0**-10, 1.3 * 2.0**-9]]]])
    vllm, sglang = (code_of(f"{engine}:fp8", "keys") for engine in ("vllm", "sglang"))
    read = vllm.decode(vllm.encode(numbers), 7, torch.float32)[0, 0, 0]
    assert read.tolist() == [448.0, 448.0, -448.0, 448.0, -448.0, 0.0, 2.0**-9]
    read = sglang.decode(sglang.encode(numbers), 7, torch.float32)[0, 0, 0]
    assert read[:3].tolist() == [448.0, 448.0, -448.0]
    assert read[3:5].isnan().all()
    assert torch.equal(sglang.encode(numbers)[..., 5:], vllm.encode(numbers)[..., 5:])
    assert torch.equal(vllm.rounded_queries(numbers), vllm.decode(vllm.encode(numbers), 7, torch.float32))


def test_levels_of_a_normal_distribution() -> None:
    """Each is the mean of the numbers nearest to it, which is what makes them lose least."""
    drawn = torch.randn(400_000, generator=torch.Generator().manual_seed(0)).double() / 8
    for bits in (3, 4):
        levels = levels_of_normal(64, bits)
        assert len(levels) == 2**bits
        nearest = (drawn[:, None] - levels).abs().argmin(-1)
        means = torch.stack([drawn[nearest == number].mean() for number in range(len(levels))])
        assert (means - levels).abs().max() < 0.004


def test_the_first_and_last_layers_are_not_quantised_where_the_engine_leaves_them(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 6}
    model = headwise.load(save_family(tmp_path / "llama", "llama", **sizes), dtype="float32")
    codecs = [layer.codec for layer in HeadwiseCache(model, quantize="vllm:turboquant_4bit_nc").layers]
    assert [codec is None for codec in codecs] == [True, True, False, False, True, True]
    codecs = [layer.codec for layer in HeadwiseCache(model, quantize="vllm:int4_per_token_head").layers]
    assert codecs == [parse_format("vllm:int4_per_token_head")] * 6
    form = ENGINE_FORMATS["vllm"]["turboquant_3bit_nc"]
    assert [form.is_unquantised(layer, 3) for layer in range(3)] == [True, False, True]


@pytest.mark.parametrize("spelling", FORMATS)
@torch.inference_mode()
def test_attention_reads_what_codes_stand_for(spelling: str, tmp_path: Path) -> None:
    """Tokens one by one, read in the order and rotation they are stored in, beside a prompt that is decoded."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    model = headwise.load(save_family(tmp_path / "qwen2", "qwen2", **sizes), dtype="float32")
    ids = torch.randint(3, 97, (1, 12), generator=torch.Generator().manual_seed(1))
    plain = model(ids).logits
    model.set_attn_implementation("sdpa")
    decoded = model(ids, past_key_values=HeadwiseCache(model, quantize=spelling)).logits
    model.set_attn_implementation("headwise")
    cache = HeadwiseCache(model, quantize=spelling)
    steps = torch.cat([model(ids[:, [at]], past_key_values=cache).logits for at in range(12)], 1)
    form = parse_format(spelling)
    assert isinstance(form, EngineFormat)
    assert (decoded - plain).abs().max() > 1e-4
    if torch.equal(form.keys.rounded_queries(torch.ones(1, 64) * 1.1), torch.ones(1, 64) * 1.1):
        assert_close(steps, decoded, 1e-3)
    else:  # queries are rounded too, where the attention is headwise's
        assert_close(steps, decoded, 0.2)
