"""The candidates of a frontier: a ladder of targets, or several methods and ablations at each target."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from headwise.checkpoints import Checkpoint
from headwise.conversion.methods import Method, all_methods, find_method
from headwise.conversion.planning.plan import ConversionPlan, make_plan
from headwise.conversion.planning.target import Target, parse_target
from headwise.errors import ArgumentError, HeadwiseError
from headwise.specs import GroupedSpec

BUDGETS = (0.75, 0.5, 0.33, 0.25)
"""The fractions of the source's cache that MLA candidates have."""

TARGETS = "mla:F (a fraction of the source's cache), mla:R+P (latent and rotary key), gqa:K, mqa or mha"


@dataclass(frozen=True)
class Candidate:
    """One conversion to try.

    Attributes:
        target: ``mla:F``, ``mla:R+P``, ``gqa:K``, ``mqa`` or ``mha``.
        method: the spelling of a method; headwise's own when None.
        without: the stages to leave out.
    """

    target: str
    method: str | None = None
    without: tuple[str, ...] = ()

    @property
    def way(self) -> str:
        """The method and the missing stages, in words."""
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
        parts = (self.target, *([] if self.way == "headwise" else [self.way]))
        return re.sub(r"[^a-z0-9.+]+", "-", "-".join(parts))

    def options(self) -> dict[str, Any]:
        """Its arguments of `headwise.convert`."""
        return {**_options(self.target), "method": self.method, "without": self.without}

    def parsed(self) -> Target:
        """The target as a `Target`."""
        return parse_target(**_options(self.target))


def read_target(text: str) -> str:
    """A user's target in its one spelling, such as ``mla:0.5`` for ``MLA: .50``.

    Raises:
        ArgumentError: it is no target.
    """
    target = re.sub(r"\s", "", text).lower()
    kind, _, size = target.partition(":")
    try:
        if kind == "mla" and "+" in size:
            rank, rope = map(int, size.split("+"))
            target = f"mla:{rank}+{rope}"
        elif kind == "mla":
            target = f"mla:{float(size):.12g}"
        elif kind == "gqa":
            target = f"gqa:{int(size)}"
        parse_target(**_options(target))
    except (ValueError, OverflowError) as error:
        reason = f"; {error.field} {error.rule}" if isinstance(error, HeadwiseError) and error.field != "to" else ""
        raise ArgumentError("target", text, f"must be {TARGETS}{reason}") from None
    return target


def list_candidates(
    checkpoint: Checkpoint, targets: Sequence[str] = (), *, methods: bool = False, dtype: torch.dtype | None = None
) -> tuple[list[Candidate], list[str]]:
    """List the candidates of a frontier, and notes that say which targets and methods are left out and why.

    Args:
        checkpoint: the source.
        targets: the targets that the user names; without any, a ladder: MLA at each of `BUDGETS`, GQA at each proper
            divisor of the key–value heads, and MQA (with ``methods``, only MLA at half the cache, or the ladder's
            first possible target).
        methods: whether each target is also tried without each of its stages, without all of them, and by the
            published methods.
        dtype: the dtype of the results; the source's when None.

    Raises:
        ArgumentError: a name is no target, or a layer cannot have the size.
        SpecError: the source cannot be converted to any of the targets.
    """
    refusals: dict[str, HeadwiseError] = {}
    if targets:
        candidates = [Candidate(target) for target in dict.fromkeys(map(read_target, targets))]
        for candidate in candidates:
            make_plan(checkpoint, candidate.parsed(), dtype=dtype)
    else:
        candidates = _possible(
            [Candidate(target) for target in default_targets(checkpoint)], checkpoint, dtype, refusals
        )
        if not candidates:
            raise next(iter(refusals.values()))
        if methods:
            candidates = sorted(candidates, key=lambda candidate: candidate.target != "mla:0.5")[:1]
    if methods:
        candidates = [
            variant
            for candidate in candidates
            for variant in (
                *_ablations(candidate, checkpoint, dtype),
                *_possible(_baselines(candidate), checkpoint, dtype, refusals),
            )
        ]
    return candidates, [f"not tried: {name} ({error})" for name, error in refusals.items()]


def default_targets(checkpoint: Checkpoint) -> list[str]:
    """The ladder of targets for a user who names none."""
    heads = {layer.num_kv_heads for layer in checkpoint.spec.layers if isinstance(layer, GroupedSpec)}
    fewest = min(heads, default=1)
    divisors = [count for count in range(fewest - 1, 1, -1) if fewest % count == 0]
    grouped = [f"gqa:{count}" for count in divisors] + (["mqa"] if fewest > 1 else [])
    return [*(f"mla:{budget:g}" for budget in BUDGETS), *grouped]


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
            make_plan(checkpoint, candidate.parsed(), dtype=dtype, method=candidate.method)
        except HeadwiseError as error:
            refusals[candidate.method or candidate.target] = error
        else:
            possible.append(candidate)
    return possible


def _options(target: str) -> dict[str, Any]:
    """A target as keywords of `parse_target` and `headwise.convert`."""
    kind, _, size = target.partition(":")
    if kind != "mla":
        return {"to": target}
    if "+" in size:
        rank, rope = map(int, size.split("+"))
        return {"to": "mla", "kv_lora_rank": rank, "qk_rope_head_dim": rope}
    return {"to": "mla", "kv_budget": float(size)}
