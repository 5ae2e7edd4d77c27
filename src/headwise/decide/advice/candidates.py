"""What can be done to a model's cache: an engine's own, a format, other heads, a latent, codes; with notes on it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from headwise.costs.formulas.layer import cache_values
from headwise.costs.formulas.target import (
    Target,
    conversion_targets,
    convert_spec,
    parse_target,
    plain_formats,
    refuse_codes,
    target_options,
)
from headwise.costs.prediction import SERVING_ENGINES, Device, EngineCache, check_engine, engine_caches, named_caches
from headwise.errors import HeadwiseError
from headwise.measure.points import PREDICTED_ERROR, PREDICTED_WITHIN, Measured
from headwise.models.specs import AttentionSpec, GroupedSpec, ModelSpec, locate
from headwise.serving.programs import runs, served_by

AS_IT_IS = "as it is"

_NOTHING: Mapping[str, Measured] = MappingProxyType({})
_SIZES = re.compile(r"MLA (\d+) \+ (\d+)")
"""The label of a conversion that was measured, of its layers' mean sizes where they differ."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One way to serve a model.

    Attributes:
        target: ``as it is``, an engine's cache (``llama.cpp:q8_0``), a format, or a target of ``headwise convert`` as
            a frontier spells it (``mla:0.5``).
        model: the model as this candidate serves it.
        cache_bits: the bits of one cached value; None for those of the dtype.
        convert_to: the options of ``headwise convert``; None where nothing is converted.
        is_exact: whether nothing is lost.
        is_safe: whether models like this one lose next to nothing, so that it may be used unmeasured.
        is_measurable: whether headwise can measure what it loses.
        cache: the engine's own cache that the candidate uses; None for all else.
        served_by: the programs that run it, in words.
        is_first_size: whether the sizes are those that a search on a text begins with, and are not known before it.
    """

    target: str
    model: ModelSpec
    cache_bits: float | None = None
    convert_to: str | None = None
    is_exact: bool = False
    is_safe: bool = False
    is_measurable: bool = True
    cache: EngineCache | None = None
    served_by: str = ""
    is_first_size: bool = False

    @property
    def words(self) -> str:
        """The engine's own options, for its own caches; empty for all else."""
        return "" if self.cache is None else self.cache.words

    @property
    def is_bound(self) -> bool:
        """Whether its memory is an upper bound, because some weights take fewer bits than are known."""
        return self.model.stored is not None and self.model.stored.is_bound

    def runs_on(self, device: Device) -> bool:
        """Whether a device is known to run it.

        For example ``candidates(model)[0].runs_on(device("laptop"))`` is True, of the model as it is.
        """
        return self.cache is None or self.cache.runs_on(device)


def candidates(
    source: ModelSpec,
    measured: Mapping[str, Measured] = _NOTHING,
    engine: str | None = None,
    device: Device | None = None,
) -> tuple[Alternative, ...]:
    """Everything that is tried: the model itself, engines' own caches, what a frontier tries, and what was measured.

    For example ``[each.target for each in candidates(read_spec("llama-2-7b"), engine="mlx")][:2]`` is
    ``["as it is", "mlx:8"]``.

    Args:
        source: the model.
        measured: the measured or predicted losses by target.
        engine: the engine that is to run the model, which leaves out what it does not run.
        device: the device that is to run the model, which leaves out what it cannot run; any when None.
    """
    has_windows = any(layer.sliding_window is not None for layer in source.layers)
    # What is left of a cache whose windows stay as they are is not one number of bits: it depends on the tokens.
    formats = {
        name: form.bits(source)
        for name, form in plain_formats(source).items()
        if not (form.has_blocks and has_windows)
    }
    own = [
        Alternative(
            target=name,
            model=source,
            cache_bits=cache.bits(source),
            is_safe=cache.is_safe_for(source),
            is_measurable=cache.is_simulated and all(isinstance(layer, GroupedSpec) for layer in source.layers),
            cache=cache,
        )
        for name, cache in (engine_caches(source, engine) | named_caches(source, measured)).items()
    ]
    listed = {each.target for each in own} | formats.keys()
    formats |= {
        name: 16 * point.cache_fraction for name, point in measured.items() if point.is_format and name not in listed
    }
    ladder = conversion_targets(source)
    others = [name for name, point in measured.items() if not point.is_format and name not in {*ladder, *listed}]
    found = [Alternative(target=AS_IT_IS, model=source, is_exact=True), *own]
    found += [Alternative(target=name, model=source, cache_bits=bits) for name, bits in formats.items()]
    converted = (_converted(source, target, measured.get(target)) for target in (*ladder, *others))
    found += [candidate for candidate in converted if candidate is not None]
    return tuple(
        replace(each, served_by=served_by(each.target, source))
        for each in found
        if (engine is None or runs(each.target, source, engine)) and (device is None or each.runs_on(device))
    )


def predictable(
    source: ModelSpec,
    measured: Mapping[str, Measured] = _NOTHING,
    engine: str | None = None,
    device: Device | None = None,
) -> tuple[str, ...]:
    """The candidates whose loss `headwise.quick_frontier` predicts: formats of the model's own cache.

    For example ``predictable(read_spec("llama-2-7b"), engine="mlx")`` is ``("mlx:8", "mlx:4")``.

    Args:
        source: the model.
        measured: the measured losses by target; what is known is not predicted.
        engine: the engine that is to run the model.
        device: the device that is to run the model, which leaves out what it cannot run; any when None.
    """
    tried = candidates(source, engine=engine, device=device)
    formats = (each for each in tried if each.is_measurable and not each.is_exact and each.convert_to is None)
    return tuple(each.target for each in formats if each.target not in measured)


def _can_merge(layer: AttentionSpec) -> bool:
    """Whether the default method merges the key–value heads of a layer."""
    return isinstance(layer, GroupedSpec) and not layer.sinks and layer.qk_norm != "full"


def _converted(source: ModelSpec, target: str, measured: Measured | None) -> Alternative | None:
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
        return Alternative(target=target, model=model, cache_bits=bits, convert_to=words, is_first_size=is_first)
    return None


def engine_notes(model: ModelSpec, engine: str | None, known: Mapping[str, Measured]) -> tuple[str, ...]:
    """What is known of an engine's small caches: what all of them need, and what goes wrong with some.

    For example ``engine_notes(read_spec("llama-3-8b"), None, {})`` is empty.

    Args:
        model: the model.
        engine: the engine that is to run it; when None, those caches of all engines are spoken of whose loss is
            known.
        known: measurements and predictions by target.
    """
    caches = named_caches(model, known) if engine is None else engine_caches(model, engine)
    limits: dict[str, list[str]] = {}
    for target, cache in caches.items():
        if cache.limit and not (cache.overflows and cache.is_safe_for(model)):
            limits.setdefault(cache.limit, []).append(target if engine is None else cache.name)
    notes = [f"{', '.join(names)}: {limit}" for limit, names in limits.items()]
    return (*(() if engine is None else check_engine(engine).notes), *notes)


def file_note(source: str, engine: str | None) -> list[str]:
    """A note where an engine does not load the ``.gguf`` that the model is in."""
    if engine is None or SERVING_ENGINES[engine].reads_gguf:
        return []
    with suppress(HeadwiseError):  # of a name that stands for no model
        if locate(source).kind == "gguf":
            title = SERVING_ENGINES[engine].title
            return [f"{title} loads no .gguf, which {source} is: give it the folder that it was made of, MODEL here"]
    return []


def weight_notes(model: ModelSpec, tried: Sequence[Alternative]) -> tuple[str, ...]:
    """What is to be said of a model whose weights are quantised, and of its conversions.

    For example ``weight_notes(read_spec("llama-3-8b"), ())`` is empty.
    """
    if model.stored is None:
        return ()
    converted = any(each.model.stored is None for each in tried)
    rule = (
        "conversions count in the dtype: headwise converts the original, or a GGUF, and writes no quantised weights"
    )
    return (*model.stored.warnings(), *([rule] if converted else []))


def predicted_note(are_predicted: Iterable[bool]) -> tuple[str, ...]:
    """What is to be said where the loss of an option is predicted.

    For example ``predicted_note([False])`` is empty.

    Args:
        are_predicted: for each option, whether its loss is predicted.
    """
    if not any(are_predicted):
        return ()
    held = f"--max-quality-loss is compared with exp({PREDICTED_WITHIN} KL) - 1"
    return (
        f"losses with ~× are predicted, not measured, of the model as it is: {PREDICTED_ERROR}; {held}",
        "what headwise prepare gains is not in them: prepare the model, and measure or predict that of the result",
    )
