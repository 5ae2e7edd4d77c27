"""What llama.cpp's caches lose of models, on windows of tokens, beside one of them with a float16 cache.

The request has ``models`` (files, the first of which is the reference), ``caches`` (pairs of ggml types), ``windows``
of token ids, and ``threads``; the last line printed has a row for each model and cache.
"""

from __future__ import annotations

import json
from typing import Any

import llama_cpp
import numpy as np
from benchmarks.engines.logged import cache_bytes, logged
from benchmarks.engines.protocol import request

BATCH = 512


def open_model(file: str, keys: str, values: str, window: int, threads: int) -> tuple[Any, float]:
    """A model with its cache in two types, and the cache's bytes a token."""
    kinds = (getattr(llama_cpp, f"GGML_TYPE_{name.upper()}") for name in (keys, values))
    with logged() as log:
        model = llama_cpp.Llama(
            file, n_ctx=window, n_batch=BATCH, n_ubatch=BATCH, logits_all=True, flash_attn=True, n_threads=threads,
            n_threads_batch=threads, **dict(zip(("type_k", "type_v"), kinds, strict=True)),
        )  # fmt: skip
    return model, cache_bytes(log[0])


def log_probs(model: Any, ids: list[int]) -> Any:
    """Log-probabilities ``[S, V]`` of all tokens behind each of a window's."""
    model.reset()
    model.eval(ids)
    logits = np.array(model.scores[: len(ids)], dtype=np.float32)
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits


def main() -> None:
    """Measure each model with each cache; the last line printed has the rows."""
    asked = request()
    windows, threads = asked["windows"], asked["threads"]
    wide = open_model(asked["models"][0], "f16", "f16", len(windows[0]), threads)[0]
    references = [log_probs(wide, ids) for ids in windows]
    rows = []
    for file in asked["models"]:
        for keys, values in asked["caches"]:
            model, taken = open_model(file, keys, values, len(windows[0]), threads)
            costs, divergences, equal = [], [], []
            for ids, reference in zip(windows, references, strict=True):
                own = log_probs(model, ids)
                costs.append(-own[np.arange(len(ids) - 1), ids[1:]])
                divergences.append((np.exp(reference) * (reference - own)).sum(-1)[:-1])
                equal.append((own.argmax(-1) == reference.argmax(-1))[:-1])
            cost = np.array([window.mean(dtype=np.float64) for window in costs])
            every = np.concatenate(divergences).astype(np.float64)
            rows.append(
                {
                    "model": file,
                    "cache": f"{keys}/{values}" if keys != values else keys,
                    "bytes": taken,
                    "perplexity": float(np.exp(cost.mean())),
                    "costs": cost.tolist(),
                    "kl": float(every.mean()),
                    "kl_999": float(np.quantile(every, 0.999)),
                    "same_top": float(np.concatenate(equal).mean()),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
            model.close()
    print(json.dumps({"rows": rows, "version": f"llama-cpp-python {llama_cpp.__version__}"}), flush=True)


main()
