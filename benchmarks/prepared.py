"""What llama.cpp's own caches lose of models as they are, and prepared for them: in stock llama.cpp.

    python -m benchmarks.prepared --python ENV/bin/python      # of an environment with llama-cpp-python

A model is prepared from its weights alone, and on 4,096 tokens of WikiText-2 train. Perplexity and divergence are
beside the file as it is with a float16 cache. Kept in benchmarks/results/prepared.json.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kept import Kept, say

import headwise
from benchmarks import data

MODELS = {"Qwen2.5-Coder-0.5B": data.qwen}
TEXTS = ("wikitext-test", "brown", "python-reference")
CACHES = ("f16", "q8_0", "q4_0")
WAYS = ("as it is", "weights", "text")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the interpreter of an environment with llama-cpp-python")
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--texts", nargs="+", choices=[*data.ALL], default=[*TEXTS], metavar="TEXT")
    parser.add_argument("--prepare-for", default="llama.cpp:q4_0", metavar="ENGINE:FORMAT")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=1024, help="tokens in each")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/prepared.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where models and texts are")
    parser.add_argument("--work", type=Path, default=Path("build/prepared"), help="where models are prepared")
    options = parser.parse_args(arguments)
    settings = {"windows": options.windows, "window": options.window, "prepared for": options.prepare_for}
    kept = Kept(options.json, settings)
    options.work.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        source = MODELS[name](options.cache)
        files, seconds = {"as it is": source}, {"as it is": 0.0}
        for way in WAYS[1:]:
            files[way] = options.work / f"{name}-{way}.gguf"
            fitted = {"calibrate": data.wikitext("train", options.cache)} if way == "text" else {}
            begin = time.perf_counter()
            headwise.prepare(source, files[way], cache=options.prepare_for, overwrite=True, **fitted)
            seconds[way] = time.perf_counter() - begin
        for text_name in options.texts:
            if f"{name} {text_name}" in kept.rows:
                continue
            text = data.ALL[text_name](options.cache)
            run = {"engine": "llama.cpp", "engine_python": options.python, "text": text, "against": source}
            run |= {"windows": options.windows, "window": options.window}
            rows = []
            for way, cache in itertools.product(WAYS, CACHES):
                result = headwise.evaluate_in_engine(files[way], cache=cache, **run)
                rows.append(
                    {
                        "model": way,
                        "cache": cache,
                        "bytes": result.cache_bytes_per_token,
                        "perplexity": result.perplexity,
                        "kl": result.kl,
                        "kl_999": result.kl_999,
                        "same_top": result.top1_agreement,
                    }
                )
                say(f"{name} {text_name} {way} {cache}: {result.perplexity:.3f}, KL {result.kl:.4f}")
            kept.add(
                f"{name} {text_name}",
                {"rows": rows, "engine": result.engine, "seconds": seconds, "text": text_name, "name": name},
            )


if __name__ == "__main__":
    main()
