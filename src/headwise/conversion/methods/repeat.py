"""Key–value heads repeated for the query heads that read them, and one layer converted without a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.conversion.methods.base import Evidence, GroupedMethod, all_methods, kv_heads
from headwise.conversion.solvers.layer import Layer, LayerTarget
from headwise.conversion.solvers.statistics import Statistics
from headwise.errors import ArgumentError
from headwise.models.specs import GroupedSpec, ModelSpec, as_grouped


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


def convert_to_grouped(
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    target: GroupedSpec,
    *,
    method: str = "aligned",
    statistics: Statistics | None = None,
    sensitivity: Tensor | None = None,
) -> dict[str, Tensor]:
    """Convert one layer's attention to more key–value heads by repeating them, or to fewer by merging them.

    For example ``convert_to_grouped(state, source, as_grouped(source, 1), method="mean")``.

    Args:
        state: the layer's tensors by its own names (``q_proj.weight`` …).
        source: the layer's spec.
        target: the layer's spec with a multiple or a divisor of the key–value heads, from
            `headwise.models.specs.as_grouped`.
        method: the name of the method that merges heads; repeating copies the source's numbers bit for bit.
        statistics: the means over a text, which ``aligned`` uses; None to align by weights alone.
        sensitivity: the cost of an error of the output, ``[E, E]``, which ``aligned`` uses; None where every
            direction costs the same.

    Returns:
        The converted layer's tensors.

    Raises:
        ArgumentError: no method has that name, ``target`` has an impossible number of key–value heads, or it differs
            from ``source`` in something else.
        SpecError: the layer leaves ``aligned`` no place to undo a mixture of heads in.
    """
    if target != as_grouped(source, target.num_kv_heads):
        rule = "must be as_grouped(source, num_kv_heads): only the number of key–value heads may differ"
        raise ArgumentError("target", target, rule)
    selectable = (candidate for candidate in all_methods() if candidate.is_selectable)
    methods = {candidate.name: candidate for candidate in selectable if "gqa" in candidate.targets}
    if method not in methods:
        raise ArgumentError("method", method, f"must be one of {', '.join(methods)}")
    if target.num_kv_heads >= source.num_kv_heads:
        return repeat_heads(state, source, target)
    layer = methods[method].solve(Layer(source, state), LayerTarget(target), Evidence(statistics, sensitivity))
    return dict(layer.state)
