"""Measure the field's formats of a cache on SmolLM2: its own keys and values in fewer bits, nothing converted.

    python -m benchmarks.formats                     # kept in benchmarks/results/formats.json
    python -m benchmarks.formats --formats kivi4 int8/int4

The windows are those of `benchmarks.budgets` and `benchmarks.rivals`. Bytes are read off the tensors of a cache that
is filled with a window; numbers that are not in codes are bfloat16, as a server would store them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kept import Kept, say

import headwise
from benchmarks import data
from headwise.costs.formulas.target import PLAIN_FORMATS
from headwise.measure.evaluation import open_pair
from headwise.measure.evaluation.beside_source import bfloat16_bytes
from headwise.models.checkpoints import open_checkpoint

SOURCE = "smollm2-135m"
FORMATS = (
    *map(str, PLAIN_FORMATS),
    "int8:32/int4:32",
    "kivi2:128",
    "kivi4:32",
    "int3+hadamard/int2",
    "int4:32+hadamard",
    "int3+hadamard",
    "fp8",
    "int4:32",
    "int3:32",
    "int3",
    "int2:32",
    "int8:32",
)
"""Those that conversions are compared with, then others that could be better at their bytes, and what they vary."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=SOURCE)
    parser.add_argument(
        "--formats", nargs="+", default=FORMATS, metavar="FORMAT", help="as of headwise evaluate --cache"
    )
    parser.add_argument("--windows", type=int, default=6, help="of each text to evaluate on")
    parser.add_argument("--window", type=int, default=2048, help="tokens in each")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/formats.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    options = parser.parse_args(arguments)
    kept = Kept(options.json, {name: getattr(options, name) for name in ("source", "windows", "window")})
    if kept.rows.keys() >= set(options.formats):
        return
    checkpoint = open_checkpoint(options.source)
    pair = open_pair(options.source, against=options.source, dtype="float32")
    exams = [data.wikitext("test", options.cache), data.brown(options.cache), data.austen(options.cache)]
    for name in options.formats:
        if name in kept.rows:
            continue
        result = headwise.evaluate(pair, text=exams, cache=name, window=options.window, windows=options.windows)
        taken, whole = (bfloat16_bytes(checkpoint, result.window, cache) for cache in (name, None))
        stored = {"bytes_per_token": taken, "source_bytes_per_token": whole}
        kept.add(name, {"evaluate": result.to_dict(), "cache": stored})
        ratios = ", ".join(f"{score['perplexity_ratio']:.4f}" for score in kept.rows[name]["evaluate"]["texts"])
        say(f"{name:20} {100 * taken / whole:6.2f} %  {ratios}")


if __name__ == "__main__":
    main()
