"""Old spellings of public names, which work and warn."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def moved_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a module's ``__getattr__`` that finds names that have moved, with a DeprecationWarning.

    Args:
        module: the module's name, such as ``headwise.evaluation``.
        names: the current full name of each, such as ``headwise.texts.read_text``, by its old name.
    """

    def lookup(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now {names[name]}", DeprecationWarning, stacklevel=2)
        package, _, current = names[name].rpartition(".")
        return getattr(importlib.import_module(package), current)

    return lookup


def moved_to(package: str, *names: str) -> dict[str, str]:
    """The current full names of names that have moved to one package and kept their spelling, for `moved_names`."""
    return {name: f"{package}.{name}" for name in names}
