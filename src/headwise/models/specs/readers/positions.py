"""Read what depends on positions from a config: the rotary embedding, and the sliding window of each layer.

Families write windows in different ways. A rule takes the config and the number of layers, and returns a window or
None for each layer.

The rotary embedding is the one that transformers' class would compute, however it is written: fields are read in the
classes' order of precedence, a fraction of rotated dims only where the class reads one, and where the class would
fail, the config is refused. Tests hold random combinations of fields to the class's own module.

Sources: ``RotaryEmbeddingConfigMixin`` in transformers' modeling_rope_utils.py, and the families' config classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from headwise.errors import SpecError
from headwise.models.specs.base import RopeSpec
from headwise.models.specs.readers.fields import Config, MissingFieldError, check_number

Windows = list[int | None]
Rule = Callable[[Config, int], Windows]
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_TYPES = {FULL: FULL, SLIDING: SLIDING}


def no_window(config: Config, num_layers: int) -> Windows:
    """The rule of a family without windows, in which ``sliding_window`` must be null.

    Its attention would see every token, while a cache made from the config kept only some.
    """
    window = config.optional_integer("sliding_window")
    if window is not None:
        raise SpecError("sliding_window", window, f"must be null: a {config['model_type']} model has none")
    return _by_type(config, num_layers, window, [FULL] * num_layers)


def window_in_every_layer(absent: int | None = None) -> Rule:
    """A rule for one window in all layers; ``absent`` is its default, and null means no window."""

    def rule(config: Config, num_layers: int) -> Windows:
        window = config.optional_integer("sliding_window", absent=absent)
        return _by_type(config, num_layers, window, [FULL if window is None else SLIDING] * num_layers)

    return rule


def window_but_every_nth(period: int, *, field: str | None = None, may_be_null: bool = False) -> Rule:
    """A rule for windows in all layers but every ``period``-th, where the file does not list the layers' types.

    Args:
        period: the period of the family, or the default of ``field``.
        field: the name of the field that has the period; None where the family's class reads none.
        may_be_null: whether ``sliding_window`` may be null, for no window in any layer.
    """

    def rule(config: Config, num_layers: int) -> Windows:
        window = config.optional_integer("sliding_window")
        if window is None and may_be_null and "sliding_window" in config:
            return [None] * num_layers
        is_listed = config.get("layer_types") is not None  # the field then says nothing, whatever it holds
        nth = period if field is None or is_listed else config.optional_integer(field) or period
        types = [FULL if (i + 1) % nth == 0 else SLIDING for i in range(num_layers)]
        return _by_type(config, num_layers, window, types)

    return rule


def windows_with_switch(default: Callable[[Config, int], list[str]], *, absent: int | None = None) -> Rule:
    """Qwen's rule: windows only with ``use_sliding_window``; without, ``sliding_window`` may be any number, even 0.

    Args:
        default: the type of each layer where ``layer_types`` is absent.
        absent: the window, in tokens, where the file has the switch alone.
    """

    def rule(config: Config, num_layers: int) -> Windows:
        is_on = config.flag("use_sliding_window", False)
        window = config.optional_integer("sliding_window", absent=absent) if is_on else None
        return _by_type(config, num_layers, window, _usual(config, num_layers, window, default), off=not is_on)

    return rule


def upper_layers(config: Config, num_layers: int, absent: int | None = None) -> list[str]:
    """Layer types with windows from layer ``max_window_layers`` on, which is ``absent`` where the file has none."""
    if config.get("max_window_layers", absent) is None:
        raise MissingFieldError("max_window_layers", None, "must be a whole number of at least 0")
    first = Config({"max_window_layers": absent, **config}).count("max_window_layers", 0)
    return [SLIDING if i >= first else FULL for i in range(num_layers)]


def all_layers(config: Config, num_layers: int) -> list[str]:
    """Layer types with a window in every layer."""
    return [SLIDING] * num_layers


def must_be_listed(config: Config, num_layers: int) -> list[str]:
    """Raise a `SpecError`: releases of transformers differ in the default, so the file must have ``layer_types``."""
    raise SpecError("layer_types", None, f"is required where {config['model_type']} has use_sliding_window")


def above_max_window_layers(config: Config, num_layers: int) -> Windows:
    """The rule of dots.llm1, which has no switch: a file without ``sliding_window`` has no windows."""
    window = config.optional_integer("sliding_window")
    return _by_type(config, num_layers, window, _usual(config, num_layers, window, upper_layers))


def windows_of_chunks(default: Callable[[Config, int], list[str]], *, absent: int) -> Rule:
    """A rule for layers that attend within chunks, of ``attention_chunk_size`` tokens.

    Args:
        default: the type of each layer where ``layer_types`` is absent.
        absent: the number of tokens in a chunk where the file has none.
    """

    def rule(config: Config, num_layers: int) -> Windows:
        chunk = config.optional_integer("attention_chunk_size", absent=absent)
        types = config.layer_types("layer_types", num_layers, {FULL: FULL, CHUNKED: CHUNKED})
        return [chunk if name == CHUNKED else None for name in types or default(config, num_layers)]

    return rule


def _usual(
    config: Config, num_layers: int, window: int | None, default: Callable[[Config, int], list[str]]
) -> list[str]:
    """The type of each layer by a family's default, which is asked for only where it decides."""
    decides = window is not None and config.get("layer_types") is None
    return default(config, num_layers) if decides else [FULL] * num_layers


def _by_type(config: Config, num_layers: int, window: int | None, types: list[str], *, off: bool = False) -> Windows:
    types = config.layer_types("layer_types", num_layers, _TYPES) or types
    if SLIDING in types and window is None and not off:
        raise SpecError("sliding_window", None, "is required where layer_types has sliding_attention")
    return [window if name == SLIDING else None for name in types]


_LENGTH, _PART = "original_max_position_embeddings", "partial_rotary_factor"


def read_rope(
    config: Config,
    head_dim: int,
    *,
    theta: float = 10000.0,
    fraction: float | None = None,
    interleaved: bool = False,
    kinds: Mapping[str, str] | None = None,
    layer_type: str = FULL,
    local: tuple[str, float] | None = None,
) -> RopeSpec:
    """Read the rotary embedding from ``rope_scaling`` or ``rope_parameters``, and from the fields beside them.

    Where both objects are there, ``rope_scaling`` alone counts, or is laid over that of full layers where layers
    differ. What such an object holds takes precedence over ``rope_theta`` and ``partial_rotary_factor`` beside it.

    Args:
        config: the config.
        head_dim: width of a head.
        theta: the family's default base.
        fraction: the family's default of the rotated part of a head; None where whole heads are rotated.
        interleaved: whether rotary pairs are neighbours.
        kinds: the kinds of scaling that the family has, each with the kind that its class computes; None for all
            kinds.
        layer_type: the type of the layers whose embedding is read, where types differ.
        local: the field with the base of sliding layers that have an embedding of their own (empty where
            ``rope_parameters`` has it) and the family's default; None where all layers share one embedding.

    Raises:
        SpecError: a field is impossible, or transformers' class would fail with it.
    """
    base: Any = config.get("rope_theta", theta)
    values = _shared_rope(config) if local is None else _rope_of_layers(config, layer_type)
    if local is not None and layer_type == SLIDING:
        base = config.get(*local)
    kind = values.pop("rope_type", values.pop("type", "default"))
    values.pop("type", None)
    if not isinstance(kind, str):
        raise SpecError("rope_type", kind, "must be the name of a kind of scaling")
    if kinds is not None and kind not in kinds:
        rule = f"is not understood in a {config['model_type']} model; known: {', '.join(kinds)}"
        raise SpecError("rope_type", kind, rule)
    kind = kind if kinds is None else kinds[kind]
    base = values.pop("rope_theta", base)
    dim = _rotated_dims(config, head_dim, kind, values, fraction)
    if kind in ("llama3", "yarn", "longrope"):
        if local is None and _LENGTH in config:
            values[_LENGTH] = config[_LENGTH]
        elif _LENGTH not in values:
            values[_LENGTH] = config.integer("max_position_embeddings")
    return RopeSpec(
        dim=dim,
        theta=check_number("rope_theta", base),
        rope_type=kind,
        parameters=tuple(
            (key, tuple(value) if isinstance(value, list) else value)
            for key, value in sorted(values.items())
            if value is not None
        ),
        interleaved=interleaved,
        max_position_embeddings=config.optional_integer("max_position_embeddings"),
    )


def _rotated_dims(config: Config, head_dim: int, kind: str, values: dict[str, Any], fraction: float | None) -> int:
    """The number of rotated dims of a head; removes the fraction from ``values`` where it says no more than that."""
    beside = config.get(_PART, fraction)
    part = values.pop(_PART, 1.0 if beside is None else beside)
    if fraction is None and kind == "default":
        return head_dim  # transformers does not read the fraction here, while every kind of scaling does
    part = check_number(_PART, part)
    if not 0 < part <= 1:
        raise SpecError(_PART, part, "must be above 0 and at most 1")
    if kind == "proportional":  # rotates all of the head, with frequencies of 0 beyond the fraction
        values[_PART] = part
        return head_dim
    dim = int(head_dim * part)
    if fraction is None and dim != head_dim:
        rule = f"must be 1 beside rope_type {kind}: a {config.get('model_type')} model rotates whole heads"
        raise SpecError(_PART, part, rule)
    return dim


def _shared_rope(config: Config) -> dict[str, Any]:
    """The object that describes the one embedding of all layers; empty where there is none."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    values = _check_object(name, config.get(name) or {})
    for key in (FULL, SLIDING):
        if isinstance(value := values.get(key), Mapping):
            rule = f"is not understood: all layers of a {config.get('model_type')} model share one embedding"
            raise SpecError(f"{name}.{key}", value, rule)
    return values


def _rope_of_layers(config: Config, layer_type: str) -> dict[str, Any]:
    """The object that describes the embedding of one type of layers, where types differ (Gemma 3, OLMo 3)."""
    given: Any = config.get("rope_parameters")
    if given is None:
        given = {FULL: {"rope_type": "default"}}
    given = _check_object("rope_parameters", given)
    values = _check_object(f"rope_parameters.{layer_type}", given.get(layer_type) or {})
    if (scaling := config.get("rope_scaling")) is not None:
        if not isinstance(given.get(FULL), Mapping):
            rule = f"cannot be read beside rope_parameters = {given!r}, which has no {FULL} that it would change"
            raise SpecError("rope_scaling", scaling, rule)
        if layer_type == FULL:
            values |= _check_object("rope_scaling", scaling)
    # transformers reads this number of yarn's beside the types of layers, and not within one.
    if "truncate" in (values | given):
        values["truncate"] = given.get("truncate", True)
    return values


def _check_object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(name, value, "must be a JSON object")
    return dict(value)


def yarn_softmax_scale(rope: RopeSpec | None, qk_head_dim: int) -> float | None:
    """The softmax scale with YaRN's temperature, which DeepSeek applies to scores rather than to cos and sin."""
    if rope is None or rope.rope_type == "default":
        return None
    parameters = dict(rope.parameters)
    if not parameters.get("mscale_all_dim"):
        return None
    all_dim = check_number("mscale_all_dim", parameters["mscale_all_dim"])
    if (factor := check_number("rope factor", parameters.get("factor"))) <= 1:
        return None
    mscale = 0.1 * all_dim * math.log(factor) + 1.0
    return float(qk_head_dim**-0.5 * mscale * mscale)
