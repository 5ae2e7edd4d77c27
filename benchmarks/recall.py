"""Plant facts in long texts, and ask for them with each cache: the model's own, formats, and conversions.

    python -m benchmarks.recall                      # kept in benchmarks/results/recall.json
    python -m benchmarks.recall --caches mla@0.25    # of one cache
    python -m benchmarks.recall --keys 4 --json benchmarks/results/recall-keys.json    # four facts, one asked for
    python -m benchmarks.recall --together --depths 0.25 0.5 0.75 1 --json benchmarks/results/recall-together.json
    python -m benchmarks.recall --strings 12 --together --json benchmarks/results/recall-strings.json    # begun again

A cache is ``own``, a format of ``headwise evaluate --cache``, ``TARGET@F``, a conversion to a fraction F of the
bytes, or ``TARGET:F``, a conversion to a fraction F of the values. ``TARGET:F without STAGE`` is an ablation,
``TARGET:F with spread`` has its cache spread over layers, ``TARGET:F on N`` is calibrated on N tokens, and ``TARGET:F
on N healed at RATE`` is then healed on the same tokens. Each trial hides a code of five digits in other tokens of the
text, or a string of random ones; all caches are asked for the same at the same places. A row is one cache and one
depth.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.kept import Kept, say

import headwise
from benchmarks import data
from headwise.base.options.evaluate import DEPTHS
from headwise.measure.evaluation import open_pair

TARGETS = ("mla@", "mla:", "same@")
CACHES = ("own", "mla:0.5", "mla@0.25 without recall", "kivi3:32", "mla@0.15 without recall", "kivi2")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="smollm2-135m")
    parser.add_argument("--caches", nargs="+", default=CACHES, metavar="CACHE")
    parser.add_argument("--tokens", type=int, default=16_384, help="of WikiText-2 train to calibrate on")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--trials", type=int, default=20, help="at each depth")
    parser.add_argument("--keys", type=int, default=1, help="facts in each context")
    parser.add_argument("--strings", type=int, help="tokens of random strings, planted in place of sentences")
    parser.add_argument(
        "--together", action="store_const", const=True, help="ask for all depths after reading a context once"
    )
    parser.add_argument("--depths", type=float, nargs="+", default=DEPTHS)
    parser.add_argument("--seed", type=int, default=0, help="of the codes")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", help="to ask on; the CPU when left out")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/recall.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/recall"), help="where models are converted")
    options = parser.parse_args(arguments)
    names = ("source", "tokens", "context", "trials", "keys", "strings", "together", "seed", "dtype", "device")
    kept = Kept(options.json, {name: getattr(options, name) for name in names})
    for cache in options.caches:
        missing = [depth for depth in options.depths if f"{cache}/{depth}" not in kept.rows]
        if not missing:
            continue
        is_converted = cache.startswith(TARGETS)
        model = converted(options, cache) if is_converted else options.source
        pair = open_pair(model, dtype=options.dtype, device=options.device)
        for depths in [missing] if options.together else [[depth] for depth in missing]:
            found = headwise.evaluate_planted(
                pair,
                text=data.wikitext("test", options.cache),
                context=options.context,
                depths=depths,
                trials=options.trials,
                seed=options.seed,
                keys=options.keys,
                strings=options.strings,
                together=bool(options.together),
                cache=None if is_converted or cache == "own" else cache,
            )
            for score in found.depths:
                row = {"name": cache, "depth": score.depth, **replace(found, depths=(score,)).to_dict()}
                if options.together:  # these are of all depths
                    del row["found"], row["first"]
                kept.add(f"{cache}/{score.depth}", row)
                rates = f"found {score.found:.2f}  likeliest {score.first:.2f}"
                say(f"{cache:10} {score.depth:4}  {rates}  {score.nll:.2f} nats")


def converted(options: argparse.Namespace, cache: str) -> Path:
    """The conversion to a fraction of the bytes or of the values, made once, and healed where the name says so."""
    unhealed, _, rate = cache.partition(" healed at ")
    tokens = int(unhealed.partition(" on ")[2] or options.tokens)
    if rate:
        return _healed(options, converted(options, unhealed), tokens, rate)
    name = unhealed.partition(" on ")[0]
    sized, _, stage = name.partition(" without ")
    size, spread, _ = sized.partition(" with spread")
    target, separator, fraction = size.partition("@") if "@" in size else size.partition(":")
    way = size.replace("@", "-").replace(":", "-values-") + (f"-without-{stage}" if stage else "")
    way += "-with-spread" if spread else ""
    folder = Path(options.work) / f"{Path(options.source).name}-{way}-{tokens}"
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        headwise.convert(
            options.source,
            folder,
            to=target,
            **{"kv_bytes" if separator == "@" else "kv_budget": float(fraction)},
            without=[stage] if stage else (),
            spread=bool(spread),
            calibrate=data.wikitext("train", options.cache),
            calibration_tokens=tokens,
            evaluate=False,
        )
    return folder


def _healed(options: argparse.Namespace, folder: Path, tokens: int, rate: str) -> Path:
    """A conversion that was trained once more on the tokens that it was calibrated on."""
    healed = folder.with_name(f"{folder.name}-healed-{rate}")
    if not (healed / "config.json").exists():
        headwise.heal(
            folder,
            healed,
            teacher=options.source,
            text=data.wikitext("train", options.cache),
            tokens=tokens,
            learning_rate=float(rate),
            measurements=4,
            evaluate=False,
        )
    return healed


if __name__ == "__main__":
    main()
