"""What can be done to a model's cache: nothing, a format of fewer bits, other heads, a latent, a latent in codes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

from headwise.advice.measured import Measured
from headwise.cost.default_targets import conversions, plain_formats
from headwise.cost.layer import cache_values
from headwise.cost.target import Target, convert_spec, parse_target, refuse_codes, target_options
from headwise.errors import HeadwiseError
from headwise.specs import AttentionSpec, GroupedSpec, ModelSpec

AS_IT_IS = "as it is"

_NOTHING: Mapping[str, Measured] = MappingProxyType({})
_SIZES = re.compile(r"MLA (\d+) \+ (\d+)")
"""The label of a conversion that was measured, of its layers' mean sizes where they differ."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to serve a model.

    Attributes:
        target: ``as it is``, a format, or a target of ``headwise convert`` as a frontier spells it (``mla:0.5``).
        model: as it is then.
        cache_bits: of one cached value; None for those of the dtype.
        convert_to: the options of ``headwise convert``; None where nothing is converted.
        is_exact: whether nothing is lost.
        is_first_size: whether the sizes are those that a search on a text begins with, and are not known before it.
    """

    target: str
    model: ModelSpec
    cache_bits: float | None = None
    convert_to: str | None = None
    is_exact: bool = False
    is_first_size: bool = False


def candidates(source: ModelSpec, measured: Mapping[str, Measured] = _NOTHING) -> tuple[Candidate, ...]:
    """Everything that is tried: the model itself, what a frontier tries by default, and what else was measured.

    For example ``[each.target for each in candidates(read_spec("llama-2-7b"))][:2]`` is ``["as it is", "int8"]``.

    Args:
        source: the model.
        measured: of it, by target.
    """
    has_windows = any(layer.sliding_window is not None for layer in source.layers)
    # What is left of a cache whose windows stay as they are is not one number of bits: it depends on the tokens.
    formats = {
        name: form.bits(source)
        for name, form in plain_formats(source).items()
        if not (form.has_blocks and has_windows)
    }
    formats |= {
        name: 16 * point.cache_fraction for name, point in measured.items() if point.is_format and name not in formats
    }
    ladder = conversions(source)
    others = [name for name, point in measured.items() if not point.is_format and name not in ladder]
    found = [Candidate(target=AS_IT_IS, model=source, is_exact=True)]
    found += [Candidate(target=name, model=source, cache_bits=bits) for name, bits in formats.items()]
    converted = (_converted(source, target, measured.get(target)) for target in (*ladder, *others))
    return (*found, *(candidate for candidate in converted if candidate is not None))


def _can_merge(layer: AttentionSpec) -> bool:
    """Whether the default method merges the key–value heads of a layer."""
    return isinstance(layer, GroupedSpec) and not layer.sinks and layer.qk_norm != "full"


def _converted(source: ModelSpec, target: str, measured: Measured | None) -> Candidate | None:
    """A conversion; None where the model cannot be converted so."""
    with suppress(HeadwiseError, ValueError, OverflowError):
        options = target_options(target)
        wanted = parse_target(**options)
        if wanted.mechanism != "mla" and not all(map(_can_merge, source.layers)):
            return None
        sizes = None if measured is None or wanted.kv_bytes is None else _SIZES.match(measured.label)
        if sizes is None:
            model = convert_spec(source, wanted)
        else:
            rank, rope = map(int, sizes.groups())
            model = convert_spec(source, Target("mla", kv_lora_rank=rank, qk_rope_head_dim=rope - rope % 2))
        bits = None
        if wanted.kv_bytes is not None:
            refuse_codes(model)
            whole, kept = (sum(cache_values(layer) for layer in each.layers) for each in (source, model))
            bits = 16 * wanted.kv_bytes * whole / kept
        words = " ".join(
            f"--{name.replace('_', '-')} {value if isinstance(value, str) else format(value, 'g')}"
            for name, value in options.items()
        )
        is_first = wanted.mechanism == "mla" and wanted.kv_bytes is not None and sizes is None
        return Candidate(target=target, model=model, cache_bits=bits, convert_to=words, is_first_size=is_first)
    return None
