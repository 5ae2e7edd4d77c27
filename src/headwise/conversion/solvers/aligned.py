"""One layer of MHA or GQA converted to fewer key–value heads, by aligning the heads of a group before merging them.

At each rotary frequency the key heads of a group are merged into one complex channel, and the coefficients that
reproduce each head from it are moved into the queries, so that plain RoPE still applies. Key dims without rotation,
and values, are merged by a truncated SVD as wide as one head, which the queries and the output projection undo.
Groups are chosen to lose least. Query heads move with their key head, so that each group's heads are neighbours.
Merging is exact where heads are copies of each other, or mixtures of as many heads as remain.

Shapes: K key heads, s query heads of each, H = K·s, D key dims, V value dim, g heads of a group, F rotated pairs, n
dims of one part of a head, E hidden, E' = E or E + 1 (a column for the biases). Everything is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.conversion.solvers.joint_latent import NOTHING
from headwise.conversion.solvers.latent import split_bias, with_bias
from headwise.conversion.solvers.layer import KEY_WEIGHT
from headwise.conversion.solvers.merging import Group, LinearHeads, NormedHeads, RotaryHeads, group_heads
from headwise.conversion.solvers.rope_channels import as_rotated, to_complex
from headwise.conversion.solvers.statistics import (
    KEY_BALANCE,
    Statistics,
    centred,
    key_metric,
    score_weight,
    value_metric,
)
from headwise.errors import SpecError
from headwise.models.specs import GroupedSpec, rotated_dims


def align(
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    target: GroupedSpec,
    *,
    statistics: Statistics | None = None,
    sensitivity: Tensor | None = None,
) -> dict[str, Tensor]:
    """Merge a layer's key–value heads into fewer.

    Args:
        state: the layer's tensors by its own names (``q_proj.weight`` …); a norm's weight is the factor it
            multiplies by.
        source: the layer's spec.
        target: the layer's spec with fewer key–value heads, a divisor of the source's.
        statistics: the means over a text; all inputs count equally when None.
        sensitivity: the cost of an error of the output, ``[E, E]``; the same in every direction when None.

    Returns:
        The converted layer's tensors, float64.

    Raises:
        SpecError: the queries, or the output, leave no place to undo a mixture of heads in.
    """
    layer, group_loss = _prepare(state, source, statistics, sensitivity)
    groups = group_heads(group_loss, source.num_kv_heads, target.num_kv_heads)
    group_rows = [layer.merge(group) for group in groups]
    projections = {
        name: torch.cat([rows[name].flatten(0, -2) for rows in group_rows])  # [heads·D, E']
        for name in ("q_proj", "k_proj", "v_proj")
    }
    out = dict(state)
    for name, projection in projections.items():
        tensors = split_bias(name, projection, layer.biased)
        out |= {name: tensor for name, tensor in tensors.items() if name in state}
    outputs = [rows["o_proj"].movedim(2, 0).flatten(1) for rows in group_rows]  # each [E, g·s·V]
    out["o_proj.weight"] = torch.cat(outputs, dim=1)
    if "o_proj.bias" in state:
        mean_loss = torch.stack([rows["mean_loss"] for rows in group_rows]).sum(0)  # [E]
        out["o_proj.bias"] = state["o_proj.bias"].double() + mean_loss
    return out


def _prepare(
    state: Mapping[str, Tensor], source: GroupedSpec, statistics: Statistics | None, sensitivity: Tensor | None
) -> tuple[_Heads, Callable[[Group], float]]:
    """A layer divided into heads, and the function that gives the loss of merging a group of them."""
    refuse_unaligned(source)
    layer = _divide(state, source, statistics, sensitivity)
    key_weight = KEY_WEIGHT
    if statistics is None:
        total = sum(heads.total for heads in layer.keys)
        key_weight = KEY_BALANCE * layer.values.total / max(total, NOTHING)

    def group_loss(group: Group) -> float:
        return key_weight * sum(heads.loss(group) for heads in layer.keys) + layer.values.loss(group)

    return layer, group_loss


@dataclass(frozen=True)
class _Heads:
    """A layer divided into heads.

    Attributes:
        source: the layer's spec.
        biased: whether the last input is a constant 1, for the biases.
        queries: the rows of each query head, ``[K, s, D, E']``.
        outputs: each query head's columns of the output projection, ``[K, s, E, V]``.
        keys: the keys in parts that merge differently: rotated dims and the others, or heads with a norm.
        values: the values, all of which can be mixed freely.
        mean: the mean of the inputs, ``[E']``.
    """

    source: GroupedSpec
    biased: bool
    queries: Tensor
    outputs: Tensor
    keys: list[LinearHeads | RotaryHeads | NormedHeads]
    values: LinearHeads
    mean: Tensor

    def merge(self, group: Group) -> dict[str, Tensor]:
        """Merge one group, and return its rows.

        Returns:
            ``q_proj`` ``[g, s, D, E']``, ``k_proj`` ``[D, E']``, ``v_proj`` ``[V, E']``, ``o_proj`` ``[g, s, E, V]``,
            and ``mean_loss`` ``[E]``, the mean of the output that the merged values lose.
        """
        heads = list(group)
        queries, start = [], 0
        keys = []
        for part in self.keys:
            width = part.width
            part_queries = self.queries[heads][:, :, start : start + width]  # [g, s, n, E']
            key, query = self._merge_keys(part, group, part_queries)
            keys.append(key)
            queries.append(query)
            start += width
        down, up = self.values.merge(group)  # [V, E'], [g, V, V]
        outputs = self.outputs[heads]  # [g, s, E, V]
        mean_loss = (self.values.rows[heads] - up @ down) @ self.mean  # [g, V]
        return {
            "q_proj": torch.cat(queries, dim=2),
            "k_proj": torch.cat(keys),
            "v_proj": down,
            "o_proj": outputs @ up[:, None],
            "mean_loss": torch.einsum("gsev,gv->e", outputs, mean_loss),
        }

    def _merge_keys(
        self, part: LinearHeads | RotaryHeads | NormedHeads, group: Group, queries: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The shared key's rows ``[n, E']`` in one part of a head, and its queries ``[g, s, n, E']``."""
        if isinstance(part, RotaryHeads):
            assert self.source.rope is not None
            interleaved = self.source.rope.interleaved
            pairs, back = part.merge(group)  # [F, E'], [g, F]
            query_pairs = back.conj()[:, None, :, None] * part.queries[list(group)]  # [g, s, F, E']
            return as_rotated(pairs, interleaved=interleaved), as_rotated(query_pairs, interleaved=interleaved)
        key, back = part.merge(group)
        if isinstance(part, NormedHeads):
            return key, queries * back[:, None, :, None]
        return key, back.mT[:, None] @ queries


def _divide(
    state: Mapping[str, Tensor], source: GroupedSpec, statistics: Statistics | None, sensitivity: Tensor | None
) -> _Heads:
    K, s, D, V = source.num_kv_heads, source.group_size, source.head_dim, source.value_dim
    names = ("q_proj", "k_proj", "v_proj")
    biased = any(name in source.bias for name in names)
    w_q, w_k, w_v = (with_bias(state, name, biased) for name in names)
    width = w_q.shape[1]
    means = statistics or Statistics.nothing(source.hidden_size, source.num_heads, 1)
    mean = torch.cat((means.inputs[:-1, -1], torch.ones(1, dtype=torch.float64)))[:width]  # [E']
    # The mean of the values has a place in the output's bias, if there is one.
    value_moments = centred(means.inputs) if "o_proj" in source.bias else means.inputs
    queries = w_q.view(K, s, D, width)  # [K, s, D, E']
    w_o = torch.unflatten(state["o_proj.weight"].double(), 1, (K, s, V)).movedim(0, 2)  # [K, s, E, V]
    metric = value_metric(state["o_proj.weight"], sensitivity, source)  # [K, V, V]
    values = LinearHeads(w_v.view(K, V, width), metric, value_moments[:width, :width])
    divide_keys = _free_keys if source.qk_norm is None else _normed_keys
    keys = divide_keys(state, source, queries, w_k.view(K, D, width), means)
    return _Heads(source, biased, queries, w_o, keys, values, mean)


def _free_keys(
    state: Mapping[str, Tensor], source: GroupedSpec, queries: Tensor, keys: Tensor, means: Statistics
) -> list[LinearHeads | RotaryHeads | NormedHeads]:
    """The rotated dims, which come first, and the others."""
    K, s, D, width = queries.shape
    inputs, rotary = means.inputs[:width, :width], rotated_dims(source)
    parts: list[LinearHeads | RotaryHeads | NormedHeads] = []
    if source.rope is not None:
        pairs = [  # of queries [H, F, E'], of keys [K, F, E']
            to_complex(rows[..., :rotary, :].reshape(-1, width), count, interleaved=source.rope.interleaved)
            for rows, count in ((queries, K * s), (keys, K))
        ]
        weight = score_weight(means.head_weight, source).view(K, s)
        parts.append(
            RotaryHeads(torch.unflatten(pairs[0], 0, (K, s)), pairs[1], weight, inputs, means.keys[:width, :width])
        )
    if rotary < D:
        metric = key_metric(queries[:, :, rotary:].flatten(0, 1), inputs, means.head_weight, source)
        parts.append(LinearHeads(keys[:, rotary:], metric, centred(means.keys)[:width, :width]))
    return parts


def _normed_keys(
    state: Mapping[str, Tensor], source: GroupedSpec, queries: Tensor, keys: Tensor, means: Statistics
) -> list[LinearHeads | RotaryHeads | NormedHeads]:
    """Key heads that are normalised one by one; so are the queries."""
    K, s, D, width = queries.shape
    inputs, moments = (gram[:width, :width] for gram in (means.inputs, means.keys))
    units = _units(source)
    energy = torch.einsum("ksde,ef,ksdf->ksd", queries, inputs, queries)  # [K, s, D]
    energy = energy / energy.mean(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    energy = energy * state["q_norm.weight"].double().square()
    energy = (energy * score_weight(means.head_weight, source).view(K, s, 1)).sum(1)  # [K, D]
    # Rotation brings both dims of a key's pair before both of the query's: each counts by their mean.
    unit_energy = torch.zeros(K, D, dtype=torch.float64).index_add_(1, units, energy)  # [K, D]
    energy = (unit_energy / torch.bincount(units, minlength=D).clamp_min(1))[:, units]  # [K, D]
    return [NormedHeads(keys, state["k_norm.weight"].double(), energy, units, moments)]


def _units(source: GroupedSpec) -> Tensor:
    """A number for each dim of a head, ``[D]``: one for both dims of a rotated pair, which change sign together."""
    units = torch.arange(source.head_dim)
    if source.rope is not None:
        pairs = source.rope.dim // 2
        rotary = units[: 2 * pairs]
        units = torch.cat((rotary // 2 if source.rope.interleaved else rotary % pairs, units[2 * pairs :]))
    return units


def refuse_unaligned(source: GroupedSpec) -> None:
    """Refuse a layer with no place to undo a mixture of heads in.

    Raises:
        SpecError: the layer has one norm over all key heads, no output projection, or attention sinks.
    """
    if source.qk_norm == "full":
        rule = "one norm over all heads changes with their number; method mean pools them"
        raise SpecError("qk_norm", source.qk_norm, rule)
    if not source.output_projection:
        raise SpecError("output_projection", False, "values are merged only where a projection undoes it")
    if source.sinks:
        raise SpecError("sinks", True, "a layer with a learned logit a head is not aligned yet; method mean pools it")
