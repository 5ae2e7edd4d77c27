"""Biases of keys are shifted where attention hardly sees it: what that does to a full cache and to a small one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import headwise
from headwise.conversion.preparation.one_layer import seen_by_attention, shift
from headwise.conversion.preparation.samples import Projected
from headwise.errors import ArgumentError
from headwise.models.specs import GroupedSpec, RopeSpec
from headwise.runtime.quantization.formats import parse_format
from tests.conversion.preparation.test_loss import TEXT, divergence, uneven
from tests.tiny_families import save_family

D, H, K, W = 32, 4, 2, 40

pytestmark = pytest.mark.usefixtures("short_search")


def random_layer(rope: RopeSpec | None, *, window: int | None = None) -> Projected:
    layer = GroupedSpec(
        hidden_size=64, num_heads=H, num_kv_heads=K, head_dim=D, rope=rope, bias=("q_proj", "k_proj"),
        sliding_window=window,
    )  # fmt: skip
    queries, keys, values, bias = (
        torch.randn(H, 2, W, D),
        torch.randn(K, 2, W, D),
        torch.randn(K, 2, W, D),
        9 * torch.randn(K, D),
    )
    return Projected(layer, queries, keys + bias[:, None, None], values, torch.arange(W), bias.flatten())


def weights_of(states: Projected, positions: torch.Tensor, added: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
    """The scores ``[K, H/K, B, S, W]`` of the queries that the metric asks, before the softmax."""
    queries = states.rotated("q", positions)[:, :, asked].unflatten(0, (K, -1))
    scores = torch.einsum("kgbsd,kbtd->kgbst", queries, states.rotated("k", positions, added)) * D**-0.5
    apart = positions[asked][:, None] - positions
    hidden = apart < 0
    if states.layer.sliding_window is not None:
        hidden |= apart >= states.layer.sliding_window
    return scores.masked_fill(hidden, -torch.inf)


@pytest.mark.parametrize("rope", [RopeSpec(dim=D, theta=1e4), RopeSpec(dim=16, theta=1e4), None])
@pytest.mark.parametrize("window", [None, 12])
def test_the_metric_is_the_variance_of_the_change_of_scores(rope: RopeSpec | None, window: int | None) -> None:
    states = random_layer(rope, window=window)
    metric = seen_by_attention(states, longest=W)
    added = torch.randn(K, D)
    asked = torch.linspace(W // 16, W - 1, 24).long()
    before, after = (weights_of(states, torch.arange(W), c, asked) for c in (torch.zeros(K, D), added))
    weights = before.softmax(-1)
    change = torch.where(before.isfinite(), after - before, 0.0)
    mean = (weights * change).sum(-1, keepdim=True)
    variance = (weights * (change - mean).square()).sum(-1).mean((1, 2, 3))
    seen = torch.einsum("kd,kde,ke->k", added, metric, added)
    torch.testing.assert_close(seen, variance, rtol=1e-3, atol=1e-4)
    if rope is None:  # what all keys share is not seen at all
        assert float(seen.abs().max()) < 1e-4


def test_longer_texts_see_slopes_that_short_ones_do_not() -> None:
    states = random_layer(RopeSpec(dim=D, theta=1e6))
    slowest = torch.zeros(K, D)
    slowest[:, D // 2 - 1] = 30.0
    near, far = (
        torch.einsum("kd,kde,ke->k", slowest, seen_by_attention(states, longest), slowest) for longest in (W, 20_000)
    )
    assert bool((far > 10 * near).all())


def test_a_constant_that_attention_does_not_see_is_taken_away() -> None:
    """Without RoPE, any constant of keys is invisible: almost nothing of a large one is left."""
    states = random_layer(None)
    code = parse_format("llama.cpp:q4_0")
    added = shift(states, [code], longest=W)  # type: ignore[list-item]
    bias = states.bias.view(K, D)  # type: ignore[union-attr]
    assert float((bias + added).norm()) < 0.2 * float(bias.norm())


@pytest.mark.parametrize("on_a_text", [False, True])
def test_a_refitted_model_loses_less_and_is_named(on_a_text: bool, tmp_path: Path) -> None:
    source = uneven(tmp_path / "source", seen=1)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    calibrate = {"calibrate": text, "calibration_tokens": 1024} if on_a_text else {}
    exact, made = (
        headwise.prepare(source, tmp_path / name, cache="llama.cpp:q4_0", refit=refit, **calibrate)
        for name, refit in (("exact", False), ("refitted", True))
    )
    assert not any(layer.off for layer in exact.layers)
    assert any(layer.off for layer in made.layers)
    assert any("not exact" in note for note in made.notes)
    ids = torch.randint(3, 97, (4, 60), generator=torch.Generator().manual_seed(1))
    before, after = (divergence(source, tmp_path / name, "llama.cpp:q4_0", ids) for name in ("exact", "refitted"))
    assert after < 0.7 * before
    full = divergence(source, tmp_path / "refitted", "llama.cpp:f16", ids)
    assert full < 0.25 * after
    # Only queries and keys differ, and of keys' biases more than their factors.
    old, new = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "refitted"))
    for name, tensor in old.items():
        if not any(part in name for part in ("q_proj", "k_proj")):
            assert torch.equal(tensor, new[name]), name


def test_models_without_such_biases_are_refused(tmp_path: Path) -> None:
    save_family(tmp_path / "llama", "llama", hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(ArgumentError, match=r"refit.*no bias"):
        headwise.prepare(tmp_path / "llama", tmp_path / "out", cache="llama.cpp:q4_0", refit=True)
    assert not (tmp_path / "out").exists()
    sinks = replace(random_layer(None).layer, sinks=True)
    assert headwise.conversion.preparation.one_layer.why_no_shift(sinks) is not None


def test_shorter_texts_let_more_be_shifted(tmp_path: Path) -> None:
    source = uneven(tmp_path / "source", seen=1)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    keywords = {"cache": "llama.cpp:q4_0", "refit": True, "calibrate": text, "calibration_tokens": 1024}
    longer, shorter = (headwise.prepare(source, tmp_path / f"{n}", context=n, **keywords) for n in (100_000, 64))
    assert all(
        short.loss["llama.cpp:q4_0"] < long.loss["llama.cpp:q4_0"]
        for short, long in zip(shorter.layers, longer.layers, strict=True)
    )
    assert any("texts of up to 64 tokens" in note for note in shorter.notes)
    with pytest.raises(ArgumentError, match="context = 64: goes with refit"):
        headwise.prepare(source, tmp_path / "out", cache="llama.cpp:q4_0", context=64)
