"""What every attention layer's description has in common."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from headwise.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding of one layer.

    Source: Su et al. 2021 (arXiv:2104.09864); scaling as transformers' ``modeling_rope_utils`` defines it.

    Attributes:
        dim: how many of a head's dims are rotated (an even number).
        theta: the base of the frequencies, ``theta ** (-2 i / dim)``.
        rope_type: ``default`` or one of transformers' scaled kinds (``linear``, ``llama3``, ``yarn``, …).
        parameters: the scaled kind's own numbers, as (name, value) pairs in transformers' names.
        interleaved: pairs are neighbours (2i, 2i+1) rather than halves (i, i + dim/2).
        max_position_embeddings: what ``dynamic`` and ``longrope`` compare the length with.
    """

    dim: int
    theta: float = 10000.0
    rope_type: str = "default"
    parameters: tuple[tuple[str, Any], ...] = ()
    interleaved: bool = False
    max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        positive("rope dim", self.dim)
        if self.dim % 2:
            raise SpecError("rope dim", self.dim, "must be an even number of at least 2")
        positive_number("rope_theta", self.theta)
        if not isinstance(self.rope_type, str):
            raise SpecError("rope_type", self.rope_type, "must be the name of a kind of scaling")
        _switches(self)
        if self.max_position_embeddings is not None:
            positive("max_position_embeddings", self.max_position_embeddings)
        for name, value in self.parameters:
            numbers = value if isinstance(value, tuple) else () if isinstance(value, str) else (value,)
            if not all(is_finite(n) for n in numbers):
                raise SpecError(f"rope {name}", value, "must be a number, a word or a list of numbers")
            if name in _DIVISORS:
                for one in value if isinstance(value, tuple) else (value,):
                    positive_number(f"rope {name}", one)
        # One order, so that equal embeddings compare equal.
        object.__setattr__(self, "parameters", tuple(sorted(self.parameters, key=lambda pair: pair[0])))


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One layer's attention: everything its cost depends on, and nothing about its weights.

    A subclass lives in a module of ``headwise.specs`` whose name is the mechanism's ``kind``; its formulas
    live in ``headwise.cost.<kind>`` and its layer in ``headwise.attention.<kind>``.

    Attributes:
        hidden_size: E, width of the residual stream.
        is_causal: a decoder's layer; an encoder's is not causal and keeps no cache.
        sliding_window: how many of the latest tokens are attended to, or None for all.
        rope: the rotary embedding, or None.
        softmax_scale: multiplies the scores; None means 1/sqrt(query–key width of a head).
        bias: names of the projections that carry a bias.
    """

    kind: ClassVar[str] = ""

    hidden_size: int
    is_causal: bool = True
    sliding_window: int | None = None
    rope: RopeSpec | None = None
    softmax_scale: float | None = None
    bias: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.kind = cls.__module__.rpartition(".")[2]

    def __post_init__(self) -> None:
        _switches(self)
        positive("hidden_size", self.hidden_size)
        if self.sliding_window is not None:
            positive("sliding_window", self.sliding_window)
        if self.softmax_scale is not None:
            positive_number("softmax_scale", self.softmax_scale)

    @property
    def mechanism(self) -> str:
        """The field's short name: ``mha``, ``mqa``, ``gqa``, ``mla``, …"""
        return self.kind

    @property
    def label(self) -> str:
        """The mechanism with its sizes, for tables."""
        return self.mechanism

    def to_dict(self) -> dict[str, Any]:
        """The spec as JSON-able values, ``kind`` first; `spec_from_dict` reads it back equal."""
        out: dict[str, Any] = {"kind": self.kind}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, RopeSpec):
                value = {f.name: getattr(value, f.name) for f in fields(value)}
                value["parameters"] = dict(value["parameters"])
            out[field.name] = list(value) if isinstance(value, tuple) else value
        return out

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of `to_dict`; an unknown or missing key is a `SpecError`."""
        values = {key: value for key, value in values.items() if key != "kind"}
        known = {field.name for field in fields(cls)}
        for key in values:
            if key not in known:
                raise SpecError(f"{cls.kind} spec key", key, f"must be one of {sorted(known)}")
        try:
            if (rope := values.get("rope")) is not None:
                parameters = tuple(
                    (key, tuple(value) if isinstance(value, list) else value)
                    for key, value in rope.get("parameters", {}).items()
                )
                values["rope"] = RopeSpec(**{**rope, "parameters": parameters})
            values["bias"] = tuple(values.get("bias", ()))
            return cls(**values)
        except (TypeError, AttributeError) as error:
            raise SpecError(f"{cls.kind} spec", values, f"cannot be read: {error}") from None


def mechanism_module(room: str, kind: str) -> types.ModuleType:
    """The module that holds a mechanism's part in a room: ``headwise.<room>.<kind>``.

    One name in every room is the whole registry: adding a mechanism is adding files.
    """
    name = f"headwise.{room}.{kind}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise SpecError("attention kind", kind, f"there is no module {name}") from None


def spec_from_dict(values: dict[str, Any]) -> AttentionSpec:
    """Build the spec that `AttentionSpec.to_dict` described, whatever its kind."""
    kind = values.get("kind")
    if not isinstance(kind, str) or not kind.isidentifier():
        raise SpecError("attention kind", kind, "must be the name of a module of headwise.specs")
    module = mechanism_module("specs", kind)
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, AttentionSpec) and value.kind == kind:
            return value.from_dict(values)
    raise SpecError("attention kind", kind, f"{module.__name__} defines no AttentionSpec")


def _switches(spec: RopeSpec | AttentionSpec) -> None:
    for field in fields(spec):
        if field.type == "bool" and not isinstance(value := getattr(spec, field.name), bool):
            raise SpecError(field.name, value, "must be true or false")


_DIVISORS = ("factor", "short_factor", "long_factor")  # of frequencies

MAX_SIZE = 2**40
MAX_HEADS = 2**16
"""No size of a real model comes near it, and products of sizes below it stay numbers that can be printed."""


def positive(name: str, value: int, most: int = MAX_SIZE) -> None:
    """Raise a `SpecError` unless ``value`` is a whole number of at least 1 and at most ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(name, value, "must be a whole number of at least 1")
    if value > most:
        raise SpecError(name, value, f"must be at most {most}")


def positive_number(name: str, value: float) -> None:
    """Raise a `SpecError` unless ``value`` is a finite number above 0."""
    if isinstance(value, bool) or not is_finite(value) or value <= 0:
        raise SpecError(name, value, "must be a number above 0")


def is_finite(value: object) -> bool:
    """Whether it is a number that a float can hold; JSON's integers know no limit, and its NaN is a float."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def bias_names(
    bias: bool | str | Collection[str],
    *,
    projections: tuple[str, ...],
    shorthands: dict[str, tuple[str, ...]],
) -> tuple[str, ...]:
    """Which projections carry a bias, in the order of ``projections``.

    Args:
        bias: True for all of them, False for none, a shorthand, or projection names.
        projections: the names the layer has.
        shorthands: what ``"qkv"`` or ``"hf"`` stands for in this mechanism.
    """
    if isinstance(bias, bool):
        return projections if bias else ()
    if isinstance(bias, str):
        if bias not in shorthands:
            raise SpecError("bias", bias, f"must be True, False, one of {sorted(shorthands)} or projection names")
        wanted: Collection[str] = shorthands[bias]
    elif isinstance(bias, Collection):
        wanted = bias
    else:
        raise SpecError("bias", bias, f"must be True, False, one of {sorted(shorthands)} or projection names")
    for name in wanted:
        if name not in projections:
            raise SpecError("bias", name, f"must name one of {list(projections)}")
    return tuple(name for name in projections if name in wanted)
