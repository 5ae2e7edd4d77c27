"""Public names that have moved: the old spelling works, and warns."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def moved_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` for names that live elsewhere now.

    Args:
        module: where the old spelling was, such as ``headwise.evaluation``.
        names: the module that has each name today.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now {names[name]}.{name}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(names[name]), name)

    return find
