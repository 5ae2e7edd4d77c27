"""Memory of a model that runs: weights, workspace, and the cache as engines allocate it; and what fits.

How many sequences fit, or how long ones, is the largest number for which that same memory fits. It is searched for,
so that capacity has no formula of its own that could differ.

Serving engines allocate a cache in whole blocks of tokens, windows with room for a batch, and states in float32. This
was read in llama.cpp (``src/llama-kv-cache.cpp``, ``llama-kv-cache-iswa.cpp``, ``llama-memory-recurrent.cpp``,
``llama-context.cpp``; the copy in llama-cpp-python 0.3.36) and in vLLM 0.32 (``v1/kv_cache_interface.py``,
``v1/core/kv_cache_utils.py``). `benchmarks.allocations` compares this file with what they say.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

from headwise.costs.formulas import dtype_bytes, layer
from headwise.costs.formulas import model as costs
from headwise.costs.formulas.recurrent import convolved_channels
from headwise.costs.formulas.stages import WeightsInMemory
from headwise.costs.prediction.operators import MOST, Pass, operators
from headwise.costs.prediction.work import known_body
from headwise.errors import ArgumentError, SpecError
from headwise.models.specs import AttentionSpec, GroupedSpec, LatentSpec, ModelSpec, RecurrentSpec
from headwise.models.specs.huggingface import HOSTED_PREFIX

Engine = Literal["llama.cpp", "vllm"]
ALLOCATING_ENGINES: tuple[Engine, ...] = get_args(Engine)

CELLS = 256
"""llama.cpp: contexts, and the cells of windowed layers, are multiples of this."""

MICRO_BATCH = 512
"""llama.cpp: tokens that are computed at once, for which windowed layers have memory (``--ubatch-size``)."""

BLOCK = 16
"""vLLM: tokens of a block (``--block-size``)."""

_WINDOWED = ("gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gpt_oss", "cohere2", "olmo3", "exaone4")
"""Model types whose windows llama.cpp keeps; it gives all layers of others the whole context. Of exaone4 it knows the
windows of models of 64 layers."""

IN_FLIGHT = 8192
"""vLLM: tokens that are scheduled at once, for which windowed layers have memory (``--max-num-batched-tokens``)."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What an engine allocates for a cache.

    Attributes:
        engine: the name of the engine.
        bytes: the bytes that it allocates for all sequences.
        more: the bytes beyond those that the tokens take, as a fraction of these; negative where it stores less.
        reasons: the reasons for ``more``, in words.
        options: the engine's options for a cache of so many bits; empty where the cache is in the dtype.
    """

    engine: Engine
    bytes: int
    more: float
    reasons: tuple[str, ...]
    options: str = ""


def cache_bytes(model: ModelSpec, forward: Pass) -> int:
    """Bytes of the cache on one device, rounded up for each layer."""
    held = 0
    for spec, times in Counter(model.layers).items():
        shard = layer.shard(spec, forward.ranks)
        tokens = layer.held_tokens(shard, forward.total)
        values = layer.cache_values(shard) if shard.is_causal else 0
        state = layer.state_bytes(shard, batch=forward.batch, dtype=forward.dtype)
        held += times * (-int(-forward.batch * tokens * values * forward.value_bytes // 1) + state)
    return held


def allocation(model: ModelSpec, forward: Pass, engine: Engine) -> Allocation:
    """What an engine allocates for the cache of a batch of sequences.

    For example ``allocation(read_spec("gemma-3-4b"), Pass(batch=4, total=9000), "llama.cpp").more``.

    Args:
        model: the model, on one of the ranks.
        forward: ``batch`` sequences of ``total`` tokens.
        engine: llama.cpp with a context of ``batch × total`` and as many sequences, each with cells of its own; or
            vLLM with requests of ``total`` tokens.

    Raises:
        ArgumentError: the engine is not known.
        SpecError: the engine has no such layers, or how it allocates them is not known here.
    """
    if engine not in ALLOCATING_ENGINES:
        raise ArgumentError("engine", engine, f"must be one of {', '.join(ALLOCATING_ENGINES)}")
    shards = [layer.shard(spec, forward.ranks) for spec in model.layers]
    if engine == "llama.cpp":
        family = model.model_type.removeprefix(HOSTED_PREFIX)
        has_windows = family in _WINDOWED and (family != "exaone4" or model.num_layers == 64)
        found, reasons = _llama_cpp(shards, forward, has_windows=has_windows)
    else:
        found, reasons = _vllm(shards, forward)
    needed = cache_bytes(model, forward)
    return Allocation(
        engine=engine, bytes=found, more=found / needed - 1 if needed else 0.0, reasons=tuple(dict.fromkeys(reasons))
    )


def _padded(number: int, to: int) -> int:
    return -(-number // to) * to


def _is_plain(spec: AttentionSpec) -> bool:
    """Whether a layer caches the same values of every token, as engines allocate heads and latents."""
    return type(spec) in (GroupedSpec, LatentSpec) and not spec.chunked


def _llama_cpp(shards: Sequence[AttentionSpec], forward: Pass, *, has_windows: bool) -> tuple[int, list[str]]:
    """Cells of all sequences, in float16 unless bits are named; states in float32."""
    batch = min(forward.batch * forward.total, MICRO_BATCH)
    cells = _padded(forward.total, CELLS)
    bytes_of_value = 2 if forward.cache_bits is None else forward.cache_bits / 8
    found, reasons = 0, []
    for spec in shards:
        if isinstance(spec, RecurrentSpec):
            # One past input of the convolution fewer than transformers keeps.
            values = layer.state_bytes(spec, dtype="int8") - convolved_channels(spec)
            found += 4 * forward.batch * values
            reasons += ["states in float32"] if values else []
            continue
        held, values = cells, layer.cache_values(spec)
        if not values:
            continue
        if not _is_plain(spec):
            raise SpecError("attention", spec.label, "is allocated by llama.cpp in a way that is not known here")
        if spec.sliding_window is not None and not has_windows:
            reasons.append("the whole context for windowed layers")
        elif spec.sliding_window is not None:
            held = _padded(min(cells, spec.sliding_window + batch), CELLS)
            reasons.append(f"windows in cells of {CELLS}, with {batch} more")
        elif cells != forward.total:
            reasons.append(f"contexts in steps of {CELLS}")
        found += int(forward.batch * held * values * bytes_of_value)
    return found, reasons


def _vllm(shards: Sequence[AttentionSpec], forward: Pass) -> tuple[int, list[str]]:
    """Blocks of all layers that a request draws, from one pool of blocks of one size."""
    caching = [spec for spec in shards if layer.cache_values(spec)]
    for spec in shards:
        if not _is_plain(spec) and not (isinstance(spec, RecurrentSpec) and spec.form == "none"):
            raise SpecError("attention", spec.label, "is allocated by vLLM in a way that is not known here")
    width = forward.value_bytes
    kinds = Counter((spec.sliding_window, layer.cache_values(spec)) for spec in caching)
    windows = {window for window, _ in kinds}
    reasons = []
    if None in windows and forward.total % BLOCK:
        reasons.append(f"blocks of {BLOCK} tokens")
    if windows - {None}:
        reasons.append(f"windows with {IN_FLIGHT:,} tokens more, and a block")
    if len(windows) < 2:  # one kind of block table for all layers, of whatever width
        blocks = sum(_blocks(window, forward.total) for window in windows)
        page = sum(times * values * BLOCK * width for (_, values), times in kinds.items())
        return int(forward.batch * page * blocks), reasons
    if len({values for _, values in kinds}) > 1:
        raise SpecError("layers", "windows", "of several widths: how vLLM allocates them is not known here")
    (values,) = {values for _, values in kinds}
    most, least = max(kinds.values()), min(kinds.values())
    # Groups of as many layers share a block; groups that are not full are padded.
    group = most if most < 1.5 * least else least
    groups = {window: -(-times // group) for (window, _), times in kinds.items()}
    padding = sum(groups[window] * group - times for (window, _), times in kinds.items())
    if padding:
        reasons.append(f"{padding} layers of padding, so that groups of layers are as large")
    blocks_of_all = sum(groups[window] * _blocks(window, forward.total) for window in windows)
    return int(forward.batch * blocks_of_all * group * values * BLOCK * width), reasons


def _blocks(window: int | None, total: int) -> int:
    """Blocks of one request in a layer."""
    if window is None:
        return -(-total // BLOCK)
    return -(-min(window - 1 + IN_FLIGHT, total) // BLOCK) + 1


CHUNK = 2048
"""Tokens of prompts that are read at once: longer prompts are read in parts."""

_STREAMS = 4
"""Copies of the stream that a layer holds at most, as was measured: itself, normed, and what norms make."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device.

    Attributes:
        weights: the bytes of the device's share of the weights.
        cache: the bytes of the cache of all sequences.
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
        model: the model's spec, with its body.
        forward: the decode step; its ``new`` and ``impl`` are not used.
        engine: the engine that allocates the cache; None for the bytes that its tokens take.

    Raises:
        ArgumentError: see `operators`.
        SpecError: the model's body is not known.
    """
    step = replace(forward, new=1, impl="absorbed")  # a step absorbs, whatever its length
    prompt = Pass(new=min(CHUNK, forward.total), total=forward.total, dtype=forward.dtype, ranks=forward.ranks)
    workspace = max(_workspace(model, step), _prompt_workspace(model, prompt))
    cache = cache_bytes(model, forward) if engine is None else allocation(model, forward, engine).bytes
    return Memory(weights=weight_bytes(model, forward), cache=cache, workspace=workspace)


def weight_bytes(model: ModelSpec, forward: Pass) -> int:
    """Bytes of the weights that one device holds, those of `held_weights`."""
    return int(held_weights(model, forward.ranks).nbytes(dtype_bytes(forward.dtype)))


@lru_cache(maxsize=64)
def held_weights(model: ModelSpec, ranks: int) -> WeightsInMemory:
    """The weights that one device holds: heads, networks and the vocabulary are shared out.

    For example ``held_weights(read_spec("llama-3-8b"), 1).values`` is 8,030,261,248.
    """
    whole = costs.weights_in_memory(model)
    everywhere = sum((whole[part] for part in ("norms", "positions", "streams")), WeightsInMemory())
    names = ("embedding", "feed_forward", "experts", "shared_experts", "router", "head")
    shared = sum((whole[part] for part in names), WeightsInMemory())
    attention = WeightsInMemory()
    for (spec, _, formats), times in costs.distinct_layers(model, [None] * model.num_layers).items():
        vector_bytes = model.stored.vector_bytes if model.stored else None
        attention += layer.held_weights(layer.shard(spec, ranks), formats, vector_bytes) * times
    parts = (-(-getattr(shared, name) // ranks) for name in ("values", "unquantised", "packed"))
    found = attention + everywhere + WeightsInMemory(*parts)
    return replace(found, packed=math.ceil(found.packed))


def largest_batch(model: ModelSpec, forward: Pass, memory_bytes: int, engine: Engine | None = None) -> int:
    """The most sequences of ``forward.total`` tokens that fit in a memory; 0 where not even one does.

    For example ``largest_batch(read_spec("llama-3-8b"), Pass(total=8192), 80 * 2**30)``.

    Args:
        model: the model's spec, with its body.
        forward: the decode step; its ``batch`` is not used.
        memory_bytes: the bytes of one device's memory.
        engine: the engine that allocates the cache; None for the bytes that its tokens take.

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


@lru_cache(maxsize=256)
def _prompt_workspace(model: ModelSpec, prompt: Pass) -> int:
    """The workspace of reading a prompt, which may be absorbed or expanded.

    Which one is faster changes with the context, and memory that shrinks as a text grows would be no bound. Batches
    and bits do not change it, so that it is computed once for all of them.
    """
    return max(_workspace(model, replace(prompt, impl=impl)) for impl in ("absorbed", "expanded"))


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
        ArgumentError: the share is not in that range.
    """
    if not 0 < usable <= 1:
        raise ArgumentError("usable", usable, "must be above 0 and at most 1")
    return usable
