"""What `headwise frontier --quick` predicts of each format of a cache, beside what is measured on another text.

    python -m benchmarks.quick
    python -m benchmarks.quick --models qwen --targets int8 int4 kivi2 …       # fewer formats of a larger model

Predicted from 2,048 tokens of WikiText-2 train; measured on windows of WikiText-2 test, by the model run with that
cache. ``trained`` is benchmarks.small_models' qwen2, trained in so many steps. Kept in benchmarks/results/quick.json.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.kept import Kept, say
from torch import Tensor
from torch.nn.functional import log_softmax

import headwise
from benchmarks import data, small_models
from headwise.measure.evaluation.scoring import kl_divergence
from headwise.measure.texts import read_text
from headwise.measure.texts.windows import token_windows
from headwise.models.checkpoints import load_tokenizer, open_checkpoint
from headwise.runtime.hf import default_cache

WINDOW = 512
"""Tokens of a window, where a model has so many positions."""

STEPS = 400
"""Steps of training of the model that is made here."""


def _glassllm(cache: Path, work: Path) -> Path:
    return small_models.MODELS["glassllm"](work / "glassllm", cache)


def _trained(cache: Path, work: Path) -> Path:
    folder = work / "qwen2"
    if not (folder / "config.json").is_file():
        small_models.train(small_models.qwen2, folder, cache, steps=STEPS)
    return folder


MODELS = {
    "SmolLM2-135M": lambda cache, work: "smollm2-135m",
    "Qwen2.5-Coder-0.5B": lambda cache, work: data.qwen(cache),
    "glassllm": _glassllm,
    "qwen2, trained here": _trained,
}


@torch.inference_mode()
def measured(source: str | Path, targets: Sequence[str], text: Path, tokens: int) -> dict[str, float]:
    """KL(full cache ‖ format) in nats a token, of each format.

    Args:
        source: the model.
        targets: the formats.
        text: to measure on.
        tokens: of the text.
    """
    model = headwise.load(source, dtype=torch.float32)
    checkpoint = open_checkpoint(source)
    width = min(WINDOW, checkpoint.spec.max_position_embeddings or WINDOW)
    windows = token_windows(load_tokenizer(checkpoint.path), read_text(text), window=width, windows=tokens // width)
    sums = dict.fromkeys(targets, 0.0)
    for window in windows:
        exact = log_softmax(model(window[None], use_cache=False).logits[0].float(), -1)
        for target in targets:
            with default_cache(model, target):
                logits: Tensor = model(window[None], use_cache=False).logits[0].float()
            loss = kl_divergence(exact, log_softmax(logits, -1))
            sums[target] += float(loss.double().mean())
    return {target: total / len(windows) for target, total in sums.items()}


def agreement(rows: dict[str, Any]) -> dict[str, float]:
    """How predictions of a model's formats agree with measurements.

    Args:
        rows: of formats, with ``predicted`` and ``measured``.

    Returns:
        Spearman's rank correlation, the share of formats within a factor of 1.5, and the largest factor.
    """
    pairs = [(row["predicted"], row["measured"]) for row in rows.values()]
    ranks = torch.tensor([[sorted(side).index(value) for value in side] for side in zip(*pairs, strict=True)])
    factors = [math.exp(abs(math.log(one / other))) for one, other in pairs]
    return {
        "rank correlation": float(torch.corrcoef(ranks.double())[0, 1]),
        "within 1.5": sum(factor <= 1.5 for factor in factors) / len(factors),
        "largest factor": max(factors),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS], metavar="MODEL")
    parser.add_argument("--targets", nargs="+", default=[], metavar="FORMAT", help="all formats when left out")
    parser.add_argument("--tokens", type=int, default=1024, help="that are measured on")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/quick.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where models and texts are")
    parser.add_argument("--work", type=Path, default=Path("build/quick"), help="where models are made")
    options = parser.parse_args(arguments)
    kept = Kept(options.json, {"window": WINDOW, "steps": STEPS})
    study, exam = (data.wikitext(part, options.cache) for part in ("train", "test"))
    for name in options.models:
        if name in kept.rows:
            continue
        source = MODELS[name](options.cache, options.work)
        result = headwise.quick_frontier(source, calibrate=study, targets=options.targets)
        found = measured(source, [point.target for point in result.points], exam, options.tokens)
        rows = {
            point.target: {"fraction": point.cache_fraction, "predicted": point.kl, "measured": found[point.target]}
            for point in result.points
        }
        agrees = agreement(rows)
        kept.add(name, {"formats": rows, "seconds": result.seconds, "tokens": options.tokens, **agrees})
        say(name, f"{result.seconds:.0f} s", agrees)


if __name__ == "__main__":
    main()
