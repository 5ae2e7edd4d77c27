"""One small file a model family, named as transformers' ``model_type``; each defines ``FAMILY``."""

import importlib
import pkgutil
from typing import cast

from headwise.checkpoints.families.base import Family
from headwise.errors import SpecError
from headwise.specs import HOSTED_PREFIX

__all__ = ["Family", "family_names", "family_of"]


def family_names() -> list[str]:
    """The families there is a file for."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")


def family_of(model_type: str) -> Family:
    """The family of a model type, a converted one's included (``headwise_llama`` is of the llama family).

    Raises:
        SpecError: there is no such family.
    """
    name = model_type.removeprefix(HOSTED_PREFIX)
    if name not in family_names():
        raise SpecError("model_type", name, f"cannot be converted yet; can: {', '.join(family_names())}")
    return cast(Family, importlib.import_module(f"{__name__}.{name}").FAMILY)
