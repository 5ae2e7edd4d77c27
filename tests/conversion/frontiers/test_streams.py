"""Streams lose what a model with that cache loses, in every family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headwise.conversion.frontiers.quick import stream_losses
from headwise.measure.evaluation.scoring import score_window
from headwise.models.checkpoints import open_checkpoint
from headwise.runtime.hf import LayerwiseModel, default_cache, load
from tests.real_models import save_tiny
from tests.tiny_families import save_family

FAMILIES = ("llama", "qwen2", "mistral", "qwen3", "gemma3_text", "phi3", "gpt_neox", "gpt2", "opt")
FORMATS = ("int8", "int3", "kivi2:16", "vllm:fp8", "vllm:int4_per_token_head")
WIDE, KEYS, VALUES = "llama.cpp:f32", "llama.cpp:q4_0/f32", "llama.cpp:f32/q4_0"


def windows(tokens: int = 48, seed: int = 0) -> Tensor:
    return torch.randint(3, 97, (2, tokens), generator=torch.Generator().manual_seed(seed))


FEW = torch.tensor([3, 17, 18, 30, 41, 47])


def streamed(folder: Path, reference: str, formats: Sequence[str] = ()) -> dict[str, Tensor]:
    """What whole windows lose in the reference, under its name, and a few tokens in the formats."""
    model = LayerwiseModel(open_checkpoint(folder), torch.float64)
    wholes, parts = stream_losses(model, windows(), [reference], formats, positions=FEW)
    return {**wholes, **{f"{name} in part": part for name, part in parts.items()}}


def measured(folder: Path, ids: Tensor, quantize: str) -> Tensor:
    """The divergence of each position but the last, ``[B, W - 1]``."""
    models = {"model": load(folder, dtype=torch.float64), "against": load(folder, dtype=torch.float64)}
    with default_cache(models["model"], quantize):
        return torch.stack([score_window(models, window)["kl"] for window in ids])


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_windows_lose_what_is_measured(family: str, tmp_path: Path) -> None:
    folder = save_family(tmp_path / family, family)
    for name in FORMATS:
        if family == "mistral" and name.startswith("kivi"):
            continue  # which does not store windows that slide
        loss = streamed(folder, name)[name]
        torch.testing.assert_close(
            loss[:, :-1].double(), measured(folder, windows(), name), rtol=1e-3, atol=1e-6, msg=name
        )
        assert float(loss.mean()) > 0


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_tokens_of_one_layer_lose_what_they_lose_in_whole_windows(family: str, tmp_path: Path) -> None:
    folder = save_family(tmp_path / family, family, num_hidden_layers=1)
    losses = streamed(folder, "int3", ["int3", "vllm:fp8"])
    assert losses["int3 in part"].shape == losses["vllm:fp8 in part"].shape == (2, 6)
    torch.testing.assert_close(losses["int3 in part"], losses["int3"][:, FEW])
    torch.testing.assert_close(losses["vllm:fp8 in part"], streamed(folder, "vllm:fp8")["vllm:fp8"][:, FEW])


def test_tokens_of_the_reference_lose_what_they_lose_in_whole_windows(tmp_path: Path) -> None:
    """The other tokens are then as far off as they are in whole windows."""
    losses = streamed(save_family(tmp_path / "llama", "llama"), "int3", ["int3"])
    torch.testing.assert_close(losses["int3 in part"], losses["int3"][:, FEW])


def test_keys_and_values_both_count(tmp_path: Path) -> None:
    names = (WIDE, KEYS, VALUES, "llama.cpp:q4_0")
    losses = streamed(save_tiny(tmp_path / "wide", head_dim=32), "int4", names)
    wide, keys, values, both = (float(losses[f"{name} in part"].mean()) for name in names)
    assert abs(wide) < 1e-6 < min(keys, values) / 100
    assert both > max(keys, values)
