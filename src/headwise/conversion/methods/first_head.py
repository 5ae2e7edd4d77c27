"""Fewer key–value heads by keeping the first of those that come to share one.

The GQA paper's second choice (Ainslie et al. 2023, figure 4), behind mean pooling and ahead of a random head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.conversion.methods.base import Evidence, LayerTarget, MergingMethod
from headwise.conversion.solvers.layer import Layer
from headwise.specs import GroupedSpec


class FirstHead(MergingMethod):
    """See `first_head`."""

    name = "first_head"
    label = "first head"
    uses_text = False
    is_cheap = True

    def solve(self, source: Layer, target: LayerTarget, evidence: Evidence) -> Layer:
        """See `first_head`."""
        assert isinstance(source.spec, GroupedSpec)
        assert isinstance(target.spec, GroupedSpec)
        return Layer(target.spec, first_head(source.state, source.spec, target.spec), norm_eps=source.norm_eps)


def first_head(state: Mapping[str, Tensor], source: GroupedSpec, target: GroupedSpec) -> dict[str, Tensor]:
    """A layer with fewer key–value heads: of those that come to share one, the first stays.

    Args:
        state: the layer's tensors by its own names.
        source: what they are.
        target: the same layer with a divisor of the key–value heads.
    """
    step = source.num_kv_heads // target.num_kv_heads
    out = dict(state)
    for name, tensor in state.items():
        if name.partition(".")[0] in ("k_proj", "v_proj"):
            out[name] = torch.unflatten(tensor, 0, (source.num_kv_heads, -1))[::step].flatten(0, 1)
    return out


METHOD = FirstHead()
