"""Plain quantisation: the bytes of a model's cache in one of the field's formats, which needs no conversion.

Caches are compared as a server would store them: quantised values take the bytes of their codes, and all other
numbers are bfloat16, whatever dtype a model is evaluated in.

Shapes: K key–value heads, D width of a key, V width of a value, W tokens of a window.
"""

from __future__ import annotations

import math

import torch

from headwise.costs.formulas.target import plain_formats
from headwise.costs.prediction import cached_heads, engine_caches
from headwise.errors import SpecError
from headwise.measure.evaluation.results import Evaluation
from headwise.models.checkpoints import Checkpoint
from headwise.models.specs import AttentionSpec, ModelSpec
from headwise.runtime.hf import HeadwiseCache, stock_config
from headwise.runtime.quantization.transform_code import FILE as CODES

SAME_BYTES = 1.01
"""A cache that takes at most this many times the bytes of another is no larger: sizes cannot be met exactly."""

SIMILAR_BYTES = 0.01
"""Two caches are said to have the same bytes where they differ by at most this part of the cache in bfloat16."""


@torch.inference_mode()
def bfloat16_bytes(checkpoint: Checkpoint, tokens: int, quantize: str | None = None) -> float:
    """Bytes a token that a model's cache allocates, where numbers that are not in codes are bfloat16.

    The bytes are those of a cache of the model's shapes that is filled with zeros; no weight is read. For example
    ``bfloat16_bytes(open_checkpoint("smollm2-135m"), 2048, "kivi4")`` is 6,480, of 23,040 without a format.

    Args:
        checkpoint: the model; a code that it was converted with is not counted, because an `Evaluation` has its
            bytes.
        tokens: W, tokens in the cache; with few of them, scales of blocks, sliding windows and unquantised recent
            tokens weigh more.
        quantize: the format of the cache, see `headwise.hf.HeadwiseCache`; None for the cache as it is.

    Raises:
        ArgumentError: the format does not suit the model's heads.
        SpecError: a layer is of a kind whose cache is not quantised.
    """
    cache = HeadwiseCache(stock_config(checkpoint.config), max_length=tokens, quantize=quantize)
    sizes: dict[tuple[object, ...], int] = {}  # of layers that are alike, one is filled
    total = 0
    for index, layer in enumerate(checkpoint.spec.layers):
        shapes = _shapes(layer)
        kind = (shapes, layer.sliding_window, type(cache.layers[index]))
        if kind not in sizes:
            before = cache.nbytes
            keys, values = (torch.zeros(1, heads, tokens, width, dtype=torch.bfloat16) for heads, width in shapes)
            cache.update(keys, values, index)
            sizes[kind] = cache.nbytes - before
        total += sizes[kind]
    return total / tokens


def served_bytes(checkpoint: Checkpoint, evaluation: Evaluation) -> float:
    """Bytes a token of an evaluated model's cache as a server would store it.

    Evaluations compute in float32, so only a cache in codes of the model's own has the bytes that they measured.

    Args:
        checkpoint: the model.
        evaluation: an evaluation of the model.
    """
    if (checkpoint.path / CODES).is_file():
        return evaluation.cache_bytes_per_token
    return bfloat16_bytes(checkpoint, evaluation.window, evaluation.cache)


def compared_formats(model: ModelSpec, engine: str | None = None) -> list[str]:
    """The formats that a conversion of a model is compared with: an engine's own, or else those of the field.

    For example ``compared_formats(read_spec("llama-3-8b"), "llama.cpp")`` is
    ``["llama.cpp:q8_0", "llama.cpp:q4_0"]``.

    Args:
        model: the model.
        engine: the engine whose caches are wanted, without those that are known to go wrong; the field's formats are
            taken when None, or where headwise can simulate none of the engine's.
    """
    own = [] if engine is None else engine_caches(model, engine).items()
    return [name for name, cache in own if cache.is_simulated and not cache.limit] or list(plain_formats(model))


def nearest_formats(checkpoint: Checkpoint, tokens: int, size: float, engine: str | None = None) -> dict[str, float]:
    """The formats to compare a cache with, and their bytes a token: one below and one above.

    These are the largest that is no larger, and the smallest that is larger, or one of the two where there is no
    other.
    For example ``nearest_formats(open_checkpoint("smollm2-135m"), 2048, 7_000)`` is
    ``{"kivi4": 6480.0, "int8/int4": 9360.0}``.

    Args:
        checkpoint: the model that would be quantised.
        tokens: W, tokens in the cache, see `bfloat16_bytes`.
        size: bytes a token of the cache to compare with.
        engine: the engine whose caches are wanted, see `compared_formats`.

    Returns:
        At most two formats, the smaller first; an empty dictionary where none suits the model.
    """
    formats = compared_formats(checkpoint.spec, engine)
    sizes = {spelling: bfloat16_bytes(checkpoint, tokens, spelling) for spelling in formats}
    below = {spelling: taken for spelling, taken in sizes.items() if taken <= SAME_BYTES * size}
    above = {spelling: taken for spelling, taken in sizes.items() if spelling not in below}
    nearest = [max(below, key=below.__getitem__)] if below else []
    nearest += [min(above, key=above.__getitem__)] if above else []
    return {spelling: sizes[spelling] for spelling in nearest}


def log_perplexity_margin(kl: float, other_kl: float, tokens: int) -> float:
    """The difference of two models' log-perplexities that chance explains: two standard errors, in nats.

    A token's cost in a model that lies KL from the source differs from its cost in the source by a mean of about KL
    and a variance of about 2 KL (both by the second order of the divergence). The errors of two ways to store a cache
    are taken as independent. For example ``log_perplexity_margin(0.01, 0.02, 12_282)`` is 0.0044.

    Args:
        kl: mean KL(source ‖ model) a token, in nats.
        other_kl: mean KL(source ‖ other model) a token, in nats.
        tokens: the number of predictions that both were scored on.
    """
    return 2 * math.sqrt(2 * (max(kl, 0.0) + max(other_kl, 0.0)) / tokens)


def _shapes(layer: AttentionSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """The heads and widths of a layer's keys and values in a transformers cache: (K, D) and (K, V)."""
    heads, key, value = cached_heads(layer)
    if not heads:
        raise SpecError("attention", layer.label, "has no cache of keys and values that could be measured")
    return (heads, key), (heads, value)
