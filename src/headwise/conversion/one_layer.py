"""Convert a single layer to another number of key–value heads, without a model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from headwise.conversion.methods import Evidence, all_methods
from headwise.conversion.methods.repeat import repeat_heads
from headwise.conversion.solvers.layer import Layer
from headwise.conversion.solvers.statistics import Statistics
from headwise.conversion.solvers.target import LayerTarget
from headwise.errors import ArgumentError
from headwise.models.specs import GroupedSpec, as_grouped


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
