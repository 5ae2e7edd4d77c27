"""Cache bytes and decoding time of models, measured in turn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from headwise.measurement import cache_nbytes, time_interleaved
from headwise.progress import Progress, silent


@dataclass(frozen=True)
class Speed:
    """One model's cache and decoding time.

    Attributes:
        bytes_per_token: bytes of the cache over the number of cached tokens.
        decode_ms: median milliseconds for one more token.
    """

    bytes_per_token: float
    decode_ms: float


def decode_times(
    models: dict[str, Any], prompt: Tensor, *, repeats: int = 12, progress: Progress = silent
) -> dict[str, Speed]:
    """Count the bytes of each model's cache tensors, and time one more token of each model in turn.

    For example ``decode_times({"model": load("./model")}, torch.arange(512)[None])["model"].decode_ms``.

    Args:
        models: transformers models, by name.
        prompt: ``[1, context]`` token ids that fill the cache.
        repeats: the number of tokens to time for each model.
        progress: told of each round.
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
