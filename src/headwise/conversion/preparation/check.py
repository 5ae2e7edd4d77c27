"""What was written beside its source: products of queries and keys, and values, of every layer, read from the disk.

No model is run: a layer's weights are read from both, one layer after the other, and given the same random inputs.

Shapes: T tokens, H query heads, K key–value heads, D head dim, G groups of channels (see `channels`), E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.base.progress import Progress
from headwise.conversion.preparation.change import Change, changed, channels, num_pairs
from headwise.conversion.preparation.samples import projected
from headwise.errors import CheckpointError
from headwise.models.checkpoints import Checkpoint
from headwise.models.specs import GroupedSpec

TOKENS = 16
"""Random inputs of a layer."""

APART = 7
"""Positions from one input to the next: neighbours alone would not see slow pairs turn."""

ROUNDING = 2.0**-8
"""What products may be off by, in parts of their size. Powers of two are exact but where float16 is too small for a
scale, or 16 bits hold a shifted bias; a row in a wrong place, or a factor, is off by about as much as its size."""

_TINY = 1e-300


def check_written(
    source: Checkpoint, written: Checkpoint, changes: Sequence[Change], output: object, progress: Progress
) -> float:
    """Compare the attention of every written layer with that of the source, in float64.

    Each rotary pair's part of a product has to be the source's at all positions, so that a wrong row shows however
    small it is beside others of its head.

    Args:
        source: the model.
        written: what was written, opened anew.
        changes: of each layer; biases that they shift are shifted in the source first.
        output: what the user knows the written model by.
        progress: told of each layer.

    Returns:
        The largest root mean square of a difference over that of the source's numbers, of all layers and heads; of
        products over the lengths of the pairs of queries and keys, which may be nearly at right angles.

    Raises:
        CheckpointError: it is beyond rounding.
    """
    generator = torch.Generator().manual_seed(1)
    largest = 0.0
    for index, change in enumerate(changes):
        progress("checking", index, len(changes))
        layer = source.spec.layers[index]
        assert isinstance(layer, GroupedSpec)
        before, after = (each.family.read_attention(each.read, index, layer) for each in (source, written))
        if change.shift is not None:  # in float64: what was written may have more digits than the source's biases
            before["k_proj.bias"] = before["k_proj.bias"].double()
            before = changed(before, replace(Change.none(layer), shift=change.shift), layer)
        inputs = torch.randn(1, TOKENS, layer.hidden_size, generator=generator, dtype=torch.float64)
        old, new = (_Parts.of(each, layer, inputs) for each in (before, after))
        for name, size in old.sizes.items():
            off = (new.parts[name] - old.parts[name]).square().mean(1).sqrt()
            largest = max(largest, float((off / size.clamp_min(_TINY)).max()))
        if not largest <= ROUNDING:
            rule = f"computes something else than its source in layer {index}: products are off by {largest:.2g} of"
            raise CheckpointError("output", str(output), f"{rule} their size; nothing is left of it")
    progress("checking", len(changes), len(changes))
    return largest


@dataclass(frozen=True, eq=False)
class _Parts:
    """What a layer's attention makes of inputs.

    Attributes:
        parts: each pair's part of the products of queries and keys, ``[H, T · T, G]``, and values ``[K, T, V]``.
        sizes: of both, root mean squares over tokens, ``[H, G]`` and ``[K, V]``.
    """

    parts: dict[str, Tensor]
    sizes: dict[str, Tensor]

    @classmethod
    def of(cls, state: Mapping[str, Tensor], layer: GroupedSpec, inputs: Tensor) -> _Parts:
        states = projected(state, layer, inputs, APART * torch.arange(TOKENS))
        queries, keys = (states.rotated(side, states.positions)[:, 0] for side in "qk")
        keys, values = keys.repeat_interleave(len(queries) // len(keys), 0), states.values[:, 0]
        first, second = channels(layer).T
        pairs = num_pairs(layer)

        def by_group(numbers: Tensor) -> Tensor:
            groups = numbers[..., first]
            groups[..., :pairs] += numbers[..., second[:pairs]]
            return groups

        squares = [by_group(side.square()).mean(1) for side in (queries, keys)]
        return cls(
            {"products": by_group((queries[:, :, None] * keys[:, None]).flatten(1, 2)), "values": values},
            {"products": (squares[0] * squares[1]).sqrt(), "values": values.square().mean(1).sqrt()},
        )
