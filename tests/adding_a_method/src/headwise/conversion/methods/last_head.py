"""A worked example of a method: it keeps the last of the key–value heads that are merged."""

from __future__ import annotations

import torch

from headwise.conversion.methods.base import Evidence, LayerTarget, MergingMethod
from headwise.conversion.methods.repeat import head_tensors
from headwise.conversion.solvers.layer import Layer
from headwise.specs import GroupedSpec


class LastHead(MergingMethod):
    """The last head of each group, in the place of all."""

    name = "last_head"
    label = "last head"
    uses_text = False
    is_cheap = True

    def solve(self, source: Layer, target: LayerTarget, evidence: Evidence) -> Layer:
        """Keep every ``K / K'``-th head."""
        assert isinstance(source.spec, GroupedSpec)
        assert isinstance(target.spec, GroupedSpec)
        heads, step = source.spec.num_kv_heads, source.spec.num_kv_heads // target.spec.num_kv_heads
        state = dict(source.state)
        for name in head_tensors(state, source.spec):
            state[name] = torch.unflatten(state[name], 0, (heads, -1))[step - 1 :: step].flatten(0, 1)
        return Layer(target.spec, state, norm_eps=source.norm_eps)


METHOD = LastHead()
