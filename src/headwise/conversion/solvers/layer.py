"""One layer's attention as a function of its tensors, for a sample of the queries, and what it is converted to.

A layer's own call computes every query; statistics, errors and gradients need only a sample of them, of all heads.

In layers with norms of queries and keys that are converted to MLA, what is linear begins behind the norms. A norm
divides a head by a number of its token, so that no projection of the inputs gives normed keys. But the latent need
not be a map of the inputs: it is one of the layer's own normed keys and values. To the solvers such a layer is one
without norms, whose inputs are its normed queries, its normed keys and its values, and whose projections pick them
out.

Shapes: T tokens of one window, S of them as queries, H query heads, K key heads, D key dims of a head, V value dim,
E hidden, N + P query dims of a converted head, P of them rotary, R latent rank, U = H·D + K·(D + V).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.models.specs import AttentionSpec, GroupedSpec, LatentSpec, ModelSpec
from headwise.runtime.attention import RotaryEmbedding
from headwise.runtime.attention.rope import rotate
from headwise.runtime.kernels import attend
from headwise.runtime.quantization import TransformCode

NORM_EPS = 1e-6
"""The epsilon of norms of queries and keys, where a config does not name one."""

PIECE = 256
"""The number of queries that are computed at a time, each piece against the keys up to its last query."""

KEYS = 128
"""The multiple that a piece's number of keys is rounded up to: oneDNN compiles a kernel for every new shape, which
took a quarter of the time of a descent whose queries are drawn at random."""

State = Mapping[str, Tensor]


def grouped_spec(spec: AttentionSpec) -> GroupedSpec:
    """The spec of a layer that is known to be MHA, GQA or MQA, as every source's is."""
    assert isinstance(spec, GroupedSpec)
    return spec


def latent_spec(spec: AttentionSpec) -> LatentSpec:
    """The spec of a layer that is known to be MLA."""
    assert isinstance(spec, LatentSpec)
    return spec


def grouped_layers(model: ModelSpec) -> list[GroupedSpec]:
    """The specs of all layers of a source, cross-attention last."""
    return [grouped_spec(layer) for layer in (*model.layers, *model.cross_layers)]


class Heads(NamedTuple):
    """Queries ``[H, S, D]``, keys ``[H, T, D]`` and values ``[H, T, V]``; keys and values are repeated to H heads."""

    query: Tensor
    key: Tensor
    value: Tensor


class Rotation(NamedTuple):
    """cos and sin ``[1, T, pairs]`` of each position of a window at each frequency of the model."""

    cos: Tensor
    sin: Tensor


def rotation_tables(source: GroupedSpec, positions: Tensor) -> Rotation | None:
    """The rotary tables of a source layer for the tokens of a window; None without RoPE.

    Args:
        source: the layer's spec.
        positions: the positions of the tokens, ``[T]``, rising.
    """
    if source.rope is None:
        return None
    return Rotation(*RotaryEmbedding(source.rope)(positions[None], torch.float32, int(positions[-1]) + 1))


def sample_rows(tokens: int, count: int, window: int = 0) -> Tensor:
    """About ``count`` evenly spread positions ``[S]``, the last one included; each window's are shifted by one."""
    step = max(tokens // max(count, 1), 1)
    return torch.arange(step - 1 - window % step, tokens, step)


def grouped_heads(layer: Layer, inputs: Tensor, rows: Tensor, rotation: Rotation | None) -> Heads:
    """The queries, keys and values of MHA, GQA or MQA; a code rounds keys before rotation, and values.

    Args:
        layer: the layer; the weights of norms of queries and keys are the factors they multiply by.
        inputs: the inputs of the layer's attention, ``[T, E]``.
        rows: the positions of the queries, ``[S]``.
        rotation: the model's rotary tables.
    """
    spec = grouped_spec(layer.spec)
    H, K = spec.num_heads, spec.num_kv_heads
    query, key, value = normed_heads(layer, inputs, rows)  # [H, S, D], [K, T, D], [K, T, V]
    if layer.code is not None:
        cached = coded(torch.cat((key.transpose(0, 1).flatten(1), value.transpose(0, 1).flatten(1)), 1), layer.code)
        key, value = (_split(x, K) for x in cached.split_with_sizes((K * spec.head_dim, K * spec.value_dim), 1))
    if spec.rope is not None and rotation is not None:
        query = _rotate(query, rotation, spec.rope.interleaved, rows)
        key = _rotate(key, rotation, spec.rope.interleaved)
    group = H // K
    return Heads(query, key.repeat_interleave(group, 0), value.repeat_interleave(group, 0))


def normed_heads(layer: Layer, inputs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Projected queries ``[H, S, D]``, keys ``[K, T, D]`` and values ``[K, T, V]``, with norms where there are any.

    Args:
        layer: the layer, which projects its inputs to heads.
        inputs: the inputs of the layer's attention, ``[T, E]``.
        rows: the positions of the queries, ``[S]``.
    """
    state, K = layer.state, layer.spec.num_kv_heads
    assert K is not None
    query = _split(_project(state, "q_proj", inputs[rows]), layer.spec.num_heads)
    key, value = (_split(_project(state, name, inputs), K) for name in ("k_proj", "v_proj"))
    if layer.spec.qk_norm is not None:
        query, key = (_normed(x, state[f"{n}_norm.weight"], layer) for x, n in ((query, "q"), (key, "k")))
    return query, key, value


def latent_heads(layer: Layer, inputs: Tensor, rows: Tensor, rotation: Rotation | None) -> Heads:
    """The queries, decoded keys and values of MLA: each head's key is its content and the shared rotary key.

    Args:
        layer: the layer, without a query latent; N is the width of its heads' content. A code rounds cached values.
        inputs: the inputs of the layer's attention, ``[T, E]``.
        rows: the positions of the queries, ``[S]``.
        rotation: the model's rotary tables, of which the layer's channels are taken.
    """
    spec, state = latent_spec(layer.spec), layer.state
    H, R, N = spec.num_heads, spec.kv_lora_rank, spec.qk_nope_head_dim
    if spec.qk_norm is None:
        query = _split(_project(state, "q_proj", inputs[rows]), H)  # [H, S, N + P]
    else:
        query, key, value = normed_heads(layer, inputs, rows)
        query = query @ torch.unflatten(state["q_b_proj.weight"], 0, (H, -1)).mT  # [H, S, N + P]
        inputs = torch.cat((key.transpose(0, 1).flatten(1), value.transpose(0, 1).flatten(1)), 1)  # [T, K·(D + V)]
    latent = _project(state, "kv_a_proj_with_mqa", inputs)  # [T, R + P], the rotary key last
    if layer.code is not None:
        latent = coded(latent, layer.code)
    decoded = latent[:, :R]
    if spec.latent_norm:
        weight = state["kv_a_layernorm.weight"]
        decoded = F.rms_norm(decoded.to(weight.dtype), (R,), weight, NORM_EPS)
    content = _split(F.linear(decoded, state["kv_b_proj.weight"]), H)  # [H, T, N + V]
    key, value = content[..., :N], content[..., N:]
    if layer.channels:
        assert rotation is not None
        tables = Rotation(*(table[..., layer.channels] for table in rotation))  # [1, T, P/2]
        rotary_key = _rotate(latent[None, :, R:], tables, interleaved=False).expand(H, -1, -1)  # [H, T, P]
        rotary_query = _rotate(query[..., N:], tables, interleaved=False, rows=rows)  # [H, S, P]
        query, key = torch.cat((query[..., :N], rotary_query), -1), torch.cat((key, rotary_key), -1)
    return Heads(query, key, value)


def coded(values: Tensor, code: TransformCode) -> Tensor:
    """Cached values ``[T, W]`` of a window as they are read from the cache.

    Derivatives pass the rounding as if it were not there.
    """
    own = values.detach()
    rounded = code.rounded(own, torch.arange(len(own)) == 0)
    return values + (rounded - own) if values.requires_grad else rounded


def attention_weights(heads: Heads, spec: AttentionSpec, rows: Tensor) -> Tensor:
    """The softmax of the scores of queries at positions ``rows``, ``[H, S, T]``."""
    scale = heads.query.shape[-1] ** -0.5 if spec.softmax_scale is None else spec.softmax_scale
    scores = (heads.query * scale) @ heads.key.mT  # [H, S, T]
    if spec.is_causal:
        distance = rows[:, None] - torch.arange(heads.key.shape[1])  # [S, T]
        masked = distance < 0
        if spec.sliding_window is not None:
            masked |= distance >= spec.sliding_window
        # The mask is added: the backward pass of an addition costs nothing.
        scores = scores + torch.zeros(masked.shape, dtype=scores.dtype).masked_fill_(masked, -torch.inf)
    return scores.softmax(-1)


def mixed_values(heads: Heads, spec: AttentionSpec, rows: Tensor) -> Tensor:
    """The inputs of the output projection for queries at positions ``rows``: ``[S, H·V]``."""
    pieces = []
    for positions, query in zip(torch.split(rows, PIECE), torch.split(heads.query, PIECE, dim=1), strict=True):
        count = -(-(int(positions.max()) + 1) // KEYS) * KEYS if spec.is_causal else heads.key.shape[1]
        key, value = heads.key[:, :count], heads.value[:, :count]
        pieces.append(attention_weights(Heads(query, key, value), spec, positions) @ value)  # [H, PIECE, V]
    return torch.cat(pieces, 1).transpose(0, 1).flatten(1)


@dataclass(frozen=True)
class Layer:
    """A layer's attention, which can be run for a sample of its queries.

    Attributes:
        spec: the layer's spec.
        state: the layer's tensors by its own names.
        channels: the model frequency of each rotary pair of an MLA layer; empty for other layers.
        norm_eps: the epsilon of the norms of queries and keys, where there are any.
        code: the code of its cached values; None where they are not rounded.
    """

    spec: GroupedSpec | LatentSpec
    state: State
    channels: list[int] = field(default_factory=list)
    norm_eps: float = NORM_EPS
    code: TransformCode | None = None

    def float(self) -> Layer:
        """The layer with its tensors in float32."""
        return replace(self, state={name: tensor.float() for name, tensor in self.state.items()})

    def heads(self, inputs: Tensor, rows: Tensor, rotation: Rotation | None) -> Heads:
        """The queries at positions ``rows``, and the keys and values, of one window's inputs ``[T, E]``."""
        heads = latent_heads if isinstance(self.spec, LatentSpec) else grouped_heads
        return heads(self, inputs, rows, rotation)

    def mixed(self, inputs: Tensor, rotation: Rotation | None) -> Tensor:
        """The inputs of the output projection at every position: ``[T, H·V]``."""
        query, key, value = (x[None] for x in self.heads(inputs, torch.arange(len(inputs)), rotation))
        spec = self.spec
        values = attend(  # [1, H, T, V]
            query, key, value, is_causal=spec.is_causal, scale=spec.softmax_scale, window=spec.sliding_window
        )
        return values[0].transpose(0, 1).flatten(1)

    def own_values(self, inputs: Tensor, rotation: Rotation | None) -> Tensor:
        """The inputs of the output projection at tokens that each begin a text, alone: ``[T, H·V]``.

        Args:
            inputs: the inputs of the layer's attention, ``[T, E]``.
            rotation: the tables of any window of at least T tokens. Rotation changes no value.
        """
        own = None if self.code is None else self.code.first
        value = replace(self, code=own).heads(inputs, torch.arange(1), rotation).value  # [H, T, V]
        return value.transpose(0, 1).flatten(1)

    def own_output(self, inputs: Tensor, rotation: Rotation | None) -> Tensor:
        """The layer's output ``[T, E]`` at tokens that each begin a text alone; see `own_values`."""
        return self.projected(self.own_values(inputs, rotation))

    def output(self, inputs: Tensor, rotation: Rotation | None, rows: Tensor | None = None) -> Tensor:
        """The layer's output ``[S, E]`` at positions ``rows``, or at every position."""
        if rows is None:
            return self.projected(self.mixed(inputs, rotation))
        return self.projected(mixed_values(self.heads(inputs, rows, rotation), self.spec, rows))

    def projected(self, mixed: Tensor) -> Tensor:
        """The layer's output ``[S, E]`` from mixed values ``[S, H·V]``."""
        return _project(self.state, "o_proj", mixed)


def _project(state: State, name: str, inputs: Tensor) -> Tensor:
    return F.linear(inputs, state[f"{name}.weight"], state.get(f"{name}.bias"))


def _split(projection: Tensor, heads: int) -> Tensor:
    return torch.unflatten(projection, -1, (heads, -1)).transpose(0, 1)  # [heads, tokens, dims]


def _normed(heads: Tensor, weight: Tensor, layer: Layer) -> Tensor:
    heads = heads.to(weight.dtype)  # narrower where products are
    if layer.spec.qk_norm == "head":
        return F.rms_norm(heads, heads.shape[-1:], weight, layer.norm_eps)
    flat = heads.transpose(0, 1).flatten(1)  # [tokens, heads·dims]
    return _split(F.rms_norm(flat, flat.shape[-1:], weight, layer.norm_eps), len(heads))


def _rotate(heads: Tensor, rotation: Rotation, interleaved: bool, rows: Tensor | None = None) -> Tensor:
    cos, sin = (table[:, : heads.shape[1]] if rows is None else table[:, rows] for table in rotation)
    return rotate(heads[None], cos, sin, interleaved=interleaved)[0]


KEY_WEIGHT = 0.5
"""The share of the predicted cost of an error of the keys that counts: softmax forgives some. The rank
allocation tries other shares."""

LONGEST = 2048
"""The longest distance between query and key that counts without a text, in tokens."""


@dataclass(frozen=True)
class LayerTarget:
    """The target of one layer.

    For example ``LayerTarget(as_latent(source, 96, 32), key_weight=1.0)``, where errors of keys and of values count
    equally.

    Attributes:
        spec: the converted layer's spec.
        key_weight: the cost of an error of the keys relative to one of the values, on a text; for MLA.
        rotary_channels: the channels that keep their rotation, bool ``[F, K]``, for MLA; when None, the layer keeps
            those that lose most without it.
        mixes_heads: whether key heads are mixed into rotary channels (the stage ``channels``), for MLA; otherwise
            each channel is one head's own.
        longest: the distance in tokens up to which a dropped rotation is averaged where there is no text.
    """

    spec: GroupedSpec | LatentSpec
    key_weight: float = KEY_WEIGHT
    rotary_channels: Tensor | None = None
    mixes_heads: bool = True
    longest: int = LONGEST


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
    """The MLA layer with norms out of the solution of `of_heads`, float64; the solution itself without norms.

    Args:
        source: the source layer.
        solved: the solution, which of a layer with norms reads the source's normed queries, normed keys and values.
        target: the converted layer's spec.
    """
    if not is_normed(source):
        return solved
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
