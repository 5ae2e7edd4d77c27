"""What can be done to a model's cache: nothing, a format of fewer bits, other heads, a latent, a latent in codes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

from headwise.advice.measured import Measured
from headwise.cost.layer import cache_values
from headwise.cost.target import convert_spec, parse_target, refuse_codes
from headwise.errors import HeadwiseError
from headwise.specs.grouped import GroupedSpec
from headwise.specs.model import ModelSpec

AS_IT_IS = "as it is"

FORMATS: Mapping[str, float] = MappingProxyType({"int8:32": 9.0, "int4:32": 5.0, "kivi4": 4.5, "kivi2": 2.5})
"""Formats of a cache, and the bits of one value in them, scales included."""

BUDGETS = (0.75, 0.5, 0.333, 0.25, 0.125)
"""Fractions of the values that a latent keeps."""

BYTES = (0.5, 0.28, 0.25, 0.19, 0.15, 0.125, 0.094, 0.0625)
"""Fractions of a bfloat16 cache's bytes that a latent in codes keeps."""

OWN_BYTES = (0.5, 0.28, 0.25, 0.19)
"""The same of the model's own keys and values in codes."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to serve a model.

    Attributes:
        target: ``as it is``, a format, or a target of ``headwise convert`` as a frontier spells it (``mla:0.5``).
        model: as it is then.
        cache_bits: of one cached value; None for those of the dtype.
        convert_to: the options of ``headwise convert``; None where nothing is converted.
        is_exact: whether nothing is lost.
    """

    target: str
    model: ModelSpec
    cache_bits: float | None = None
    convert_to: str | None = None
    is_exact: bool = False


def candidates(source: ModelSpec) -> tuple[Candidate, ...]:
    """Everything that can be done to a model, the model itself first.

    For example ``[each.target for each in candidates(read_spec("llama-2-7b"))][:2]`` is ``["as it is", "int8:32"]``.
    """
    found = [Candidate(target=AS_IT_IS, model=source, is_exact=True)]
    found += [Candidate(target=name, model=source, cache_bits=bits) for name, bits in FORMATS.items()]
    found += [candidate for candidate in _converted(source) if candidate is not None]
    return tuple(found)


def measured_formats(source: ModelSpec, measured: Iterable[Measured]) -> tuple[Candidate, ...]:
    """The formats of a cache that were measured and are not among `FORMATS`, with the bits that they took.

    For example ``measured_formats(read_spec("llama-2-7b"), read_measured(["./out"]).values())``.
    """
    return tuple(
        Candidate(target=point.target, model=source, cache_bits=16 * point.cache_fraction)
        for point in measured
        if point.is_format and point.target not in FORMATS
    )


def _converted(source: ModelSpec) -> Iterator[Candidate | None]:
    heads = {spec.num_kv_heads if isinstance(spec, GroupedSpec) else 0 for spec in source.layers}
    if len(heads) > 1 or 0 in heads:  # layers that are not converted, or not alike
        return
    (own,) = heads
    for count in range(own - 1, 0, -1):
        if own % count == 0:
            target = "mqa" if count == 1 else f"gqa:{count}"
            yield _candidate(source, target, target)
    for fraction in OWN_BYTES:
        yield _candidate(source, f"same@{fraction:g}", "same", kv_bytes=fraction)
    for budget in BUDGETS:
        yield _candidate(source, f"mla:{budget:g}", "mla", kv_budget=budget)
    for fraction in BYTES:
        yield _candidate(source, f"mla@{fraction:g}", "mla", kv_bytes=fraction)


def _candidate(
    source: ModelSpec, target: str, to: str, *, kv_budget: float | None = None, kv_bytes: float | None = None
) -> Candidate | None:
    """A conversion; None where the model cannot be converted so."""
    with suppress(HeadwiseError):
        model = convert_spec(source, parse_target(to, kv_budget=kv_budget, kv_bytes=kv_bytes))
        bits, options = None, "" if kv_budget is None else f" --kv-budget {kv_budget:g}"
        if kv_bytes is not None:
            refuse_codes(model)
            whole, kept = (sum(cache_values(layer) for layer in each.layers) for each in (source, model))
            bits, options = 16 * kv_bytes * whole / kept, f" --kv-bytes {kv_bytes:g}"
        return Candidate(target=target, model=model, cache_bits=bits, convert_to=f"--to {to}{options}")
    return None
