"""Time the steps of healing: tokens a second, and their share of the fastest matrix product.

    python -m benchmarks.heal_speed                    # kept in benchmarks/results/heal-speed.json
    python -m benchmarks.heal_speed --device cuda --batches 1 4 16 32

The model is SmolLM2's conversion to half of its values, without calibration, since values do not change the time; the
teacher is its source. FLOPs are those of linear layers, the head among them: six for each weight and token in the
model, which goes forwards and backwards, and two in the teacher. A row is a device and the windows in a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.kept import Kept, say

import headwise
from benchmarks import data
from headwise.base.options.heal import HealOptions
from headwise.conversion.healing.loop import Loop
from headwise.conversion.healing.optimizer import Progressed, optimizer_of
from headwise.conversion.healing.windows import open_windows
from headwise.measure.timing.machine import Probes
from headwise.measure.timing.timing import time_call
from headwise.runtime.hf import as_dtype, load, open_decoder

REPEATS = {"step": 1, "product": 10}
"""Calls in a row that are timed together: one product is too short for a GPU that has just waited."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--steps", type=int, default=5, help="that are timed, after one that is not")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/heal-speed.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/heal-speed"), help="where the model is converted")
    options = parser.parse_args(arguments)
    kept = Kept(options.json, {"window": options.window})
    converted = options.work / "half"
    options.work.mkdir(parents=True, exist_ok=True)
    if not (converted / "config.json").exists():
        headwise.convert(options.source, converted, to="mla", kv_budget=0.5, evaluate=False)
    probes = Probes(torch.bfloat16, options.device)
    product = probes.calls()["product"]
    models = [
        load(folder, dtype=dtype, device=options.device)
        for folder, dtype in ((converted, "float32"), (options.source, "bfloat16"))
    ]
    for batch in options.batches:
        step, flops = _step(options, converted, models, batch)
        calls = {"step": step, "product": product}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(options.steps):
            for name, call in calls.items():
                times[name].append(time_call(call, REPEATS[name]))
        took, peak = median(times["step"]), probes.limits(1.0, median(times["product"])).flops_per_second
        row = {
            "tokens_per_second": batch * options.window / took,
            "seconds": times["step"],
            "flops": flops,
            "product_flops_per_second": peak,
            "share_of_product": flops / took / peak,
        }
        if torch.device(options.device).type == "cuda":
            row["device_bytes"] = torch.cuda.max_memory_allocated()
        kept.add(f"{options.device} {batch}", row)
        say(
            f"{batch:4} windows: {row['tokens_per_second']:,.0f} tokens/s, {row['share_of_product']:.1%} of a product"
        )


def _step(
    options: argparse.Namespace, converted: Path, models: list[Any], batch: int
) -> tuple[Callable[[], object], int]:
    """A step of healing, and its FLOPs."""
    model, teacher = models
    text = data.wikitext("train", options.cache)
    heal = HealOptions(teacher=options.source, text=text, window=options.window, batch=batch, steps=4)
    windows = open_windows(open_decoder(converted), heal, open_decoder(options.source).spec)
    parameters = dict(model.named_parameters())
    optimizer = optimizer_of(model, parameters, heal.optimizer, rate=1e-6, dtype=as_dtype("bfloat16"))
    loop = Loop(model, teacher, parameters, windows, heal, as_dtype("bfloat16"))
    done = Progressed()
    loop._step(optimizer, done)
    weights = [sum(p.numel() for p in one.parameters() if p.dim() == 2) for one in models]
    flops = (6 * weights[0] + 2 * weights[1]) * batch * options.window
    return (lambda: loop._step(optimizer, done)), flops


if __name__ == "__main__":
    main()
