"""A GGUF file in llama.cpp; what it allocates for the cache is read off its log."""

from __future__ import annotations

import llama_cpp
import numpy as np
from benchmarks.engines.logged import cache_bytes, logged
from benchmarks.engines.protocol import answer, request

ROOM = 4096
"""Tokens that the cache is allocated for."""


asked = request()
kinds = {"float32": llama_cpp.GGML_TYPE_F32, "float16": llama_cpp.GGML_TYPE_F16}
kind = kinds[asked["dtype"]]
if asked["stored"] is not None:
    kind = getattr(llama_cpp, f"GGML_TYPE_{asked['stored'].upper()}")
# Flash attention rounds queries, probabilities and values to float16 on a CPU, also where the cache is float32.
flash = kind != llama_cpp.GGML_TYPE_F32
with logged() as log:
    model = llama_cpp.Llama(
        asked["model"], n_ctx=ROOM, logits_all=True, n_threads=1, n_threads_batch=1, type_k=kind, type_v=kind,
        flash_attn=flash,
    )  # fmt: skip
ids, prompt = asked["ids"], asked["prompt"]
model.eval(ids)
logits = np.array(model.scores[: len(ids)])
model.reset()
model.eval(ids[:prompt])
greedy: list[int] = []
for _ in range(asked["new"]):
    greedy.append(int(np.argmax(model.scores[model.n_tokens - 1])))
    model.eval([greedy[-1]])
text = "In 2048 tokens,  it's about\n\n the café — naïve 1,234.5 x"
tokens = model.tokenize(text.encode(), add_bos=False, special=True)
answer(
    logits,
    asked,
    greedy=greedy,
    cache_bytes=cache_bytes(log[0]),
    tokens=tokens,
    text=text,
    version=f"llama-cpp-python {llama_cpp.__version__}",
)
