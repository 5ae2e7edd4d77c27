"""Set all ways to a smaller cache side by side on small models: quantising, converting, and both.

    python -m benchmarks.ways                        # kept in benchmarks/results/ways.json
    python -m benchmarks.ways qwen2 --work build/ways

The models are those of `benchmarks.small_models`; each is made once, in the work folder. A row is one model's
`headwise.frontier`: calibrated on WikiText-2 train, evaluated on WikiText-2 test and Brown.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kept import Kept, say
from benchmarks.small_models import made

import headwise
from benchmarks import data

TARGETS = (
    *("int8", "int8/int4", "kivi4", "int4+hadamard/int4", "int4:32", "kivi3:32", "kivi2:32", "int2:32"),
    *("same@0.28", "same@0.25", "same@0.19", "same@0.125", "mla:0.5", "mla:0.25"),
    *("mla@0.5", "mla@0.28", "mla@0.25", "mla@0.19", "mla@0.15", "mla@0.125", "mla@0.094", "mla@0.0625"),
)
WINDOWS = {"glassllm": 128, "qwen2": 512}
"""Tokens of a window: those that the model was trained on."""

SCORED = 16_384
"""Tokens of each text to evaluate on."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(WINDOWS), metavar="MODEL", help=", ".join(WINDOWS))
    parser.add_argument("--targets", nargs="+", default=TARGETS, metavar="TARGET", help="of headwise frontier")
    parser.add_argument("--tokens", type=int, default=65_536, help="of WikiText-2 train to calibrate on")
    parser.add_argument("--scored", type=int, default=SCORED, help="tokens of each text to evaluate on")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/ways.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/ways"), help="for models and frontiers")
    options = parser.parse_args(arguments)
    kept = Kept(options.json, {name: getattr(options, name) for name in ("targets", "tokens", "scored")})
    for name in options.models:
        if name in kept.rows:
            continue
        folder = made(name, options.work / name, options.cache)
        window = WINDOWS[name]
        result = headwise.frontier(
            folder,
            options.work / f"{name}-frontier",
            calibrate=data.wikitext("train", options.cache),
            calibration_tokens=options.tokens,
            calibration_window=window,
            evaluate=[data.wikitext("test", options.cache), data.brown(options.cache)],
            window=window,
            windows=options.scored // window,
            targets=options.targets,
            dtype="float32",
            plot=False,
        )
        document = result.to_dict()
        for point in document["points"]:  # the reports are long, and in the frontier's own folder
            del point["conversion"], point["evaluation"]
        kept.add(name, document)
        for point in result.points:
            ratios = ", ".join(f"{ratio:.4f}" for ratio in point.ratios.values())
            say(f"{name:10} {point.target:20} {100 * point.cache_fraction:6.2f} %  {ratios}")


if __name__ == "__main__":
    main()
