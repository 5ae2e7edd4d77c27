"""Reduce key–value heads by keeping the first head of each group.

The GQA paper's second choice (Ainslie et al. 2023, figure 4), behind mean pooling and ahead of a random head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.conversion.methods.base import Evidence, MergingMethod
from headwise.models.specs import GroupedSpec


class FirstHead(MergingMethod):
    """See `first_head`."""

    name = "first_head"
    label = "first head"
    uses_text = False
    is_cheap = True

    def solve_heads(
        self, state: Mapping[str, Tensor], source: GroupedSpec, target: GroupedSpec, evidence: Evidence
    ) -> dict[str, Tensor]:
        """See `first_head`."""
        return first_head(state, source, target)


def first_head(state: Mapping[str, Tensor], source: GroupedSpec, target: GroupedSpec) -> dict[str, Tensor]:
    """Reduce a layer's key–value heads to the first head of each group of neighbours.

    For example ``first_head(state, source, as_grouped(source, 1))`` keeps the first head alone.

    Args:
        state: the layer's tensors by its own names.
        source: the layer's spec.
        target: the layer's spec with fewer key–value heads, a divisor of the source's.

    Returns:
        The converted layer's tensors, in the dtype of ``state``.
    """
    step = source.num_kv_heads // target.num_kv_heads
    out = dict(state)
    for name, tensor in state.items():
        if name.partition(".")[0] in ("k_proj", "v_proj"):
            out[name] = torch.unflatten(tensor, 0, (source.num_kv_heads, -1))[::step].flatten(0, 1)
    return out


METHOD = FirstHead()
