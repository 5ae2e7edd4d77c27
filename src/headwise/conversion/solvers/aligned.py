"""One layer of MHA or GQA → fewer key–value heads, by aligning those that come to share one.

A group's key heads become one complex channel for each frequency, and the queries are given the numbers that made
each head of it, so that plain RoPE still applies; key dims that never rotated, and values, become the best rank of
one head, undone in the queries and the output projection. Which heads form a group is chosen by what that loses.
Query heads move with their key head, so that groups are neighbours. Heads that are copies of each other, or
mixtures of as many as there will be, are merged without loss.

Shapes: K key heads, s query heads to each, H = K·s, D key dims, D' rotated, V value dim, g heads of a group, E
hidden, E' = E or E + 1 (a column for the biases). Everything is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.conversion.solvers.assemble import split_bias, with_bias
from headwise.conversion.solvers.head_groups import Group, group_heads
from headwise.conversion.solvers.joint_latent import NOTHING
from headwise.conversion.solvers.merging import LinearHeads, NormedHeads, RotaryHeads
from headwise.conversion.solvers.metrics import (
    KEY_BALANCE,
    KEY_WEIGHT,
    centred,
    key_metric,
    score_weight,
    value_metric,
)
from headwise.conversion.solvers.rope_channels import as_rotated, to_complex
from headwise.conversion.solvers.statistics import Statistics
from headwise.errors import SpecError
from headwise.specs import GroupedSpec, rotated_dims


def align(
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    target: GroupedSpec,
    *,
    statistics: Statistics | None = None,
    sensitivity: Tensor | None = None,
) -> dict[str, Tensor]:
    """The layer with fewer key–value heads, float64.

    Args:
        state: the layer's tensors by its own names (``q_proj.weight`` …), norms as what they multiply by.
        source: what they are.
        target: the same layer with a divisor of the key–value heads.
        statistics: means over a text; all inputs count alike when None.
        sensitivity: ``[E, E]``, what an error of the output costs; the same in every direction when None.

    Raises:
        SpecError: the queries, or the output, leave no place to undo a mixture of heads in.
    """
    parts, lost = _prepare(state, source, statistics, sensitivity)
    groups = group_heads(lost, source.num_kv_heads, target.num_kv_heads)
    merged = [parts.merge(group) for group in groups]
    rows = {
        name: torch.cat([part[name].flatten(0, -2) for part in merged]) for name in ("q_proj", "k_proj", "v_proj")
    }
    out = dict(state)
    for name, tensor in rows.items():
        split = split_bias(name, tensor, parts.biased)
        out |= {name: tensor for name, tensor in split.items() if name in state}
    out["o_proj.weight"] = torch.cat([part["o_proj"].movedim(2, 0).flatten(1) for part in merged], dim=1)
    if "o_proj.bias" in state:
        missing = torch.stack([part["missing"] for part in merged]).sum(0)
        out["o_proj.bias"] = state["o_proj.bias"].double() + missing
    return out


def _prepare(
    state: Mapping[str, Tensor],
    source: GroupedSpec,
    statistics: Statistics | None,
    sensitivity: Tensor | None,
) -> tuple[_Parts, Callable[[Group], float]]:
    """A layer head by head, and what merging some of them costs."""
    refuse_unaligned(source)
    parts = _parts(state, source, statistics, sensitivity)
    key_weight = KEY_WEIGHT
    if statistics is None:
        total = sum(heads.total for heads in parts.keys)
        key_weight = KEY_BALANCE * parts.values.total / max(total, NOTHING)

    def lost(group: Group) -> float:
        return key_weight * sum(heads.lost(group) for heads in parts.keys) + parts.values.lost(group)

    return parts, lost


@dataclass(frozen=True)
class _Parts:
    """A layer, head by head.

    Attributes:
        source: what it is.
        biased: the last input is a constant 1.
        queries: ``[K, s, D, E']``.
        outputs: ``[K, s, E, V]``, each query head's part of the output projection.
        keys: what the keys consist of: rotated dims and others, or normalised heads.
        values: the values.
        mean: ``[E']``, of the inputs.
    """

    source: GroupedSpec
    biased: bool
    queries: Tensor
    outputs: Tensor
    keys: list[LinearHeads | RotaryHeads | NormedHeads]
    values: LinearHeads
    mean: Tensor

    def merge(self, group: Group) -> dict[str, Tensor]:
        """One group's rows: of its queries ``[g, s, D, E']``, key and value; its part of the output ``[g, s, E, V]``.

        ``missing`` ``[E]`` is what the output then lacks on average.
        """
        heads = list(group)
        queries, at = [], 0
        keys = []
        for part in self.keys:
            width = part.width
            own = self.queries[heads][:, :, at : at + width]
            key, asking = self._merge_keys(part, group, own)
            keys.append(key)
            queries.append(asking)
            at += width
        down, up = self.values.merge(group)
        outputs = self.outputs[heads]
        lacking = (self.values.rows[heads] - up @ down) @ self.mean
        return {
            "q_proj": torch.cat(queries, dim=2),
            "k_proj": torch.cat(keys),
            "v_proj": down,
            "o_proj": outputs @ up[:, None],
            "missing": torch.einsum("gsev,gv->e", outputs, lacking),
        }

    def _merge_keys(
        self, part: LinearHeads | RotaryHeads | NormedHeads, group: Group, queries: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The shared key's rows of some dims, and the queries ``[g, s, n, E']`` that ask for it."""
        if isinstance(part, RotaryHeads):
            assert self.source.rope is not None
            interleaved = self.source.rope.interleaved
            pairs, back = part.merge(group)
            asking = back.conj()[:, None, :, None] * part.queries[list(group)]
            return as_rotated(pairs, interleaved=interleaved), as_rotated(asking, interleaved=interleaved)
        key, back = part.merge(group)
        if isinstance(part, NormedHeads):
            return key, queries * back[:, None, :, None]
        return key, back.mT[:, None] @ queries


def _parts(
    state: Mapping[str, Tensor], source: GroupedSpec, statistics: Statistics | None, sensitivity: Tensor | None
) -> _Parts:
    K, s, D, V = source.num_kv_heads, source.group_size, source.head_dim, source.value_dim
    names = ("q_proj", "k_proj", "v_proj")
    biased = any(name in source.bias for name in names)
    w_q, w_k, w_v = (with_bias(state, name, biased) for name in names)
    width = w_q.shape[1]
    known = statistics or Statistics.nothing(source.hidden_size, source.num_heads, 1)
    mean = torch.cat((known.inputs[:-1, -1], torch.ones(1, dtype=torch.float64)))[:width]
    # What the values are on average has a place in the output's bias, if there is one.
    valued = centred(known.inputs) if "o_proj" in source.bias else known.inputs
    queries = w_q.view(K, s, D, width)
    w_o = torch.unflatten(state["o_proj.weight"].double(), 1, (K, s, V)).movedim(0, 2)
    metric = value_metric(state["o_proj.weight"], sensitivity, source)
    values = LinearHeads(w_v.view(K, V, width), metric, valued[:width, :width])
    make = _free_keys if source.qk_norm is None else _normed_keys
    keys = make(state, source, queries, w_k.view(K, D, width), known)
    return _Parts(source, biased, queries, w_o, keys, values, mean)


def _free_keys(
    state: Mapping[str, Tensor], source: GroupedSpec, queries: Tensor, keys: Tensor, known: Statistics
) -> list[LinearHeads | RotaryHeads | NormedHeads]:
    """Rotated dims, which come first, and the others."""
    K, s, D, width = queries.shape
    inputs, turned = known.inputs[:width, :width], rotated_dims(source)
    parts: list[LinearHeads | RotaryHeads | NormedHeads] = []
    if source.rope is not None:
        rotated = [
            to_complex(rows[..., :turned, :].reshape(-1, width), count, interleaved=source.rope.interleaved)
            for rows, count in ((queries, K * s), (keys, K))
        ]
        weight = score_weight(known.head_weight, source).view(K, s)
        parts.append(
            RotaryHeads(
                torch.unflatten(rotated[0], 0, (K, s)), rotated[1], weight, inputs, known.keys[:width, :width]
            )
        )
    if turned < D:
        metric = key_metric(queries[:, :, turned:].flatten(0, 1), inputs, known.head_weight, source)
        parts.append(LinearHeads(keys[:, turned:], metric, centred(known.keys)[:width, :width]))
    return parts


def _normed_keys(
    state: Mapping[str, Tensor], source: GroupedSpec, queries: Tensor, keys: Tensor, known: Statistics
) -> list[LinearHeads | RotaryHeads | NormedHeads]:
    """Heads with a norm of each, whose queries have one too."""
    K, s, D, width = queries.shape
    inputs, moments = (gram[:width, :width] for gram in (known.inputs, known.keys))
    units = _units(source)
    asked = torch.einsum("ksde,ef,ksdf->ksd", queries, inputs, queries)
    asked = asked / asked.mean(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    asked = asked * state["q_norm.weight"].double().square()
    asked = (asked * score_weight(known.head_weight, source).view(K, s, 1)).sum(1)
    # Both dims of a pair ask for whichever of the key's the rotation turns to them.
    together = torch.zeros(K, D, dtype=torch.float64).index_add_(1, units, asked)
    asked = (together / torch.bincount(units, minlength=D).clamp_min(1))[:, units]
    return [NormedHeads(keys, state["k_norm.weight"].double(), asked, units, moments)]


def _units(source: GroupedSpec) -> Tensor:
    """Which dims of a head change sign together: the two of a rotated pair."""
    units = torch.arange(source.head_dim)
    if source.rope is not None:
        pairs = source.rope.dim // 2
        own = units[: 2 * pairs]
        units = torch.cat((own // 2 if source.rope.interleaved else own % pairs, units[2 * pairs :]))
    return units


def refuse_unaligned(source: GroupedSpec) -> None:
    """Refuse a layer with no place to undo a mixture of heads in.

    Raises:
        SpecError: it is one.
    """
    if source.qk_norm == "full":
        rule = "one norm over all heads changes with their number; method mean pools them"
        raise SpecError("qk_norm", source.qk_norm, rule)
    if not source.output_projection:
        raise SpecError("output_projection", False, "values are merged only where a projection undoes it")
    if source.sinks:
        raise SpecError("sinks", True, "a layer with a learned logit a head is not aligned yet; method mean pools it")
