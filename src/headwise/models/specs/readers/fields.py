"""Read and check single fields of a ``config.json``; and `Reader`, the functions that read a family.

A field that a config leaves out has the default of the family's transformers class, if all its models agree on it;
otherwise the config is refused. A guess would give wrong costs without a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from headwise.errors import SpecError
from headwise.models.specs.base import AttentionSpec, check_positive, check_positive_number, is_finite
from headwise.models.specs.model import BodySpec

_MAX_LAYERS = 10_000
"""The most layers that a config may have, because a spec is made for each."""


class MissingFieldError(SpecError):
    """A config leaves out a field, without which its attention cannot be read or its body stays unknown."""


class Config(dict[str, Any]):
    """The fields of a ``config.json``, which are checked as they are read.

    For example ``Config({"hidden_size": 64}).integer("hidden_size")`` is 64.
    """

    def integer(self, *names: str) -> int:
        """Read a positive whole number, from the first of several names that is present."""
        value = self.optional_integer(*names)
        if value is None:
            raise MissingFieldError(names[0], None, "is required in config.json")
        return value

    def optional_integer(self, *names: str, absent: int | None = None) -> int | None:
        """Read as `integer`; ``absent``, a family's default, where no name is there, and None where one is null."""
        for name in names:
            value = self.get(name)
            if value is not None:
                check_positive(name, value)
                return int(value)
        return None if any(name in self for name in names) else absent

    def head_dim(self, absent: int | None = None) -> int:
        """Read ``head_dim``; where it is absent it is the family's default, or without one E/H."""
        head_dim = self.optional_integer("head_dim", absent=absent)
        return head_dim or divided_head_dim(self.integer("hidden_size"), self.integer("num_attention_heads"))

    def count(self, name: str, absent: int) -> int:
        """Read a whole number that may be 0; ``absent`` where it is not there or null."""
        value = self.get(name)
        if value is None:
            return absent
        if type(value) is not int or value < 0:
            raise SpecError(name, value, "must be a whole number of at least 0")
        return value

    def optional_number(self, name: str, absent: float | None = None) -> float | None:
        """Read a number above 0; ``absent`` where it is not there, None where it is null."""
        value = self.get(name, absent)
        if value is not None:
            check_positive_number(name, value)
        return None if value is None else float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Read true or false; ``default`` where it is not there or null."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise SpecError(name, value, "must be true or false")
        return value

    def layer_types(self, name: str, num_layers: int, meanings: Mapping[str, str]) -> list[str] | None:
        """Read a list with a word for each layer, and return what ``meanings`` maps them to; None if it is absent."""
        words = self.get(name)
        if words is None:
            return None
        if not isinstance(words, list) or len(words) != num_layers:
            raise SpecError(name, words, f"must list one type for each of {num_layers} layers")
        for word in words:
            if not isinstance(word, str) or word not in meanings:
                raise SpecError(name, word, f"is not understood; known: {', '.join(meanings)}")
        return [meanings[word] for word in words]

    def num_layers(self, *names: str) -> int:
        """Read the number of layers; as a spec is made for each, an absurd number is an error."""
        value = self.integer(*(names or ("num_hidden_layers", "n_layer", "n_layers")))
        check_positive("num_hidden_layers", value, most=_MAX_LAYERS)
        return value

    def refuse(self, name: str, *, unless: tuple[Any, ...], rule: str) -> None:
        """Raise a `SpecError` where a field holds a value that is not null and not among ``unless``."""
        if (value := self.get(name)) is not None and value not in unless:
            raise SpecError(name, value, rule)


class Reader(NamedTuple):
    """Functions that read the config of one ``model_type``.

    Attributes:
        layers: reads the attention of each layer.
        body: reads the body around a number of layers; None where the family's body is not supported yet.
        absent: the values of fields that a published file leaves out, where their defaults are one model's sizes.
        cross: reads the attention of each layer to an encoder's output; None for a model without an encoder.
    """

    layers: Callable[[Config], tuple[AttentionSpec, ...]]
    body: Callable[[Config, int], BodySpec] | None = None
    absent: Mapping[str, Any] = MappingProxyType({})
    cross: Callable[[Config], tuple[AttentionSpec, ...]] | None = None


def check_number(name: str, value: Any) -> float:
    """Check that a value is a finite number, and return it as a float."""
    if isinstance(value, bool) or not is_finite(value):
        raise SpecError(name, value, "must be a number")
    return float(value)


def divided_head_dim(hidden_size: int, num_heads: int) -> int:
    """The head dim of a family whose heads divide the hidden size among them."""
    if hidden_size % num_heads:
        raise SpecError("num_attention_heads", num_heads, f"must divide hidden_size = {hidden_size}")
    return hidden_size // num_heads
