"""The best of several changes of a layer, by the error of the attention's output through the rounding itself.

What scores lose on average does not tell everything of keys with a large constant part: their rounding is the same
for most tokens, and how much it hides of the rest is a matter of where the constant lies between two codes.

Shapes: C changes, B windows, W tokens of a window, S queries of a window, H query heads, K key–value heads, D head
dim, V value dim, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headwise.conversion.preparation.change import Change, by_head
from headwise.conversion.preparation.samples import Projected
from headwise.models.specs import GroupedSpec
from headwise.runtime.quantization.formats import EngineFormat

QUERIES = 64
"""Queries of each window whose output is compared, evenly spread."""


class Output:
    """The output of a layer's attention, and how far changes take it off.

    Args:
        projected: its queries, keys and values before they are rotated.
        state: its attention under headwise's names.

    Attributes:
        size: the mean square of the output of each key–value head's query heads, ``[K]``.
    """

    def __init__(self, projected: Projected, state: Mapping[str, Tensor]) -> None:
        self._projected, K = projected, projected.layer.num_kv_heads
        W = len(projected.positions)
        places = torch.linspace(W // 8, W - 1, min(QUERIES, W)).long()
        queries = projected.rotated("q", projected.positions)[:, :, places]
        self._queries = torch.unflatten(queries, 0, (K, -1))  # [K, H/K, B, S, D]
        self._keys = projected.rotated("k", projected.positions)
        self._visible = torch.arange(W) <= places[:, None]
        weight = output_weight(state, projected.layer)
        self._weight = torch.unflatten(weight, -1, (K, -1)).permute(1, 2, 0)  # [K, V·H/K, E]
        self._exact = self._attended(self._queries, self._keys)
        self.size = self._exact.square().mean((1, 2))

    def error(self, change: Change, code: EngineFormat | None = None) -> Tensor:
        """The mean square error of the output of each key–value head's query heads, ``[K]``.

        Args:
            change: of the layer.
            code: the format of the cache; a full one when None.
        """
        layer, keys, queries = self._projected.layer, self._keys, self._queries
        if change.shift is not None:
            keys = self._projected.rotated("k", self._projected.positions, change.shift)
        keys = change.applied(keys.flatten(1, 2), layer, "k").view_as(keys)
        queries = change.applied(queries.flatten(1, 3), layer, "q").view_as(queries)
        if code is not None:
            keys = code.keys.as_read(code.keys.stored(code.keys.turned(keys)), layer.head_dim)
            queries = code.keys.rounded_queries(code.keys.turned(queries))
        return (self._attended(queries, keys) - self._exact).square().mean((1, 2))

    def _attended(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The output ``[K, B·S, E]`` of queries ``[K, H/K, B, S, D]`` and keys ``[K, B, W, D]``."""
        scores = torch.einsum("kgbsd,kbtd->kgbst", queries, keys) * self._projected.scale
        weights = scores.masked_fill(~self._visible, -torch.inf).softmax(-1)
        out = torch.einsum("kgbst,kbtv->kbsgv", weights, self._projected.values).flatten(-2)  # [K, B, S, V·H/K]
        return out.flatten(1, 2) @ self._weight


def best_of(changes: Sequence[Change], output: Output, layer: GroupedSpec, formats: Sequence[EngineFormat]) -> Change:
    """For each key–value head, the change by which the output of its query heads is off least.

    Args:
        changes: to choose from, of which heads with a norm of their own weights get one together.
        output: of the layer's attention.
        layer: the layer's spec.
        formats: that the cache has; of several, the product of the errors is compared.
    """
    errors = torch.stack([_errors(change, output, formats) for change in changes])  # [C, K]
    return by_head(changes, errors, layer)


def _errors(change: Change, output: Output, formats: Sequence[EngineFormat]) -> Tensor:
    """The logarithm of the product of the errors with each format, ``[K]``."""
    errors = torch.stack([output.error(change, code) for code in formats])
    # A format that has no code for a number makes NaN of it: nothing is worse.
    return (errors + 1e-30).log().nan_to_num(torch.inf, torch.inf).sum(0)


def output_weight(state: Mapping[str, Tensor], layer: GroupedSpec) -> Tensor:
    """The output projection ``[E, H·V]``; the identity where there is none.

    Args:
        state: the attention under headwise's names.
        layer: its spec.
    """
    if (weight := state.get("o_proj.weight")) is not None:
        return weight.float()
    return torch.eye(layer.num_heads * layer.value_dim)
