"""Migrate SmolLM2 to the smallest cache whose loss is allowed, and evaluate the result on texts it was not chosen by.

    python -m benchmarks.migration                                 # kept in benchmarks/results/migration.json
    python -m benchmarks.migration --losses 0.02 0.05              # two rows

A row is the loss that is allowed. Texts to calibrate and train on are WikiText-2 train, Moby Dick and XSum; sizes are
chosen by WikiText-2 test, Brown and Austen.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.healing import EXAMS, mixture
from benchmarks.kept import Kept, say

import headwise
from benchmarks import data
from headwise.measure.evaluation import open_pair

TARGETS = ("mla@0.25", "mla@0.1875", "mla@0.125")
"""The sizes that are tried: caches in codes, as parts of the bytes."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="smollm2-135m")
    parser.add_argument("--losses", nargs="+", type=float, default=[0.05], metavar="F", help="that are allowed")
    parser.add_argument("--targets", nargs="+", default=TARGETS, metavar="TARGET", help="sizes, the largest first")
    parser.add_argument("--heal-tokens", type=int, default=131_072, help="of the texts, for a size that loses more")
    parser.add_argument("--windows", type=int, default=6, help="of each text to evaluate on")
    parser.add_argument("--device", help="to convert, train and evaluate on; the CPU when left out")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/migration.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/migration"), help="where models are written")
    options = parser.parse_args(arguments)
    names = ("source", "targets", "heal_tokens", "windows")
    kept = Kept(options.json, {name: getattr(options, name) for name in names})
    for loss in options.losses:
        if f"{loss:g}" not in kept.rows:
            kept.add(f"{loss:g}", measure(options, loss))
            say(loss, kept.rows[f"{loss:g}"]["migration"]["chosen"])


def measure(options: argparse.Namespace, loss: float) -> dict[str, Any]:
    """Migrate, and evaluate the result; a killed run goes on with what it had done."""
    output = options.work / f"within-{loss:g}"
    migration = headwise.migrate(
        options.source,
        output,
        max_quality_loss=loss,
        targets=options.targets,
        heal_tokens=options.heal_tokens,
        calibrate=mixture(options.cache),
        evaluate=[text(options.cache) for text in EXAMS["test"]],
        evaluation_windows=options.windows,
        device=options.device,
        overwrite=True,
    )
    row: dict[str, Any] = {"migration": migration.to_dict()}
    if migration.chosen is not None:
        pair = open_pair(output, against=options.source, dtype="float32", device=options.device)
        texts = [text(options.cache) for text in EXAMS["tuning"]]
        row["evaluation"] = headwise.evaluate(pair, text=texts, windows=options.windows).to_dict()
    return row


if __name__ == "__main__":
    main()
