"""Models prepared for caches of 8-bit floats: keys that such a float cannot be come into range, no others move."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import headwise
import headwise.hf
from headwise.conversion.preparation.change import fit
from headwise.conversion.preparation.prepare import read_formats
from headwise.errors import ArgumentError
from headwise.models.specs import GroupedSpec, RopeSpec
from headwise.runtime.hf import default_cache
from tests.tiny_families import answer, save_family

LARGE = 8
"""A head's pair with large keys, of channels 8 and 40, which turns by a tenth each token."""


def with_large_keys(folder: Path, size: float) -> Path:
    """A qwen2 of which a pair has keys of a size, and queries that make scores of some size of them."""
    save_family(folder, "qwen2", hidden_size=256, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("k_proj.bias"):
            tensor.view(2, 2, 32)[:, :, LARGE] = size
        if "q_proj" in name:
            tensor.unflatten(0, (4, 2, 32))[:, :, LARGE] /= size / 16
    save_file(tensors, file, {"format": "pt"})
    return folder


def divergence(source: Path, folder: Path, cache: str) -> float:
    """KL in nats a token, from the source without a small cache."""
    ids = torch.randint(3, 97, (4, 60), generator=torch.Generator().manual_seed(1))
    plain, small = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (source, folder))
    with default_cache(small.eval(), cache):
        own = answer(small, ids).log_softmax(-1)
    reference = answer(plain.eval(), ids).log_softmax(-1)
    return float((reference.exp() * (reference - own)).sum(-1).mean())


@pytest.mark.parametrize("cache", ["vllm:fp8", "sglang:fp8"])
def test_large_keys_come_into_range_and_nothing_else_changes(cache: str, tmp_path: Path) -> None:
    source = with_large_keys(tmp_path / "source", 3000.0)
    headwise.prepare(source, tmp_path / "out", cache=cache)
    before, after = (divergence(source, folder, cache) for folder in (source, tmp_path / "out"))
    assert after < 0.2 * before if cache == "vllm:fp8" else math.isnan(before)
    assert after < 0.03
    old, new = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    for name in old:
        if "q_proj" in name or "k_proj" in name:
            rows = (new[name] / old[name]).unflatten(0, (-1, 2, 32))
            others = [pair for pair in range(32) if pair != LARGE]
            assert (rows[:, :, others] == 1).all(), name
            factors = rows[:, :, LARGE].flatten()
            assert set(factors.tolist()) <= ({1 / 8, 1 / 16} if "k_proj" in name else {8.0, 16.0}), name
        else:
            assert torch.equal(old[name], new[name])


def test_keys_in_range_are_left_alone(tmp_path: Path) -> None:
    source = with_large_keys(tmp_path / "source", 100.0)
    made = headwise.prepare(source, tmp_path / "out", cache="vllm:fp8")
    assert all(layer.loss == {"vllm:fp8": 1.0} for layer in made.layers)
    old, new = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert all(torch.equal(old[name], new[name]) for name in old)


def test_queries_are_kept_in_range_too() -> None:
    """Keys that could only be stored if many queries left the range are cut a little, and a few queries too."""
    layer = GroupedSpec(hidden_size=64, num_heads=1, num_kv_heads=1, head_dim=64, rope=RopeSpec(dim=64, theta=1e4))
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(1, 500, 64, generator=generator) for _ in range(2))
    keys[:, :, 0] *= 1000
    queries[:, :, 0] *= 0.01
    change = fit(queries, keys, layer, read_formats("vllm:fp8"))
    assert change.exponents[0, 0] in (-3, -4)
    assert (change.exponents[0, 1:] == 0).all()
    assert not change.turns.any()
    queries[:, :, 0] *= 8000
    change = fit(queries, keys, layer, read_formats("vllm:fp8"))
    assert change.exponents[0, 0] == -2


@pytest.mark.usefixtures("short_search")
def test_several_formats_of_several_engines(tmp_path: Path) -> None:
    source = with_large_keys(tmp_path / "source", 3000.0)
    caches = ["vllm:fp8", "mlx:4", "vllm:int4_per_token_head"]
    headwise.prepare(source, tmp_path / "out", cache=caches)
    for cache in caches:
        before, after = (divergence(source, folder, cache) for folder in (source, tmp_path / "out"))
        assert after < 0.5 * before, (cache, before, after)


def test_layers_that_stay_wide_are_left_alone(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 5}
    source = save_family(tmp_path / "source", "qwen2", **sizes)
    file = source / "model.safetensors"
    uneven = load_file(file)
    for name in (name for name in uneven if "k_proj.weight" in name):
        uneven[name][::5] *= 16
    save_file(uneven, file, {"format": "pt"})
    made = headwise.prepare(source, tmp_path / "out", cache="vllm:turboquant_4bit_nc")
    assert [len(layer.loss) for layer in made.layers] == [0, 0, 1, 0, 0]
    new = load_file(tmp_path / "out/model.safetensors")
    moved = {name.split(".")[2] for name in uneven if not torch.equal(uneven[name], new[name])}
    assert moved == {"2"}
    sizes["num_hidden_layers"] = 2
    with pytest.raises(ArgumentError, match="all 2 layers"):
        headwise.prepare(
            save_family(tmp_path / "two", "qwen2", **sizes), tmp_path / "no", cache="vllm:turboquant_3bit_nc"
        )
