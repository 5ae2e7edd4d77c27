"""Increase key–value heads by repeating each for the query heads that read it. No logit changes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.conversion.methods.base import Evidence, GroupedMethod, kv_heads
from headwise.models.specs import GroupedSpec, ModelSpec


class Repeat(GroupedMethod):
    """See `repeat_heads`."""

    name = "repeat"
    label = "repeated heads"
    is_default = True
    is_selectable = False
    is_cheap = True

    def suits(self, source: ModelSpec, target: ModelSpec) -> bool:
        """Whether the target has more key–value heads."""
        return super().suits(source, target) and kv_heads(target) > kv_heads(source)

    def is_exact(self, source: ModelSpec, target: ModelSpec) -> bool:
        """Always True."""
        return True

    def solve_heads(
        self, state: Mapping[str, Tensor], source: GroupedSpec, target: GroupedSpec, evidence: Evidence
    ) -> dict[str, Tensor]:
        """See `repeat_heads`."""
        return repeat_heads(state, source, target)


def repeat_heads(state: Mapping[str, Tensor], source: GroupedSpec, target: GroupedSpec) -> dict[str, Tensor]:
    """Repeat a layer's key–value heads, equal heads side by side; the numbers are the source's, bit for bit."""
    times = target.num_kv_heads // source.num_kv_heads
    out = dict(state)
    for name in head_tensors(state, source):
        heads = torch.unflatten(state[name], 0, (source.num_kv_heads, -1))  # [K, D, E], or [K, D] for a bias
        out[name] = heads.repeat_interleave(times, dim=0).flatten(0, 1)
    return out


def head_tensors(state: Mapping[str, Tensor], source: GroupedSpec) -> list[str]:
    """The names of a layer's tensors whose rows belong to key–value heads."""
    projections = ("k_proj", "v_proj", "k_norm") if source.qk_norm == "full" else ("k_proj", "v_proj")
    return [name for name in state if name.partition(".")[0] in projections]


METHOD = Repeat()
