"""How far conversions depend on the first token of a text: KL from the source in windows with different ones.

    python -m benchmarks.first_tokens      # kept in benchmarks/results/first-tokens.json

Windows of a text are cut so that no two of them begin with the same token. A conversion whose source rests its
attention on the first token, whatever it is, can lose a whole window where it never learnt that token's own values.
The mean hides it; the share of windows that are far off shows it. Caches are named as in `benchmarks.recall`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarks.kept import Kept, say
from benchmarks.recall import converted
from torch import Tensor

from benchmarks import data
from headwise.measure.evaluation import open_pair
from headwise.measure.evaluation.scoring import kl_divergence
from headwise.measure.texts import read_text, token_ids

CACHES = ("mla:0.5", "mla:0.5 without starts")

FAR = 1.0
"""The mean KL of a window, in nats, from which it counts as lost."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="smollm2-135m")
    parser.add_argument("--caches", nargs="+", default=CACHES, metavar="CACHE")
    parser.add_argument("--tokens", type=int, default=16_384, help="of WikiText-2 train to calibrate on")
    parser.add_argument("--windows", type=int, default=1024)
    parser.add_argument("--window", type=int, default=64, help="tokens in each")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/first-tokens.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/recall"), help="where models are converted")
    options = parser.parse_args(arguments)
    names = ("source", "tokens", "windows", "window")
    kept = Kept(options.json, {name: getattr(options, name) for name in names})
    texts = {"wikitext-2.test": data.wikitext("test", options.cache), "brown": data.brown(options.cache)}
    for cache in options.caches:
        if cache in kept.rows:
            continue
        pair = open_pair(converted(options, cache), against=options.source, dtype="float32")
        row = {}
        for name, text in texts.items():
            windows = first_token_windows(token_ids(pair.tokenizer, read_text(text)), options.window, options.windows)
            losses = divergences(pair.models["model"], pair.models["against"], windows)
            quantiles = torch.tensor([0.5, 0.99, 1.0], dtype=torch.float64)
            median, high, most = losses.quantile(quantiles).tolist()
            row[name] = {
                "windows": len(windows),
                "kl": float(losses.mean()),
                "median": median,
                "p99": high,
                "max": most,
                "lost": float((losses > FAR).double().mean()),
            }
            say(f"{cache:24} {name:16} {row[name]}")
        kept.add(cache, {"name": cache, "texts": row})


def first_token_windows(ids: list[int], window: int, count: int) -> Tensor:
    """Windows ``[n, window]`` of a text that begin with n different tokens, as far as it has so many."""
    found: dict[int, int] = {}
    for start in torch.randperm(len(ids) - window, generator=torch.Generator().manual_seed(0)).tolist():
        found.setdefault(ids[start], start)
        if len(found) == count:
            break
    return torch.tensor([ids[start : start + window] for start in found.values()])


@torch.no_grad()
def divergences(model: torch.nn.Module, source: torch.nn.Module, windows: Tensor) -> Tensor:
    """The mean KL of each window in nats, float64 ``[n]``."""
    losses = []
    for batch in windows.split(16):
        ours, theirs = (one(batch, use_cache=False).logits.log_softmax(-1) for one in (model, source))
        losses.append(kl_divergence(theirs, ours).double().mean(-1))
    return torch.cat(losses)


if __name__ == "__main__":
    main()
