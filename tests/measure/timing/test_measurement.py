"""Timing is interleaved, medians are medians, and memory is in bytes."""

from __future__ import annotations

import time
from functools import partial

import torch

from headwise.costs.formulas import compare
from headwise.measure.timing import (
    matmul_flops_per_second,
    measure_comparison,
    measure_layers,
    peak_rss_bytes,
    time_interleaved,
)
from headwise.models.specs import GroupedSpec, LatentSpec, ModelSpec


def test_calls_take_turns_and_warm_up_is_not_timed() -> None:
    order: list[str] = []
    waits = {"slow": iter([0.2, 0.2, 0.02, 0.03, 0.02]), "fast": iter([0.0] * 5)}

    def call(name: str) -> None:
        order.append(name)
        time.sleep(next(waits[name]))

    heard: list[tuple[str, int, int]] = []
    times = time_interleaved(
        {name: partial(call, name) for name in waits},
        repeats=3,
        warmup=2,
        progress=lambda *said: heard.append(said),
    )
    assert order == ["slow", "fast"] * 5
    assert 0.02 <= times["slow"] < 0.2
    assert times["fast"] < times["slow"]
    assert heard[0] == ("timing", 0, 5)
    assert heard[-1] == ("timing", 5, 5)


def test_peak_memory_sees_an_allocation() -> None:
    before = peak_rss_bytes()
    block = torch.ones(before // 4 + 64 * 1024**2)
    assert peak_rss_bytes() >= before + 32 * 1024**2
    assert block.sum() > 0


def test_the_matmul_rate_is_a_rate() -> None:
    assert matmul_flops_per_second(size=128) > 1e6


def test_every_kind_of_layer_is_timed_at_the_context_asked_for() -> None:
    grouped = GroupedSpec(hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, sliding_window=5)
    latent = LatentSpec(
        hidden_size=32, num_heads=4, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
    )
    for times in measure_layers([grouped, latent], context=33, batch=2, repeats=2):
        assert times.decode_ms > 0
        assert times.prefill_ms > 0


def test_a_measured_comparison_is_the_comparison_with_times() -> None:
    spec = GroupedSpec(hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8)
    comparison = compare(ModelSpec(model_type="llama", hidden_size=32, layers=(spec,)), context=16)
    measured = measure_comparison(comparison)
    for before, after in zip(comparison.rows, measured.rows, strict=True):
        assert "decode_ms" not in before.to_dict()
        assert {**before.to_dict(), "decode_ms": after.decode_ms, "prefill_ms": after.prefill_ms} == after.to_dict()
