"""A model folder in MLX-LM, on the CPU."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
from benchmarks.engines.protocol import answer, request
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

asked = request()
mx.set_default_device(mx.cpu)
model, _ = load_model(Path(asked["model"]))
model.set_dtype(getattr(mx, asked["dtype"]))
ids = mx.array([asked["ids"]])
cache = None
if asked["stored"] is not None:
    cache = [layer.to_quantized(group_size=64, bits=int(asked["stored"])) for layer in make_prompt_cache(model)]
logits = np.array(model(ids, cache=cache)[0].astype(mx.float32))
cache = make_prompt_cache(model)
last = model(ids[:, : asked["prompt"]], cache=cache)[0, -1]
greedy: list[int] = []
for _ in range(asked["new"]):
    greedy.append(int(mx.argmax(last)))
    last = model(mx.array([[greedy[-1]]]), cache=cache)[0, -1]
# Each layer's arrays have room for more tokens than are there.
held = sum(
    array.nbytes / array.shape[-2]
    for layer in cache
    for array in (layer.keys, layer.values)
    if array is not None and array.shape[-1]
)
answer(logits, asked, greedy=greedy, cache_bytes=held, version=f"mlx-lm {version('mlx-lm')}, mlx {version('mlx')}")
