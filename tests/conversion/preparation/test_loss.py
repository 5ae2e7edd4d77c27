"""What a prepared model's cache loses, beside what the model's own loses: on keys that are as uneven as Qwen2.5's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import headwise
import headwise.hf
from headwise.runtime.hf import default_cache
from tests.tiny_families import answer, save_family

TEXT = "Some keys are a hundred times larger than the rest, and the text goes on. " * 60


def uneven(folder: Path, *, seen: float = 0.02) -> Path:
    """A qwen2 whose slowest pairs have keys with a large constant part.

    Args:
        folder: to write.
        seen: what the queries' channels there are multiplied by.
    """
    save_family(folder, "qwen2", hidden_size=256, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("k_proj.bias"):
            heads = tensor.view(2, 2, 32)
            heads[:, :, -3:] = 25.0 * torch.tensor([1.0, -1.0, 1.0])
        if name.endswith("q_proj.weight"):
            tensor.view(4, 2, 32, -1)[:, :, -3:] *= seen
        if name.endswith("q_proj.bias"):
            tensor.view(4, 2, 32)[:, :, -3:] *= seen
    save_file(tensors, file, {"format": "pt"})
    return folder


def divergence(source: Path, folder: Path, cache: str, ids: torch.Tensor) -> float:
    """KL in nats a token, from the source without a small cache."""
    plain, small = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (source, folder)
    )
    with default_cache(small, cache):
        own = answer(small, ids).log_softmax(-1)
    reference = answer(plain, ids).log_softmax(-1)
    return float((reference.exp() * (reference - own)).sum(-1).mean())


@pytest.mark.parametrize("on_a_text", [False, True])
def test_it_loses_a_fraction(on_a_text: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.conversion.preparation.one_layer._STARTS", 5)  # of 24
    source = uneven(tmp_path / "source")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    calibrate = {"calibrate": text, "calibration_tokens": 1024} if on_a_text else {}
    headwise.prepare(source, tmp_path / "out", cache="llama.cpp:q4_0", **calibrate)
    ids = torch.randint(3, 97, (4, 60), generator=torch.Generator().manual_seed(1))
    for cache, part in (("llama.cpp:q4_0", 0.25), ("llama.cpp:q8_0", 0.25)):
        before, after = (divergence(source, folder, cache, ids) for folder in (source, tmp_path / "out"))
        assert after < part * before, (cache, before, after)
