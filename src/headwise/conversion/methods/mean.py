"""Fewer key–value heads by mean pooling, the GQA paper's way (Ainslie et al. 2023, section 2.1)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.conversion.methods.base import Evidence, LayerTarget, MergingMethod
from headwise.conversion.methods.repeat import head_tensors
from headwise.conversion.solvers.layer import Layer
from headwise.specs import GroupedSpec


class Mean(MergingMethod):
    """See `mean_heads`."""

    name = "mean"
    label = "mean of heads"
    uses_text = False
    is_cheap = True

    def solve(self, source: Layer, target: LayerTarget, evidence: Evidence) -> Layer:
        """See `mean_heads`."""
        assert isinstance(source.spec, GroupedSpec)
        assert isinstance(target.spec, GroupedSpec)
        return Layer(target.spec, mean_heads(source.state, source.spec, target.spec), norm_eps=source.norm_eps)


def mean_heads(state: Mapping[str, Tensor], source: GroupedSpec, target: GroupedSpec) -> dict[str, Tensor]:
    """A layer with fewer key–value heads, each the mean of neighbours, biases included."""
    out = dict(state)
    for name in head_tensors(state, source):
        size = source.num_kv_heads // target.num_kv_heads
        heads = torch.unflatten(state[name].double(), 0, (target.num_kv_heads, size, -1))  # [K', size, D, E]
        out[name] = heads.mean(1).to(state[name].dtype).flatten(0, 1)
    return out


METHOD = Mean()
