"""The guides' claims, by topic. A file that assigns ``CLAIMS`` is read; a new claim is an entry of one of them."""

from __future__ import annotations

import importlib
import pkgutil

from headwise.study.audit.claim import Claim


def all_claims() -> tuple[Claim, ...]:
    """Every claim, C1 to C26 and then the sections of exact figures and of selection rules.

    For example ``[claim.id for claim in all_claims()][:2]`` is ``["C1", "C2"]``.
    """
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    found = [claim for module in modules for claim in module.CLAIMS]
    return tuple(sorted(found, key=_order))


def _order(claim: Claim) -> tuple[bool, int]:
    digits = "".join(letter for letter in claim.id if letter.isdigit())
    return not claim.id.startswith("C"), int(digits)
