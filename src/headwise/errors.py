"""The errors a user can cause: each names the field, the value and the rule."""

from __future__ import annotations


class HeadwiseError(ValueError):
    """Something the user can put right.

    Args:
        field: the argument, config key, tensor or path that is wrong.
        value: what it held.
        rule: what it must be, or what to do instead.
    """

    def __init__(self, field: str, value: object, rule: str) -> None:
        self.field, self.value, self.rule = field, value, rule
        super().__init__(f"{field} = {_short(value)}: {rule}")

    def __reduce__(self) -> tuple[type[HeadwiseError], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.rule)


class ArgumentError(HeadwiseError):
    """An argument or option is outside its rule."""


class SpecError(HeadwiseError):
    """A config describes something impossible, or something headwise does not understand."""


class CheckpointError(HeadwiseError):
    """A model file is missing, damaged, or of a kind that is not read."""


class StorageError(CheckpointError):
    """The disk would not give or take a file: it is full, or the file may not be read or written."""


class MissingExtraError(HeadwiseError):
    """An optional package is not installed; the rule is the pip line that installs it."""


def _short(value: object, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
