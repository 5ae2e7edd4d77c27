"""Time MLA's two implementations for few and many new tokens, and find where they take as long.

    python -m benchmarks.crossover          # kept in benchmarks/results/crossover.json

One layer of random weights with tokens in its cache takes a few or many more: absorbed, which attends to the latents
themselves, and expanded, which decodes every cached key and value first. They take turns. The layer's own choice is
the one of fewer FLOPs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from benchmarks.kept import Kept, say

from headwise.costs.formulas.target import convert_spec, parse_target
from headwise.costs.prediction.operators import most_absorbed
from headwise.measure.timing.timing import filled_cache, time_interleaved
from headwise.models.specs import LatentSpec, layer_spec, read_spec
from headwise.runtime.attention import build

NEW = (1, 8, 32, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of new tokens."""


def layers() -> dict[str, LatentSpec]:
    """The layers that are timed: SmolLM2's at half its values, and 16 of DeepSeek-V3's 128 heads."""
    half = convert_spec(read_spec("smollm2-135m"), parse_target("mla", kv_budget=0.5)).layers[0]
    deepseek = layer_spec("deepseek-v3")
    assert isinstance(half, LatentSpec)
    assert isinstance(deepseek, LatentSpec)
    part = replace(deepseek, hidden_size=2048, num_heads=16, q_lora_rank=None)
    return {"smollm2-135m at half": half, "deepseek-v3, 16 heads": part}


@torch.inference_mode()
def seconds(spec: LatentSpec, dtype: torch.dtype, total: int, new: int, repeats: int) -> dict[str, float]:
    """The median seconds of each implementation."""
    calls = {}
    for impl in ("absorbed", "expanded"):
        layer = build(spec).to(dtype).eval()
        layer.impl = impl
        cache = filled_cache(layer, 1, total, total)
        states = torch.randn(1, new, spec.hidden_size, dtype=dtype)

        def call(layer: torch.nn.Module = layer, cache: object = cache, states: torch.Tensor = states) -> None:
            cache.length = total - new  # type: ignore[attr-defined]
            layer(states, is_causal=True, cache=cache)

        calls[impl] = partial(call)
    return time_interleaved(calls, repeats=repeats)


def crossing(measured: Sequence[tuple[int, dict[str, float]]]) -> float | None:
    """Where both take as long, by the logarithm of their ratio between two measured numbers of tokens."""
    ratios = [(new, math.log(times["absorbed"] / times["expanded"])) for new, times in measured]
    for (new, before), (then, after) in pairwise(ratios):
        if before < 0 <= after:
            return new + (then - new) * before / (before - after)
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total", type=int, default=4096, help="tokens that are attended to")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/crossover.json"))
    options = parser.parse_args(arguments)
    kept = Kept(options.json, {"total": options.total, "new": list(NEW)})
    for name, spec in layers().items():
        for dtype in options.dtypes:
            if f"{name} {dtype}" in kept.rows:
                continue
            found = [
                (new, seconds(spec, getattr(torch, dtype), options.total, new, options.repeats))
                for new in NEW
                if new < options.total
            ]
            row = {
                "label": spec.label,
                "ms": {str(new): {impl: 1e3 * each for impl, each in times.items()} for new, times in found},
                "measured": crossing(found),
                "by_flops": most_absorbed(spec, options.total),
            }
            kept.add(f"{name} {dtype}", row)
            say(name, dtype, "measured", row["measured"], "by FLOPs", row["by_flops"])


if __name__ == "__main__":
    main()
