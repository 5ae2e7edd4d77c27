"""What a forward pass does, operator by operator: FLOPs, and bytes of weights, cache and activations that move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headwise.costs.formulas import dtype_bytes
from headwise.costs.prediction.curves import Kind
from headwise.costs.prediction.work import Count, Reach, Work, expected_experts, model_work
from headwise.errors import ArgumentError
from headwise.models.specs.model import ModelSpec

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
        dtype: of activations, and of weights that are not stored in a format of their own.
        cache_bits: of one cached value; those of ``dtype`` when None.
        ranks: tensor-parallel devices that share the pass.
        impl: of the layers whose mechanism has several implementations; ``auto`` takes the one of fewest FLOPs.
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
        name: such as ``q_proj``.
        part: ``attention``, ``mixer``, ``feed_forward``, ``norms``, ``embedding``, ``head`` or ``link``.
        times: how often it runs, once in each layer of its kind.
        flops: of one run.
        weight_bytes: of weights that one run reads.
        cache_bytes: of cached keys and values that one run reads.
        activation_bytes: that one run reads and writes.
        link_bytes: that one run sends to other devices.
        kind: operators of the same kind are measured alike.
        weights: values of weights that one run reads.
        hidden_size: E, where the time depends on it.
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

    @property
    def memory_bytes(self) -> float:
        """All bytes that one run moves between memory and processor."""
        return self.weight_bytes + self.cache_bytes + self.activation_bytes


def operators(model: ModelSpec, forward: Pass) -> list[Operator]:
    """The operators of one forward pass on one device; the head is computed for the last token of each sequence.

    For example ``sum(o.times * o.weight_bytes for o in operators(read_spec("llama-3-8b"), Pass(total=1024)))``.

    Args:
        model: with its body.
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
    )


def _sum(numbers: Mapping[Count, float], counts: Mapping[Count, int]) -> float:
    return sum(number * counts[name] for name, number in numbers.items())
