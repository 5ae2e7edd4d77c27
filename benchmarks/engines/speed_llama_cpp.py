"""The speed of GGUF files in llama.cpp, with a float16 cache and flash attention, as its server has by default."""

from __future__ import annotations

import json
import time
from typing import Any

import llama_cpp
from benchmarks.engines.logged import cache_bytes, logged
from benchmarks.engines.protocol import request

CHUNK = 512
"""Tokens of a prompt that are read at once."""


def main() -> None:
    """Measure each load with the models in turns; a line of JSON for each load and model."""
    asked = request()
    llama_cpp.llama_backend_init()
    for load in asked["loads"]:
        C, B = load["context"], load["batch"]
        said: dict[str, dict[str, Any]] = {name: {"prompt": [], "decode": []} for name in asked["models"]}
        for _ in range(asked["rounds"]):
            for name, model in asked["models"].items():
                prompt, decode, cached = measure(model["model"], C, B, asked["new"], asked["threads"])
                said[name]["prompt"].append(prompt)
                said[name]["decode"].append(decode)
                said[name] |= {"fits": int(2**30 // (cached * C)), "cache_bytes": cached}
        for name, row in said.items():
            version = f"llama-cpp-python {llama_cpp.__version__}"
            print(json.dumps({"output": name, "context": C, "batch": B, **row, "version": version}), flush=True)


def measure(file: str, C: int, B: int, N: int, threads: int) -> tuple[float, float, float]:
    """Load, read prompts and decode: tokens a second of both, and bytes of cache a token."""
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_seq_max = (C + N + 8) * B, max(CHUNK, B), B
    options.n_threads = options.n_threads_batch = threads
    with logged() as log:
        context = llama_cpp.llama_init_from_model(model, options)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(max(CHUNK, B), 0, 1)

    def decode(tokens: list[tuple[int, int, int]]) -> None:
        """Pass ``(token, position, text)`` through the model; logits of the last one, or of all one-token texts."""
        batch.n_tokens = len(tokens)
        for at, (token, position, text) in enumerate(tokens):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0] = token, position, 1, text
            batch.logits[at] = len(tokens) <= B or at == len(tokens) - 1
        if status := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        llama_cpp.llama_synchronize(context)

    token = [(7 * at + 11) % (vocabulary - 100) + 50 for at in range(C + N + 8)]
    begin = time.perf_counter()
    for text in range(B):
        for first in range(0, C, CHUNK):
            decode([(token[at], at, text) for at in range(first, min(first + CHUNK, C))])
    prompt = B * C / (time.perf_counter() - begin)
    for at in range(C, C + 4):  # warm
        decode([(token[at], at, text) for text in range(B)])
    begin = time.perf_counter()
    for at in range(C + 4, C + 4 + N):
        decode([(token[at], at, text) for text in range(B)])
    speed = B * N / (time.perf_counter() - begin)
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return prompt, speed, cache_bytes(log[0])


if __name__ == "__main__":
    main()
