"""Measure how far a conversion's quality depends on the sample of text that it is calibrated on.

    python -m benchmarks.samples          # kept in benchmarks/results/samples.json

SmolLM2 is converted to one target from several samples of WikiText-2 train that share no article, and each
conversion is evaluated on texts of which no article is in any sample. ``articles K of N`` has every N-th article, so
it spans the whole corpus; ``part K of N`` is a contiguous part, which treats fewer subjects.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kept import Kept, say
from benchmarks.shared import exam_windows, shared_fractions

import headwise
from benchmarks import data
from headwise.base.disk import write_whole
from headwise.measure.evaluation import evaluate_choices, open_pair
from headwise.measure.texts import read_text
from headwise.measure.texts.calibration import CalibrationTexts
from headwise.models.checkpoints import open_checkpoint

SOURCE = "smollm2-135m"
SAMPLES = ("articles 1 of 3", "articles 2 of 3", "articles 3 of 3")


def articles(text: str) -> list[str]:
    """Split WikiText into articles, each with its title, a line ``= Title =`` between empty lines.

    Code is split into modules, which begin as those of `benchmarks.data.networkx` do.
    """
    starts = [match.start() for match in re.finditer(r"^(?: *= [^=\n]+ = *|# module: .*)$", text, flags=re.MULTILINE)]
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def sample(text: str, name: str) -> str:
    """Select the articles of a sample.

    Args:
        text: WikiText, or code.
        name: ``articles K of N`` or ``part K of N``, K from 1.
    """
    kind, number, _, count = name.split()
    k, n = int(number) - 1, int(count)
    listed = articles(text)
    selected = listed[k::n] if kind == "articles" else listed[len(listed) * k // n : len(listed) * (k + 1) // n]
    return "".join(selected)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=SOURCE)
    parser.add_argument("--samples", nargs="+", default=SAMPLES, metavar="NAME")
    parser.add_argument("--kv-budget", type=float, default=0.5, help="fraction of the source's cache")
    parser.add_argument("--tokens", type=int, default=16_384, help="of each sample")
    parser.add_argument("--windows", type=int, default=6, help="of each text to evaluate on")
    parser.add_argument("--window", type=int, default=2048, help="tokens in each")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/samples.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/samples"), help="where models are converted")
    options = parser.parse_args(arguments)
    names = ("source", "kv_budget", "tokens", "windows", "window")
    kept = Kept(options.json, {name: getattr(options, name) for name in names})
    train = read_text(data.wikitext("train", options.cache))
    options.work.mkdir(parents=True, exist_ok=True)
    for name in options.samples:
        if name in kept.rows:
            continue
        text = options.work / f"{name.replace(' ', '-')}.txt"
        text.write_text(sample(train, name), encoding="utf-8")
        kept.add(name, measure(options, text, {"to": "mla", "kv_budget": options.kv_budget}, tokens=options.tokens))
        ratios = ", ".join(f"{score['perplexity_ratio']:.4f}" for score in kept.rows[name]["evaluate"]["texts"])
        say(f"{name:16} {ratios}")


def measure(
    options: argparse.Namespace, text: Path, target: Mapping[str, Any], *, tokens: int, items: int = 0
) -> dict[str, Any]:
    """Convert with one sample and evaluate the result; the converted folder is removed.

    A run that is killed during the evaluation goes on with it: the conversion's report lies beside the folder.

    Args:
        options: ``source``, ``windows``, ``window`` and ``cache``.
        text: the sample.
        target: options of the conversion.
        tokens: of the sample.
        items: the number of PIQA's questions that are asked too.
    """
    folder, finished = text.with_suffix(""), text.with_suffix(".json")
    made = {"source": str(options.source), "tokens": tokens, **target}
    conversion = json.loads(finished.read_text(encoding="utf-8")) if finished.exists() else {}
    if conversion.get("made") != made:
        finished.unlink(missing_ok=True)
        report = headwise.convert(
            options.source,
            folder,
            **target,
            calibrate=text,
            calibration_tokens=tokens,
            evaluate=False,
            overwrite=True,
        )
        conversion = {"made": made, "report": report.to_dict()}
        write_whole(finished, json.dumps(conversion).encode())
    exams = [data.wikitext("test", options.cache), data.brown(options.cache), data.austen(options.cache)]
    result = headwise.evaluate(
        folder,
        against=options.source,
        text=exams,
        window=options.window,
        windows=options.windows,
        dtype="float32",
    )
    checkpoint = open_checkpoint(options.source)
    windows = exam_windows(
        checkpoint, {str(path): path for path in exams}, window=options.window, windows=options.windows
    )
    shared = shared_fractions(checkpoint, windows, CalibrationTexts((text,), tokens, None))
    row = {"conversion": conversion["report"], "evaluate": result.to_dict(), "shared": shared}
    if items:
        pair = open_pair(folder, against=options.source, dtype="float32")
        row["choices"] = evaluate_choices(pair, file=data.piqa(options.cache), limit=items).to_dict()
    finished.unlink()
    shutil.rmtree(folder)
    return row


if __name__ == "__main__":
    main()
