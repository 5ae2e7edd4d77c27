"""The errors a user can cause: each names the field, the value and the rule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class HeadwiseError(ValueError):
    """An error that the user can correct; the command line prints it as one line and ends with status 2.

    Args:
        field: the argument, config key, tensor or path that is wrong.
        value: its value.
        rule: the rule for the value, or what to do instead.
    """

    def __init__(self, field: str, value: object, rule: str) -> None:
        self.field, self.value, self.rule = field, value, rule
        super().__init__(f"{_short(field)} = {_short(repr(value))}: {_short(rule, 1500)}")

    def __reduce__(self) -> tuple[type[HeadwiseError], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.rule)


class ArgumentError(HeadwiseError):
    """An argument or option is outside its rule."""


class SpecError(HeadwiseError):
    """A config describes something impossible, or something headwise does not understand."""


class CheckpointError(HeadwiseError):
    """A model file is missing, damaged, or of an unsupported kind."""


class StorageError(CheckpointError):
    """A file cannot be read or written: the disk is full, or permissions do not allow it."""


class MissingExtraError(HeadwiseError):
    """An optional package is not installed; the rule is the pip line that installs it."""


def _short(text: str, limit: int = 200) -> str:
    """A text that a file may have made as long as it is."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


@contextmanager
def naming(**names: str) -> Iterator[None]:
    """Give fields of errors the names by which a caller's user knows them.

    For example, ``with naming(context="planted"):`` around a function whose ``context`` is the option ``--planted``.

    Args:
        names: the new name of each field.
    """
    try:
        yield
    except HeadwiseError as error:
        if error.field not in names:
            raise
        raise type(error)(names[error.field], error.value, error.rule) from None
