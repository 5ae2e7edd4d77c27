"""The base class of attention specs, the rotary embedding's spec, and the checks that specs share."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Collection
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Self

from headwise.errors import SpecError

_LEAST_THETA = 1e-6
"""Of a smaller base the frequencies can be infinite in float32, and their cosines no numbers."""


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """The rotary position embedding of one layer.

    For example ``RopeSpec(dim=64, theta=500_000.0)``.

    Source: Su et al. 2021 (arXiv:2104.09864); scaling as transformers' ``modeling_rope_utils`` defines it.

    Attributes:
        dim: the number of dims of a head that are rotated; it is even.
        theta: the base of the frequencies, ``theta ** (-2 i / dim)``.
        rope_type: ``default`` or one of transformers' scaled kinds (``linear``, ``llama3``, ``yarn``, …).
        parameters: the numbers of the kind of scaling, as (name, value) pairs in transformers' names.
        interleaved: whether pairs are neighbours (2i, 2i+1) rather than halves (i, i + dim/2).
        max_position_embeddings: the length from which ``dynamic`` and ``longrope`` scale.

    Raises:
        SpecError: a number is impossible.
    """

    dim: int
    theta: float = 10000.0
    rope_type: str = "default"
    parameters: tuple[tuple[str, Any], ...] = ()
    interleaved: bool = False
    max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        check_positive("rope dim", self.dim)
        if self.dim % 2:
            raise SpecError("rope dim", self.dim, "must be an even number of at least 2")
        check_positive_number("rope_theta", self.theta)
        if self.theta < _LEAST_THETA:
            raise SpecError("rope_theta", self.theta, f"must be at least {_LEAST_THETA}")
        if not isinstance(self.rope_type, str):
            raise SpecError("rope_type", self.rope_type, "must be the name of a kind of scaling")
        _check_booleans(self)
        if self.max_position_embeddings is not None:
            check_positive("max_position_embeddings", self.max_position_embeddings)
        for name, value in self.parameters:
            numbers = value if isinstance(value, tuple) else () if isinstance(value, str) else (value,)
            if not all(is_finite(n) for n in numbers):
                raise SpecError(f"rope {name}", value, "must be a number, a word or a list of numbers")
            if name in _DIVISORS:
                for one in value if isinstance(value, tuple) else (value,):
                    check_positive_number(f"rope {name}", one)
        # Sorted, so that equal embeddings compare equal.
        object.__setattr__(self, "parameters", tuple(sorted(self.parameters, key=lambda pair: pair[0])))

    @property
    def changes_at(self) -> int | None:
        """The longest text, in tokens, that has these frequencies; None where texts of all lengths have the same."""
        if self.rope_type == "dynamic":
            return self.max_position_embeddings
        numbers = dict(self.parameters)
        if self.rope_type != "longrope" or numbers.get("short_factor") == numbers.get("long_factor"):
            return None
        length = numbers.get("original_max_position_embeddings")
        return None if length is None else int(length)


def hides_tokens(window: int, longest: int | None) -> bool:
    """Whether a sliding window or a chunk hides anything from a text within a model's positions.

    For example ``hides_tokens(262144, 131072)`` is False, as in Phi-3.5.

    A window as long as the positions hides nothing from any text that the model can read, so that `read_config`
    leaves it out of the spec, and caches keep all tokens.

    Args:
        window: the number of tokens in the window or chunk.
        longest: the number of positions, ``max_position_embeddings``; None where it is not known.
    """
    return longest is None or window < longest


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The attention of one layer: everything that its cost depends on, without its weights.

    A subclass is in a module of ``headwise.models.specs`` whose name is the mechanism's ``kind``. Its formulas are in
    ``headwise.costs.formulas.<kind>`` and its layer is in ``headwise.runtime.attention.<kind>``.

    Attributes:
        hidden_size: E, width of the residual stream.
        is_causal: True in a decoder; an encoder's layer is not causal and keeps no cache.
        sliding_window: the number of latest tokens that are attended to, or None for all.
        chunked: whether the window does not slide: a text is cut into chunks of ``sliding_window`` tokens, and a
            token attends to those before it in its chunk (Llama 4).
        rope: the rotary embedding, or None.
        softmax_scale: the factor of the scores; None means 1/sqrt(query–key width of a head).
        bias: names of the projections that have a bias.
    """

    kind: ClassVar[str] = ""

    hidden_size: int
    is_causal: bool = True
    sliding_window: int | None = None
    chunked: bool = False
    rope: RopeSpec | None = None
    softmax_scale: float | None = None
    bias: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.kind = cls.__module__.rpartition(".")[2]

    def __post_init__(self) -> None:
        _check_booleans(self)
        check_positive("hidden_size", self.hidden_size)
        if self.sliding_window is not None:
            check_positive("sliding_window", self.sliding_window)
        elif self.chunked:
            raise SpecError("chunked", True, "needs sliding_window, the number of tokens in a chunk")
        if self.softmax_scale is not None:
            check_positive_number("softmax_scale", self.softmax_scale)

    @property
    def mechanism(self) -> str:
        """The field's short name: ``mha``, ``mqa``, ``gqa``, ``mla``, …"""
        return self.kind

    @property
    def label(self) -> str:
        """The mechanism with its sizes, for tables."""
        return self.mechanism

    def to_dict(self) -> dict[str, Any]:
        """The spec as JSON-able values, ``kind`` first; `spec_from_dict` makes an equal spec of them."""
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
        """Make a spec from the values of `to_dict`.

        Raises:
            SpecError: a key is unknown or missing, or a value is impossible.
        """
        values = {key: value for key, value in values.items() if key != "kind"}
        names = {field.name for field in fields(cls)}
        for key in values:
            if key not in names:
                raise SpecError(f"{cls.kind} spec key", key, f"must be one of {sorted(names)}")
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


@cache
def mechanism_module(package: str, kind: str) -> types.ModuleType:
    """Import a mechanism's module in a package: ``headwise.<package>.<kind>``.

    For example ``mechanism_module("costs.formulas", "latent").__name__`` is ``"headwise.costs.formulas.latent"``.

    There is no other registry: a mechanism is added by adding these files.

    Costs and layers are imported by name, and only when a caller asks for them: this is the one place where the specs
    reach packages that are built on them.

    Args:
        package: ``models.specs``, ``costs.formulas`` or ``runtime.attention``.
        kind: the mechanism's `AttentionSpec.kind`.

    Raises:
        SpecError: there is no such module.
    """
    name = f"headwise.{package}.{kind}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise SpecError("attention kind", kind, f"there is no module {name}") from None


def spec_from_dict(values: dict[str, Any]) -> AttentionSpec:
    """Make the spec that `AttentionSpec.to_dict` described, whatever its kind.

    For example ``spec_from_dict(layer_spec("llama-3-8b").to_dict())``.

    Raises:
        SpecError: the kind is unknown, or the values do not fit it.
    """
    kind = values.get("kind")
    if not isinstance(kind, str) or not kind.isidentifier():
        raise SpecError("attention kind", kind, "must be the name of a module of headwise.models.specs")
    module = mechanism_module("models.specs", kind)
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, AttentionSpec) and value.kind == kind:
            return value.from_dict(values)
    raise SpecError("attention kind", kind, f"{module.__name__} defines no AttentionSpec")


def _check_booleans(spec: RopeSpec | AttentionSpec) -> None:
    """Raise a `SpecError` unless every field annotated as bool is one."""
    for field in fields(spec):
        if field.type == "bool" and not isinstance(value := getattr(spec, field.name), bool):
            raise SpecError(field.name, value, "must be true or false")


_DIVISORS = ("factor", "short_factor", "long_factor")
"""Parameters that frequencies are divided by, which must be above 0."""

MAX_SIZE = 2**40
"""The largest size of a spec: no real model comes near it, and costs below it can still be printed."""
MAX_HEADS = 2**16
"""The most heads of a spec."""


def check_positive(name: str, value: int, most: int = MAX_SIZE) -> None:
    """Raise a `SpecError` unless ``value`` is a whole number between 1 and ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(name, value, "must be a whole number of at least 1")
    if value > most:
        raise SpecError(name, value, f"must be at most {most}")


def check_sizes(spec: object, *names: str, least: int = 1) -> None:
    """Raise a `SpecError` unless each of these fields is a whole number of at least 1, or of at least 0."""
    for name in names:
        value = getattr(spec, name)
        if least == 1:
            check_positive(name, value)
        elif type(value) is not int or value < 0:
            raise SpecError(name, value, "must be a whole number of at least 0")


def check_positive_number(name: str, value: float) -> None:
    """Raise a `SpecError` unless ``value`` is a finite number above 0."""
    if isinstance(value, bool) or not is_finite(value) or value <= 0:
        raise SpecError(name, value, "must be a number above 0")


def is_finite(value: object) -> bool:
    """Whether ``value`` is a finite number that a float can hold; integers in JSON have no limit."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def bias_names(
    bias: bool | str | Collection[str], *, projections: tuple[str, ...], shorthands: dict[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """Names of the projections that have a bias, in the order of ``projections``.

    Args:
        bias: True for all of them, False for none, a shorthand, or projection names.
        projections: all projections of the layer.
        shorthands: the projections that ``"qkv"`` or ``"hf"`` stands for in this mechanism.

    Raises:
        SpecError: a name is unknown.
    """
    if isinstance(bias, bool):
        return projections if bias else ()
    names = shorthands.get(bias) if isinstance(bias, str) else bias
    if not isinstance(names, Collection):
        raise SpecError("bias", bias, f"must be True, False, one of {sorted(shorthands)} or projection names")
    for name in names:
        if name not in projections:
            raise SpecError("bias", name, f"must name one of {list(projections)}")
    return tuple(name for name in projections if name in names)
