"""One layer's attention as a function of its tensors, for some of the queries: what conversion studies and refines.

A layer's call computes every query; statistics, errors and gradients need only a sample of them, of all heads.

Shapes: T tokens of one window, S of them as queries, H query heads, K key heads, D key dims of a head, V value dim,
E hidden, P rotary dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention import RotaryEmbedding
from headwise.attention.rope import rotate
from headwise.kernels import attend
from headwise.specs import AttentionSpec, GroupedSpec, LatentSpec

NORM_EPS = 1e-6
"""Of norms of queries and keys in families that have them, where a config does not say."""

PIECE = 256
"""Queries that are attended with at a time; and little more of the keys is looked at than lies behind them."""

KEYS = 128
"""Of these a piece looks at whole multiples: every other shape costs oneDNN a kernel compiled anew, a quarter of the
time of a descent whose queries are drawn by chance."""

State = Mapping[str, Tensor]


class Heads(NamedTuple):
    """Queries ``[H, S, D]``, keys ``[H, T, D]`` and values ``[H, T, V]``, keys and values repeated for each head."""

    query: Tensor
    key: Tensor
    value: Tensor


class Rotation(NamedTuple):
    """cos and sin ``[1, T, pairs]`` of each position of a window, at each frequency of the model's."""

    cos: Tensor
    sin: Tensor


def rotation_tables(source: GroupedSpec, tokens: int) -> Rotation | None:
    """What a source layer's positions are turned by; None without RoPE."""
    if source.rope is None:
        return None
    positions = torch.arange(tokens)[None]
    return Rotation(*RotaryEmbedding(source.rope)(positions, torch.float32, tokens))


def sample_rows(tokens: int, count: int, window: int = 0) -> Tensor:
    """About ``count`` positions, evenly spread, the last among them; from one window to the next they move on."""
    step = max(tokens // max(count, 1), 1)
    return torch.arange(step - 1 - window % step, tokens, step)


def grouped_heads(
    state: State, spec: GroupedSpec, inputs: Tensor, rows: Tensor, rotation: Rotation | None, norm_eps: float
) -> Heads:
    """Of MHA, GQA and MQA, ``inputs`` being ``[T, E]``; a norm of queries and keys counts from 0 as Llama's does."""
    H, K = spec.num_heads, spec.num_kv_heads
    query = _split(_project(state, "q_proj", inputs[rows]), H)
    key, value = (_split(_project(state, name, inputs), K) for name in ("k_proj", "v_proj"))
    if spec.qk_norm is not None:
        query, key = (_normed(x, state[f"{n}_norm.weight"], spec, norm_eps) for x, n in ((query, "q"), (key, "k")))
    if spec.rope is not None and rotation is not None:
        query, key = (
            _turned(query, rotation, spec.rope.interleaved, rows),
            _turned(key, rotation, spec.rope.interleaved),
        )
    group = H // K
    return Heads(query, key.repeat_interleave(group, 0), value.repeat_interleave(group, 0))


def latent_heads(
    state: State, spec: LatentSpec, inputs: Tensor, rows: Tensor, rotation: Rotation | None, channels: list[int]
) -> Heads:
    """Of MLA, decoded: a head's key is its content and the shared rotary key.

    Args:
        state: the layer's tensors, without a query latent or norms.
        spec: what they are.
        inputs: ``[T, E]``.
        rows: ``[S]``, which of them are queries.
        rotation: the model's, of which ``channels`` are taken.
        channels: the model's frequency of each of the P/2 pairs.
    """
    H, R, N = spec.num_heads, spec.kv_lora_rank, spec.qk_nope_head_dim
    query = _split(_project(state, "q_proj", inputs[rows]), H)
    remembered = _project(state, "kv_a_proj_with_mqa", inputs)
    decoded = _split(F.linear(remembered[:, :R], state["kv_b_proj.weight"]), H)
    key, value = decoded[..., :N], decoded[..., N:]
    if channels:
        assert rotation is not None
        own = Rotation(*(table[..., channels] for table in rotation))
        rotary = _turned(remembered[None, :, R:], own, interleaved=False).expand(H, -1, -1)
        turned = _turned(query[..., N:], own, interleaved=False, rows=rows)
        query, key = torch.cat((query[..., :N], turned), -1), torch.cat((key, rotary), -1)
    return Heads(query, key, value)


def attention_weights(heads: Heads, spec: AttentionSpec, rows: Tensor) -> Tensor:
    """Softmax of the scores, ``[H, S, T]``."""
    scale = heads.query.shape[-1] ** -0.5 if spec.softmax_scale is None else spec.softmax_scale
    scores = (heads.query * scale) @ heads.key.mT
    if spec.is_causal:
        behind = rows[:, None] - torch.arange(heads.key.shape[1])
        hidden = behind < 0
        if spec.sliding_window is not None:
            hidden |= behind >= spec.sliding_window
        # Added, which has nothing to do on the way back.
        scores = scores + torch.zeros(hidden.shape, dtype=scores.dtype).masked_fill_(hidden, -torch.inf)
    return scores.softmax(-1)


def mixed_values(heads: Heads, spec: AttentionSpec, rows: Tensor) -> Tensor:
    """What goes into the output projection: ``[S, H·V]``."""
    made = []
    for some, query in zip(torch.split(rows, PIECE), torch.split(heads.query, PIECE, dim=1), strict=True):
        seen = -(-(int(some.max()) + 1) // KEYS) * KEYS if spec.is_causal else heads.key.shape[1]
        key, value = heads.key[:, :seen], heads.value[:, :seen]
        made.append(attention_weights(Heads(query, key, value), spec, some) @ value)
    return torch.cat(made, 1).transpose(0, 1).flatten(1)


@dataclass(frozen=True)
class Layer:
    """A layer that can be run for some of its queries.

    Attributes:
        spec: what it is.
        state: its tensors by its own names.
        channels: the model's frequency of each rotary pair (MLA).
        norm_eps: of the norms of queries and keys, where there are any.
    """

    spec: GroupedSpec | LatentSpec
    state: State
    channels: list[int] = field(default_factory=list)
    norm_eps: float = NORM_EPS

    def float(self) -> Layer:
        """With its tensors in float32."""
        return replace(self, state={name: tensor.float() for name, tensor in self.state.items()})

    def heads(self, inputs: Tensor, rows: Tensor, rotation: Rotation | None) -> Heads:
        """Of one window's inputs ``[T, E]``, the queries those at ``rows``."""
        if isinstance(self.spec, LatentSpec):
            return latent_heads(self.state, self.spec, inputs, rows, rotation, self.channels)
        return grouped_heads(self.state, self.spec, inputs, rows, rotation, self.norm_eps)

    def mixed(self, inputs: Tensor, rotation: Rotation | None) -> Tensor:
        """What goes into the output projection at every position: ``[T, H·V]``."""
        query, key, value = (x[None] for x in self.heads(inputs, torch.arange(len(inputs)), rotation))
        spec = self.spec
        made = attend(
            query, key, value, is_causal=spec.is_causal, scale=spec.softmax_scale, window=spec.sliding_window
        )
        return made[0].transpose(0, 1).flatten(1)

    def output(self, inputs: Tensor, rotation: Rotation | None, rows: Tensor | None = None) -> Tensor:
        """The layer's output ``[S, E]`` at ``rows``, or at every position."""
        if rows is None:
            return self.projected(self.mixed(inputs, rotation))
        return self.projected(mixed_values(self.heads(inputs, rows, rotation), self.spec, rows))

    def projected(self, mixed: Tensor) -> Tensor:
        """The output of mixed values: ``[S, H·V]`` to ``[S, E]``."""
        return _project(self.state, "o_proj", mixed)


def _project(state: State, name: str, inputs: Tensor) -> Tensor:
    return F.linear(inputs, state[f"{name}.weight"], state.get(f"{name}.bias"))


def _split(projected: Tensor, heads: int) -> Tensor:
    return torch.unflatten(projected, -1, (heads, -1)).transpose(0, 1)


def _normed(heads: Tensor, weight: Tensor, spec: GroupedSpec, eps: float) -> Tensor:
    if spec.qk_norm == "head":
        return F.rms_norm(heads, heads.shape[-1:], weight, eps)
    flat = heads.transpose(0, 1).flatten(1)
    return _split(F.rms_norm(flat, flat.shape[-1:], weight, eps), len(heads))


def _turned(heads: Tensor, rotation: Rotation, interleaved: bool, rows: Tensor | None = None) -> Tensor:
    cos, sin = (table[:, : heads.shape[1]] if rows is None else table[:, rows] for table in rotation)
    return rotate(heads[None], cos, sin, interleaved=interleaved)[0]
