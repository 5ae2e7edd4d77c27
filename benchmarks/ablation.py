"""Ablate the stages of the solver: SmolLM2 with half its cache, without each stage in turn.

    python -m benchmarks.ablation          # writes benchmarks/results/ablation.json

It runs ``headwise frontier --methods`` on the texts of the other benchmarks; a killed run can be continued.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kept import run, say

import headwise
from benchmarks import data
from headwise.base.disk import write_whole

SOURCE = "smollm2-135m"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=SOURCE)
    parser.add_argument("--target", default="mla:0.5")
    parser.add_argument("--tokens", type=int, default=16_384, help="of text to calibrate on")
    parser.add_argument("--windows", type=int, default=6, help="of each text")
    parser.add_argument("--window", type=int, default=2048, help="tokens in each")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/ablation.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/ablation"), help="where models are converted")
    options = parser.parse_args(arguments)
    frontier = headwise.frontier(
        options.source,
        options.work,
        calibrate=data.wikitext("train", options.cache),
        evaluate=[data.wikitext("test", options.cache), data.brown(options.cache)],
        targets=[options.target],
        methods=True,
        calibration_tokens=options.tokens,
        window=options.window,
        windows=options.windows,
        dtype="float32",
        plot=False,
        progress=say_step,
    )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.json, (json.dumps({**frontier.to_dict(), "run": run()}, indent=1) + "\n").encode())


def say_step(what: str, done: int, total: int) -> None:
    """Print the number of finished conversions."""
    if what == "frontier":
        say(f"{done} of {total} conversions")


if __name__ == "__main__":
    main()
