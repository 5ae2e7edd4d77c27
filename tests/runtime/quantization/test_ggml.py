"""llama.cpp's types beside the gguf package's own code of them, and what attention makes of a cache in them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import headwise.hf
from headwise.costs.prediction import GGML_TYPES
from headwise.errors import ArgumentError
from headwise.runtime.hf import HeadwiseCache, default_cache
from headwise.runtime.quantization.formats import EngineFormat, parse_format
from headwise.runtime.quantization.ggml import GgmlCode, LlamaCppCode
from tests.closeness import assert_close
from tests.tiny_families import save_family

PACKAGED = [kind for kind in GGML_TYPES if kind != "iq4_nl"]  # which the package decodes, and does not encode


def states(seed: int, width: int = 128) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(1, 2, 40, width, generator=generator)
    drawn *= 10 ** torch.empty(1, 2, 40, 1).uniform_(-4, 3, generator=generator)
    drawn[0, 0, 0], drawn[0, 0, 1], drawn[0, 0, 2, :5] = 0.0, 1.0, -2.0
    return drawn


@pytest.mark.parametrize("kind", PACKAGED)
@given(seed=st.integers(0, 2**31))
def test_bytes_are_those_of_the_gguf_package(kind: str, seed: int) -> None:
    drawn = states(seed)
    rows = GgmlCode(kind).encode(drawn)
    assert rows.shape[-1] == GgmlCode(kind).token_bytes(128)
    wanted = gguf.quants.quantize(drawn.numpy(), GGMLQuantizationType[kind.upper()])
    own = rows.reshape(80, -1).numpy()
    packaged = np.ascontiguousarray(wanted).view(np.uint8).reshape(own.shape)
    if kind == "q8_0":  # ggml's code for x86 rounds half a code to even, the package away from zero
        off = own.view(np.int8).astype(int) - packaged.view(np.int8)
        assert np.abs(off).max() <= 1
        assert (off != 0).mean() < 1e-2
        own, packaged = (part.reshape(-1, 34)[:, :2] for part in (own, packaged))
    assert np.array_equal(own, packaged)


@pytest.mark.parametrize("kind", [kind for kind in GGML_TYPES if kind not in ("f32", "f16")])
def test_it_decodes_what_the_gguf_package_decodes(kind: str) -> None:
    rows = GgmlCode(kind).encode(states(5))
    wanted = gguf.quants.dequantize(rows.reshape(80, -1).numpy(), GGMLQuantizationType[kind.upper()])
    own = GgmlCode(kind).decode(rows, 128, torch.float32)
    assert torch.equal(own.reshape(80, -1), torch.from_numpy(wanted))


def test_the_scale_of_levels_is_fitted_and_codes_are_not() -> None:
    """As ggml's reference does for a cache, where it tries no other scale: written out for one block."""
    block = states(11)[0, 1, 3, :32].double()
    levels = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]).double()
    largest = block[block.abs().argmax()]
    codes = (block[:, None] / (largest / -127) - levels).abs().argmin(-1)
    guess = levels[codes]
    scale = (block**3 * guess).sum() / (block**2 * guess**2).sum()
    own = GgmlCode("iq4_nl").decode(GgmlCode("iq4_nl").encode(block.float()[None]), 32, torch.float64)[0]
    assert_close(own, guess * scale.half().double(), 1e-6)


@pytest.mark.parametrize("width", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("is_keys", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_turning_keeps_products_and_is_undone(width: int, is_keys: bool, interleaved: bool) -> None:
    code = LlamaCppCode("q8_0", is_keys=is_keys, is_interleaved=interleaved and is_keys)
    a, b = states(1, width).double(), states(2, width).double()
    seen = code.turned(a)
    assert_close((seen * code.turned(b)).sum(-1), (a * b).sum(-1), 1e-12)
    if width % 64:
        assert torch.equal(seen.sort().values, a.sort().values)  # another order at most
    elif not is_keys:
        assert_close(seen[..., :64], code.turned(a[..., :64]), 1e-12)  # values are rotated by 64 channels
    rows = code.encode(a.float())
    back = code.decode(rows, width, torch.float32)
    assert (back - a).abs().max() <= a.abs().max() / 100


def test_blocks_divide_heads() -> None:
    with pytest.raises(ArgumentError, match="blocks of 32"):
        GgmlCode("q4_0").token_bytes(80)
    assert GgmlCode("f16").token_bytes(80) == 160


@pytest.mark.parametrize("spelling", ["llama.cpp:q4_0", "llama.cpp:q8_0/q4_0", "llama.cpp:iq4_nl/f16"])
def test_spellings(spelling: str) -> None:
    assert str(parse_format(spelling)) == spelling
    for wrong in (f"{spelling}/q8_0", spelling.replace("llama.cpp", "llama"), "llama.cpp:", "llama.cpp:q4"):
        with pytest.raises(ArgumentError, match=r"llama\.cpp"):
            parse_format(wrong if wrong != f"{spelling}/q8_0" else "llama.cpp:q8_0/q4_0/q4_0")


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("cache", ["llama.cpp:q8_0", "llama.cpp:q4_0", "llama.cpp:f16/q5_1"])
@torch.inference_mode()
def test_attention_is_that_of_rounded_queries_keys_and_values(name: str, cache: str, tmp_path: Path) -> None:
    """A model's logits with the cache, beside the same rounding written into its attention by hand."""
    # One layer: behind a second one, a last bit of the first would turn some of its codes into the next.
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    folder = save_family(tmp_path / name, name, **sizes)
    ids = torch.randint(3, 97, (2, 30), generator=torch.Generator().manual_seed(1))
    code = parse_format(cache)
    assert isinstance(code, EngineFormat)
    code = code.interleaved() if name == "llama" else code
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plain = model(ids).logits

    def rounded(module, query, key, value, mask, scaling=None, **_):  # type: ignore[no-untyped-def]
        key = code.keys.decode(code.keys.encode(key), 64, torch.float32)
        value = code.values.decode(code.values.encode(value), 64, torch.float32)
        seen = code.keys.turned(query)
        operand = GgmlCode("q8_0" if code.keys.rounds else "f16")
        exact = operand.decode(operand.encode(seen), 64, torch.float32)
        keys = code.keys.turned(key).repeat_interleave(2, 1)
        scores = exact @ keys.mT * 64**-0.5
        scores = scores.masked_fill(torch.ones(30, 30).triu(1).bool(), -torch.inf)
        return (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2).contiguous(), None

    from transformers import AttentionInterface

    AttentionInterface.register("rounded_by_hand", rounded)
    model.set_attn_implementation("rounded_by_hand")
    wanted = model(ids).logits
    model.set_attn_implementation("sdpa")
    with default_cache(model, cache):
        own = model(ids).logits
    assert model.config._attn_implementation == "sdpa"
    assert_close(own, wanted, 1e-4)
    assert (own - plain).abs().max() > 30 * (own - wanted).abs().max()


@torch.inference_mode()
def test_tokens_one_by_one_are_those_of_a_prompt(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "qwen2", "qwen2", hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    model = headwise.load(folder, dtype="float32")
    model.set_attn_implementation("headwise")
    ids = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(1))
    cache = HeadwiseCache(model, quantize="llama.cpp:q4_0")
    whole = model(ids, past_key_values=cache).logits
    assert cache.layers[0].keys.shape[-1] == 36
    cache = HeadwiseCache(model, quantize="llama.cpp:q4_0")
    steps = [model(ids[:, [at]], past_key_values=cache).logits for at in range(20)]
    assert_close(torch.cat(steps, 1), whole, 1e-4)
