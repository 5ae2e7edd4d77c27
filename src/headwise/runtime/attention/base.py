"""The base class of the attention layers, RMSNorm, and `build`, which makes the layer of a spec.

There is one call for all layers. It checks arguments, rotates positions, and fills or reads the cache, sliding
windows among them; a mechanism only says what it caches of a token, and how queries attend to that. RMSNorm rounds as
transformers' models round it.

Shapes: B batch, S new tokens, T all tokens, H query heads, P rotated dims, E hidden.
"""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from headwise.errors import ArgumentError, SpecError
from headwise.models.specs import AttentionSpec, CompressedSpec, GroupedSpec, RecurrentSpec, mechanism_module
from headwise.models.specs.base import RopeSpec, check_positive
from headwise.runtime.attention.cache import AttentionCache
from headwise.runtime.attention.rope import RotaryEmbedding, Rotation, rotate
from headwise.runtime.kernels import (
    BACKENDS,
    WITHOUT_WEIGHTS,
    AttendOptions,
    Backend,
    as_bool_mask,
    attend,
    attend_with_weights,
)


class RMSNorm(nn.Module):
    """``weight · x / rms(x)``, the mean square taken at least in float32.

    For example ``RMSNorm(512)(torch.randn(1, 10, 512))``.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim; the dtype stays."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide.to(x.dtype)).to(x.dtype)  # under autocast the weight's dtype is wider than x's

    def extra_repr(self) -> str:
        """The width and eps, for ``print(model)``."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


Rope = RopeSpec | RotaryEmbedding


Weighed = tuple[Tensor, Tensor | None]
"""Mixed values ``[B, H, S, V]``, and the weights ``[B, H, S, T]`` where they are returned."""

Attended = Tensor | tuple[Tensor, Tensor]
"""The output of a layer ``[B, S, E]``; with weights ``[B, H, S, T]`` where they are asked for."""


class CacheLike(Protocol):
    """The interface that layers use of a cache: `AttentionCache` has it, and transformers' caches are wrapped."""

    @property
    def length(self) -> int:
        """The number of cached tokens."""

    def update(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Append new tokens to each tensor, and return all cached tokens."""

    def views(self) -> tuple[Tensor, ...]:
        """All cached tokens, for each tensor."""


class Call(NamedTuple):
    """The options of one forward call, as a mechanism's `AttentionLayer._attend` gets them.

    Attributes:
        attention_mask: a 4-D bool mask; with a cache of another library it is left as the caller gave it.
        is_causal: whether to apply the bottom-right causal mask.
        is_cross: whether the layer attends to another sequence.
        return_weights: whether the attention weights are returned too.
        position_ids: the positions of the new tokens, ``[B or 1, S]``; None without RoPE.
        rotation: cos and sin of the new tokens, ``[B or 1, S, P/2]`` each; None without RoPE.
        total: the number of tokens so far, the new ones included.
    """

    attention_mask: Tensor | None
    is_causal: bool
    is_cross: bool
    return_weights: bool
    position_ids: Tensor | None
    rotation: Rotation | None
    total: int


class Cut(NamedTuple):
    """How the tensors of a module are cut, when ranks share a layer's heads.

    Attributes:
        dim: the dimension along which a weight is cut; its bias is cut where that is 0, and is on every rank in full
            otherwise.
        heads: the number of heads along it.
        sections: the number of equal parts of it that have so many heads each, such as 2 for keys beside values.
    """

    dim: int
    heads: int
    sections: int = 1


class HeadSplit(NamedTuple):
    """How ranks share a layer by heads (`headwise.runtime.parallel`).

    Attributes:
        cuts: how each module or parameter is cut, by its name; every rank holds the others in full.
        sums: the module whose outputs ranks add up, so that all go on with the sum. Its bias is the first rank's.
        shared_sums: modules whose outputs ranks add up, and use for their own heads alone.
        after: modules behind ``sums``, which every rank computes in full.
        norms: RMSNorms whose mean is over all ranks' heads.
    """

    cuts: dict[str, Cut]
    sums: str = "o_proj"
    shared_sums: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()


class AttentionLayer(nn.Module):
    """Base class of the layers. A mechanism defines what it caches of a token, and how queries attend to that.

    Args:
        spec: the layer's sizes; `headwise.cost` computes its costs from them.
        rope: the rotary embedding, or None.
        dropout: probability of dropping an attention weight while training.
        backend: passed to `headwise.runtime.kernels.attend`.

    Attributes:
        caches_rotated: whether keys are rotated before they are cached, and not when they are read.
    """

    caches_rotated: ClassVar[bool] = True

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        rope: RotaryEmbedding | None = None,
        dropout: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        if isinstance(dropout, str) or dropout is None or not 0.0 <= dropout < 1.0:
            raise ArgumentError("dropout", dropout, "must be at least 0 and below 1")
        if backend not in BACKENDS:
            raise ArgumentError("backend", backend, f"must be one of {', '.join(BACKENDS)}")
        self.spec = spec
        self.dropout = dropout
        self.backend: Backend = backend
        self.rope = rope

    def forward(
        self,
        hidden_states: Tensor,
        *,
        key_value_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
        position_ids: Tensor | None = None,
        position_embeddings: Rotation | None = None,
        cache: CacheLike | None = None,
        return_weights: bool = False,
    ) -> Attended:
        """Attend to the tokens themselves, to those in a cache, or to another sequence.

        Args:
            hidden_states: ``[B, S, E]``.
            key_value_states: ``[B, T, E]``, another sequence to attend to (cross-attention); a cache is then filled
                by the first call and only read by the next ones.
            attention_mask: bool or 0/1 integers, True = attend; ``[B, T]`` padding or broadcastable to
                ``[B, H, S, T]``, where T includes the cached tokens, even those that a window has forgotten.
            is_causal: bottom-right causal; combines with the mask. A layer with a sliding window requires it.
            position_ids: ``[B or 1, S]`` for RoPE; the next positions after the cache when None. In cross-attention
                keys are at 0 … T − 1, and queries at 0 … S − 1 of each call unless given.
            position_embeddings: cos and sin ``[B or 1, S, P/2]`` of the new tokens, instead of the layer's own.
            cache: the cache of earlier tokens, which is extended in place.
            return_weights: also return the attention weights ``[B, H, S, T]``; with a window, T counts the tokens
                held.

        Returns:
            ``[B, S, E]``, or that and the weights.

        Raises:
            ArgumentError: shapes do not fit together, or the mechanism does not support an option.
        """
        self._check_hidden("hidden_states", hidden_states)
        is_cross = key_value_states is not None
        window = self.spec.sliding_window
        if window is not None and (is_cross or not is_causal):
            rule = "a layer with a sliding window attends to its own past: is_causal=True, no key_value_states"
            raise ArgumentError("sliding_window", window, rule)
        past = 0 if cache is None or is_cross else cache.length
        total = past + hidden_states.shape[1]
        self._check_rotation(position_embeddings, hidden_states.shape[1])
        ids, rotation = None, position_embeddings
        if position_ids is not None or (self.rope is not None and rotation is None):
            ids = positions(past, hidden_states, position_ids)
            if self.rope is not None and rotation is None:
                if self.caches_rotated:
                    self.rope.warn_of_change(past, total)
                rotation = self.rope(ids, hidden_states.dtype, total)
        if attention_mask is not None and (cache is None or isinstance(cache, AttentionCache)):
            # Checked before anything is cached. The length of another library's cache is not known here.
            keys = total if key_value_states is None else key_value_states.shape[1]
            attention_mask = self._as_mask(attention_mask, hidden_states, keys)
        if return_weights and self.backend in WITHOUT_WEIGHTS:
            raise ArgumentError("backend", self.backend, "never holds the weights; use reference, packed or auto")
        call = Call(attention_mask, is_causal, is_cross, return_weights, ids, rotation, total)
        self._refuse(call, position_ids, position_embeddings, cache)
        memory = self._remember(hidden_states, key_value_states, rotation, cache)
        if window is not None and attention_mask is not None:
            call = call._replace(attention_mask=_latest(attention_mask, total, memory[0].shape[2]))
        return self._attend(hidden_states, memory, call)

    def _refuse(  # a hook: most mechanisms refuse nothing
        self, call: Call, position_ids: Tensor | None, position_embeddings: Rotation | None, cache: CacheLike | None
    ) -> None:
        """Raise an error for options that this mechanism does not support, before anything is cached."""

    def _check_rotation(self, tables: Rotation | None, S: int) -> None:
        if tables is None or self.rope is None:
            return
        expected = (S, self.rope.spec.dim // 2)
        for table in tables:
            if table.shape[1:] != expected:
                rule = f"must be [B or 1, {expected[0]}, {expected[1]}]"
                raise ArgumentError("position_embeddings shape", tuple(table.shape), rule)

    def _as_mask(self, mask: Tensor, states: Tensor, keys: int) -> Tensor:
        heads: int = self.spec.num_heads  # type: ignore[attr-defined]  # of every kind that has a layer
        return as_bool_mask(mask, (states.shape[0], heads, states.shape[1], keys))

    def _states_to_cache(self, states: Tensor, rotation: Rotation | None) -> tuple[Tensor, ...]:
        """Compute what is cached of tokens ``[B, S, E]``: ``[B, heads, S, width]`` for each of `cache_shapes`."""
        raise NotImplementedError

    def _attend(self, hidden_states: Tensor, memory: tuple[Tensor, ...], call: Call) -> Attended:
        """Compute the layer's output for new tokens.

        Args:
            hidden_states: ``[B, S, E]``.
            memory: ``[B, heads, T, width]`` for each of `cache_shapes`, of all tokens attended to.
            call: the call's options.
        """
        raise NotImplementedError

    def _remember(
        self, states: Tensor, source: Tensor | None, rotation: Rotation | None, cache: CacheLike | None
    ) -> tuple[Tensor, ...]:
        """Cache the new tokens and return all that are attended to, or those of the source of cross-attention."""
        if source is not None:
            self._check_hidden("key_value_states", source)
            T = source.shape[1]
            if source.shape[0] != states.shape[0]:
                rule = f"must be {states.shape[0]}, as of hidden_states"
                raise ArgumentError("key_value_states batch", source.shape[0], rule)
            if cache is not None and cache.length:
                if cache.length != T:
                    rule = f"must be the {cache.length} tokens the cross-attention cache was filled from"
                    raise ArgumentError("key_value_states tokens", T, rule)
                cached = cache.views()
                if cached[0].shape[0] != states.shape[0]:
                    rule = f"must be {cached[0].shape[0]}, the batch size the cross-attention cache was filled with"
                    raise ArgumentError("batch", states.shape[0], rule)
                return cached
            states = source
            rotation = None if self.rope is None else self.rope(positions(0, source, None), source.dtype, T)
        new = self._states_to_cache(states, rotation)
        return new if cache is None else cache.update(*new)

    def _kernel(self, query: Tensor, key: Tensor, value: Tensor, call: Call, scale: float | None) -> Weighed:
        """Mixed values ``[B, H, S, V]`` by `headwise.runtime.kernels.attend`, and the weights if the call asks for
        them."""
        options: AttendOptions = {
            "attn_mask": call.attention_mask,
            "dropout_p": self._dropout_p(),
            "is_causal": call.is_causal,
            "scale": scale,
            "window": self.spec.sliding_window,
            "backend": self.backend,
        }
        if call.return_weights:
            return attend_with_weights(query, key, value, **options)
        return attend(query, key, value, **options), None

    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        """(heads, width) of each tensor that this layer caches."""
        raise NotImplementedError

    def head_split(self) -> HeadSplit:
        """How ranks share this layer by heads.

        Raises:
            ArgumentError: the mechanism does not say.
        """
        raise ArgumentError("mechanism", self.spec.mechanism, "is not shared by heads: its layer has no head_split")

    def new_cache(
        self,
        batch_size: int,
        max_length: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> AttentionCache:
        """Make an empty cache for this layer.

        Args:
            batch_size: B.
            max_length: the most tokens it can be given.
            dtype: the dtype of the cache; the weights' when None.
            device: the device of the cache; the weights' when None.
        """
        weight = next(self.parameters())
        return AttentionCache(
            batch_size,
            self.cache_shapes(),
            max_length,
            dtype=dtype or weight.dtype,
            device=device or weight.device,
            window=self.spec.sliding_window,
        )

    def _dropout_p(self) -> float:
        return self.dropout if self.training else 0.0

    def _check_hidden(self, name: str, states: Tensor) -> None:
        if states.dim() != 3 or states.shape[2] != self.spec.hidden_size or not states.shape[1]:
            rule = f"must be [batch, tokens, hidden_size = {self.spec.hidden_size}], at least one token"
            raise ArgumentError(f"{name} shape", tuple(states.shape), rule)


def rotated(x: Tensor, rotation: Rotation | None, rope: RotaryEmbedding | None) -> Tensor:
    """Rotate heads ``[B, heads, S, D]`` as a layer's rotary embedding says; without one they stay as they are."""
    if rotation is None or rope is None:
        return x
    cos, sin = rotation
    if cos.dtype != x.dtype:  # under autocast heads are narrower than the layer's input
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return rotate(x, cos, sin, interleaved=rope.spec.interleaved)


def as_rotary(rope: Rope | None) -> RotaryEmbedding | None:
    """Make a spec into a module; a module and None stay as they are.

    Raises:
        ArgumentError: ``rope`` is neither a spec, a module nor None.
    """
    if rope is not None and not isinstance(rope, RopeSpec | RotaryEmbedding):
        raise ArgumentError("rope", rope, "must be a RopeSpec, a RotaryEmbedding or None")
    return RotaryEmbedding(rope) if isinstance(rope, RopeSpec) else rope


def positions(start: int, states: Tensor, position_ids: Tensor | None) -> Tensor:
    """Position ids ``[B or 1, S]`` of ``[B, S, E]`` states; ``start … start + S − 1`` when None are given.

    Raises:
        ArgumentError: the given position ids have another shape.
    """
    B, S = states.shape[:2]
    if position_ids is None:
        return torch.arange(start, start + S, device=states.device)[None]
    if position_ids.dim() == 1:
        position_ids = position_ids[None]
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, B) or position_ids.shape[1] != S:
        raise ArgumentError("position_ids shape", tuple(position_ids.shape), f"must be [{B} or 1, {S}]")
    return position_ids


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``[B, S, heads·D]`` → ``[B, heads, S, D]``, a view."""
    return torch.unflatten(x, -1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """``[B, heads, S, D]`` → ``[B, S, heads·D]``."""
    return x.transpose(1, 2).flatten(-2)


_FEW_ROWS = 4
"""Rows of bfloat16 that are multiplied in float32 on a CPU."""


def per_head(x: Tensor, matrices: Tensor) -> Tensor:
    """``[B, heads, S, a]`` times a matrix for each head, ``[heads, a, b]``, read once for all sequences."""
    B, _, S, _ = x.shape
    if B == 1 and S <= _FEW_ROWS and x.is_cpu and x.dtype == torch.bfloat16 and not torch.is_grad_enabled():
        # With so few rows, torch's products in bfloat16 take longer than those in float32 and widening the matrices
        # (torch 2.13, a Xeon with AMX).
        return torch.bmm(x[0].float(), matrices.float()).to(x.dtype)[None]
    if B == 1:
        return torch.bmm(x[0], matrices)[None]
    folded = x.transpose(0, 1).flatten(1, 2)  # [heads, B·S, a]
    return torch.unflatten(torch.bmm(folded, matrices), 1, (B, S)).transpose(0, 1)


def default_head_dim(hidden_size: int, num_heads: int) -> int:
    """The width of a head that fills the hidden size: ``hidden_size / num_heads``.

    Raises:
        SpecError: ``hidden_size`` is no multiple of ``num_heads``.
    """
    check_positive("hidden_size", hidden_size)
    check_positive("num_heads", num_heads)
    if hidden_size % num_heads:
        raise SpecError("num_heads", num_heads, f"must divide hidden_size = {hidden_size}, or give head_dim")
    return hidden_size // num_heads


def _latest(attention_mask: Tensor, total: int, held: int) -> Tensor:
    """The columns of a mask that belong to the latest tokens, which a window's cache holds."""
    return attention_mask[..., -held:] if attention_mask.shape[-1] == total else attention_mask


def constructor_arguments(spec: AttentionSpec, layer: type[AttentionLayer]) -> dict[str, Any]:
    """The fields of a spec that are keywords of a layer's constructor, by name."""
    taken = inspect.signature(layer.__init__).parameters
    return {field.name: getattr(spec, field.name) for field in fields(spec) if field.name in taken}


def build(spec: AttentionSpec, **kwargs: Any) -> AttentionLayer:
    """Build the layer that a spec describes, freshly initialised.

    Args:
        spec: the layer.
        kwargs: passed to the ``from_spec`` of the mechanism's module, such as ``dropout`` or ``backend``.

    Raises:
        SpecError: headwise has no such layer: the spec shares keys and values, gates its output, attends within
            chunks or to entries, has a query latent, or is recurrent.

    >>> build(headwise.GroupedSpec(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16), dropout=0.1)
    """
    for name in ("output_gate", "shares_kv", "chunked"):
        if getattr(spec, name, False):
            raise SpecError(name, True, "is not supported by the layers yet")
    if isinstance(spec, GroupedSpec) and spec.q_lora_rank is not None:
        raise SpecError("q_lora_rank", spec.q_lora_rank, "is not supported by these layers yet")
    if isinstance(spec, RecurrentSpec | CompressedSpec):
        raise SpecError("attention", spec.label, "has costs, but no layer that runs; choose a layer of attention")
    layer = cast(AttentionLayer, mechanism_module("runtime.attention", spec.kind).from_spec(spec, **kwargs))
    # A layer is told at each call whether to be causal; its spec, which costs are computed from, says what the model
    # does.
    layer.spec = replace(layer.spec, is_causal=spec.is_causal)
    return layer
