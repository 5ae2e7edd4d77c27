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

from headwise.preparation.change import Change
from headwise.quantization.formats import EngineFormat
from headwise.specs import GroupedSpec

QUERIES = 64
"""Queries of each window whose output is compared, evenly spread."""


def best_of(
    changes: Sequence[Change],
    layer: GroupedSpec,
    state: Mapping[str, Tensor],
    windows: tuple[Tensor, Tensor, Tensor],
    formats: Sequence[EngineFormat],
) -> Change:
    """For each key–value head, the change by which the output of its query heads is off least.

    Args:
        changes: to choose from, of which heads with a norm of their own weights get one together.
        layer: the layer's spec.
        state: its attention under headwise's names.
        windows: queries ``[H, B, W, D]``, keys ``[K, B, W, D]`` and values ``[K, B, W, V]``.
        formats: that the cache has; of several, the product of the errors is compared.
    """
    errors = torch.stack([_errors(change, layer, state, windows, formats) for change in changes])  # [C, K]
    if layer.qk_norm == "head":
        errors = errors.mean(-1, keepdim=True).expand_as(errors)
    best, heads = errors.argmin(0), torch.arange(layer.num_kv_heads)
    every = [torch.stack([getattr(change, name) for change in changes]) for name in ("exponents", "turns")]
    cut = max(changes[number].cut for number in best.tolist())
    return Change(every[0][best, heads], every[1][best, heads], cut)


def _errors(
    change: Change,
    layer: GroupedSpec,
    state: Mapping[str, Tensor],
    windows: tuple[Tensor, Tensor, Tensor],
    formats: Sequence[EngineFormat],
) -> Tensor:
    """The logarithm of the mean square error of the output of each key–value head's query heads, ``[K]``."""
    queries, keys, values = windows
    K, D, W = layer.num_kv_heads, layer.head_dim, keys.shape[2]
    asked = torch.linspace(W // 8, W - 1, min(QUERIES, W)).long()
    grouped = torch.unflatten(queries[:, :, asked], 0, (K, -1))  # [K, H/K, B, S, D]
    visible = torch.arange(W) <= asked[:, None]
    scale = D**-0.5 if layer.softmax_scale is None else layer.softmax_scale

    def attended(q: Tensor, k: Tensor) -> Tensor:
        scores = torch.einsum("kgbsd,kbtd->kgbst", q, k) * scale
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("kgbst,kbtv->kbsgv", weights, values).flatten(-2)  # [K, B, S, V·H/K]

    exact = attended(grouped, keys)
    output = torch.unflatten(_output(state, layer), -1, (K, -1)).permute(1, 2, 0)  # [K, V·H/K, E]
    total = torch.zeros(K)
    for code in formats:
        new_keys = change.applied(keys.flatten(1, 2), layer, "k").view_as(keys)
        new_queries = change.applied(grouped.flatten(1, 3), layer, "q").view_as(grouped)
        rounded = code.keys.as_read(code.keys.stored(code.keys.turned(new_keys)), D)
        asked_of = code.keys.rounded_queries(code.keys.turned(new_queries))
        off = (attended(asked_of, rounded) - exact).flatten(1, 2) @ output  # [K, B·S, E]
        # A format that has no code for a number makes NaN of it: nothing is worse.
        total = total + (off.square().sum((1, 2)) + 1e-30).log().nan_to_num(torch.inf, torch.inf)
    return total


def _output(state: Mapping[str, Tensor], layer: GroupedSpec) -> Tensor:
    """The output projection ``[E, H·V]``; the identity where there is none."""
    if (weight := state.get("o_proj.weight")) is not None:
        return weight.float()
    return torch.eye(layer.num_heads * layer.value_dim)
