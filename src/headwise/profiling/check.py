"""Predicted beside measured: decoders that no curve was measured on."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import torch

from headwise.checkpoints import dtype_name
from headwise.prediction import Device, Pass, operators, peak_memory, seconds
from headwise.prediction.roofline import pass_bytes
from headwise.profiling.decoder import Decoder, decode_step, filled_cache, prompt_call
from headwise.profiling.grids import BITS, CPU, Grids, Places
from headwise.profiling.memory import MemoryPoint, memory_point
from headwise.profiling.pace import HERE, Bound, Pace, bound_by
from headwise.progress import Progress, silent

KV_HEADS = {"MHA": None, "GQA": 4, "MQA": 1}
"""Key–value heads of mechanisms that cache heads; all query heads when None."""


def kinds(places: Places) -> dict[str, dict[str, Any]]:
    """The arguments of `Decoder` that make its attention each mechanism's."""
    return {**{name: {"num_kv_heads": heads} for name, heads in KV_HEADS.items()}, "MLA": {"latent": places.latent}}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One model, measured and predicted.

    Attributes:
        mechanism: of its attention.
        sizes: of the model.
        dtype: of weights and activations.
        cache: the format of the cache; None for the dtype's own.
        batch: sequences of a decode step.
        context: tokens of each; of the prompt, where ``is_prompt``.
        is_prompt: whether a prompt was read, or a token decoded.
        measured: seconds.
        predicted: seconds, at the pace that the machine was profiled at.
        pace: how many times as long as then a call of the same kind took beside the measurement; see `Pace`.
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
    """All points, and how well they were predicted.

    Attributes:
        points: times.
        memory: what decoders of each mechanism and dtype hold.
    """

    points: tuple[Point, ...]
    memory: tuple[MemoryPoint, ...] = ()

    @property
    def memory_error(self) -> float:
        """The largest absolute value."""
        return max((abs(point.error) for point in self.memory), default=0.0)

    @property
    def median_error(self) -> float:
        """Of the absolute values."""
        return statistics.median(abs(point.error) for point in self.points)

    @property
    def median_error_unpaced(self) -> float:
        """Of the absolute values, as if the machine were as fast as when it was profiled."""
        return statistics.median(abs(point.predicted / point.measured - 1) for point in self.points)

    @property
    def high_error(self) -> float:
        """The 90th percentile of the absolute values."""
        return statistics.quantiles([abs(point.error) for point in self.points], n=10)[-1]

    @property
    def ranked(self) -> tuple[int, int]:
        """Pairs of mechanisms in the same place whose order is predicted, of those that differ by 10 % or more."""
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


def _place_of(point: Point) -> Point:
    """A point without what differs between mechanisms."""
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
        device: with curves.
        places: sizes, contexts and batches; each is tried with every mechanism, decoding and reading a prompt.
        seed: of the choice.
        grids: of the kind of device.
        place: that decoders run on.
        progress: told of each model.
    """
    chosen = random.Random(seed)
    names = [dtype_name(dtype) for dtype in grids.dtypes]
    known = {name: device.curves[name].pace for name in names if name in device.curves}
    paces = {name: Pace(getattr(torch, name), reference, place) for name, reference in known.items()}
    points: list[Point] = []
    for index in range(places):
        progress("checking", index, places + 1)
        points += _place(chosen, device, paces, grids)
    progress("checking", places, places + 1)
    memory = []
    for name, kind in kinds(grids.places).items():
        heads = chosen.choice(grids.places.heads)
        sizes = _sizes(grids, heads) | {"vocab_size": chosen.choice(grids.places.vocabularies)}
        inner = chosen.choice([2, 3, 4]) * grids.head_dim * heads
        decoder = Decoder(**sizes, intermediate_size=inner, **kind)
        memory += [memory_point(name, decoder, dtype, place) for dtype in paces]
    progress("checking", places + 1, places + 1)
    return Check(points=tuple(points), memory=tuple(memory))


def _sizes(grids: Grids, heads: int) -> dict[str, Any]:
    """Sizes of a decoder with so many query heads."""
    return {"hidden_size": grids.head_dim * heads, "num_heads": heads, "head_dim": grids.head_dim}


def _place(chosen: random.Random, device: Device, paces: Mapping[str, Pace], grids: Grids) -> list[Point]:
    """All mechanisms at one place."""
    choices = grids.places
    heads = chosen.choice(choices.heads)
    layers, hidden = chosen.choice(choices.layers), grids.head_dim * heads
    sizes = _sizes(grids, heads) | {"num_layers": layers}
    sizes |= {
        "intermediate_size": chosen.choice([2, 3, 4]) * hidden,
        "vocab_size": chosen.choice(choices.vocabularies),
    }
    dtype = chosen.choice(list(paces))
    pace = paces[dtype]
    batch, context, prompt = map(chosen.choice, (choices.batches, choices.contexts, choices.prompts))
    while batch > 1 and _peak(sizes, Pass(batch=batch, total=context + 1, dtype=dtype)) > device.memory_bytes / 2:
        batch //= 2
    label = f"{layers} × {hidden}, {sizes['intermediate_size']}, {sizes['vocab_size']}"
    points = []
    formats = [None, chosen.choice([each for each in BITS.values() if each is not None])]

    def times(decoder: Decoder, call: Callable[[], object], forward: Pass, bound: Bound) -> dict[str, Any]:
        least: dict[str, Any] = {"least": 3} if forward.new > 1 else {"patience": 0.2}
        measured, now = pace.measure(call, bound, **least)
        return {"measured": measured, "pace": now, "predicted": _predicted(decoder, forward, device)}

    for name, kind in kinds(choices).items():
        decoder = Decoder(**sizes, **kind)
        model, spec = decoder.build(getattr(torch, dtype), pace.device), decoder.spec()
        common: dict[str, Any] = {"mechanism": name, "sizes": label, "dtype": dtype}
        for cache_format in formats if decoder.latent is None else [None]:
            bits = next(bits for bits, each in BITS.items() if each == cache_format) or None
            step = Pass(batch=batch, total=context + 1, dtype=dtype, cache_bits=bits)
            cache = filled_cache(model, spec, batch=batch, tokens=context, quantize=cache_format)
            found = times(
                decoder, decode_step(model, cache, batch), step, bound_by(pass_bytes(operators(spec, step)))
            )
            about: dict[str, Any] = {"cache": cache_format, "batch": batch, "context": context, "is_prompt": False}
            points.append(Point(**common, **about, **found))
            del cache
        found = times(decoder, prompt_call(model, prompt), Pass(new=prompt, total=prompt, dtype=dtype), "products")
        points.append(Point(**common, cache=None, batch=1, context=prompt, is_prompt=True, **found))
    return points


def _peak(sizes: Mapping[str, Any], step: Pass) -> int:
    """Bytes that the largest of a place's decoders, which caches all heads, holds at most."""
    return peak_memory(Decoder(**sizes).spec(), step).total


def _predicted(decoder: Decoder, forward: Pass, device: Device) -> float:
    return sum(each.seconds for each in seconds(operators(decoder.spec(), forward), device, forward))


def by_kind(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The points of each mechanism, decoding and prompts apart."""
    kinds: dict[str, list[Point]] = {}
    for point in points:
        kinds.setdefault(f"{point.mechanism}, {'prompts' if point.is_prompt else 'decoding'}", []).append(point)
    return kinds
