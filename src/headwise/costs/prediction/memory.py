"""Memory of a model that runs: weights, cache and workspace; and how many sequences, or how long ones, fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from headwise.costs.formulas import dtype_bytes, layer
from headwise.costs.formulas import model as costs
from headwise.costs.formulas.stages import Held
from headwise.costs.prediction.allocation import Engine, allocation, cache_bytes
from headwise.costs.prediction.operators import MOST, Pass, operators
from headwise.costs.prediction.work import known_body
from headwise.errors import ArgumentError
from headwise.models.specs.model import ModelSpec

CHUNK = 2048
"""Tokens of prompts that are read at once: longer prompts are read in parts."""

_STREAMS = 4
"""Copies of the stream that a layer holds at most, as was measured: itself, normed, and what norms make."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device.

    Attributes:
        weights: of its share of the model.
        cache: of all sequences.
        workspace: activations that are held at once, in a decode step or while a prompt is read, of MLA in the
            implementation that needs more for a prompt.
    """

    weights: int
    cache: int
    workspace: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.cache + self.workspace


def peak_memory(model: ModelSpec, forward: Pass, engine: Engine | None = None) -> Memory:
    """The memory of one device while it decodes ``batch`` sequences of ``total`` tokens, after reading their prompts.

    For example ``peak_memory(read_spec("llama-3-8b"), Pass(batch=8, total=8192)).cache``.

    Args:
        model: with its body.
        forward: the decode step; its ``new`` and ``impl`` are not used.
        engine: that allocates the cache; None for the bytes that its tokens take.

    Raises:
        ArgumentError: see `operators`.
        SpecError: the model's body is not known.
    """
    step = replace(forward, new=1)
    prompt = replace(forward, batch=1, new=min(CHUNK, forward.total))
    # A step absorbs, whatever its length. A prompt may do either: which one is faster changes with the context, and
    # memory that shrinks as a text grows would be no bound.
    passes = (replace(step, impl="absorbed"), replace(prompt, impl="absorbed"), replace(prompt, impl="expanded"))
    workspace = max(_workspace(model, each) for each in passes)
    cache = cache_bytes(model, forward) if engine is None else allocation(model, forward, engine).bytes
    return Memory(weights=weight_bytes(model, forward), cache=cache, workspace=workspace)


def weight_bytes(model: ModelSpec, forward: Pass) -> int:
    """Bytes of the weights that one device holds, those of `held_weights`."""
    return int(held_weights(model, forward.ranks).nbytes(dtype_bytes(forward.dtype)))


@lru_cache(maxsize=64)
def held_weights(model: ModelSpec, ranks: int) -> Held:
    """The weights that one device holds: heads, networks and the vocabulary are shared out.

    For example ``held_weights(read_spec("llama-3-8b"), 1).values`` is 8,030,261,248.
    """
    whole = costs.held(model)
    everywhere = sum((whole[part] for part in ("norms", "positions", "streams")), Held())
    names = ("embedding", "feed_forward", "experts", "shared_experts", "router", "head")
    shared = sum((whole[part] for part in names), Held())
    attention = Held()
    for (spec, _, formats), times in costs.distinct_layers(model, [None] * model.num_layers).items():
        vector_bytes = model.stored.vector_bytes if model.stored else None
        attention += layer.held_weights(layer.shard(spec, ranks), formats, vector_bytes) * times
    parts = (-(-getattr(shared, name) // ranks) for name in ("values", "wide", "packed"))
    found = attention + everywhere + Held(*parts)
    return replace(found, packed=math.ceil(found.packed))


def largest_batch(model: ModelSpec, forward: Pass, memory_bytes: int, engine: Engine | None = None) -> int:
    """The most sequences of ``forward.total`` tokens that fit in a memory; 0 where not even one does.

    For example ``largest_batch(read_spec("llama-3-8b"), Pass(total=8192), 80 * 2**30)``.

    Args:
        model: with its body.
        forward: the decode step; its ``batch`` is not used.
        memory_bytes: of one device.
        engine: as for `peak_memory`.

    Raises:
        ArgumentError: see `operators`.
        SpecError: the model's body is not known.
    """
    return _largest(lambda batch: peak_memory(model, replace(forward, batch=batch), engine).total, memory_bytes)


def longest_context(model: ModelSpec, forward: Pass, memory_bytes: int) -> int:
    """The most tokens that ``forward.batch`` sequences can each have in a memory; 0 where not even one token fits.

    For example ``longest_context(read_spec("llama-3-8b"), Pass(batch=16), 80 * 2**30)``. Where windows or states
    bound the cache, any length fits, and the result is 2^30.

    Raises:
        ArgumentError: see `operators`.
        SpecError: the model's body is not known.
    """
    return _largest(lambda tokens: peak_memory(model, replace(forward, total=tokens)).total, memory_bytes)


def _workspace(model: ModelSpec, forward: Pass) -> int:
    """Activations that are held at once: of the operators of one place, and the stream in `_STREAMS` forms."""
    stream = forward.tokens * model.hidden_size * dtype_bytes(forward.dtype)
    moved: dict[str, float] = {}
    for operator in operators(model, forward):
        moved[operator.name] = max(operator.activation_bytes, moved.get(operator.name, 0))
    # Attention of expanded MLA reads keys and values that are copies of what the latent was decoded to.
    held = [*moved.values(), moved.get("attention", 0) + moved.get("kv_b_proj", 0)]
    # A gated network holds the activated gate, the values and their product, all of its inner width.
    for place in ("", "shared "):
        inner = moved.get(f"{place}down_proj", stream) - stream
        held.append((3 if f"{place}gate_proj" in moved else 2) * inner)
    return int(max(held)) + (_STREAMS + known_body(model).streams - 1) * stream


def _largest(size: Callable[[int], int], available: int) -> int:
    """The largest number whose size is available, where no larger number has a smaller size.

    Sizes are nearly proportional, so that a straight line between two of them comes close; every other step is a
    bisection, for those that are not.
    """
    low, high = 1, MOST
    least, most = size(low), size(high)
    if least > available:
        return 0
    if most <= available:
        return MOST
    is_line = True
    while high - low > 1:
        middle = low + (available - least) * (high - low) // (most - least) if is_line else (low + high) // 2
        middle, is_line = min(max(middle, low + 1), high - 1), not is_line
        found = size(middle)
        if found <= available:
            low, least = middle, found
        else:
            high, most = middle, found
    return low


def check_usable(usable: float) -> float:
    """A share of a memory, above 0 and at most 1.

    Raises:
        ArgumentError: it is not.
    """
    if not 0 < usable <= 1:
        raise ArgumentError("usable", usable, "must be above 0 and at most 1")
    return usable
