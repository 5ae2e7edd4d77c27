"""Predicted beside measured: decoders that no curve was measured on."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import torch

from headwise.prediction import Device, Pass, operators, seconds
from headwise.prediction.roofline import pass_bytes
from headwise.profiling.decoder import Decoder, decode_step, filled_cache, prompt_call
from headwise.profiling.measure import BITS
from headwise.profiling.memory import MemoryPoint, memory_point
from headwise.profiling.pace import Pace, bound_by
from headwise.progress import Progress, silent

MECHANISMS: dict[str, dict[str, Any]] = {
    "MHA": {"num_kv_heads": None},
    "GQA": {"num_kv_heads": 4},
    "MQA": {"num_kv_heads": 1},
    "MLA": {"latent": (160, 32)},
}
DTYPES = ("float32", "bfloat16")
HEADS, LAYERS, VOCABULARIES = (8, 12, 16), (3, 4, 6, 8), (8192, 32_768)
BATCHES, CONTEXTS, PROMPTS = (1, 1, 2, 4, 8), (300, 1000, 3000, 6000), (96, 200, 400, 900)


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


def check(device: Device, *, places: int = 12, seed: int = 0, progress: Progress = silent) -> Check:
    """Measure decoders of random sizes, and predict them with a device's curves.

    For example ``check(device("this-machine", Path("profile.toml"))).median_error``.

    Args:
        device: with curves.
        places: sizes, contexts and batches; each is tried with every mechanism, decoding and reading a prompt.
        seed: of the choice.
        progress: told of each model.
    """
    chosen = random.Random(seed)
    known = {name: device.curves[name].pace for name in DTYPES if name in device.curves}
    paces = {name: Pace(getattr(torch, name), reference) for name, reference in known.items()}
    points: list[Point] = []
    for index in range(places):
        progress("checking", index, places + 1)
        points += _place(chosen, device, paces)
    progress("checking", places, places + 1)
    memory = []
    for name, kind in MECHANISMS.items():
        heads = chosen.choice(HEADS)
        sizes = {"hidden_size": 64 * heads, "num_heads": heads, "vocab_size": chosen.choice(VOCABULARIES)}
        decoder = Decoder(**{**sizes, "intermediate_size": chosen.choice([2, 3, 4]) * 64 * heads, **kind})
        memory += [memory_point(name, decoder, dtype) for dtype in paces]
    progress("checking", places + 1, places + 1)
    return Check(points=tuple(points), memory=tuple(memory))


def _place(chosen: random.Random, device: Device, paces: Mapping[str, Pace]) -> list[Point]:
    """All mechanisms at one place."""
    heads = chosen.choice(HEADS)
    hidden, layers = 64 * heads, chosen.choice(LAYERS)
    sizes = {"hidden_size": hidden, "num_layers": layers, "num_heads": heads}
    sizes |= {"intermediate_size": chosen.choice([2, 3, 4]) * hidden, "vocab_size": chosen.choice(VOCABULARIES)}
    dtype = chosen.choice(list(paces))
    batch, context, prompt = chosen.choice(BATCHES), chosen.choice(CONTEXTS), chosen.choice(PROMPTS)
    label = f"{layers} × {hidden}, {sizes['intermediate_size']}, {sizes['vocab_size']}"
    points = []
    formats = [None, chosen.choice([each for each in BITS.values() if each is not None])]
    for name, kind in MECHANISMS.items():
        decoder = Decoder(**{**sizes, **kind})
        model, spec = decoder.build(getattr(torch, dtype)), decoder.spec()
        common = {"mechanism": name, "sizes": label, "dtype": dtype}
        for cache_format in formats if decoder.latent is None else [None]:
            bits = next(bits for bits, each in BITS.items() if each == cache_format) or None
            step = Pass(batch=batch, total=context + 1, dtype=dtype, cache_bits=bits)
            cache = filled_cache(model, spec, batch=batch, tokens=context, quantize=cache_format)
            bound = bound_by(pass_bytes(operators(spec, step)))
            measured, pace = paces[dtype].measure(decode_step(model, cache, batch), bound, patience=0.2)
            points.append(
                Point(
                    **common,
                    cache=cache_format,
                    batch=batch,
                    context=context,
                    is_prompt=False,
                    measured=measured,
                    pace=pace,
                    predicted=_predicted(decoder, step, device),
                )
            )
            del cache
        measured, pace = paces[dtype].measure(prompt_call(model, prompt), "products", least=3)
        points.append(
            Point(
                **common,
                cache=None,
                batch=1,
                context=prompt,
                is_prompt=True,
                measured=measured,
                pace=pace,
                predicted=_predicted(decoder, Pass(new=prompt, total=prompt, dtype=dtype), device),
            )
        )
    return points


def _predicted(decoder: Decoder, forward: Pass, device: Device) -> float:
    return sum(each.seconds for each in seconds(operators(decoder.spec(), forward), device, forward))


def by_kind(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The points of each mechanism, decoding and prompts apart."""
    kinds: dict[str, list[Point]] = {}
    for point in points:
        kinds.setdefault(f"{point.mechanism}, {'prompts' if point.is_prompt else 'decoding'}", []).append(point)
    return kinds
