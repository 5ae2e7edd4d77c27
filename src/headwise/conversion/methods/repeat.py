"""More key–value heads: each is repeated for the query heads that read it. No logit changes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.conversion.methods.base import Evidence, LayerTarget, Method, kv_heads
from headwise.conversion.solvers.layer import Layer
from headwise.specs import GroupedSpec, ModelSpec


class Repeat(Method):
    """See `repeat_heads`."""

    name = "repeat"
    label = "repeated heads"
    targets = frozenset({"mha", "gqa", "mqa"})
    is_default = True
    is_selectable = False
    is_cheap = True

    def suits(self, source: ModelSpec, target: ModelSpec) -> bool:
        """There are more key–value heads afterwards."""
        return super().suits(source, target) and kv_heads(target) > kv_heads(source)

    def is_exact(self, source: ModelSpec, target: ModelSpec) -> bool:
        """Always."""
        return True

    def solve(self, source: Layer, target: LayerTarget, evidence: Evidence) -> Layer:
        """See `repeat_heads`."""
        assert isinstance(source.spec, GroupedSpec)
        assert isinstance(target.spec, GroupedSpec)
        return Layer(target.spec, repeat_heads(source.state, source.spec, target.spec), norm_eps=source.norm_eps)


def repeat_heads(state: Mapping[str, Tensor], source: GroupedSpec, target: GroupedSpec) -> dict[str, Tensor]:
    """A layer with a multiple of its key–value heads, equal ones side by side; bit for bit the source's numbers."""
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
