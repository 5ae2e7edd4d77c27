"""Measure conversions to fewer bytes, ranks and bits together, each from several samples of text.

    python -m benchmarks.budgets                     # kept in benchmarks/results/budgets.json
    python -m benchmarks.budgets --kv-bytes 0.19

SmolLM2 is converted at each budget from three samples of WikiText-2 train that share no article, of 16 384 tokens; or
of 65 536 below 10 percent, where more text is needed. Each conversion is evaluated on texts of which no article is in
any sample; bytes are read off the tensors of its cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kept import Kept, OtherSettingsError, say
from benchmarks.samples import SAMPLES, SOURCE, measure, sample

from benchmarks import data
from headwise.measure.texts import read_text

BUDGETS = (0.5, 0.43, 0.28, 0.25, 0.19, 0.15, 0.125, 0.094, 0.0625)

TOKENS, MORE_TOKENS, NEEDS_MORE = 16_384, 65_536, 0.1
"""Tokens of each sample, and of those for budgets below `NEEDS_MORE`."""

ASKED = 0.19
"""The least budget with questions: below it, answers are expected to change."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=SOURCE)
    parser.add_argument("--samples", nargs="+", default=SAMPLES, metavar="NAME")
    parser.add_argument("--kv-bytes", nargs="+", type=float, default=BUDGETS, help="fractions of a cache in bfloat16")
    parser.add_argument("--tokens", type=int, help="of each sample, for every budget")
    parser.add_argument("--windows", type=int, default=6, help="of each text to evaluate on")
    parser.add_argument("--window", type=int, default=2048, help="tokens in each")
    parser.add_argument(
        "--items", type=int, default=500, help="questions of PIQA, asked with the first sample down to 19 percent"
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/budgets.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/budgets"), help="where models are converted")
    options = parser.parse_args(arguments)
    names = ("source", "windows", "window")
    kept = Kept(options.json, {name: getattr(options, name) for name in names})
    train = read_text(data.wikitext("train", options.cache))
    options.work.mkdir(parents=True, exist_ok=True)
    for name in options.samples:  # a whole sample first: one row of each budget
        text = options.work / f"{name.replace(' ', '-')}.txt"
        text.write_text(sample(train, name), encoding="utf-8")
        for budget in options.kv_bytes:
            row = f"{budget:g}/{name}"
            tokens = options.tokens or (TOKENS if budget >= NEEDS_MORE else MORE_TOKENS)
            if row in kept.rows:
                if (was := kept.rows[row]["tokens"]) != tokens:
                    raise OtherSettingsError(f"{row} was measured with {was} tokens, not {tokens}: give another file")
                continue
            items = options.items if name == SAMPLES[0] and budget >= ASKED else 0
            measured = measure(options, text, {"to": "mla", "kv_bytes": budget}, tokens=tokens, items=items)
            kept.add(row, {"budget": budget, "sample": name, "tokens": tokens, **measured})
            scores = kept.rows[row]["evaluate"]["texts"]
            say(f"{row:24}", ", ".join(f"{score['perplexity_ratio']:.4f}" for score in scores))


if __name__ == "__main__":
    main()
