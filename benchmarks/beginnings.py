"""Perplexity of models whose tokenizer begins every text with a BOS token, with that token and without it.

    python -m benchmarks.beginnings      # kept in benchmarks/results/beginnings.json

Windows without it are what headwise judged models on before; both kinds have as many tokens. A cache in int4 is
judged on both too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kept import Kept, say

from benchmarks import data
from headwise.evaluation import evaluate_windows, open_pair
from headwise.texts import cut_windows, read_text, token_ids, token_windows

CACHES = (None, "int4")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder or .gguf; Gemma 3 270M when left out")
    parser.add_argument("--texts", nargs="+", default=["wikitext-test", "brown", "austen"], metavar="TEXT")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--window", type=int, default=1024, help="tokens in each")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/beginnings.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the model and the texts are")
    options = parser.parse_args(arguments)
    model = options.model or data.gemma(options.cache)
    kept = Kept(options.json, {"windows": options.windows, "window": options.window})
    pair = open_pair(model, against=model, dtype="float32")
    for text in options.texts:
        name = f"{Path(model).name} {text}"
        if name in kept.rows:
            continue
        content, size = read_text(data.ALL[text](options.cache)), (options.window, options.windows)
        ids = token_ids(pair.tokenizer, content, at_most=size[0] * size[1])
        row = {
            "with": token_windows(pair.tokenizer, content, window=size[0], windows=size[1]),
            "without": cut_windows(ids, window=size[0], windows=size[1]),
        }
        results = {
            kind: {str(cache): evaluate_windows(pair, [(text, ids)], cache=cache).to_dict() for cache in CACHES}
            for kind, ids in row.items()
        }
        kept.add(name, {"model": Path(model).name, "text": text, **results})
        say(f"{name}: {[results[kind]['None']['perplexity'] for kind in row]}")


if __name__ == "__main__":
    main()
