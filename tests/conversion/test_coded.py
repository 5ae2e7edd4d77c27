"""Conversions to a coded cache: bytes as asked for, quality that follows them, and inputs that are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import headwise
from headwise.conversion.storage import Activations
from headwise.errors import HeadwiseError
from headwise.models.specs import LatentSpec, read_config
from headwise.runtime.hf import HeadwiseCache
from headwise.runtime.quantization.transform_code import FILE, read_codes
from tests.closeness import assert_close
from tests.conversion.test_resumed import TEXT, StoppedError, stop_at
from tests.real_models import save_tiny
from tests.tiny_families import save_family

OPTIONS: dict[str, Any] = {"to": "mla", "calibration_tokens": 512, "calibration_window": 64, "evaluate": False}


NO_TEXT = {"calibration_tokens": None, "calibration_window": None}


@pytest.fixture(autouse=True, scope="module")
def few_ratios() -> Iterator[None]:
    """Each takes a second; `codes/test_scales.py` has all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwise.conversion.codes.RATIOS", (1.0, 1.6))
        yield


@pytest.fixture(scope="module")
def whole(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion that ran to its end; not to be changed."""
    place = tmp_path_factory.mktemp("whole")
    (place / "text.txt").write_text(TEXT)
    headwise.convert(tiny_llama_folder, place / "out", kv_bytes=0.3, calibrate=place / "text.txt", **OPTIONS)
    return place / "out"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.mark.parametrize("fraction", [0.5, 0.25, 0.15])
def test_allocated_bytes_are_the_budget(tiny_llama: Path, text: Path, tmp_path: Path, fraction: float) -> None:
    report = headwise.convert(tiny_llama, tmp_path / "out", kv_bytes=fraction, calibrate=text, **OPTIONS)
    codes = read_codes(tmp_path / "out")
    assert report.kv_bytes_per_token_after == sum(code.token_bytes for code in codes.values())
    source_bytes = 2 * 2 * 2 * 2 * 8  # layers, keys and values, heads of 8 values, bfloat16
    assert report.kv_bytes_per_token_before == 2 * source_bytes  # the tiny model is float32
    model = headwise.load(tmp_path / "out")
    cache = HeadwiseCache(model, max_length=128)
    with torch.no_grad():
        model(torch.randint(2, 30, (1, 128)), past_key_values=cache)
    starts = 8 * len(codes)
    assert cache.nbytes == 128 * report.kv_bytes_per_token_after + starts
    # A layer of this size has few bytes, and a step is two of them.
    assert fraction * source_bytes - 6 <= report.kv_bytes_per_token_after <= fraction * source_bytes


@torch.inference_mode()
def test_mla_behind_norms_has_codes_too(text: Path, tmp_path: Path) -> None:
    source = save_family(tmp_path / "source", "qwen3")
    report = headwise.convert(source, tmp_path / "out", kv_bytes=0.25, calibrate=text, **OPTIONS)
    assert report.coded
    model = headwise.load(tmp_path / "out")
    ids = torch.randint(2, 30, (2, 40), generator=torch.Generator().manual_seed(0))
    whole = model(ids, use_cache=False).logits
    cache = HeadwiseCache(model, max_length=64)
    parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 20), (20, 21), (21, 40))]
    assert_close(torch.cat(parts, 1), whole, 1e-6)
    # Random weights lose much by a quarter of the bytes; a map of the wrong channels would lose everything.
    error = (whole - headwise.load(source)(ids).logits).norm() / whole.norm()
    assert error < 1


@pytest.mark.parametrize(
    ("heads", "fraction"), [((4, 2, 8), 0.08), ((4, 2, 8), 0.25), ((7, 1, 10), 0.08), ((7, 1, 10), 0.12)]
)
def test_small_layers_have_small_budgets(
    heads: tuple[int, int, int], fraction: float, text: Path, tmp_path: Path
) -> None:
    H, K, D = heads
    sizes = {"num_attention_heads": H, "num_key_value_heads": K, "head_dim": D, "hidden_size": 56}
    source = save_tiny(tmp_path / "source", "llama", **sizes)
    report = headwise.convert(source, tmp_path / "out", kv_bytes=fraction, calibrate=text, **OPTIONS)
    assert 0 < report.kv_bytes_per_token_after <= fraction * report.kv_bytes_per_token_before / 2  # of float32
    cached = HeadwiseCache(headwise.load(tmp_path / "out")).layers
    assert report.kv_bytes_per_token_after == sum(layer.codec.code.token_bytes for layer in cached)


def test_less_than_a_bit_for_each_value_is_refused(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    rule = r"kv_bytes = 0\.03: leaves less than a bit for each of 4 values"
    with pytest.raises(headwise.ArgumentError, match=rule):
        headwise.convert(tiny_llama, tmp_path / "out", kv_bytes=0.03, calibrate=text, **OPTIONS)


def test_a_layer_that_gives_nothing_has_a_code(text: Path, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "llama")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"].zero_()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    for target in ({"to": "same", "bits": 3}, {"to": "mla", "kv_bytes": 0.2}):
        headwise.convert(source, tmp_path / "out", calibrate=text, overwrite=True, **{**OPTIONS, **target})
        with torch.no_grad():
            assert bool(headwise.load(tmp_path / "out")(torch.randint(2, 30, (1, 20))).logits.isfinite().all())


@pytest.mark.parametrize("target", [{"to": "same", "bits": 4}, {"to": "mla", "kv_bytes": 0.25}])
def test_weights_that_leave_the_range_are_refused(target: dict[str, Any], text: Path, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "llama")
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if "k_proj" in name or "v_proj" in name:
            tensor.mul_(1e30)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(headwise.CheckpointError, match=r"weights = .*: are so large or so small"):
        headwise.convert(source, tmp_path / "out", calibrate=text, **{**OPTIONS, **target})
    assert not (tmp_path / "out").exists()


def test_a_text_that_is_too_short_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the fox")
    with pytest.raises(headwise.ArgumentError, match=r"calibrate = '.* tokens': are too few to design a code on"):
        headwise.convert(tiny_llama, tmp_path / "out", kv_bytes=0.5, calibrate=tmp_path / "text.txt", **OPTIONS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "target", [{"to": "mla", "kv_bytes": 0.4}, {"to": "same", "bits": 4}, {"to": "mla", "kv_budget": 0.5, "bits": 4}]
)
def test_a_dry_run_estimates_codes_too(tiny_llama: Path, text: Path, tmp_path: Path, target: dict[str, Any]) -> None:
    dry = headwise.convert(tiny_llama, tmp_path / "out", calibrate=text, dry_run=True, **{**OPTIONS, **target})
    assert dry.seconds > 0
    assert dry.kv_bytes_per_token_after < dry.kv_bytes_per_token_before
    assert not (tmp_path / "out").exists()


def test_bits_go_with_a_size(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    headwise.convert(tiny_llama, tmp_path / "out", kv_budget=0.75, bits=2.5, calibrate=text, **OPTIONS)
    spec = read_config(json.loads((tmp_path / "out" / "config.json").read_text()))
    codes = read_codes(tmp_path / "out")
    assert sorted(codes) == [0, 1]
    for index, code in codes.items():
        layer = spec.layers[index]
        assert isinstance(layer, LatentSpec)
        assert code.width == layer.kv_lora_rank + layer.qk_rope_head_dim
        assert code.token_bytes <= int(2.5 * code.width / 8) + 1


def test_more_bits_lose_less(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    exam = tmp_path / "exam.txt"
    exam.write_text(TEXT[7:] * 2)
    divergences = []
    for bits in (2, 4, 8):
        report = headwise.convert(
            tiny_llama,
            tmp_path / "out",
            kv_budget=1.0,
            bits=bits,
            calibrate=text,
            overwrite=True,
            **{**OPTIONS, "evaluate": False},
        )
        assert report.coded
        # In float64, because at 8 bits most of what float32 finds is its own rounding.
        found = headwise.evaluate(tmp_path / "out", against=tiny_llama, text=exam, dtype="float64")
        assert found.kl is not None
        divergences.append(found.kl)
    assert divergences == sorted(divergences, reverse=True)
    assert divergences[0] > 5 * divergences[1]
    assert divergences[1] > 2 * divergences[2]


@pytest.mark.parametrize(
    "family",
    ["llama", "gpt2", "gpt_neox", "phi3", "qwen2", "opt", "mistral", "gemma3_text", "qwen3", "olmo2", "smollm3"],
)
def test_a_model_keeps_its_attention_and_gets_codes(family: str, text: Path, tmp_path: Path) -> None:
    source = save_family(tmp_path / family, family)
    report = headwise.convert(source, tmp_path / "out", **{**OPTIONS, "to": "same"}, bits=3.5, calibrate=text)
    assert not report.model_type.startswith("headwise_")
    ids = torch.randint(2, 90, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = headwise.load(source, dtype=torch.float64)(ids).logits
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)(ids).logits
        coded = headwise.load(tmp_path / "out", dtype=torch.float64)
        rounded = coded(ids, use_cache=False).logits
        cache = HeadwiseCache(coded)
        steps = [coded(ids[:, :3], past_key_values=cache).logits]
        steps += [coded(ids[:, at : at + 1], past_key_values=cache).logits for at in range(3, 20)]
    size = float(expected.std())
    # Refined to serve the codes, the weights serve a wide cache nearly as well as before.
    assert float((stock - expected).std()) < 0.25 * size
    assert 0 < float((rounded - expected).std()) < 0.5 * size
    # Windows rotate by slots that move with them, whose angles are float32; Gemma's norms are float32.
    close = 1e-5 if any(layer.is_sliding for layer in cache.layers) else 1e-9
    assert torch.allclose(torch.cat(steps, 1), rounded, atol=close * size)
    assert all(type(layer.codec).__name__ == "TrellisFormat" for layer in cache.layers)
    assert report.kv_bytes_per_token_after == sum(code.token_bytes for code in read_codes(tmp_path / "out").values())


def test_fewer_heads_and_codes_together(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    report = headwise.convert(
        tiny_llama, tmp_path / "out", **{**OPTIONS, "to": "gqa:1"}, kv_bytes=0.2, calibrate=text
    )
    assert report.kv_bytes_per_token_after <= 0.2 * 128
    assert headwise.load(tmp_path / "out").config.num_key_value_heads == 1


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_killed_run_writes_the_same_codes(
    whole: Path, tiny_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    options = {**OPTIONS, "kv_bytes": 0.3, "calibrate": text}
    with monkeypatch.context() as patch:
        stop_at(patch, Activations, "commit", call, after=True)
        with pytest.raises(StoppedError):
            headwise.convert(tiny_llama, tmp_path / "out", **options)
    headwise.convert(tiny_llama, tmp_path / "out", **options)
    for name in (FILE, "model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_bytes": 0.0}, "kv_bytes = 0.0: must be a fraction above 0"),
        ({"kv_bytes": 1.5}, "kv_bytes = 1.5: must be a fraction above 0"),
        ({"kv_bytes": 0.001}, "kv_bytes = 0.001: leaves less than a byte for each of 3 values"),
        ({"kv_bytes": 0.3, "kv_budget": 0.5}, "kv_bytes = 0.3: cannot be used with kv_budget"),
        ({"kv_bytes": 0.3, "bits": 4.0}, "kv_bytes = 0.3: cannot be used with bits"),
        ({"kv_budget": 0.5, "bits": 0.5}, "bits = 0.5: must be between 1 and 8"),
        ({"kv_budget": 0.5, "bits": 9.0}, "bits = 9.0: must be between 1 and 8"),
        ({"bits": 4.0}, "kv_budget = None: mla needs"),
        ({"to": "same"}, "to = same: needs kv_bytes or bits"),
        ({"to": "same", "bits": 4.0, "kv_bytes": 0.3}, "kv_bytes = 0.3: cannot be used with bits"),
        ({"to": "same", "bits": 4.0, "kv_budget": 0.5}, "kv_budget = 0.5: goes with mla"),
        ({"to": "same", "kv_bytes": 0.07}, "kv_bytes = 0.07: leaves less than a bit for each of 32 values"),
        ({"kv_bytes": 0.3, "calibrate": None, **NO_TEXT}, "calibrate = None: is required: the codes of a cache"),
        ({"kv_bytes": 0.3, "format": "deepseek"}, "format = deepseek: has no place for the codes"),
    ],
)
def test_inputs_that_do_not_go_together(
    tiny_llama: Path, text: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(HeadwiseError) as raised:
        headwise.convert(tiny_llama, tmp_path / "out", **{**OPTIONS, "calibrate": text, **options})
    assert message in str(raised.value).replace("'", "")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["bert"])
def test_models_without_such_a_cache_are_refused(family: str, text: Path, tmp_path: Path) -> None:
    source = save_family(tmp_path / family, family)
    with pytest.raises(HeadwiseError, match="cache"):
        headwise.convert(source, tmp_path / "out", kv_bytes=0.3, calibrate=text, **OPTIONS)
