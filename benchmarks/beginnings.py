"""Perplexity of models whose tokenizer begins every text with a BOS token, with that token and without it.

    python -m benchmarks.beginnings      # kept in benchmarks/results/beginnings.json

Windows without it are what headwise judged models on before; both kinds have as many tokens. A cache in int4 is
judged on both too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarks.kept import Kept, say
from torch import Tensor

from benchmarks import data
from headwise.measure.evaluation import Pair, open_pair, score_window
from headwise.measure.texts import cut_windows, read_text, token_ids, token_windows

CACHES = (None, "int4")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder or .gguf; Gemma 3 270M when left out")
    parser.add_argument("--texts", nargs="+", default=["wikitext-test", "brown", "austen"], metavar="TEXT")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--window", type=int, default=512, help="tokens in each")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/beginnings.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the model and the texts are")
    options = parser.parse_args(arguments)
    model = options.model or data.gemma(options.cache)
    kept = Kept(options.json, {"windows": options.windows, "window": options.window})
    pair = open_pair(model, dtype="float32")
    for text in options.texts:
        name = f"{Path(model).name} {text}"
        if name in kept.rows:
            continue
        content, size = read_text(data.ALL[text](options.cache)), (options.window, options.windows)
        ids = token_ids(pair.tokenizer, content, at_most=size[0] * size[1])
        windows = {
            "with": token_windows(pair.tokenizer, content, window=size[0], windows=size[1]),
            "without": cut_windows(ids, window=size[0], windows=size[1]),
        }
        perplexities = {kind: [_perplexity(pair, ids, cache) for cache in CACHES] for kind, ids in windows.items()}
        kept.add(name, {"model": Path(model).name, "text": text, "caches": CACHES, **perplexities})
        say(f"{name}: {perplexities}")


def _perplexity(pair: Pair, windows: Tensor, cache: str | None) -> float:
    with pair.caching(cache):
        scores = [score_window(pair.models, ids)["nll"] for ids in windows]
    return float(torch.cat(scores).mean().exp())


if __name__ == "__main__":
    main()
