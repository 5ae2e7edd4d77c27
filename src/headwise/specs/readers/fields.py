"""Fields of a ``config.json``, checked as they are read, and what a family's reader is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from headwise.errors import SpecError
from headwise.specs.base import AttentionSpec, is_finite, positive, positive_number
from headwise.specs.model import BodySpec

Config = Mapping[str, Any]
_MAX_LAYERS = 10_000


class NotSaidError(SpecError):
    """A config does not say something: reason to refuse its attention, and to leave what is around it unread."""


class Reader(NamedTuple):
    """How one ``model_type`` is read.

    Attributes:
        layers: the attention of each layer.
        body: what stands around ``n`` such layers; None where nobody has written it down yet.
        absent: what a published file leaves to its class, where that is one model's size.
        cross: the attention of each layer to an encoder's output, where it has one.
    """

    layers: Callable[[Config], tuple[AttentionSpec, ...]]
    body: Callable[[Config, int], BodySpec] | None = None
    absent: Config = MappingProxyType({})
    cross: Callable[[Config], tuple[AttentionSpec, ...]] | None = None


def integer(config: Config, *names: str) -> int:
    """The first of several spellings that is present, as a positive whole number."""
    value = optional_integer(config, *names)
    if value is None:
        raise NotSaidError(names[0], None, "is required in config.json")
    return value


def optional_integer(config: Config, *names: str, absent: int | None = None) -> int | None:
    """As `integer`; ``absent`` (a family's own default) where no spelling is there, None where they are null."""
    for name in names:
        value = config.get(name)
        if value is not None:
            positive(name, value)
            return int(value)
    return None if any(name in config for name in names) else absent


def head_dim_of(config: Config, absent: int | None = None) -> int:
    """``head_dim``; where it is absent the family's own (if it has one), where there is none E/H."""
    given = optional_integer(config, "head_dim", absent=absent)
    return given or divide(integer(config, "hidden_size"), integer(config, "num_attention_heads"))


def count(config: Config, name: str, absent: int) -> int:
    """A whole number that may be 0; absent and null are ``absent``."""
    value = config.get(name)
    if value is None:
        return absent
    if type(value) is not int or value < 0:
        raise SpecError(name, value, "must be a whole number of at least 0")
    return value


def optional_number(config: Config, name: str, absent: float | None = None) -> float | None:
    """A number above 0; ``absent`` where it is not there, None where it is null."""
    value = config.get(name, absent)
    if value is not None:
        positive_number(name, value)
    return None if value is None else float(value)


def number(name: str, value: Any) -> float:
    """Any finite number."""
    if isinstance(value, bool) or not is_finite(value):
        raise SpecError(name, value, "must be a number")
    return float(value)


def flag(config: Config, name: str, default: bool) -> bool:
    """A switch; absent and null are the default, and only true and false are others."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise SpecError(name, value, "must be true or false")
    return value


def listed(config: Config, name: str, num_layers: int, known: Mapping[str, str]) -> list[str] | None:
    """A list with one of the ``known`` words for each layer, each as what it maps to; None where it is absent."""
    words = config.get(name)
    if words is None:
        return None
    if not isinstance(words, list) or len(words) != num_layers:
        raise SpecError(name, words, f"must list one type for each of {num_layers} layers")
    for word in words:
        if not isinstance(word, str) or word not in known:
            raise SpecError(name, word, f"is not understood; known: {', '.join(known)}")
    return [known[word] for word in words]


def num_layers(config: Config, *names: str) -> int:
    """How many layers; a spec is made for each, so a number without sense must not take the machine with it."""
    value = integer(config, *(names or ("num_hidden_layers", "n_layer", "n_layers")))
    positive("num_hidden_layers", value, most=_MAX_LAYERS)
    return value


def divide(hidden_size: int, num_heads: int) -> int:
    """The head dim of a family whose heads share the hidden size out."""
    if hidden_size % num_heads:
        raise SpecError("num_attention_heads", num_heads, f"must divide hidden_size = {hidden_size}")
    return hidden_size // num_heads


def refuse(config: Config, name: str, *, unless: tuple[Any, ...], rule: str) -> None:
    """Raise a `SpecError` where a field holds anything but what it is understood to."""
    if (value := config.get(name)) is not None and value not in unless:
        raise SpecError(name, value, rule)
