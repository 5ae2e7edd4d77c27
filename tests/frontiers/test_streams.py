"""Streams lose what a model with that cache loses, in every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from headwise.checkpoints import open_checkpoint
from headwise.evaluation.scoring import score_window
from headwise.frontiers.streams import Stream, stream_losses
from headwise.hf import LayerwiseModel, default_cache, load
from tests.real_models import save_tiny
from tests.tiny_families import save_family

FAMILIES = ("llama", "qwen2", "mistral", "qwen3", "gemma3_text", "phi3", "gpt_neox", "gpt2", "opt")
FORMATS = ("int8", "int3", "kivi2:16", "vllm:fp8", "vllm:int4_per_token_head")
WIDE, KEYS, VALUES = "llama.cpp:f32", "llama.cpp:q4_0/f32", "llama.cpp:f32/q4_0"


def windows(tokens: int = 48, seed: int = 0) -> Tensor:
    return torch.randint(3, 97, (2, tokens), generator=torch.Generator().manual_seed(seed))


def streamed(folder: Path, ids: Tensor, streams: list[Stream]) -> dict[Stream, Tensor]:
    return stream_losses(LayerwiseModel(open_checkpoint(folder), torch.float64), ids, streams)


def measured(folder: Path, ids: Tensor, quantize: str) -> Tensor:
    """The divergence of each position but the last, ``[B, W - 1]``."""
    models = {"model": load(folder, dtype=torch.float64), "against": load(folder, dtype=torch.float64)}
    with default_cache(models["model"], quantize):
        return torch.stack([score_window(models, window)["kl"] for window in ids])


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_windows_lose_what_is_measured(family: str, tmp_path: Path) -> None:
    folder, ids = save_family(tmp_path / family, family), windows()
    formats = [name for name in FORMATS if not (family == "mistral" and name.startswith("kivi"))]
    losses = streamed(folder, ids, [Stream(name, 0) for name in formats])
    for name in formats:
        loss = losses[Stream(name, 0)]
        torch.testing.assert_close(loss[:, :-1].double(), measured(folder, ids, name), rtol=1e-3, atol=1e-6)
        assert float(loss.mean()) > 0


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_the_last_tokens_of_one_layer_lose_what_they_lose_in_whole_windows(family: str, tmp_path: Path) -> None:
    folder = save_family(tmp_path / family, family, num_hidden_layers=1)
    losses = streamed(folder, windows(), [Stream("int3", 0), Stream("int3", 40)])
    assert losses[Stream("int3", 40)].shape == (2, 8)
    torch.testing.assert_close(losses[Stream("int3", 40)], losses[Stream("int3", 0)][:, 40:])


def test_keys_and_values_both_count(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "wide", head_dim=32)
    streams = {name: Stream(name, 16) for name in (WIDE, KEYS, VALUES, "llama.cpp:q4_0")}
    losses = streamed(folder, windows(), [*streams.values()])
    wide, keys, values, both = (float(losses[stream].mean()) for stream in streams.values())
    assert abs(wide) < 1e-6 < min(keys, values) / 100
    assert both > max(keys, values)
