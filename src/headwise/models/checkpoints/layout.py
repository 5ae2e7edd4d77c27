"""How families store the four projections of an attention, as conversions from and to headwise's names.

Shapes: H query heads, K key–value heads, D head dim, V value dim, E hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.models.specs.grouped import PROJECTIONS, GroupedSpec

State = dict[str, Tensor]
Change = Callable[[Mapping[str, Tensor], GroupedSpec], State]


class Layout(NamedTuple):
    """The names and shapes of a family's projections within its attention module.

    Attributes:
        pack: converts ``q_proj.weight`` ``[H·D, E]``, ``k_proj.weight`` … and biases to the tensors of the family.
        unpack: its inverse.
    """

    pack: Change
    unpack: Change


def canonical_shapes(spec: GroupedSpec) -> dict[str, tuple[int, ...]]:
    """The shapes of an attention's tensors under headwise's names: ``q_proj.weight`` and so on.

    Args:
        spec: the attention.
    """
    E, H, K, D, V = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim
    weights = {"q_proj": (H * D, E), "k_proj": (K * D, E), "v_proj": (K * V, E), "o_proj": (E, H * V)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in PROJECTIONS:
        shapes[f"{name}.weight"] = weights[name]
        if name in spec.bias:
            shapes[f"{name}.bias"] = weights[name][:1]
    if spec.qk_norm is not None:
        whole = spec.qk_norm == "full"
        shapes["q_norm.weight"] = (H * D if whole else D,)
        shapes["k_norm.weight"] = (K * D if whole else D,)
    return shapes


def packed_shapes(layout: Layout, spec: GroupedSpec) -> dict[str, tuple[int, ...]]:
    """The shapes of an attention's tensors under a family's names; nothing is allocated.

    Args:
        layout: the family's.
        spec: the attention.
    """
    empty = {name: torch.empty(shape, device="meta") for name, shape in canonical_shapes(spec).items()}
    return {name: tuple(tensor.shape) for name, tensor in layout.pack(empty, spec).items()}


def renamed(**names: str) -> Layout:
    """A layout with headwise's projections under other names, such as ``renamed(o_proj="out_proj")``.

    Args:
        names: the family's name of each projection that it names otherwise.
    """
    inverse = {stored: canonical for canonical, stored in names.items()}
    return Layout(lambda state, _: _rename(state, names), lambda state, _: _rename(state, inverse))


def _rename(state: Mapping[str, Tensor], names: Mapping[str, str]) -> State:
    out = {}
    for name, tensor in state.items():
        stem, _, kind = name.rpartition(".")
        out[f"{names.get(stem, stem)}.{kind}"] = tensor
    return out


PLAIN = renamed()
"""Llama's layout, which is headwise's own."""


def offset_norms(offset: float) -> Layout:
    """Llama's layout with norms of queries and keys that are stored as differences from a constant (Gemma).

    Unpacked norms are float64: with the constant added, a narrower dtype would lose their last digits.

    Args:
        offset: the constant.
    """

    def shifted(state: Mapping[str, Tensor], by: float) -> State:
        norms = ("q_norm.weight", "k_norm.weight")
        return {name: tensor.double() + by if name in norms else tensor for name, tensor in state.items()}

    return Layout(lambda state, _: shifted(state, -offset), lambda state, _: shifted(state, offset))


def fused(name: str, output: str, *, by_head: bool = False, transposed: bool = False) -> Layout:
    """A layout with the rows of queries, keys and values in one projection.

    Args:
        name: of that projection.
        output: the name of the output projection.
        by_head: the rows of each head's query, key and value lie together (GPT-NeoX, which has one key–value head for
            each query head); otherwise all queries come first, then all keys, then all values.
        transposed: weights are stored as ``[in, out]`` (GPT-2).
    """

    def turn(tensor: Tensor) -> Tensor:
        return tensor.T.contiguous() if transposed and tensor.dim() == 2 else tensor

    def pack(state: Mapping[str, Tensor], spec: GroupedSpec) -> State:
        out = {f"{output}.{kind}": turn(state[f"o_proj.{kind}"]) for kind in _kinds(state, "o_proj")}
        for kind in _kinds(state, "q_proj"):
            parts = [state[f"{projection}.{kind}"] for projection in PROJECTIONS[:3]]
            if by_head:
                heads = [torch.unflatten(part, 0, (spec.num_heads, -1)) for part in parts]  # each [H, D or V, E]
                whole = torch.cat(heads, dim=1).flatten(0, 1)  # [H·(2D + V), E]
            else:
                whole = torch.cat(parts)  # [H·D + K·D + K·V, E]
            out[f"{name}.{kind}"] = turn(whole)
        return out

    def unpack(state: Mapping[str, Tensor], spec: GroupedSpec) -> State:
        D, V = spec.head_dim, spec.value_dim
        H, K = spec.num_heads, spec.num_kv_heads
        out = {f"o_proj.{kind}": turn(state[f"{output}.{kind}"]) for kind in _kinds(state, output)}
        for kind in _kinds(state, name):
            whole = turn(state[f"{name}.{kind}"])
            if by_head:
                by_part = torch.unflatten(whole, 0, (H, D + D + V))  # [H, 2D + V, E]
                heads = torch.split(by_part, [D, D, V], dim=1)  # each [H, D or V, E]
                parts = [part.flatten(0, 1) for part in heads]  # each [H·D or H·V, E]
            else:
                parts = list(torch.split(whole, [H * D, K * D, K * V]))
            for projection, part in zip(PROJECTIONS, parts, strict=False):
                out[f"{projection}.{kind}"] = part.contiguous()
        return out

    return Layout(pack, unpack)


def _kinds(state: Mapping[str, Tensor], projection: str) -> list[str]:
    return [kind for kind in ("weight", "bias") if f"{projection}.{kind}" in state]
