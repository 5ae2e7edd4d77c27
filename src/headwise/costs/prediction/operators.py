"""A forward pass operator by operator: what each does, and the time that it takes on a device.

An operator does FLOPs, and moves bytes of weights, cache and activations. It takes the longer of computing and of
moving bytes, and an overhead for each run. From these times follows up to how many new tokens MLA is faster absorbed
than expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headwise.costs.formulas import dtype_bytes
from headwise.costs.formulas.latent import best_impl
from headwise.costs.formulas.stages import attended_pairs
from headwise.costs.prediction.curves import MANY, Kind, Sizes
from headwise.costs.prediction.hardware import Device
from headwise.costs.prediction.work import Count, Reach, Work, expected_experts, model_work
from headwise.errors import ArgumentError
from headwise.models.specs import LatentSpec, ModelSpec

MOST = 2**30
"""The largest batch and context that are predicted."""


USUAL_DTYPE = "bfloat16"
"""The dtype that is predicted where a user asks for none."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward pass.

    Attributes:
        batch: B, sequences.
        new: S, tokens of each that are passed in; 1 for a decode step.
        total: T, tokens of each that are attended to, the new ones included.
        dtype: the dtype of activations, and of weights that are not stored in a format of their own.
        cache_bits: the bits of one cached value; those of ``dtype`` when None.
        ranks: tensor-parallel devices that share the pass.
        impl: the implementation of layers whose mechanism has several; ``auto`` takes the one of fewest FLOPs.
    """

    batch: int = 1
    new: int = 1
    total: int = 1
    dtype: str = USUAL_DTYPE
    cache_bits: float | None = None
    ranks: int = 1
    impl: str = "auto"

    def __post_init__(self) -> None:
        for name in ("batch", "new", "total", "ranks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
                raise ArgumentError(name, value, f"must be a whole number from 1 to {MOST}")
        if self.new > self.total:
            raise ArgumentError("new", self.new, f"must be at most total = {self.total}")
        dtype_bytes(self.dtype)
        if self.cache_bits is not None and not 0 < self.cache_bits <= 64:
            raise ArgumentError("cache_bits", self.cache_bits, "must be above 0 and at most 64")
        if self.impl not in (impls := ("auto", "expanded", "absorbed", "cached_kv", "direct")):
            raise ArgumentError("impl", self.impl, f"must be one of {', '.join(impls)}")

    @property
    def tokens(self) -> int:
        """B·S."""
        return self.batch * self.new

    @property
    def value_bytes(self) -> float:
        """Bytes of one cached value."""
        return dtype_bytes(self.dtype) if self.cache_bits is None else self.cache_bits / 8


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One kind of operator of a pass, on one device.

    Attributes:
        name: the operator's name, such as ``q_proj``.
        part: ``attention``, ``mixer``, ``feed_forward``, ``norms``, ``embedding``, ``head`` or ``link``.
        times: how often it runs, once in each layer of its kind.
        flops: the FLOPs of one run.
        weight_bytes: the bytes of weights that one run reads.
        cache_bytes: the bytes of cached keys and values that one run reads.
        activation_bytes: the bytes of activations that one run reads and writes.
        link_bytes: the bytes that one run sends to other devices.
        kind: a name that operators share whose times are read from the same curves.
        weights: values of weights that one run reads.
        hidden_size: E, where the time depends on it.
        formula: the formula of the FLOPs, in the letters of the cost model.
    """

    name: str
    part: str
    times: int = 1
    flops: float = 0
    weight_bytes: float = 0
    cache_bytes: float = 0
    activation_bytes: float = 0
    link_bytes: float = 0
    kind: Kind = "other"
    weights: float = 0
    hidden_size: int = 1
    formula: str = ""

    @property
    def memory_bytes(self) -> float:
        """All bytes that one run moves between memory and processor."""
        return self.weight_bytes + self.cache_bytes + self.activation_bytes


def operators(model: ModelSpec, forward: Pass) -> list[Operator]:
    """The operators of one forward pass on one device; the head is computed for the last token of each sequence.

    For example ``sum(o.times * o.weight_bytes for o in operators(read_spec("llama-3-8b"), Pass(total=1024)))``.

    Args:
        model: the model's spec, with its body.
        forward: the pass.

    Raises:
        ArgumentError: a count is impossible, or the heads cannot be split over the ranks.
        SpecError: the model's body is not known.
    """
    work = model_work(model, forward.ranks)
    found = [_operator(each, forward, Reach()) for each in work.body]
    for kind in work.layers:
        impl = kind.impl(forward.impl, forward.new, forward.total)
        attention = (kind.step if forward.new == 1 else kind.prompt)[impl]
        found += [_operator(each, forward, kind.reach) for each in (*attention, *kind.network)]
    return found


def _operator(work: Work, forward: Pass, reach: Reach) -> Operator:
    counts = reach.counts(forward.batch, forward.new, forward.total)
    width, share = dtype_bytes(forward.dtype), 1.0
    if work.experts is not None:
        stored, used, ranks = work.experts
        share = expected_experts(stored, used, forward.tokens) / ranks
    return Operator(
        name=work.name,
        part=work.part,
        times=work.times,
        flops=_sum(work.flops, counts),
        weight_bytes=share * ((work.weights - work.packed) * width + work.packed_bytes),
        cache_bytes=_sum(work.cached, counts) * forward.value_bytes + work.state * forward.batch * width,
        activation_bytes=_sum(work.moved, counts) * width,
        link_bytes=_sum(work.sent, counts) * width,
        kind=work.kind,
        weights=share * work.weights,
        hidden_size=work.hidden_size,
        formula=work.formula,
    )


def _sum(numbers: Mapping[Count, float], counts: Mapping[Count, int]) -> float:
    return sum(number * counts[name] for name, number in numbers.items())


Bound = Literal["compute", "memory", "link", "overhead"]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The share of a device's peaks that operators reach, and what each run costs besides.

    Attributes:
        compute: the share of the dense peak.
        memory: the share of the memory's bandwidth.
        link: the share of the bandwidth between devices.
        seconds: the seconds that each run takes besides, whatever it does.
        is_measured: whether the device has curves of the dtype, in whose place these shares then stand for what was
            not measured; otherwise they are assumed for all.
    """

    compute: float = 0.7
    memory: float = 0.8
    link: float = 0.7
    seconds: float = 4e-6
    is_measured: bool = False


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One kind of operator and its time.

    Attributes:
        name: the name of the operator.
        part: the part of the model that the operator belongs to.
        times: how often it runs.
        flops: the FLOPs of all runs together; the bytes and the seconds below are of all runs too.
        memory_bytes: the bytes that the runs move between memory and processor.
        link_bytes: the bytes that the runs send to other devices.
        seconds: the seconds that the runs take.
        bound: what most of the seconds are spent on.
    """

    name: str
    part: str
    times: int
    flops: float
    memory_bytes: float
    link_bytes: float
    seconds: float
    bound: Bound


def seconds(
    work: Sequence[Operator], device: Device, forward: Pass, efficiency: Efficiency | None = None
) -> list[Timed]:
    """The time of each operator of a pass on a device.

    For example ``sum(timed.seconds for timed in seconds(work, device("h100"), Pass(total=1024)))``.

    Args:
        work: the operators, as `operators` lists them.
        device: one of the ranks.
        forward: the pass.
        efficiency: the efficiency of the device; assumed when None.

    Raises:
        ArgumentError: the device has no peak for the dtype, or several devices are not joined.
    """
    reached = efficiency or Efficiency()
    peak = device.peak(forward.dtype) * reached.compute
    result = []
    measured = device.curves.get(forward.dtype.removeprefix("torch."))
    read = 0.0 if measured is None else pass_bytes(work)
    for operator in work:
        link = 0.0
        if operator.link_bytes:
            if device.link_bytes_per_second is None:
                raise ArgumentError("ranks", forward.ranks, f"must be 1: {device.label} has no link to others")
            link = operator.link_bytes / (device.link_bytes_per_second * reached.link)
        times: dict[Bound, float] = {
            "compute": operator.flops / peak,
            "memory": operator.memory_bytes / (device.bytes_per_second * reached.memory),
            "link": link,
            "overhead": reached.seconds,
        }
        found = None if measured is None else measured.seconds(operator.kind, _sizes(operator, forward, read))
        alone = max(times["compute"], times["memory"], link) + reached.seconds if found is None else found
        result.append(
            Timed(
                name=operator.name,
                part=operator.part,
                times=operator.times,
                flops=operator.times * operator.flops,
                memory_bytes=operator.times * operator.memory_bytes,
                link_bytes=operator.times * operator.link_bytes,
                seconds=operator.times * alone,
                bound=max(times, key=lambda kind: times[kind]),
            )
        )
    return merged(result)


def pass_bytes(work: Iterable[Operator]) -> float:
    """The bytes of weights and cache that a pass reads, which decide what a processor's caches hold.

    For example ``pass_bytes(operators(read_spec("llama-3-8b"), Pass(total=1024)))``.
    """
    return sum(operator.times * (operator.weight_bytes + operator.cache_bytes) for operator in work)


def _sizes(operator: Operator, forward: Pass, read: float) -> Sizes:
    """What the measured time of one run depends on.

    A pass of few tokens waits for the bytes of weights: one of quantised weights counts as one of the dtype's.
    """
    rows = operator.flops / (2 * operator.weights) if operator.weights else 1.0
    weights = operator.weights if rows >= MANY else operator.weight_bytes / dtype_bytes(forward.dtype)
    return Sizes(
        tokens=forward.tokens,
        new=forward.new,
        rows=rows,
        weights=max(weights, 1.0),
        flops=operator.flops,
        cache_bytes=max(operator.cache_bytes, 1.0),
        bits=0 if forward.value_bytes >= dtype_bytes(forward.dtype) else 8 * forward.value_bytes,
        hidden_size=operator.hidden_size,
        pass_bytes=max(read, 1.0),
    )


def merged(timed: Iterable[Timed]) -> list[Timed]:
    """One entry for each name: layers of several kinds, and several passes, have some in common.

    For example ``merged([*prompt, *step])``.

    Args:
        timed: the operators with their times, in any order.

    Returns:
        Their sums, bound by what the longest of them is bound by.
    """
    found: dict[str, list[Timed]] = {}
    for each in timed:
        found.setdefault(each.name, []).append(each)
    return [runs[0] if len(runs) == 1 else _sum_of(runs) for runs in found.values()]


def _sum_of(runs: Sequence[Timed]) -> Timed:
    longest = max(runs, key=lambda each: each.seconds)
    names = ("times", "flops", "memory_bytes", "link_bytes", "seconds")
    return replace(longest, **{name: sum(getattr(each, name) for each in runs) for name in names})


def most_absorbed(spec: LatentSpec, total: int) -> int:
    """The most new tokens that headwise's layer attends to ``total`` with by absorbed queries; 0 if none.

    It takes the implementation of fewer FLOPs. About ``R (N + V) / (2R − N − V)`` where the context is much longer.

    For example ``most_absorbed(layer_spec("deepseek-v3"), 32_768)`` is 170.
    """

    def is_absorbed(new: int) -> bool:
        pairs = attended_pairs(new, total, causal=True, window=spec.sliding_window)
        return best_impl(spec, new, total, pairs) == "absorbed"

    return _last(is_absorbed, total)


def fastest_absorbed(model: ModelSpec, step: Pass, hardware: Device) -> int | None:
    """The most new tokens of each sequence for which absorbed attention is predicted to take less time; 0 if none.

    For example ``fastest_absorbed(read_spec("deepseek-v3"), Pass(total=32_768, ranks=8), device("h200"))``.

    Args:
        model: the model's spec, with its body.
        step: the pass, which gives the batch, context, dtype and devices.
        hardware: one of the devices.

    Returns:
        None for a model without MLA.
    """
    if not any(isinstance(layer, LatentSpec) for layer in model.layers):
        return None

    def is_absorbed(new: int) -> bool:
        absorbed, expanded = (
            sum(timed.seconds for timed in seconds(operators(model, sized), hardware, sized))
            for sized in (replace(step, new=new, impl=impl) for impl in ("absorbed", "expanded"))
        )
        return absorbed < expanded

    return _last(is_absorbed, step.total)


def _last(holds: Callable[[int], bool], total: int) -> int:
    """The last of 1 … total that a condition holds for, which holds up to there; 0 if it never does."""
    low, high = 0, total
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
