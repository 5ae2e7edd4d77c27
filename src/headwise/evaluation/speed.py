"""Bytes of cache and milliseconds a token, of several models in turn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from headwise.measurement import cache_nbytes, time_interleaved
from headwise.progress import Progress, silent


@dataclass(frozen=True)
class Speed:
    """One model's cache and time a token."""

    bytes_per_token: float
    decode_ms: float


def decode_times(
    models: dict[str, Any], prompt: Tensor, *, repeats: int = 12, progress: Progress = silent
) -> dict[str, Speed]:
    """Bytes of cache a token, read off the tensors, and the median time of one more token, the models in turn.

    Args:
        models: transformers models.
        prompt: ``[1, context]`` token ids that fill the cache.
        repeats: timed tokens of each.
        progress: told of each round.
    """
    caches = {name: m(prompt, use_cache=True, logits_to_keep=1).past_key_values for name, m in models.items()}
    for cache in caches.values():
        cache.activate_past_recording()  # a layer with a sliding window has to be told that tokens will be taken back
    nbytes = {name: cache_nbytes(cache) / prompt.shape[1] for name, cache in caches.items()}

    def step(name: str) -> None:
        models[name](prompt[:, -1:], past_key_values=caches[name], use_cache=True)
        caches[name].crop(-1)

    seconds = time_interleaved(
        {name: partial(step, name) for name in models}, repeats=repeats, stage="decoding", progress=progress
    )
    return {name: Speed(nbytes[name], seconds[name] * 1e3) for name in models}
