"""One layer by itself to another number of key–value heads, without a model around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from headwise.conversion.methods import Evidence, LayerTarget, all_methods
from headwise.conversion.methods.repeat import repeat_heads
from headwise.conversion.solvers.layer import Layer
from headwise.conversion.solvers.statistics import Statistics
from headwise.errors import ArgumentError
from headwise.specs import GroupedSpec


def convert_to_grouped(
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    target: GroupedSpec,
    *,
    method: Literal["aligned", "mean", "first_head"] = "aligned",
    statistics: Statistics | None = None,
    sensitivity: Tensor | None = None,
) -> dict[str, Tensor]:
    """Repeat key and value heads (bit for bit the source's), or merge those that come to share one.

    Args:
        state: the layer's tensors by its own names (``q_proj.weight`` …).
        source: what they are.
        target: the same layer with a multiple or a divisor of the key–value heads.
        method: how heads are merged, by the name of a method for GQA.
        statistics: for ``aligned``, means over a text; weights alone decide when None.
        sensitivity: for ``aligned``, ``[E, E]``, the cost of an error of the output.

    Raises:
        ArgumentError: there is no such method.
        SpecError: ``aligned`` has no place to undo a mixture of heads in.
    """
    merging = {known.name: known for known in all_methods() if known.is_selectable and "gqa" in known.targets}
    if method not in merging:
        raise ArgumentError("method", method, f"must be one of {', '.join(merging)}")
    if target.num_kv_heads >= source.num_kv_heads:
        return repeat_heads(state, source, target)
    layer = merging[method].solve(Layer(source, state), LayerTarget(target), Evidence(statistics, sensitivity))
    return dict(layer.state)
