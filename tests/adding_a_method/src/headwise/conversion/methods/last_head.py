"""A worked example of a method: reduce key–value heads by keeping the last head of each group."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.conversion.methods.base import Evidence, MergingMethod
from headwise.conversion.methods.repeat import head_tensors
from headwise.models.specs import GroupedSpec


class LastHead(MergingMethod):
    """Keep the last head of each group."""

    name = "last_head"
    label = "last head"
    uses_text = False
    is_cheap = True

    def solve_heads(
        self, state: Mapping[str, Tensor], source: GroupedSpec, target: GroupedSpec, evidence: Evidence
    ) -> dict[str, Tensor]:
        """Keep every ``K / K'``-th head."""
        step = source.num_kv_heads // target.num_kv_heads
        out = dict(state)
        for name in head_tensors(state, source):
            heads = torch.unflatten(state[name], 0, (source.num_kv_heads, -1))  # [K, D, E], or [K, D] for a bias
            out[name] = heads[step - 1 :: step].flatten(0, 1)
        return out


METHOD = LastHead()
