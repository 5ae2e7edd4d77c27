"""Cache bytes and decoding time of models, measured in turn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise.base.progress import Progress, silent
from headwise.measure.timing import cache_nbytes, time_interleaved
from headwise.runtime.hf import HeadwiseCache

_PIECE = 1024
"""Tokens in each call, so that a long window's hidden states are never all in memory."""


@dataclass(frozen=True)
class Speed:
    """One model's cache and decoding time.

    Attributes:
        bytes_per_token: the bytes of the cache over the number of cached tokens.
        decode_ms: the median milliseconds for one more token.
        allocated: the bytes that an engine allocated for its cache; None without an engine.
    """

    bytes_per_token: float
    decode_ms: float
    allocated: int | None = None


@torch.inference_mode()
def allocated_bytes(model: Any, ids: Tensor, quantize: str | None = None) -> float:
    """Bytes a token that a quantised cache allocates for a window of text, scales and recent tokens included.

    For example ``allocated_bytes(load("./model"), torch.arange(2048), "int4")``.

    Args:
        model: a transformers model.
        ids: token ids of the window, ``[S]``; the cache has room for exactly so many.
        quantize: the format of the cache, see `headwise.hf.HeadwiseCache`; None for a converted model's own codes.
    """
    cache = HeadwiseCache(model, max_length=len(ids), quantize=quantize)
    for piece in torch.split(ids.to(model.device)[None], _PIECE, 1):
        model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache.nbytes / len(ids)


def decode_times(
    models: dict[str, Any], prompt: Tensor, *, repeats: int = 12, progress: Progress = silent
) -> dict[str, Speed]:
    """Count the bytes of each model's cache tensors, and time one more token of each model in turn.

    For example ``decode_times({"model": load("./model")}, torch.arange(512)[None])["model"].decode_ms``.

    Args:
        models: transformers models, by name.
        prompt: token ids that fill the cache, ``[1, context]``.
        repeats: the number of tokens to time for each model.
        progress: the callback that reports each round.
    """
    caches = {name: model(prompt, use_cache=True, logits_to_keep=1).past_key_values for name, model in models.items()}
    for cache in caches.values():
        cache.activate_past_recording()  # lets layers with a sliding window undo the cropped token
    nbytes = {name: cache_nbytes(cache) / prompt.shape[1] for name, cache in caches.items()}

    def step(name: str) -> None:
        models[name](prompt[:, -1:], past_key_values=caches[name], use_cache=True)
        caches[name].crop(-1)

    seconds = time_interleaved(
        {name: partial(step, name) for name in models}, repeats=repeats, stage="decoding", progress=progress
    )
    return {name: Speed(nbytes[name], seconds[name] * 1e3) for name in models}
