"""The candidates of a frontier: how a user spells one, and the ladder of those that are tried.

A target is a conversion (``mla:0.5``), a format that the source's own cache is stored in (``kivi4``), or a conversion
with its cache in codes, of so many of the bytes of the source's cache in bfloat16 (``mla@0.25``). Candidates are
either a ladder of targets, or several methods and ablations at each target.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from headwise.conversion.methods import Method, all_methods, find_method
from headwise.conversion.plan import ConversionPlan, make_plan
from headwise.costs.formulas.target import PLAIN_FORMATS, Target, conversion_targets, parse_target, target_options
from headwise.errors import ArgumentError, HeadwiseError
from headwise.measure.evaluation.beside_source import bfloat16_bytes
from headwise.models.checkpoints import Checkpoint
from headwise.runtime.quantization.formats import ENGINE_FORMATS, parse_format

Kind = Literal["quantised", "converted", "both", "published"]
"""What is done to the cache: the source's own in fewer bits, a conversion, or a conversion with a cache in codes.

``published`` is a method of others that is no candidate of `headwise.frontier`: its results are measured elsewhere.
"""

TARGETS = (
    "a conversion, such as mla:0.5, gqa:2, mqa or mla@0.25, or a format of the cache, such as int8 or llama.cpp:q4_0;"
    " docs/frontier.md has all"
)
"""The kinds of targets, in words."""


class Tried(Protocol):
    """The facts that a point needs about the candidate that was tried; see `Candidate`."""

    @property
    def target(self) -> str:
        """The name of the target."""

    @property
    def kind(self) -> Kind:
        """The kind of change that is made to the cache."""

    @property
    def way(self) -> str:
        """The method, in words."""


@dataclass(frozen=True)
class Candidate:
    """One conversion, or one format of the source's cache, to try.

    Attributes:
        target: the target as `read_target` spells it.
        method: the spelling of a method; headwise's own when None.
        without: the stages to leave out.
    """

    target: str
    method: str | None = None
    without: tuple[str, ...] = ()

    @property
    def cache(self) -> str | None:
        """The format that the source's own cache is stored in; None for a conversion."""
        return self.target if _is_format(self.target) else None

    @property
    def kind(self) -> Kind:
        """The kind of change that is made to the cache."""
        mechanism, _, fraction = self.target.partition("@")
        if self.cache is not None or mechanism == "same":
            return "quantised"
        return "both" if fraction else "converted"

    @property
    def way(self) -> str:
        """The method and the missing stages, in words."""
        if self.cache is not None:
            return "plain quantisation"
        if self.method is not None:
            return self.method
        if self._is_without_any_stage:
            return "headwise without any stage"
        return " ".join(("headwise", *(("without", ", ".join(self.without)) if self.without else ())))

    @property
    def _is_without_any_stage(self) -> bool:
        """Whether all stages of headwise's own method for the target are left out."""
        mechanism = self.parsed().mechanism
        defaults = (method for method in all_methods() if method.is_default and mechanism in method.targets)
        return any(set(self.without) == set(method.stages) for method in defaults if method.stages)

    @property
    def parsed_method(self) -> Method | None:
        """The method; None for headwise's own."""
        return None if self.method is None else find_method(self.method)

    @property
    def is_variant(self) -> bool:
        """Whether it is one of several variants of a method, of which the best is shown."""
        return self.parsed_method is not None and bool(self.parsed_method.variants)

    @property
    def slug(self) -> str:
        """A name for files, which tells it from other candidates."""
        parts = (self.target, *([] if self.way in ("headwise", "plain quantisation") else [self.way]))
        return re.sub(r"[^a-z0-9.+@]+", "-", "-".join(parts))

    def options(self) -> dict[str, Any]:
        """The arguments of `headwise.convert` for a conversion."""
        return {**target_options(self.target), "method": self.method, "without": self.without}

    def parsed(self) -> Target:
        """The target of a conversion as a `Target`."""
        return parse_target(**target_options(self.target))


def read_target(text: str) -> str:
    """A user's target in its one spelling, such as ``mla:0.5`` for ``MLA: .50`` and ``int8`` for ``int8/int8``.

    Raises:
        ArgumentError: the text is no target.
    """
    target = re.sub(r"\s", "", text).lower()
    if _is_format(target) or target.partition(":")[0] in ENGINE_FORMATS:
        return str(parse_format(target, name="target"))
    mechanism, at, fraction = target.partition("@")
    kind, _, size = mechanism.partition(":")
    try:
        if kind == "mla" and "+" in size:
            rank, rope = map(int, size.split("+"))
            mechanism = f"mla:{rank}+{rope}"
        elif kind == "mla" and not (at and mechanism == "mla"):  # a budget of bytes needs no other
            mechanism = f"mla:{float(size):.12g}"
        elif kind == "gqa":
            mechanism = f"gqa:{int(size)}"
        target = f"{mechanism}@{float(fraction):.12g}" if at else mechanism
        parse_target(**target_options(target))
    except (ValueError, OverflowError) as error:
        rule = f"must be {TARGETS}"
        if isinstance(error, HeadwiseError) and error.field != "to":  # a size of a known kind
            rule = f"{error.field} {error.rule}"
        raise ArgumentError("target", text, rule) from None
    return target


def _is_format(target: str) -> bool:
    """Whether a target is a format of the source's own cache."""
    try:
        parse_format(target)
    except ArgumentError:
        return False
    return True


_METHODS_AT = "mla:0.5"
"""The target that methods are compared at where the user names none."""

_TRIED = 256
"""The number of tokens of a cache by which a format is found to suit a model."""


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
    """The ladder of targets for a user who names none: formats of the source's cache, then `conversion_targets`."""
    formats = dict.fromkeys(str(form.fitted(checkpoint.spec)) for form in PLAIN_FORMATS)
    return [*formats, *conversion_targets(checkpoint.spec)]


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
