"""Measure what each layout of an MLA folder costs at the same bytes of cache.

    python -m benchmarks.layouts                       # kept in benchmarks/results/layouts.json
    python -m benchmarks.layouts --rows "deepseek 128 + 64"

SmolLM2 at half of its values, from one sample of WikiText-2 train. headwise's own format has rotary channels chosen
for each layer. ``deepseek-longrope`` has one list of channels for all layers, ``deepseek`` a comb of frequencies in
its place, which is plain RoPE, and ``--bias-free`` a constant in the latent that is a function of the inputs. All but
the first need one of the latent's channels for a constant, which the rank includes in ``deepseek``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kept import Kept, say
from benchmarks.samples import SOURCE, measure, sample

from benchmarks import data
from headwise.measure.texts import read_text


def _sized(rank: int, rope: int, **more: Any) -> dict[str, Any]:
    return {"kv_lora_rank": rank, "qk_rope_head_dim": rope, **more}


COMB: dict[str, Any] = {"format": "deepseek"}
BIAS_FREE: dict[str, Any] = {**COMB, "bias_free": True}
ROWS: dict[str, dict[str, Any]] = {
    "headwise 144 + 48": _sized(144, 48),
    "deepseek-longrope 143 + 48": _sized(143, 48, format="deepseek-longrope"),  # and a constant
    "deepseek 144 + 48": _sized(144, 48, **COMB),
    "deepseek --bias-free 144 + 48": _sized(144, 48, **BIAS_FREE),
    "deepseek 128 + 64": _sized(128, 64, **COMB),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=SOURCE)
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS], metavar="ROW")
    parser.add_argument("--sample", default="articles 2 of 3", help="of WikiText-2 train; see benchmarks.samples")
    parser.add_argument("--tokens", type=int, default=16_384, help="of the sample")
    parser.add_argument("--windows", type=int, default=6, help="of each text to evaluate on")
    parser.add_argument("--window", type=int, default=2048, help="tokens in each")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/layouts.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/layouts"), help="where models are converted")
    options = parser.parse_args(arguments)
    names = ("source", "sample", "tokens", "windows", "window")
    kept = Kept(options.json, {name: getattr(options, name) for name in names})
    options.work.mkdir(parents=True, exist_ok=True)
    text = options.work / "sample.txt"
    text.write_text(sample(read_text(data.wikitext("train", options.cache)), options.sample), encoding="utf-8")
    for name in options.rows:
        if name in kept.rows:
            continue
        kept.add(name, measure(options, text, {"to": "mla", **ROWS[name]}, tokens=options.tokens))
        ratios = ", ".join(f"{score['perplexity_ratio']:.4f}" for score in kept.rows[name]["evaluate"]["texts"])
        say(f"{name:30} {ratios}")


if __name__ == "__main__":
    main()
