"""The GQA paper's comparison on a small decoder: how key–value heads are merged, before and after uptraining.

    python -m benchmarks.uptraining          # kept in benchmarks/results/uptraining.json

A llama of eight key–value heads is trained here on WikiText-2 train, converted to fewer heads by mean pooling, by
first heads, by random heads and by headwise's own method, and trained on by cross-entropy for 5 % of its tokens
(Ainslie et al., 2023, section 3.1 and figure 4). A row is ``TARGET METHOD``; behind it is a learning rate that is not
the usual one.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kept import Kept, say

import headwise
from benchmarks import data, small_models

TARGETS = ("gqa:4", "gqa:2", "mqa")
METHODS = ("aligned", "mean", "first_head", "random")

RATE = 5e-4
LOWER = 1e-4
"""The learning rate, and one for conversions that lost little, which the higher one makes no better."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alpha", type=float, default=0.05, help="of the tokens that the model was trained on")
    parser.add_argument("--steps", type=int, default=800, help="that the model is trained for")
    parser.add_argument("--seeds", type=int, default=3, help="orders of the uptraining's windows")
    parser.add_argument("--windows", type=int, default=32, help="of WikiText-2 test, 1024 tokens each")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/uptraining.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/uptraining"), help="where models are")
    options = parser.parse_args(arguments)
    kept = Kept(options.json, {name: getattr(options, name) for name in ("alpha", "steps", "seeds", "windows")})
    source = options.work / "mha"
    if not (source / "config.json").exists():
        options.work.mkdir(parents=True, exist_ok=True)
        small_models.train(small_models.mha, source, options.cache, steps=options.steps)
    rows = {f"{target} {method}": (target, method, RATE) for target in TARGETS for method in METHODS}
    rows |= {f"{target} aligned learning_rate={LOWER:g}": (target, "aligned", LOWER) for target in TARGETS}
    for row, (target, method, rate) in rows.items():
        if row in kept.rows:
            continue
        kept.add(row, measure(options, source, target, method, rate))
        before, after = kept.rows[row]["before"], kept.rows[row]["after"]
        say(f"{row:18} {before:.4f} → {', '.join(f'{loss:.4f}' for loss in after)}")


def measure(options: argparse.Namespace, source: Path, target: str, method: str, rate: float) -> dict[str, Any]:
    """The ratio of perplexities of a conversion, and of its uptraining with several seeds."""
    train, test = data.wikitext("train", options.cache), data.wikitext("test", options.cache)
    folder = options.work / f"{target.replace(':', '-')}-{method}"
    calibrate = train if method == "aligned" else None
    named = None if method == "aligned" else method
    headwise.convert(source, folder, to=target, method=named, calibrate=calibrate, evaluate=False, overwrite=True)
    exam = {"text": test, "window": 1024, "windows": options.windows, "against": source}
    before = headwise.evaluate(folder, **exam)
    after = []
    for seed in range(options.seeds):
        healed = folder.with_name(f"{folder.name}-healed")
        headwise.heal(
            folder,
            healed,
            teacher=source,
            text=train,
            objective="cross-entropy",
            alpha=options.alpha,
            pretraining_tokens=options.steps * small_models.BATCH * small_models.WINDOW,
            window=small_models.WINDOW,
            batch=4,
            learning_rate=rate,
            recall=False,
            patience=0,
            seed=seed,
            evaluate=False,
            overwrite=True,
        )
        after.append(headwise.evaluate(healed, **exam).perplexity_ratio)
    shutil.rmtree(folder)
    return {"before": before.perplexity_ratio, "after": after, "bytes": before.cache_bytes_per_token}


if __name__ == "__main__":
    main()
