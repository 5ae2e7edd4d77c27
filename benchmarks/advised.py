"""Check advice: do what it recommends, and measure whether it is so good, so small and so fast.

    OMP_WAIT_POLICY=PASSIVE python -m benchmarks.advised machine.toml      # kept in benchmarks/results/advised.json

``machine.toml`` is a profile of the machine that this runs on (``headwise profile``). SmolLM2's kept frontier is the
measured quality. What comes first by each goal is converted, or its format is used, and evaluated on the frontier's
texts, in windows of the context's length. A decode step is timed beside the original's, after as many tokens, by the
runtime that predictions are of: ``headwise.optimize``, with threads that sleep while they wait.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.kept import Kept, say

import headwise
from benchmarks import data, joined
from headwise.costs.prediction import Pass, device
from headwise.decide.advice import AS_IT_IS, Question, advise_on, read_points
from headwise.measure.profiling.decoder import decode_step
from headwise.measure.profiling.profile import NAME
from headwise.measure.timing.timing import spread_interleaved
from headwise.models.specs import read_spec
from headwise.runtime.hf import HeadwiseCache

SOURCE = "smollm2-135m"
GOALS = ("latency", "memory")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path, help="of this machine")
    parser.add_argument("--goals", nargs="+", default=GOALS)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--max-quality-loss", type=float, default=0.02)
    parser.add_argument("--tokens", type=int, default=16_384, help="of WikiText-2 train to calibrate on")
    parser.add_argument("--windows", type=int, default=6, help="of each text, of as many tokens as the context")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/advised.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/advised"), help="where models are converted")
    options = parser.parse_args(arguments)
    names = ("context", "max_quality_loss", "tokens", "windows", "dtype")
    machine = device(NAME, options.profile)
    kept = Kept(options.json, {name: getattr(options, name) for name in names} | {"machine": machine.label})
    model = replace(read_spec(SOURCE), stored=None)  # headwise computes with weights in the dtype
    frontier = joined.frontier(Path("benchmarks/results"), SOURCE, model.layers[0].label).to_dict()
    measured = read_points(frontier, model)
    for goal in options.goals:
        if goal in kept.rows:
            continue
        question = Question(
            hardware=machine,
            step=Pass(total=options.context, dtype=options.dtype),
            goal=goal,
            max_quality_loss=options.max_quality_loss,
        )
        advice = advise_on(model, question, measured, source=SOURCE)
        assert advice.best is not None
        (now,) = (option for option in advice.options if option.target == AS_IT_IS)
        target = advice.best.target
        model_path, cache = followed(target, options)
        times = step_times({AS_IT_IS: (SOURCE, None), target: (model_path, cache)}, options)
        kept.add(
            goal,
            {
                "target": target,
                "kept_loss": advice.best.loss,
                "predicted_ms": 1e3 * advice.best.decode_seconds,
                "predicted_ms_as_it_is": 1e3 * now.decode_seconds,
                "measured_ms": times[target],
                "measured_ms_as_it_is": times[AS_IT_IS],
                "predicted_bytes": advice.best.cache_bytes_per_token,
                "evaluate": None if target == AS_IT_IS else evaluated(model_path, cache, options),
            },
        )
        predicted = f"{1e3 * advice.best.decode_seconds:.1f} ms predicted"
        say(f"{goal}: {target}, {predicted}, {times[target]:.1f} measured; as it is {times[AS_IT_IS]:.1f}")


def followed(target: str, options: argparse.Namespace) -> tuple[Path | str, str | None]:
    """The model that a target says to serve, converted if need be, and the format of its cache."""
    mechanism, _, fraction = target.partition("@")
    if not fraction:
        return SOURCE, None if target == AS_IT_IS else target
    folder: Path = options.work / target.replace("@", "-")
    if not (folder / "config.json").exists():
        headwise.convert(
            SOURCE,
            folder,
            to=mechanism,
            kv_bytes=float(fraction),
            calibrate=data.wikitext("train", options.cache),
            calibration_tokens=options.tokens,
            evaluate=False,
        )
    return folder, None


def evaluated(model: Path | str, cache: str | None, options: argparse.Namespace) -> dict[str, Any]:
    """The evaluation of a model and its cache, beside the original."""
    texts = [data.wikitext("test", options.cache), data.brown(options.cache), data.austen(options.cache)]
    return headwise.evaluate(
        model,
        against=SOURCE,
        text=texts,
        window=options.context,
        windows=options.windows,
        dtype=options.dtype,
        cache=cache,
    ).to_dict()


def step_times(ways: Mapping[str, tuple[Path | str, str | None]], options: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of a decode step after a context of each model and format of its cache, in turn."""
    steps = {}
    for name, (path, quantize) in ways.items():
        model = headwise.optimize(headwise.load(path, dtype=options.dtype))
        cache = HeadwiseCache(model, max_length=options.context + 1, quantize=quantize)
        ids = torch.arange(options.context)[None] % model.config.vocab_size
        with torch.inference_mode():
            model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        steps[name] = decode_step(model, cache, 1)
    return {name: 1e3 * each.median for name, each in spread_interleaved(steps, budget=20).items()}


if __name__ == "__main__":
    main()
