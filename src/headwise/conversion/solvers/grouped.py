"""One layer of MHA, MQA or GQA → another number of key–value heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from headwise.conversion.solvers.aligned import align
from headwise.conversion.solvers.published import first_head
from headwise.conversion.solvers.statistics import Statistics
from headwise.errors import ArgumentError
from headwise.specs import GroupedSpec

Method = Literal["aligned", "mean", "first_head"]
METHODS: tuple[Method, ...] = get_args(Method)
"""How heads can come to be shared; the first unless another is asked for."""

_SHARED = ("k_proj", "v_proj")


def convert_to_grouped(
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    target: GroupedSpec,
    *,
    method: Method = "aligned",
    statistics: Statistics | None = None,
    sensitivity: Tensor | None = None,
) -> dict[str, Tensor]:
    """Repeat key and value heads (bit for bit the source's), or merge those that come to share one.

    Args:
        state: the layer's tensors by its own names (``q_proj.weight`` …).
        source: what they are.
        target: the same layer with a multiple or a divisor of the key–value heads.
        method: how heads are merged: ``aligned`` (`headwise.conversion.solvers.aligned`), ``mean`` or ``first_head``.
        statistics: for ``aligned``, means over a text; weights alone decide when None.
        sensitivity: for ``aligned``, ``[E, E]``, what an error of the output costs.

    Raises:
        ArgumentError: there is no such method.
        SpecError: ``aligned`` has no place to undo a mixture of heads in.
    """
    if method not in METHODS:
        raise ArgumentError("method", method, f"must be one of {', '.join(METHODS)}")
    if target.num_kv_heads >= source.num_kv_heads:
        return repeat_heads(state, source, target)
    if method == "mean":
        return mean_heads(state, source, target)
    if method == "first_head":
        return first_head(state, source, target)
    return align(state, source, target, statistics=statistics, sensitivity=sensitivity)


def repeat_heads(state: Mapping[str, Tensor], source: GroupedSpec, target: GroupedSpec) -> dict[str, Tensor]:
    """More key–value heads: each is there several times over, side by side."""
    times = target.num_kv_heads // source.num_kv_heads
    out = dict(state)
    for name in _shared(state, source):
        heads = torch.unflatten(state[name], 0, (source.num_kv_heads, -1))
        out[name] = heads.repeat_interleave(times, dim=0).flatten(0, 1)
    return out


def mean_heads(state: Mapping[str, Tensor], source: GroupedSpec, target: GroupedSpec) -> dict[str, Tensor]:
    """Fewer key–value heads: neighbours are averaged, biases with them.

    Source: mean pooling of the GQA paper (Ainslie et al. 2023, section 2.1).
    """
    out = dict(state)
    for name in _shared(state, source):
        size = source.num_kv_heads // target.num_kv_heads
        heads = torch.unflatten(state[name].double(), 0, (target.num_kv_heads, size, -1))
        out[name] = heads.mean(1).to(state[name].dtype).flatten(0, 1)
    return out


def _shared(state: Mapping[str, Tensor], source: GroupedSpec) -> list[str]:
    """The tensors that are cut by key–value head."""
    names = (*_SHARED, "k_norm") if source.qk_norm == "full" else _SHARED
    return [name for name in state if name.partition(".")[0] in names]
