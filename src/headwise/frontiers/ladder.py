"""What a frontier tries: the targets of a ladder, and at one target the ways to get there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from headwise.checkpoints import Checkpoint
from headwise.conversion.methods import STAGES, Method, all_methods, find_method
from headwise.conversion.planning.plan import make_plan
from headwise.conversion.planning.target import Target, parse_target
from headwise.errors import ArgumentError, HeadwiseError
from headwise.specs import GroupedSpec

BUDGETS = (0.75, 0.5, 0.33, 0.25)
"""Fractions of the source's cache that MLA is tried at."""

TARGETS = "mla:F (a fraction of the source's cache), mla:R+P (latent and rotary key), gqa:K, mqa or mha"


@dataclass(frozen=True)
class Candidate:
    """One conversion to try.

    Attributes:
        target: ``mla:F``, ``mla:R+P``, ``gqa:K``, ``mqa`` or ``mha``.
        method: of `headwise.convert`; headwise's own when None.
        without: stages left out.
    """

    target: str
    method: str | None = None
    without: tuple[str, ...] = ()

    @property
    def way(self) -> str:
        """How it is done, in words."""
        if self.method is not None:
            return self.method
        if set(self.without) == set(STAGES):
            return "headwise without any stage"
        return " ".join(("headwise", *(("without", ", ".join(self.without)) if self.without else ())))

    @property
    def parsed_method(self) -> Method | None:
        """The method that is named, or None for headwise's own."""
        return None if self.method is None else find_method(self.method)

    @property
    def is_variant(self) -> bool:
        """Whether it is one of several variants of a method that are tried for the best to be shown."""
        return self.parsed_method is not None and bool(self.parsed_method.variants)

    @property
    def slug(self) -> str:
        """A name for files."""
        parts = (self.target, *([] if self.way == "headwise" else [self.way]))
        return re.sub(r"[^a-z0-9.+]+", "-", "-".join(parts))

    def options(self) -> dict[str, Any]:
        """The arguments of `headwise.convert` that make it what it is."""
        return {**_options(self.target), "method": self.method, "without": self.without}

    def parsed(self) -> Target:
        """The target as conversions know it."""
        return parse_target(**_options(self.target))


def read_target(text: str) -> str:
    """A target as it is always written.

    Raises:
        ArgumentError: it is none.
    """
    own = re.sub(r"\s", "", text).lower()
    kind, _, size = own.partition(":")
    try:
        if kind == "mla" and "+" in size:
            rank, rope = map(int, size.split("+"))
            own = f"mla:{rank}+{rope}"
        elif kind == "mla":
            own = f"mla:{float(size):.12g}"
        elif kind == "gqa":
            own = f"gqa:{int(size)}"
        parse_target(**_options(own))
    except (ValueError, OverflowError) as error:
        reason = f"; {error.field} {error.rule}" if isinstance(error, HeadwiseError) and error.field != "to" else ""
        raise ArgumentError("target", text, f"must be {TARGETS}{reason}") from None
    return own


def list_candidates(
    checkpoint: Checkpoint, targets: Sequence[str] = (), *, methods: bool = False, dtype: torch.dtype | None = None
) -> tuple[list[Candidate], list[str]]:
    """What to try, and what is left out of it and why.

    Args:
        checkpoint: the source.
        targets: those asked for; when there are none, a ladder of MLA at a few budgets, GQA at each proper divisor of
            the key–value heads, and MQA (with ``methods``, MLA at half the cache alone, or the ladder's first where
            that cannot be).
        methods: at each target, in place of headwise's own conversion alone, also without each stage that it has,
            without any, and by the published methods.
        dtype: of the results; the source's when None.

    Raises:
        ArgumentError: a target that was asked for is none, or of a size that the source does not have.
        SpecError: the source cannot become any of them.
    """
    refused: dict[str, HeadwiseError] = {}
    if targets:
        candidates = [Candidate(target) for target in dict.fromkeys(map(read_target, targets))]
        for candidate in candidates:
            make_plan(checkpoint, candidate.parsed(), dtype=dtype)
    else:
        candidates = _possible(
            [Candidate(target) for target in default_targets(checkpoint)], checkpoint, dtype, refused
        )
        if not candidates:
            raise next(iter(refused.values()))
        if methods:
            candidates = sorted(candidates, key=lambda candidate: candidate.target != "mla:0.5")[:1]
    if methods:
        candidates = [
            way
            for candidate in candidates
            for way in (
                *_own_ways(candidate, checkpoint, dtype),
                *_possible(_baselines(candidate), checkpoint, dtype, refused),
            )
        ]
    return candidates, [f"not tried: {what} ({error})" for what, error in refused.items()]


def default_targets(checkpoint: Checkpoint) -> list[str]:
    """The ladder that is tried when no target is asked for."""
    heads = {layer.num_kv_heads for layer in checkpoint.spec.layers if isinstance(layer, GroupedSpec)}
    least = min(heads, default=1)
    divisors = [count for count in range(least - 1, 1, -1) if least % count == 0]
    grouped = [f"gqa:{count}" for count in divisors] + (["mqa"] if least > 1 else [])
    return [*(f"mla:{budget:g}" for budget in BUDGETS), *grouped]


def _own_ways(candidate: Candidate, checkpoint: Checkpoint, dtype: torch.dtype | None) -> list[Candidate]:
    """Headwise's conversion, without each stage that it has in turn, and what goes with it, and without all."""

    def stages_without(*left_out: str) -> tuple[str, ...]:
        return make_plan(checkpoint, candidate.parsed(), dtype=dtype, without=left_out).stages

    stages = stages_without()
    fewer = [[other for other in stages if other not in stages_without(stage)] for stage in stages]
    return [replace(candidate, without=tuple(left_out)) for left_out in ((), *fewer, *([STAGES] if stages else []))]


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
    refused: dict[str, HeadwiseError],
) -> list[Candidate]:
    """Those that can be made; of the others the reason goes into ``refused``."""
    found = []
    for candidate in candidates:
        try:
            make_plan(checkpoint, candidate.parsed(), dtype=dtype, method=candidate.method)
        except HeadwiseError as error:
            refused[candidate.method or candidate.target] = error
        else:
            found.append(candidate)
    return found


def _options(target: str) -> dict[str, Any]:
    """A target as `parse_target` and `headwise.convert` take it."""
    kind, _, size = target.partition(":")
    if kind != "mla":
        return {"to": target}
    if "+" in size:
        rank, rope = map(int, size.split("+"))
        return {"to": "mla", "kv_lora_rank": rank, "qk_rope_head_dim": rope}
    return {"to": "mla", "kv_budget": float(size)}
