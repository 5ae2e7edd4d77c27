"""The change of one layer, and what it does there.

Shapes: N samples, T keys, H query heads, K key–value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from headwise.base.threads import torch_threads
from headwise.conversion.preparation.change import Change
from headwise.conversion.preparation.chosen import Output, best_of
from headwise.conversion.preparation.drawn import drawn
from headwise.conversion.preparation.fit import OFFSETS, fit, score_loss, where_it_helps
from headwise.conversion.preparation.room import Room, within
from headwise.conversion.preparation.samples import Projected
from headwise.conversion.preparation.shift import shift, why_no_shift
from headwise.models.specs import GroupedSpec
from headwise.runtime.quantization.formats import EngineFormat

Samples = tuple[Tensor, Tensor]
"""Queries ``[K, N, D]`` and keys ``[K, T, D]``."""

_STARTS = 24
"""Starts of the search on a text."""


def best_change(
    projected: Projected,
    state: Mapping[str, Tensor],
    formats: Sequence[EngineFormat],
    room: Room,
    *,
    shifts: bool,
    longest: int,
    on_text: bool,
) -> tuple[Change, dict[str, float], float]:
    """Find the change under which the layer's attention loses least.

    Args:
        projected: the layer's queries, keys and values.
        state: its attention under headwise's names.
        formats: that its cache has; without any, nothing is changed.
        room: of its weights.
        shifts: whether the bias of keys may be shifted, which is not exact.
        longest: the most tokens of a text.
        on_text: whether the projected inputs are those of a text, so that attention's weights mean something.

    Returns:
        The change; what scores lose by each format after it, over what they lost before, by its spelling; and how far
        the attention's output is off with a full cache, over its size (root mean squares), 0 without a shift.
    """
    layer, starts = projected.layer, _STARTS if on_text else len(OFFSETS)
    tried = [Change.none(layer)]
    if not formats:
        return tried[0], {}, 0.0
    with torch_threads(1):  # thousands of small operations, which are too short to be divided
        moved = None
        if shifts and why_no_shift(layer) is None:
            moved = shift(projected, formats, longest=longest)
        samples = drawn(projected, state, moved) if on_text else _samples(projected, moved)
        wanted = fit(*samples, layer, formats, turns=room.turns, grain=room.grain, starts=starts)
        fitted = where_it_helps(within(wanted, layer, room), *samples, layer, formats)
        tried.append(replace(fitted, shift=moved))
        output = Output(projected, state)
        change = best_of(tried, output, layer, formats)
        before, after = _samples(projected), _samples(projected, change.shift)
        losses = {str(code): _loss(before, after, change, layer, code) for code in formats}
        if change.shift is None:
            return change, losses, 0.0
        return change, losses, float((output.error(change).sum() / output.size.sum()).sqrt())


def _loss(before: Samples, after: Samples, change: Change, layer: GroupedSpec, code: EngineFormat) -> float:
    """What scores lose after a change, over what they lost before it: the geometric mean over heads."""
    queries, keys = (change.applied(states, layer, side) for side, states in zip("qk", after, strict=True))
    return float((score_loss(queries, keys, code) / score_loss(*before, code)).log().mean().exp())


def _samples(projected: Projected, shift: Tensor | None = None) -> Samples:
    """Rotated queries of all heads that share a key–value head together, ``[K, N, D]``, and keys ``[K, T, D]``."""
    queries = projected.rotated("q", projected.positions)
    keys = projected.rotated("k", projected.positions, shift)
    return queries.reshape(len(keys), -1, keys.shape[-1]), keys.flatten(1, 2)
