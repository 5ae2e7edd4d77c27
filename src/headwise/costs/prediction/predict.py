"""`predict`: time, memory and capacity of a model on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headwise.base.documents import as_document
from headwise.base.type_checks import checked_types
from headwise.costs.formulas import dtype_bytes
from headwise.costs.prediction.engines import caches_of_bits, engine_caches
from headwise.costs.prediction.hardware import Device, device
from headwise.costs.prediction.memory import (
    ALLOCATING_ENGINES,
    CHUNK,
    Allocation,
    Memory,
    allocation,
    check_usable,
    largest_batch,
    longest_context,
    peak_memory,
)
from headwise.costs.prediction.operators import MOST, USUAL_DTYPE, Efficiency, Pass, Timed, merged, operators, seconds
from headwise.costs.prediction.work import known_body
from headwise.errors import ArgumentError, SpecError
from headwise.models.specs import ModelSpec, read_spec

MOST_PARTS = 512
"""Parts of a prompt that are added up one by one."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What is predicted of a model on a device.

    Attributes:
        source: the model, as the user named it.
        label: the name of the model's attention.
        device: the hardware.
        step: the decode step that is predicted.
        efficiency: the shares of the device's peaks.
        prefill: the operators of reading one prompt, with their times.
        decode: the operators of one decode step of the batch.
        memory: the memory of one device at that step.
        usable_bytes: the bytes of the device's memory that may be used.
        largest_batch: sequences of this context that fit.
        longest_context: tokens of each sequence of this batch that fit.
        engines: what engines allocate for the cache, and how many sequences of this context fit then; without those
            of which it is not known, and those that have no cache of so many bits.
        trained_context: tokens that the model was made for, where its config says so.
        weights: the formats in which weights are counted, in words.
        is_bound: whether times and memory are upper bounds, because some weights take fewer bits than are known.
        notes: what is not known of the weights, and what they are stored in where a dtype was asked for instead.
    """

    source: str
    label: str
    device: Device
    step: Pass
    efficiency: Efficiency
    prefill: tuple[Timed, ...]
    decode: tuple[Timed, ...]
    memory: Memory
    usable_bytes: int
    largest_batch: int
    longest_context: int
    engines: tuple[tuple[Allocation, int], ...]
    trained_context: int | None
    weights: str
    is_bound: bool = False
    notes: tuple[str, ...] = ()

    @property
    def prefill_seconds(self) -> float:
        """The seconds that reading one prompt takes."""
        return sum(timed.seconds for timed in self.prefill)

    @property
    def decode_seconds(self) -> float:
        """The seconds of a decode step, which gives every sequence one token."""
        return sum(timed.seconds for timed in self.decode)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all sequences together in a second; 0 where they do not fit."""
        return self.step.batch / self.decode_seconds if self.fits or self.is_bound else 0.0

    @property
    def fits(self) -> bool:
        """Whether the batch fits."""
        return self.memory.total <= self.usable_bytes

    def to_dict(self) -> dict[str, Any]:
        """The prediction as JSON-able values."""
        document: dict[str, Any] = as_document(self)
        names = ("prefill_seconds", "decode_seconds", "tokens_per_second", "fits")
        return document | {name: getattr(self, name) for name in names}


@checked_types
def predict(
    source: str | Path,
    *,
    hardware: str | Device,
    context: int = 4096,
    batch: int = 1,
    dtype: str | None = None,
    cache_bits: float | None = None,
    ranks: int = 1,
    usable: float = 0.9,
) -> Prediction:
    """Predict the time, the memory and the capacity of a model on a device. Reads only the config.

    For example ``predict("llama-3-8b", hardware="h100", context=8192, batch=16).tokens_per_second``.

    Times are a roofline: each operator takes the longer of its FLOPs at a share of the dense peak and its bytes at a
    share of the bandwidth. These shares are assumed.

    Args:
        source: a model folder, a ``.gguf``, a catalog name or ``hf://owner/name``.
        hardware: the name of a device of the catalog, or one of one's own (`device`).
        context: tokens of each sequence.
        batch: sequences that are decoded together.
        dtype: the dtype of all weights and activations. When None, weights count in the formats that they are stored
            in (``quantization_config``, the types of a GGUF's tensors), and all else in bfloat16.
        cache_bits: the bits of one cached value; those of ``dtype`` when None.
        ranks: tensor-parallel devices.
        usable: the share of the device's memory that may be used.

    Raises:
        HeadwiseError: the model cannot be read, or a number is impossible.
    """
    model, dtype, notes = counted_in(read_spec(source), dtype)
    positions = check_context(model, context)
    hosted = hardware if isinstance(hardware, Device) else device(hardware)
    step = Pass(batch=batch, new=1, total=context, dtype=dtype, cache_bits=cache_bits, ranks=ranks)
    usable_bytes = int(hosted.memory_bytes * check_usable(usable))
    efficiency = Efficiency(is_measured=dtype.removeprefix("torch.") in hosted.curves)
    return Prediction(
        source=str(source),
        label=model.label,
        device=hosted,
        step=step,
        efficiency=efficiency,
        prefill=tuple(prefill(model, step, hosted, efficiency)),
        decode=tuple(seconds(operators(model, step), hosted, step, efficiency)),
        memory=peak_memory(model, step),
        usable_bytes=usable_bytes,
        largest_batch=largest_batch(model, step, usable_bytes),
        longest_context=min(longest_context(model, step, usable_bytes), positions or MOST),
        engines=tuple(_engines(model, step, usable_bytes)),
        trained_context=model.max_position_embeddings,
        weights=counted_weights(model, dtype),
        is_bound=model.stored is not None and model.stored.is_bound,
        notes=(*notes, *_bits_notes(model, step), *timed_note(model, hosted, dtype)),
    )


def prefill(model: ModelSpec, step: Pass, hardware: Device, efficiency: Efficiency | None = None) -> list[Timed]:
    """The operators of reading one prompt, part by part, with their times.

    For example ``sum(timed.seconds for timed in prefill(model, Pass(total=4096), device("h100")))``.

    Args:
        model: the model's spec, with its body.
        step: the pass of the decoding that follows; the prompt is one sequence of its ``total`` tokens.
        hardware: the device that the prompt is read on.
        efficiency: the efficiency of the device, as for `seconds`.
    """
    chunks = [replace(step, batch=1, new=end - begin, total=end) for begin, end in _chunks(step.total)]
    timed = (seconds(operators(model, chunk), hardware, chunk, efficiency) for chunk in chunks)
    return merged(one for chunk in timed for one in chunk)


def counted_weights(model: ModelSpec, dtype: str) -> str:
    """The formats in which a model's weights are counted, in words.

    For example ``counted_weights(read_spec("gpt-oss-20b"), "bfloat16")`` is ``"mxfp4, the rest bfloat16"``.
    """
    return dtype.removeprefix("torch.") if model.stored is None else model.stored.counted(dtype)


def counted_in(model: ModelSpec, dtype: str | None) -> tuple[ModelSpec, str, tuple[str, ...]]:
    """A model whose weights count in a dtype that was asked for; or where none was, as they are stored.

    For example ``counted_in(read_spec("gpt-oss-20b"), "bfloat16")[0].stored`` is None.

    Args:
        model: the model's spec, as it is stored.
        dtype: the dtype that was asked for, or None.

    Returns:
        The model, the dtype of what has no format of its own, and what is to be said of both.
    """
    if model.stored is None or dtype is None:
        return model, dtype or USUAL_DTYPE, () if model.stored is None else model.stored.warnings()
    note = f"weights count in {dtype.removeprefix('torch.')}, as asked; they are stored as {model.stored.scheme}"
    return replace(model, stored=None), dtype, (note,)


def timed_note(model: ModelSpec, device: Device, dtype: str) -> tuple[str, ...]:
    """What is to be said where times of weights in a dtype were measured, and those of a model are quantised.

    For example ``timed_note(read_spec("llama-3-8b"), device("h100"), "bfloat16")`` is empty.
    """
    dtype = dtype.removeprefix("torch.")
    if model.stored is None or dtype not in device.curves:
        return ()
    rule = "a byte of quantised weights counts as read as fast as one of others; headwise itself computes with"
    return (f"{rule} {dtype}: ask for --dtype {dtype}",)


def _engines(model: ModelSpec, step: Pass, usable: int) -> Iterator[tuple[Allocation, int]]:
    for engine in ALLOCATING_ENGINES:
        caches = [] if _is_whole(step) else caches_of_bits(engine, model, 8 * step.value_bytes)
        with suppress(SpecError):
            if caches or _is_whole(step):
                found = allocation(model, step, engine)
                options = caches[0].words if caches else ""
                yield replace(found, options=options), largest_batch(model, step, usable, engine)


def _bits_notes(model: ModelSpec, step: Pass) -> list[str]:
    """The notes that say which caches engines have where none has the bits that were asked for."""
    notes = []
    for engine in ALLOCATING_ENGINES:
        if not _is_whole(step) and not caches_of_bits(engine, model, 8 * step.value_bytes):
            own = [f"{cache.bits(model):.3g} ({cache.name})" for cache in engine_caches(model, engine).values()]
            rule = f"with scales, its caches have {', '.join(own)}" if own else "it has none for such layers"
            notes.append(f"{engine} has no cache of {8 * step.value_bytes:g} bits a value: {rule}")
    return notes


def _is_whole(step: Pass) -> bool:
    """Whether the cache is in the dtype, with no fewer bits."""
    return step.cache_bits is None or step.value_bytes >= dtype_bytes(step.dtype)


def check_context(model: ModelSpec, context: int) -> int:
    """Refuse a context that is impossible, or longer than a learned position embedding; the rows of such a one, or 0.

    For example ``check_context(read_spec("gpt2"), 1024)`` is 1,024.

    Args:
        model: the model's spec, with its body.
        context: tokens of a sequence.

    Raises:
        ArgumentError: the context is impossible or too long.
        SpecError: the model's body is not known.
    """
    if not 1 <= context <= MOST:
        raise ArgumentError("context", context, f"must be from 1 to {MOST}")
    positions = known_body(model).positions
    if 0 < positions < context:
        raise ArgumentError("context", context, f"must be at most {positions}, the model's positions")
    return positions


def _chunks(tokens: int) -> Iterator[tuple[int, int]]:
    """The parts in which a prompt is read; beyond `MOST_PARTS` larger ones, so that weights are read less often."""
    size = max(CHUNK, -(-tokens // MOST_PARTS))
    for begin in range(0, tokens, size):
        yield begin, min(begin + size, tokens)
