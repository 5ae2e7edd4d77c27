"""Find the methods by their files, and choose the one that a user named."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path

from headwise.conversion.methods.base import Method
from headwise.errors import ArgumentError
from headwise.models.specs import ModelSpec

_PACKAGE = __name__.rpartition(".")[0]


@cache
def all_methods() -> tuple[Method, ...]:
    """All methods, sorted by name: ``[method.name for method in all_methods()]``."""
    files = pkgutil.iter_modules([str(Path(__file__).parent)])
    modules = (importlib.import_module(f"{_PACKAGE}.{file.name}") for file in files)
    declared = (module.METHOD for module in modules if hasattr(module, "METHOD"))
    return tuple(sorted(declared, key=lambda method: method.name))


def find_method(spelling: str) -> Method:
    """Find the method that a user names, such as ``find_method("transmla:4")``.

    Raises:
        ArgumentError: no method has that name.
    """
    selectable = [method for method in all_methods() if method.is_selectable]
    for method in selectable:
        if (parsed := method.parsed(spelling)) is not None:
            return parsed
    latent, merging = (
        ", ".join(method.usage or method.name for method in selectable if ("mla" in method.targets) == is_latent)
        for is_latent in (True, False)
    )
    raise ArgumentError("method", spelling, f"must be one of {merging}; or for mla {latent}")


def choose_method(spelling: str | None, source: ModelSpec, target: ModelSpec) -> Method:
    """Choose the method that a user named, or the default for the target.

    Args:
        spelling: the method's name with its parameters; None for the default.
        source: the source model.
        target: the converted model.

    Raises:
        ArgumentError: no method has that name, or it does not make that target.
        SpecError: the method cannot convert a layer of the source.
    """
    if spelling is None:
        method = next(method for method in all_methods() if method.is_default and method.suits(source, target))
    else:
        method = find_method(spelling)
        if not method.suits(source, target):
            merges = "mla" not in method.targets
            rule = "merges key–value heads, and none are merged here" if merges else "goes with mla"
            raise ArgumentError("method", spelling, rule)
    method.check(source)
    return method
