"""Reduce key–value heads by mean pooling, as the GQA paper does (Ainslie et al. 2023, section 2.1)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.conversion.methods.base import Evidence, MergingMethod
from headwise.conversion.methods.repeat import head_tensors
from headwise.models.specs import GroupedSpec


class Mean(MergingMethod):
    """See `mean_heads`."""

    name = "mean"
    label = "mean pooling"
    uses_text = False
    is_cheap = True

    def solve_heads(
        self, state: Mapping[str, Tensor], source: GroupedSpec, target: GroupedSpec, evidence: Evidence
    ) -> dict[str, Tensor]:
        """See `mean_heads`."""
        return mean_heads(state, source, target)


def mean_heads(state: Mapping[str, Tensor], source: GroupedSpec, target: GroupedSpec) -> dict[str, Tensor]:
    """Reduce a layer's key–value heads to the means of neighbours, biases included."""
    out = dict(state)
    for name in head_tensors(state, source):
        size = source.num_kv_heads // target.num_kv_heads
        heads = torch.unflatten(state[name].double(), 0, (target.num_kv_heads, size, -1))  # [K', size, D, E]
        out[name] = heads.mean(1).to(state[name].dtype).flatten(0, 1)
    return out


METHOD = Mean()
