"""Decoding on a device: FLOPs for each byte that is read, and the bytes for each token of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from docs.drawings.plots import BLUE, INK, ORANGE, as_svg, figure, log_ticks, number, rounded, styled

from headwise.costs.formulas import decode_intensity
from headwise.costs.prediction import Device, Operator, Pass, device, operators
from headwise.models.specs import layer_spec, read_spec

DEVICE = "h100"
DTYPE = "bfloat16"
MECHANISMS = (
    ("MHA", "llama-2-7b"),
    ("GQA", "llama-3-8b"),
    ("MQA", "falcon-7b"),
    ("MLA", "deepseek-v3"),
)
"""A model of the catalog for each mechanism."""
DENSE = "llama-3-8b"
"""The model whose weights and cache are read."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT = 8192


@dataclass(frozen=True)
class Place:
    """What is read in decoding, on the roofline.

    Attributes:
        label: for people.
        intensity: FLOPs for each byte.
        attainable: FLOPs a second at most, at this intensity.
    """

    label: str
    intensity: float
    attainable: float


@dataclass(frozen=True)
class Read:
    """Bytes that a decode step reads for each token that it makes.

    Attributes:
        batch: sequences in the step, each of which gets one token.
        weights: bytes of weights, shared out among the sequences.
        cache: bytes of one sequence's keys and values.
    """

    batch: int
    weights: float
    cache: float


def roof(hardware: Device, intensity: float) -> float:
    """FLOPs a second at most: the peak, or what can be done with the bytes that arrive."""
    return min(hardware.peak(DTYPE), intensity * hardware.bytes_per_second)


def ridge(hardware: Device) -> float:
    """The FLOPs for each byte from which on the peak is the limit."""
    return hardware.peak(DTYPE) / hardware.bytes_per_second


def attention_places() -> list[Place]:
    """Attention to a long cache, for one new token of each sequence: any batch has the same intensity."""
    hardware = device(DEVICE)
    found = []
    for mechanism, model in MECHANISMS:
        intensity = decode_intensity(layer_spec(model), dtype=DTYPE)
        found.append(Place(f"{mechanism}, {number(round(intensity))}", intensity, roof(hardware, intensity)))
    return found


def weight_places(batches: tuple[int, ...] = (1, 16, 128)) -> list[Place]:
    """Products with the weights, for one new token of each sequence of a batch."""
    hardware = device(DEVICE)
    found = []
    for batch in batches:
        work = [each for each in _step(batch) if each.kind == "linear"]
        intensity = sum(each.times * each.flops for each in work) / _weights(work)
        found.append(Place(f"batch {batch}", intensity, roof(hardware, intensity)))
    return found


def reads() -> list[Read]:
    """Bytes for each token, by batch."""
    found = []
    for batch in BATCHES:
        work = _step(batch)
        cache = sum(each.times * each.cache_bytes for each in work)
        found.append(Read(batch, _weights(work) / batch, cache / batch))
    return found


def _step(batch: int) -> list[Operator]:
    return operators(read_spec(DENSE), Pass(batch=batch, total=CONTEXT, dtype=DTYPE))


def _weights(work: list[Operator]) -> float:
    return sum(each.times * each.weight_bytes for each in work)


def draw() -> dict[str, str]:
    """The roofline, and the bytes by batch."""
    with styled():
        return {"roofline.svg": _roofline(), "batch.svg": _batch()}


def _roofline() -> str:
    hardware = device(DEVICE)
    made, (axes,) = figure(3.3)
    ends = [0.5, ridge(hardware), 2000]
    axes.plot(rounded(ends), rounded(roof(hardware, end) / 1e12 for end in ends), color=INK, linewidth=1.5)
    for places, colour, marker, label in (
        (weight_places(), ORANGE, "D", "weights, by batch"),
        (attention_places(), BLUE, "o", "attention to the cache"),
    ):
        intensities = rounded(place.intensity for place in places)
        heights = rounded(place.attainable / 1e12 for place in places)
        above = marker == "o"
        size, face = (7, colour) if above else (10, "none")
        axes.plot(
            intensities,
            heights,
            marker,
            color=colour,
            label=label,
            linestyle="none",
            markersize=size,
            markerfacecolor=face,
            markeredgewidth=1.8,
        )
        for place, x, y in zip(places, intensities, heights, strict=True):
            axes.annotate(
                place.label,
                (x, y),
                xytext=(-6, 5) if above else (8, -4),
                textcoords="offset points",
                ha="right" if above else "left",
                va="bottom" if above else "top",
            )
    log_ticks(axes, "x", [1, 10, 100, 1000])
    log_ticks(axes, "y", [1, 10, 100, 1000])
    axes.set_xlim(0.12, 2500)
    axes.set_ylim(1, 3000)
    axes.set_xlabel("FLOPs for each byte read")
    axes.set_ylabel("TFLOP/s at most")
    axes.text(ends[1], 1.25 * roof(hardware, ends[1]) / 1e12, f"{ridge(hardware):.0f}", ha="left", va="bottom")
    axes.legend(loc="lower right", handletextpad=0.2)
    return as_svg(made)


def _batch() -> str:
    made, (axes,) = figure(3.2)
    points = reads()
    for values, colour, marker, label in (
        ([point.weights + point.cache for point in points], INK, "", "both"),
        ([point.cache for point in points], BLUE, "o", f"cache, {CONTEXT:,} tokens"),
        ([point.weights for point in points], ORANGE, "D", "weights"),
    ):
        axes.plot(BATCHES, rounded(value / 1e9 for value in values), f"{marker}-", color=colour, label=label)
    log_ticks(axes, "x", BATCHES, base=2)
    log_ticks(axes, "y", [0.1, 1, 10])
    axes.set_xlabel("sequences in a batch")
    axes.set_ylabel("GB read for each token")
    axes.legend(loc="lower left")
    return as_svg(made)
