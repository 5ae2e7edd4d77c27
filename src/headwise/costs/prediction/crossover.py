"""The crossover of MLA's two implementations: absorbed for few new tokens, expanded for many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from headwise.costs.formulas.latent import best_impl
from headwise.costs.formulas.stages import attended_pairs
from headwise.costs.prediction.hardware import Device
from headwise.costs.prediction.operators import Pass, operators
from headwise.costs.prediction.roofline import seconds
from headwise.models.specs import LatentSpec, ModelSpec


def most_absorbed(spec: LatentSpec, total: int) -> int:
    """The most new tokens that headwise's layer attends to ``total`` with by absorbed queries; 0 if none.

    It takes the implementation of fewer FLOPs. About ``R (N + V) / (2R − N − V)`` where the context is much longer.

    For example ``most_absorbed(layer_spec("deepseek-v3"), 32_768)`` is 170.
    """

    def is_absorbed(new: int) -> bool:
        pairs = attended_pairs(new, total, causal=True, window=spec.sliding_window)
        return best_impl(spec, new, total, pairs) == "absorbed"

    return _last(is_absorbed, total)


def fastest_absorbed(model: ModelSpec, step: Pass, hardware: Device) -> int | None:
    """The most new tokens of each sequence for which absorbed attention is predicted to take less time; 0 if none.

    For example ``fastest_absorbed(read_spec("deepseek-v3"), Pass(total=32_768, ranks=8), device("h200"))``.

    Args:
        model: with its body.
        step: its batch, context, dtype and devices.
        hardware: one of the devices.

    Returns:
        None for a model without MLA.
    """
    if not any(isinstance(layer, LatentSpec) for layer in model.layers):
        return None

    def is_absorbed(new: int) -> bool:
        absorbed, expanded = (
            sum(timed.seconds for timed in seconds(operators(model, sized), hardware, sized))
            for sized in (replace(step, new=new, impl=impl) for impl in ("absorbed", "expanded"))
        )
        return absorbed < expanded

    return _last(is_absorbed, step.total)


def _last(holds: Callable[[int], bool], total: int) -> int:
    """The last of 1 … total that a condition holds for, which holds up to there; 0 if it never does."""
    low, high = 0, total
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
