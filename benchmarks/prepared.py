"""What llama.cpp's own caches lose of models as they are, and prepared for them: in stock llama.cpp.

    python -m benchmarks.prepared --python ENV/bin/python      # of an environment with llama-cpp-python

A model is prepared from its weights alone, on 4,096 tokens of WikiText-2 train, and on these with the biases of its
keys shifted. Perplexity and divergence are beside the file as it is with a float16 cache. Each cell is kept in
benchmarks/results/prepared.json as soon as it is measured.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from benchmarks.kept import Kept, say

import headwise
from benchmarks import data


def larger_biases(cache: Path) -> Path:
    """Qwen2.5-Coder-0.5B with biases of norm 450 in the three slowest pairs of the first layer's keys, the size that
    they have in the 1.5B of its family."""
    source, path = data.qwen(cache), cache / "qwen2.5-coder-0.5b-larger-biases.gguf"
    if not path.exists():
        shutil.copyfile(source, path)
        bias = next(tensor for tensor in gguf.GGUFReader(path, "r+").tensors if tensor.name == "blk.0.attn_k.bias")
        slowest = bias.data.reshape(2, 2, 32)[:, :, -3:]  # heads, halves of a head, pairs
        slowest *= 450 / np.sqrt(np.square(slowest).sum(1, keepdims=True))
    return path


MODELS = {"Qwen2.5-Coder-0.5B": data.qwen, "the same with larger biases": larger_biases}
TEXTS = ("wikitext-test", "brown", "python-reference")
CACHES = ("q4_0", "q8_0", "f16")
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "weights": {},
    "text": {"calibrate": True},
    "refitted": {"calibrate": True, "refit": True},
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the interpreter of an environment with llama-cpp-python")
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--texts", nargs="+", choices=[*data.ALL], default=[*TEXTS], metavar="TEXT")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS])
    parser.add_argument("--caches", nargs="+", default=[*CACHES])
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
    for name, way in itertools.product(options.models, options.ways):
        source = MODELS[name](options.cache)
        file, seconds = source, 0.0
        if way != "as it is":
            file = options.work / f"{name}-{way}.gguf"
            fitted = dict(WAYS[way])
            if "calibrate" in fitted:
                fitted["calibrate"] = data.wikitext("train", options.cache)
            seconds = headwise.prepare(source, file, cache=options.prepare_for, overwrite=True, **fitted).seconds
        for text, cache in itertools.product(options.texts, options.caches):
            cell = f"{name} {text} {cache} {way}"
            if cell in kept.rows or (way, cache) == ("as it is", "f16"):
                continue
            result = headwise.evaluate_in_engine(
                file, engine="llama.cpp", engine_python=options.python, cache=cache, against=source,
                text=data.ALL[text](options.cache), windows=options.windows, window=options.window,
            )  # fmt: skip
            row = {
                "name": name, "text": text, "cache": cache, "way": way, "engine": result.engine, "seconds": seconds,
                "bytes": result.cache_bytes_per_token, "perplexity": result.perplexity, "kl": result.kl,
                "kl_999": result.kl_999, "same_top": result.top1_agreement,
            }  # fmt: skip
            assert result.reference is not None
            row["full"] = {
                "bytes": result.reference.cache_bytes_per_token, "perplexity": result.reference.perplexity
            }  # fmt: skip
            kept.add(cell, row)
            say(f"{cell}: ×{result.perplexity / result.reference.perplexity:.4f}, KL {result.kl:.4f}")


if __name__ == "__main__":
    main()
