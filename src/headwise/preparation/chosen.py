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
from headwise.preparation.samples import Projected
from headwise.quantization.formats import EngineFormat
from headwise.specs import GroupedSpec

QUERIES = 64
"""Queries of each window whose output is compared, evenly spread."""


def best_of(
    changes: Sequence[Change],
    layer: GroupedSpec,
    state: Mapping[str, Tensor],
    projected: Projected,
    formats: Sequence[EngineFormat],
) -> Change:
    """For each key–value head, the change by which the output of its query heads is off least.

    Args:
        changes: to choose from, of which heads with a norm of their own weights get one together.
        layer: the layer's spec.
        state: its attention under headwise's names.
        projected: its queries, keys and values before they are rotated.
        formats: that the cache has; of several, the product of the errors is compared.
    """
    errors = torch.stack([_errors(change, layer, state, projected, formats) for change in changes])  # [C, K]
    if layer.qk_norm == "head":
        errors = errors.mean(-1, keepdim=True).expand_as(errors)
    best, heads = errors.argmin(0), torch.arange(layer.num_kv_heads)
    every = [torch.stack([getattr(change, name) for change in changes]) for name in ("exponents", "turns")]
    cut = max(changes[number].cut for number in best.tolist())
    shift = None
    if any(changes[number].shift is not None for number in best.tolist()):
        none = torch.zeros(layer.num_kv_heads, layer.head_dim)
        shift = torch.stack([none if change.shift is None else change.shift for change in changes])[best, heads]
    return Change(every[0][best, heads], every[1][best, heads], cut, shift)


def output_error(
    change: Change,
    layer: GroupedSpec,
    state: Mapping[str, Tensor],
    projected: Projected,
    code: EngineFormat | None = None,
) -> tuple[Tensor, Tensor]:
    """The mean square error of the output of each key–value head's query heads, and its mean square, both ``[K]``.

    Args:
        change: of the layer.
        layer: its spec.
        state: its attention under headwise's names.
        projected: its queries, keys and values before they are rotated.
        code: the format of the cache; a full one when None.
    """
    queries, keys = (projected.rotated(side, projected.positions) for side in "qk")
    values = projected.values
    K, D, W = layer.num_kv_heads, layer.head_dim, keys.shape[2]
    places = torch.linspace(W // 8, W - 1, min(QUERIES, W)).long()
    grouped = torch.unflatten(queries[:, :, places], 0, (K, -1))  # [K, H/K, B, S, D]
    visible = torch.arange(W) <= places[:, None]

    def attended(q: Tensor, k: Tensor) -> Tensor:
        scores = torch.einsum("kgbsd,kbtd->kgbst", q, k) * projected.scale
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out = torch.einsum("kgbst,kbtv->kbsgv", weights, values).flatten(-2)  # [K, B, S, V·H/K]
        return out.flatten(1, 2) @ output

    output = torch.unflatten(_output(state, layer), -1, (K, -1)).permute(1, 2, 0)  # [K, V·H/K, E]
    exact = attended(grouped, keys)
    if change.shift is not None:
        keys = projected.rotated("k", projected.positions, change.shift)
    new_keys = change.applied(keys.flatten(1, 2), layer, "k").view_as(keys)
    new_queries = change.applied(grouped.flatten(1, 3), layer, "q").view_as(grouped)
    if code is not None:
        new_keys = code.keys.as_read(code.keys.stored(code.keys.turned(new_keys)), D)
        new_queries = code.keys.rounded_queries(code.keys.turned(new_queries))
    off = attended(new_queries, new_keys) - exact
    return off.square().mean((1, 2)), exact.square().mean((1, 2))


def _errors(
    change: Change,
    layer: GroupedSpec,
    state: Mapping[str, Tensor],
    projected: Projected,
    formats: Sequence[EngineFormat],
) -> Tensor:
    """The logarithm of the product of the errors with each format, ``[K]``."""
    errors = [output_error(change, layer, state, projected, code)[0] for code in formats]
    # A format that has no code for a number makes NaN of it: nothing is worse.
    return torch.stack([(error + 1e-30).log().nan_to_num(torch.inf, torch.inf) for error in errors]).sum(0)


def _output(state: Mapping[str, Tensor], layer: GroupedSpec) -> Tensor:
    """The output projection ``[E, H·V]``; the identity where there is none."""
    if (weight := state.get("o_proj.weight")) is not None:
        return weight.float()
    return torch.eye(layer.num_heads * layer.value_dim)
