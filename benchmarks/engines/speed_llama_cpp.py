"""The speed of a GGUF file in llama.cpp, with a float16 cache and flash attention, as its server has by default."""

from __future__ import annotations

import json
import time

import llama_cpp
from benchmarks.engines.logged import cache_bytes, logged
from benchmarks.engines.protocol import request

CHUNK = 512
"""Tokens of a prompt that are read at once."""


def main() -> None:
    """Load, read prompts and decode; the last line printed says how fast."""
    asked = request()
    C, B, N, threads = (asked[name] for name in ("context", "batch", "new", "threads"))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(asked["model"].encode(), llama_cpp.llama_model_default_params())
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
    cached = cache_bytes(log[0])
    said = {
        "prompt": prompt,
        "decode": speed,
        "fits": int(2**30 // (cached * C)),
        "cache_bytes": cached,
        "version": f"llama-cpp-python {llama_cpp.__version__}",
    }
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
