"""Perplexity by position in contexts of 8,192 tokens, of conversions and of the model they are made of.

    python -m benchmarks.long      # kept in benchmarks/results/long.json

A conversion is spelled as in ``benchmarks.recall``. A row is one conversion and one text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kept import Kept, say
from benchmarks.recall import converted

from benchmarks import data
from headwise.measure.evaluation import evaluate, open_pair

CONVERSIONS = ("mla:0.5 on 65536", "mla:0.333 on 65536")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="smollm2-135m")
    parser.add_argument("--conversions", nargs="+", default=CONVERSIONS, metavar="CONVERSION")
    parser.add_argument("--tokens", type=int, default=16_384, help="of WikiText-2 train to calibrate on")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--windows", type=int, default=3, help="of each text")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/long.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/recall"), help="where models are converted")
    options = parser.parse_args(arguments)
    names = ("source", "tokens", "context", "windows", "dtype")
    kept = Kept(options.json, {name: getattr(options, name) for name in names})
    texts = {"wikitext": data.wikitext("test", options.cache)}
    texts |= {"brown": data.brown(options.cache), "austen": data.austen(options.cache)}
    for conversion in options.conversions:
        missing = [name for name in texts if f"{conversion}/{name}" not in kept.rows]
        if not missing:
            continue
        pair = open_pair(converted(options, conversion), against=options.source, dtype=options.dtype)
        for name in missing:
            found = evaluate(
                pair,
                text=texts[name],
                window=options.context,
                windows=options.windows,
                context=options.context - 1,
            )
            kept.add(f"{conversion}/{name}", {"name": conversion, "on": name, **found.to_dict()})
            say(f"{conversion:20} {name:10} ×{found.perplexity_ratio:.4f}")


if __name__ == "__main__":
    main()
