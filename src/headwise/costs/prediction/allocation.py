"""The cache as serving engines allocate it: whole blocks of tokens, windows with room for a batch, states in float32.

Read in llama.cpp (``src/llama-kv-cache.cpp``, ``llama-kv-cache-iswa.cpp``, ``llama-memory-recurrent.cpp``,
``llama-context.cpp``; the copy in llama-cpp-python 0.3.36) and in vLLM 0.32 (``v1/kv_cache_interface.py``,
``v1/core/kv_cache_utils.py``). `benchmarks.allocations` compares this file with what they say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from headwise.costs.formulas import layer
from headwise.costs.formulas.recurrent import convolved_channels
from headwise.costs.prediction.operators import Pass
from headwise.errors import ArgumentError, SpecError
from headwise.models.specs.base import AttentionSpec
from headwise.models.specs.compressed import CompressedSpec
from headwise.models.specs.indexed_latent import IndexedLatentSpec
from headwise.models.specs.model import ModelSpec
from headwise.models.specs.recurrent import RecurrentSpec

Engine = Literal["llama.cpp", "vllm"]
ENGINES: tuple[Engine, ...] = get_args(Engine)

CELLS = 256
"""llama.cpp: contexts, and the cells of windowed layers, are multiples of this."""

MICRO_BATCH = 512
"""llama.cpp: tokens that are computed at once, for which windowed layers have room (``--ubatch-size``)."""

BLOCK = 16
"""vLLM: tokens of a block (``--block-size``)."""

_WINDOWED = ("gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gpt_oss", "cohere2", "olmo3", "exaone4")
"""Model types whose windows llama.cpp keeps; it gives all layers of others the whole context. Of exaone4 it knows the
windows of models of 64 layers."""

IN_FLIGHT = 8192
"""vLLM: tokens that are scheduled at once, for which windowed layers have room (``--max-num-batched-tokens``)."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What an engine allocates for a cache.

    Attributes:
        engine: its name.
        bytes: of all sequences.
        more: over the bytes that the tokens take, as a fraction; negative where it stores less.
        reasons: why, in words.
        options: the engine's own, of a cache of so many bits; empty where it is as wide as the dtype.
    """

    engine: Engine
    bytes: int
    more: float
    reasons: tuple[str, ...]
    options: str = ""


def cache_bytes(model: ModelSpec, forward: Pass) -> int:
    """Bytes of the cache on one device, rounded up for each layer."""
    held = 0
    for spec in model.layers:
        shard = layer.shard(spec, forward.ranks)
        tokens = layer.held_tokens(shard, forward.total)
        values = layer.cache_values(shard) if shard.is_causal else 0
        state = layer.state_bytes(shard, batch=forward.batch, dtype=forward.dtype)
        held += -int(-forward.batch * tokens * values * forward.value_bytes // 1) + state
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
        SpecError: it has no such layers, or how it allocates them is not known here.
    """
    if engine not in ENGINES:
        raise ArgumentError("engine", engine, f"must be one of {', '.join(ENGINES)}")
    shards = [layer.shard(spec, forward.ranks) for spec in model.layers]
    if engine == "llama.cpp":
        family = model.model_type.removeprefix("headwise_")
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
        if isinstance(spec, IndexedLatentSpec | CompressedSpec) or spec.chunked:
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
        if (
            isinstance(spec, IndexedLatentSpec | CompressedSpec)
            or spec.chunked
            or (isinstance(spec, RecurrentSpec) and spec.form != "none")
        ):
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
