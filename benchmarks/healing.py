"""Heal conversions of SmolLM2, and evaluate them before and after on texts that are not trained on.

    python -m benchmarks.healing                                   # kept in benchmarks/results/healing.json
    python -m benchmarks.healing --rows "mla:0.5 of 1000000"       # one row
    python -m benchmarks.healing --planted 20 --rows "mla:0.5 of 1000000"

A row is ``TARGET of TOKENS``, a target as ``headwise frontier`` spells it and the tokens that are trained on, and
then what differs from the default: ``by METHOD`` (a baseline's conversion), ``KEY=VALUE`` (an option of
``headwise.heal``). ``wikitext`` trains on WikiText-2 train alone, ``mixture`` on equal parts of it, of Moby Dick and
of XSum.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kept import Kept, say

import headwise
from benchmarks import data
from headwise.cost.target import target_options
from headwise.evaluation import evaluate_choices, open_pair

ROWS = (
    "mla:0.5 of 200000",
    "mla:0.5 of 200000 objective=cross-entropy",
    "mla:0.5 of 200000 by mha2mla",
    "mla:0.333 of 1000000",
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="smollm2-135m")
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="ROW")
    parser.add_argument("--text", choices=("wikitext", "mixture"), default="mixture", help="to train on")
    parser.add_argument("--calibration-tokens", type=int, default=16_384, help="of WikiText-2 train")
    parser.add_argument("--windows", type=int, default=6, help="of each text to evaluate on")
    parser.add_argument("--window", type=int, default=2048, help="tokens in each")
    parser.add_argument("--items", type=int, default=0, help="questions of PIQA that are asked too")
    parser.add_argument(
        "--planted", type=int, default=0, help="facts at each depth of 8,192 tokens that are asked for"
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/healing.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/healing"), help="where models are converted")
    options = parser.parse_args(arguments)
    names = ("source", "text", "calibration_tokens", "windows", "window")
    kept = Kept(options.json, {name: getattr(options, name) for name in names})
    for row in options.rows:
        if row in kept.rows:
            continue
        kept.add(row, measure(options, row))
        scores = ", ".join(f"{score['perplexity_ratio']:.4f}" for score in kept.rows[row]["after"]["texts"])
        say(f"{row:40} {scores}")


def measure(options: argparse.Namespace, row: str) -> dict[str, Any]:
    """Convert, heal and evaluate; a killed run goes on with what it had done."""
    name, _, rest = row.partition(" of ")
    tokens, *words = rest.split()
    method = words[words.index("by") + 1] if "by" in words else None
    more = dict(word.split("=", 1) for word in words if "=" in word)
    converted = options.work / f"{name.replace(':', '-')}-{method or 'headwise'}-{options.calibration_tokens}"
    options.work.mkdir(parents=True, exist_ok=True)
    if not (converted / "config.json").exists():
        headwise.convert(
            options.source,
            converted,
            **target_options(name),
            method=method,
            calibrate=data.wikitext("train", options.cache),
            calibration_tokens=options.calibration_tokens,
            evaluate=False,
        )
    healed = options.work / f"healed-{row.replace(' ', '-').replace(':', '-')}"
    texts = [data.wikitext("train", options.cache)]
    if options.text == "mixture":
        texts += [data.moby_dick(options.cache), data.xsum(options.cache)]
    exams = [data.wikitext("test", options.cache), data.brown(options.cache), data.austen(options.cache)]
    keywords = {key: _value(value) for key, value in more.items()}
    report = headwise.heal(
        converted,
        healed,
        teacher=options.source,
        text=texts,
        tokens=int(tokens),
        evaluate=False,
        overwrite=True,
        **keywords,
    )
    exam = {"text": exams, "window": options.window, "windows": options.windows, "dtype": "float32"}
    before, after = (headwise.evaluate(folder, against=options.source, **exam) for folder in (converted, healed))
    result = {"healing": report.to_dict(), "before": before.to_dict(), "after": after.to_dict()}
    if options.items:
        pair = open_pair(healed, against=options.source, dtype="float32")
        result["choices"] = evaluate_choices(pair, file=data.piqa(options.cache), limit=options.items).to_dict()
    if options.planted:
        pair = open_pair(healed, dtype="bfloat16")
        found = headwise.evaluate_planted(
            pair, text=data.wikitext("test", options.cache), context=8192, trials=options.planted
        )
        result["planted"] = found.to_dict()
    shutil.rmtree(healed)
    return result


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
