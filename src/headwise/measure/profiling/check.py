"""Check predictions of time and memory on decoders that no curve was measured on.

Measured memory is every tensor that a decoder holds while it reads a prompt and decodes.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from headwise.base.progress import Progress, silent
from headwise.costs.prediction import Device, Pass, operators, peak_memory, seconds
from headwise.costs.prediction.memory import CHUNK
from headwise.measure.profiling.decoder import (
    BITS,
    CPU,
    Decoder,
    Grids,
    Places,
    decode_step,
    filled_cache,
    prompt_call,
)
from headwise.measure.profiling.pace import HERE, Pace
from headwise.measure.timing.timing import Timeable
from headwise.models.checkpoints import dtype_name
from headwise.models.specs import ModelSpec

BATCH, CONTEXT = 4, 2048
"""The number of sequences whose memory is measured, and the number of tokens in each."""


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """The memory of one decoder at most, with the caches of all sequences, while one prompt is read or all decode.

    Attributes:
        mechanism: the mechanism of the decoder's attention.
        dtype: the dtype of weights, activations and cache.
        measured: the bytes of the decoder's tensors, without other memory of the process.
        predicted: the bytes by `headwise.costs.prediction.peak_memory`.
    """

    mechanism: str
    dtype: str
    measured: int
    predicted: int

    @property
    def error(self) -> float:
        """The prediction's relative error."""
        return self.predicted / self.measured - 1


def memory_point(mechanism: str, decoder: Decoder, dtype: str, device: torch.device = HERE) -> MemoryPoint:
    """Measure the tensors of a decoder on a device, and predict them.

    For example ``memory_point("MQA", Decoder(num_kv_heads=1), "float32").error``.
    """
    model = decoder.build(getattr(torch, dtype), device)
    weights = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    cache = filled_cache(model, decoder.spec(), batch=BATCH, tokens=CONTEXT)
    held = cache.nbytes
    tokens = min(CHUNK, CONTEXT)
    # A prompt is read into a cache of its own, which is one of those that are counted already.
    prompt, step = prompt_call(model, tokens), decode_step(model, cache, BATCH)
    for call in (prompt, step):
        call()  # tensors that only the first call makes do not count
    most = max(peak_bytes(step, device), peak_bytes(prompt, device) - held * tokens // (BATCH * CONTEXT))
    predicted = peak_memory(decoder.spec(), Pass(batch=BATCH, total=CONTEXT, dtype=dtype)).total
    return MemoryPoint(
        mechanism=mechanism, dtype=dtype, measured=sum(weights.values()) + held + most, predicted=predicted
    )


def peak_bytes(call: Timeable, device: torch.device = HERE) -> int:
    """The most bytes of tensors that a call makes and holds at once, torch's workspace for LAPACK included.

    For example ``peak_bytes(lambda: a @ b)``.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with _quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    found = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(found, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Keep what torch's profiler writes to stderr from the user."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


_PATIENCE = 0.24
"""Seconds for which each pass of one place is measured, in turns with the others."""

KV_HEADS = {"MHA": None, "GQA": 4, "MQA": 1}
"""The number of key–value heads of mechanisms that cache heads; None for as many as query heads."""


def attention_kinds(places: Places) -> dict[str, dict[str, Any]]:
    """The arguments of `Decoder` for each mechanism."""
    return {**{name: {"num_kv_heads": heads} for name, heads in KV_HEADS.items()}, "MLA": {"latent": places.latent}}


@dataclass(frozen=True, kw_only=True)
class TimePoint:
    """The time of one pass of a decoder, measured and predicted.

    Attributes:
        mechanism: the mechanism of the decoder's attention.
        sizes: the sizes of the model, for reports.
        dtype: the dtype of weights and activations.
        cache: the format of the cache, such as ``int8``, or headwise's code and its bits, such as ``codes:3``; None
            for the dtype.
        batch: the number of sequences of a decode step.
        context: the number of tokens of each sequence, or of the prompt where ``is_prompt``.
        is_prompt: whether a prompt was read; else one token was decoded.
        measured: the measured seconds.
        predicted: the predicted seconds, at the pace that the machine was profiled at.
        pace: the time of the yardsticks beside the measurement over their time in the profile, see `Pace`.
    """

    mechanism: str
    sizes: str
    dtype: str
    cache: str | None
    batch: int
    context: int
    is_prompt: bool
    measured: float
    predicted: float
    pace: float = 1.0

    @property
    def error(self) -> float:
        """The prediction's relative error, at the pace of the measurement."""
        return self.predicted * self.pace / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class Check:
    """All points of a check, and the errors of their predictions.

    Attributes:
        points: the measured and predicted times.
        memory: the measured and predicted memory of decoders, for each mechanism and dtype.
    """

    points: tuple[TimePoint, ...]
    memory: tuple[MemoryPoint, ...] = ()

    @property
    def memory_error(self) -> float:
        """The largest relative error of memory, without its sign."""
        return max((abs(point.error) for point in self.memory), default=0.0)

    @property
    def median_error(self) -> float:
        """The median relative error of times, without signs."""
        return statistics.median(abs(point.error) for point in self.points)

    @property
    def median_error_unpaced(self) -> float:
        """The median relative error of times, without signs, as if the machine were as fast as when it was
        profiled."""
        return statistics.median(abs(point.predicted / point.measured - 1) for point in self.points)

    @property
    def high_error(self) -> float:
        """The 90th percentile of the relative errors of times, without signs."""
        return statistics.quantiles([abs(point.error) for point in self.points], n=10)[-1]

    @property
    def ranked(self) -> tuple[int, int]:
        """The number of pairs in one place whose order is predicted, and that of all pairs that differ by 10 % or
        more."""
        right = count = 0
        for one, other in combinations(self.points, 2):
            if _place_of(one) != _place_of(other):
                continue
            times = [point.measured / point.pace for point in (one, other)]
            if max(times) < 1.1 * min(times):
                continue
            count += 1
            right += (times[0] < times[1]) == (one.predicted < other.predicted)
        return right, count

    def to_dict(self) -> dict[str, Any]:
        """The check as JSON-able values."""
        right, count = self.ranked
        points = [{**asdict(point), "error": point.error} for point in self.points]
        return {
            "median_error": self.median_error,
            "high_error": self.high_error,
            "median_error_unpaced": self.median_error_unpaced,
            "pairs": count,
            "pairs_in_order": right,
            "points": points,
            "memory_error": self.memory_error,
            "memory": [{**asdict(point), "error": point.error} for point in self.memory],
        }


def _place_of(point: TimePoint) -> TimePoint:
    """A point without the fields that differ between mechanisms."""
    return replace(point, mechanism="", measured=0, predicted=0, pace=1)


def check(
    device: Device,
    *,
    places: int = 12,
    seed: int = 0,
    grids: Grids = CPU,
    place: torch.device = HERE,
    progress: Progress = silent,
) -> Check:
    """Measure decoders of random sizes, and predict them with a device's curves.

    For example ``check(device("this-machine", Path("profile.toml"))).median_error``.

    Args:
        device: a profiled device, which has curves.
        places: the number of places, which are sizes, a context and a batch; each is tried with every mechanism,
            decoding and reading a prompt.
        seed: the seed that places are chosen with.
        grids: the grids of the kind of device.
        place: the torch device that decoders run on.
        progress: the callback that reports each model.
    """
    chosen = random.Random(seed)
    names = [dtype_name(dtype) for dtype in grids.dtypes]
    known = {name: device.curves[name].pace for name in names if name in device.curves}
    paces = {name: Pace(getattr(torch, name), reference, place) for name, reference in known.items()}
    points: list[TimePoint] = []
    for index in range(places):
        progress("checking", index, places + 1)
        points += _measure_place(chosen, device, paces, grids)
    progress("checking", places, places + 1)
    memory = []
    for name, kind in attention_kinds(grids.places).items():
        heads = chosen.choice(grids.places.heads)
        sizes = _draw_sizes(grids, heads) | {"vocab_size": chosen.choice(grids.places.vocabularies)}
        inner = chosen.choice([2, 3, 4]) * grids.head_dim * heads
        decoder = Decoder(**sizes, intermediate_size=inner, **kind)
        memory += [memory_point(name, decoder, dtype, place) for dtype in paces]
    progress("checking", places + 1, places + 1)
    return Check(points=tuple(points), memory=tuple(memory))


def _draw_sizes(grids: Grids, heads: int) -> dict[str, Any]:
    """The sizes of a decoder with ``heads`` query heads."""
    return {"hidden_size": grids.head_dim * heads, "num_heads": heads, "head_dim": grids.head_dim}


def _measure_place(chosen: random.Random, device: Device, paces: Mapping[str, Pace], grids: Grids) -> list[TimePoint]:
    """Measure and predict all mechanisms at one place."""
    choices = grids.places
    heads = chosen.choice(choices.heads)
    layers, hidden = chosen.choice(choices.layers), grids.head_dim * heads
    sizes = _draw_sizes(grids, heads) | {"num_layers": layers}
    sizes |= {
        "intermediate_size": chosen.choice([2, 3, 4]) * hidden,
        "vocab_size": chosen.choice(choices.vocabularies),
    }
    dtype = chosen.choice(list(paces))
    pace = paces[dtype]
    batch, context, prompt = map(chosen.choice, (choices.batches, choices.contexts, choices.prompts))
    formats = (None, chosen.choice([each for each in BITS.values() if each is not None]))
    code_bits = (None, chosen.choice(choices.code_bits)) if choices.code_bits else (None,)
    stored = {cache: bits for bits, cache in BITS.items()}
    decoders = [
        (name, Decoder(**sizes, **kind, code_bits=bits))
        for name, kind in attention_kinds(choices).items()
        for bits in (code_bits if "latent" in kind else (None,))
    ]
    caches = [
        (name, decoder, cache, decoder.code_bits or stored[cache])
        for name, decoder in decoders
        for cache in (formats if decoder.latent is None else (None,))
    ]

    def step(bits: float) -> Pass:
        return Pass(batch=batch, total=context + 1, dtype=dtype, cache_bits=bits or None)

    while (
        batch > 1 and _held_bytes([(decoder, step(bits)) for _, decoder, _, bits in caches]) > device.memory_bytes / 2
    ):
        batch //= 2
    label = f"{layers} × {hidden}, {sizes['intermediate_size']}, {sizes['vocab_size']}"
    gc.collect()  # optimised models refer to themselves, and those of the last place still take memory
    models = {decoder: decoder.build(getattr(torch, dtype), pace.device) for _, decoder in decoders}
    calls: list[_Call] = []
    for name, decoder, cache, bits in caches:
        model, spec = models[decoder], decoder.spec()
        common = {"mechanism": name, "sizes": label, "dtype": dtype}
        written = cache if decoder.code_bits is None else f"codes:{bits}"
        filled = filled_cache(model, spec, batch=batch, tokens=context, quantize=cache)
        about = common | {"cache": written, "batch": batch, "context": context}
        calls.append(_Call(decode_step(model, filled, batch), spec, step(bits), about))
        if written is None:
            about = common | {"cache": None, "batch": 1, "context": prompt}
            calls.append(_Call(prompt_call(model, prompt), spec, Pass(new=prompt, total=prompt, dtype=dtype), about))
    times = pace.measure([call.run for call in calls], least=6, patience=_PATIENCE)
    return [call.point(device, *measured) for call, measured in zip(calls, times, strict=True)]


@dataclass(frozen=True)
class _Call:
    """A pass of a decoder that is to be measured.

    Attributes:
        run: runs the pass.
        spec: the spec of the decoder.
        forward: the sizes of the pass.
        about: the fields of the pass's `TimePoint`.
    """

    run: Timeable
    spec: ModelSpec
    forward: Pass
    about: Mapping[str, Any]

    def point(self, device: Device, measured: float, pace: float) -> TimePoint:
        """The measured time of the pass beside the one that a device's curves predict."""
        timed = seconds(operators(self.spec, self.forward), device, self.forward)
        predicted = sum(each.seconds for each in timed)
        is_prompt = self.forward.new > 1
        return TimePoint(**self.about, is_prompt=is_prompt, measured=measured, pace=pace, predicted=predicted)


def _held_bytes(steps: Sequence[tuple[Decoder, Pass]]) -> int:
    """The most bytes that decoders and their caches take, all of which are in memory at once."""
    each = [(decoder, peak_memory(decoder.spec(), step)) for decoder, step in steps]
    weights = {decoder: memory.weights for decoder, memory in each}
    caches = sum(memory.cache for _, memory in each)
    return sum(weights.values()) + caches + max(memory.workspace for _, memory in each)


def points_by_mechanism(points: Sequence[TimePoint]) -> dict[str, list[TimePoint]]:
    """The points of each mechanism, decoding and prompts apart."""
    kinds: dict[str, list[TimePoint]] = {}
    for point in points:
        kinds.setdefault(f"{point.mechanism}, {'prompts' if point.is_prompt else 'decoding'}", []).append(point)
    return kinds
