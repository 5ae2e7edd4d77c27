"""Heal conversions of SmolLM2, and evaluate them before and after on texts that are not trained on.

    python -m benchmarks.healing                                   # kept in benchmarks/results/healing.json
    python -m benchmarks.healing --rows "mla:0.5 of 1000000"       # one row
    python -m benchmarks.healing --planted 20 --rows "mla:0.5 of 1000000"

A row is ``TARGET of TOKENS``: a target as ``headwise frontier`` spells it (``own`` is the source) and the tokens that
are trained on, 0 for the conversion itself. Then comes what differs from the default: ``by METHOD`` (a baseline's
conversion), ``KEY=VALUE`` (an option of ``headwise.heal``). ``--text wikitext`` trains on WikiText-2 train alone,
``mixture`` on equal parts of it, of Moby Dick and of XSum, ``mixture-own`` on equal parts of these and of text that
the source wrote, ``broad`` on equal parts of these three and of plots, biographies, abstracts of papers and captions.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kept import Kept, say

import headwise
from benchmarks import data
from headwise.base.options.evaluate import DEPTHS
from headwise.costs.formulas.target import target_options
from headwise.measure.evaluation import evaluate_choices, open_pair

EXAMS = {
    "test": (partial(data.wikitext, "test"), data.brown, data.austen),
    "tuning": (partial(data.wikitext, "valid"), data.python_reference),
}
"""Texts to evaluate on. No choice may be made by those of ``test``."""

TEXTS = ("wikitext", "mixture", "mixture-own", "broad")
"""What is trained on."""

OWN_TOKENS = 300_000
"""The tokens that the source writes, a quarter of a million of which are trained on in a million."""

UNCALIBRATED = ("mean", "first_head", "random")
"""Methods that use no text."""

ROWS = (
    "mla:0.5 of 0",
    "mla:0.5 of 1000000",
    "mla:0.333 of 0",
    "mla:0.333 of 1000000",
    "mla:0.25 of 0",
    "mla:0.25 of 1000000",
    "mla@0.125 of 0",
    "mla@0.125 of 1000000",
    "mla@0.0625 of 0",
    "mla@0.0625 of 1000000",
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="smollm2-135m")
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="ROW")
    parser.add_argument("--text", choices=TEXTS, default="mixture", help="to train on")
    parser.add_argument("--exam", choices=tuple(EXAMS), default="test", help="texts to evaluate on")
    parser.add_argument("--calibration-tokens", type=int, default=16_384, help="of WikiText-2 train")
    parser.add_argument("--windows", type=int, default=6, help="of each text to evaluate on")
    parser.add_argument("--window", type=int, default=2048, help="tokens in each")
    parser.add_argument("--items", type=int, default=0, help="questions of PIQA that are asked too")
    parser.add_argument(
        "--planted", type=int, default=0, help="facts that are asked for at each depth of 8,192 tokens"
    )
    parser.add_argument("--device", help="to convert, train and evaluate on; the CPU when left out")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/healing.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/healing"), help="where models are converted")
    options = parser.parse_args(arguments)
    names = ("source", "text", "exam", "calibration_tokens", "windows", "window")
    kept = Kept(options.json, {name: getattr(options, name) for name in names})
    for row in options.rows:
        if row in kept.rows:
            continue
        kept.add(row, measure(options, row))
        scores = ", ".join(f"{text['perplexity_ratio']:.4f}" for text in kept.rows[row]["evaluation"]["texts"])
        say(f"{row:40} {scores}")


def measure(options: argparse.Namespace, row: str) -> dict[str, Any]:
    """Convert, heal and evaluate; a killed run goes on with what it had done."""
    name, _, rest = row.partition(" of ")
    tokens, *words = rest.split()
    method = words[words.index("by") + 1] if "by" in words else None
    model = converted(options, name, method)
    result: dict[str, Any] = {}
    if int(tokens):
        healed = options.work / f"healed-{row.replace(' ', '-').replace(':', '-')}"
        report = headwise.heal(
            model,
            healed,
            teacher=options.source,
            text=texts(options),
            tokens=int(tokens),
            device=options.device,
            evaluate=False,
            overwrite=True,
            **{key: _value(value) for key, _, value in (word.partition("=") for word in words if "=" in word)},
        )
        result["healing"] = report.to_dict()
        model = healed
    pair = open_pair(model, against=options.source, dtype="float32", device=options.device)
    exams = [file(options.cache) for file in EXAMS[options.exam]]
    evaluation = headwise.evaluate(pair, text=exams, window=options.window, windows=options.windows)
    result["evaluation"] = evaluation.to_dict()
    if options.items:
        result["choices"] = evaluate_choices(pair, file=data.piqa(options.cache), limit=options.items).to_dict()
    if options.planted:
        found = headwise.evaluate_planted(
            open_pair(model, dtype="bfloat16", device=options.device),
            text=data.wikitext("test", options.cache),
            context=8192,
            depths=DEPTHS,
            trials=options.planted,
        )
        result["planted"] = found.to_dict()
    if int(tokens):
        shutil.rmtree(model)
    return result


def converted(options: argparse.Namespace, name: str, method: str | None) -> Path | str:
    """The conversion, made once; ``own`` is the source itself."""
    if name == "own":
        return str(options.source)
    folder: Path = options.work / f"{name.replace(':', '-')}-{method or 'headwise'}-{options.calibration_tokens}"
    options.work.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").exists():
        text = data.wikitext("train", options.cache)
        calibration = {"calibrate": text, "calibration_tokens": options.calibration_tokens}
        headwise.convert(
            options.source,
            folder,
            **target_options(name),
            method=method,
            **({} if method in UNCALIBRATED else calibration),
            device=options.device,
            evaluate=False,
        )
    return folder


def texts(options: argparse.Namespace) -> list[Path]:
    """The texts to train on."""
    cache = options.cache
    if options.text == "wikitext":
        return [data.wikitext("train", cache)]
    if options.text == "mixture-own":
        return [*mixture(cache), own_text(options)]
    if options.text == "broad":
        return [
            *mixture(cache),
            *(text(cache) for text in (data.plots, data.biographies, data.abstracts, data.captions)),
        ]
    return mixture(cache)


def mixture(cache: Path) -> list[Path]:
    """The texts of the mixture."""
    return [data.wikitext("train", cache), data.moby_dick(cache), data.xsum(cache)]


def own_text(options: argparse.Namespace) -> Path:
    """The text that the source writes, made once."""
    file: Path = options.work / "own.txt"
    if not file.exists():
        headwise.sample(options.source, file, tokens=OWN_TOKENS, dtype="bfloat16", device=options.device)
    return file


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


if __name__ == "__main__":
    main()
