"""Public names that have moved or are spelled anew: the old spelling works, and warns."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def moved_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` for names that live elsewhere now.

    Args:
        module: where the old spelling was, such as ``headwise.evaluation``.
        names: today's full name of each, such as ``headwise.texts.read_text``.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now {names[name]}", DeprecationWarning, stacklevel=2)
        room, _, today = names[name].rpartition(".")
        return getattr(importlib.import_module(room), today)

    return find


def moved_to(room: str, *names: str) -> dict[str, str]:
    """The full names of several that have moved to one room and kept their spelling."""
    return {name: f"{room}.{name}" for name in names}
