"""The candidates of a frontier: a ladder of targets, or several methods and ablations at each target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from headwise.conversion.frontiers.candidate import Candidate, read_target
from headwise.conversion.methods import all_methods
from headwise.conversion.planning.plan import ConversionPlan, make_plan
from headwise.costs.formulas.default_targets import PLAIN_FORMATS, conversions
from headwise.errors import ArgumentError, HeadwiseError
from headwise.measure.evaluation.plain_cache import bfloat16_bytes
from headwise.models.checkpoints import Checkpoint

_METHODS_AT = "mla:0.5"
"""The target that methods are compared at where the user names none."""

_TRIED = 256
"""Tokens of a cache by which a format is found to suit a model."""


def list_candidates(
    checkpoint: Checkpoint, targets: Sequence[str] = (), *, methods: bool = False, dtype: torch.dtype | None = None
) -> tuple[list[Candidate], list[str]]:
    """List the candidates of a frontier, and notes that say which targets and methods are left out and why.

    Args:
        checkpoint: the source.
        targets: the targets that the user names; without any, those of `default_targets` (with ``methods``, only MLA
            at half the cache, or the ladder's first possible conversion).
        methods: whether each target is also tried without each of its stages, without all of them, and by the
            published methods.
        dtype: the dtype of the results; the source's when None.

    Raises:
        ArgumentError: a name is no target, a layer cannot have the size, or with ``methods``, a target is no
            conversion.
        SpecError: the source cannot be converted to any of the targets.
    """
    refusals: dict[str, HeadwiseError] = {}
    if targets:
        candidates = [Candidate(target) for target in dict.fromkeys(map(read_target, targets))]
        for candidate in candidates:
            if methods and candidate.cache is not None:
                raise ArgumentError("target", candidate.target, "is no conversion, and has no methods to compare")
            _check(candidate, checkpoint, dtype)
    else:
        ladder = [Candidate(target) for target in default_targets(checkpoint)]
        if methods:
            ladder = [candidate for candidate in ladder if candidate.kind == "converted"]
        candidates = _possible(ladder, checkpoint, dtype, refusals)
        if not candidates:
            raise next(iter(refusals.values()))
        if methods:
            candidates = sorted(candidates, key=lambda candidate: candidate.target != _METHODS_AT)[:1]
    if methods:
        candidates = [
            variant
            for candidate in candidates
            for variant in (
                *_ablations(candidate, checkpoint, dtype),
                *_possible(_baselines(candidate), checkpoint, dtype, refusals),
            )
        ]
    return candidates, _notes(refusals)


def default_targets(checkpoint: Checkpoint) -> list[str]:
    """The ladder of targets for a user who names none: formats of the source's cache, then `conversions`."""
    formats = dict.fromkeys(str(form.fitted(checkpoint.spec)) for form in PLAIN_FORMATS)
    return [*formats, *conversions(checkpoint.spec)]


def _ablations(candidate: Candidate, checkpoint: Checkpoint, dtype: torch.dtype | None) -> list[Candidate]:
    """headwise's own conversion with all stages, without each in turn (and stages that need it), and without any."""

    def plan_without(*left_out: str) -> ConversionPlan:
        return make_plan(checkpoint, candidate.parsed(), dtype=dtype, without=left_out)

    plan = plan_without()
    missing = [[other for other in plan.stages if other not in plan_without(stage).stages] for stage in plan.stages]
    whole = [plan.method.stages] if plan.stages else []
    return [replace(candidate, without=tuple(left_out)) for left_out in ((), *missing, *whole)]


def _baselines(candidate: Candidate) -> list[Candidate]:
    """The other methods for the same target."""
    mechanism = candidate.parsed().mechanism
    spellings = [
        spelling
        for method in all_methods()
        if method.is_selectable and not method.is_default and mechanism in method.targets
        for spelling in method.variants or (method.name,)
    ]
    return [replace(candidate, method=spelling) for spelling in spellings]


def _possible(
    candidates: Sequence[Candidate],
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    refusals: dict[str, HeadwiseError],
) -> list[Candidate]:
    """The candidates that are possible; the errors of the others are added to ``refusals``."""
    possible = []
    for candidate in candidates:
        try:
            _check(candidate, checkpoint, dtype)
        except HeadwiseError as error:
            name = candidate.target if candidate.method is None else f"{candidate.method} for {candidate.target}"
            refusals[name] = error
        else:
            possible.append(candidate)
    return possible


def _check(candidate: Candidate, checkpoint: Checkpoint, dtype: torch.dtype | None) -> None:
    """Refuse a candidate that the source cannot become, before any weight is read.

    Raises:
        ArgumentError: a layer cannot have the size, or the format does not suit its heads.
        SpecError: a layer is of a kind that is not converted, or not quantised.
    """
    if candidate.cache is None:
        make_plan(checkpoint, candidate.parsed(), dtype=dtype, method=candidate.method)
    else:
        bfloat16_bytes(checkpoint, _TRIED, candidate.cache)


def _notes(refusals: dict[str, HeadwiseError]) -> list[str]:
    """A note for each reason, with all candidates that are left out for it."""
    by_reason: dict[str, list[str]] = {}
    for name, error in refusals.items():
        by_reason.setdefault(str(error), []).append(name)
    return [f"not tried: {', '.join(names)} ({reason})" for reason, names in by_reason.items()]
