"""Layers with norms of queries and keys, converted to MLA: what is linear begins behind the norms.

A norm divides a head by a number of its token, so that no projection of the inputs gives normed keys. But the latent
need not be a map of the inputs: it is one of the layer's own normed keys and values. To the solvers such a layer is
one without norms, whose inputs are its normed queries, its normed keys and its values, and whose projections pick
them out.

Shapes: T tokens, H query heads, K key heads, D key dims of a head, V value dim, U = H·D + K·(D + V), N + P query dims
of a converted head, R latent rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from headwise.conversion.solvers.layer import Layer, grouped_spec, normed_heads
from headwise.models.specs import GroupedSpec, LatentSpec

_OWN = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "q_norm.weight", "k_norm.weight")
"""The tensors of the source that the converted layer keeps."""


def seen_by_mla(layer: Layer) -> tuple[Layer, Callable[[Tensor], Tensor]]:
    """A layer as the solvers of MLA see it, and the map from the layer's inputs ``[T, E]`` to the inputs they see.

    Both are the layer itself and its inputs where it has no norms.

    Args:
        layer: the layer, MHA, GQA or MQA, float32.
    """
    if not is_normed(layer):
        return layer, lambda inputs: inputs
    return of_heads(layer), partial(_normed_inputs, layer)


def is_normed(layer: Layer) -> bool:
    """Whether a layer has norms of queries and keys."""
    return isinstance(layer.spec, GroupedSpec) and layer.spec.qk_norm is not None


def of_heads(layer: Layer) -> Layer:
    """The layer without norms whose inputs ``[T, U]`` are a layer's normed queries, normed keys and values."""
    spec = grouped_spec(layer.spec)
    widths = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.value_dim]
    identity = torch.eye(sum(widths), dtype=layer.state["o_proj.weight"].dtype)
    rows = torch.split(identity, widths)
    state = {f"{name}_proj.weight": own for name, own in zip("qkv", rows, strict=True)}
    state |= {name: tensor for name, tensor in layer.state.items() if name.startswith("o_proj.")}
    bias = tuple(name for name in spec.bias if name == "o_proj")
    return Layer(replace(spec, hidden_size=sum(widths), qk_norm=None, bias=bias), state)


def without_norms(spec: LatentSpec, seen: GroupedSpec) -> LatentSpec:
    """The MLA layer that is solved for a layer of `of_heads` in place of one with norms."""
    return replace(spec, hidden_size=seen.hidden_size, qk_norm=None, num_kv_heads=None, head_dim=None)


def with_norms(source: Layer, solved: Layer, target: LatentSpec) -> Layer:
    """The MLA layer with norms out of the solution of `of_heads`, float64.

    Args:
        source: the source layer with norms.
        solved: the solution, which reads the source's normed queries, normed keys and values.
        target: the converted layer's spec.
    """
    spec = grouped_spec(source.spec)
    H, D = spec.num_heads, spec.head_dim
    queries = torch.unflatten(solved.state["q_proj.weight"], 0, (H, -1))[..., : H * D]  # [H, N + P, H·D]
    own = torch.unflatten(queries, 2, (H, D)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [H, N + P, D]
    state = {name: source.state[name].double() for name in _OWN}
    state["q_b_proj.weight"] = own.flatten(0, 1)  # a head's queries are made of its own query
    state["kv_a_proj_with_mqa.weight"] = solved.state["kv_a_proj_with_mqa.weight"][:, H * D :].contiguous()
    state |= {name: tensor for name, tensor in solved.state.items() if name.startswith(("kv_b_proj.", "o_proj."))}
    return Layer(target, state, solved.channels, norm_eps=source.norm_eps)


def _normed_inputs(layer: Layer, inputs: Tensor) -> Tensor:
    """Normed queries, normed keys and values ``[T, U]`` of inputs ``[T, E]``."""
    parts = normed_heads(layer, inputs, torch.arange(len(inputs)))
    return torch.cat([part.transpose(0, 1).flatten(1) for part in parts], 1)
