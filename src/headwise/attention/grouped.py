"""Multi-head, multi-query and grouped-query attention: one layer, three numbers of key–value heads.

Shapes: B batch, S new tokens, T all tokens, H query heads, K key–value heads, D head dim, V value dim, E hidden.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from headwise.attention.base import (
    AttentionLayer,
    CacheLike,
    Rope,
    as_rotary,
    merge_heads,
    positions,
    split_heads,
)
from headwise.attention.norm import RMSNorm
from headwise.attention.rope import rotate
from headwise.errors import ArgumentError, SpecError
from headwise.kernels import Backend, attend
from headwise.specs.grouped import GroupedSpec, grouped_bias


class GroupedQueryAttention(AttentionLayer):
    """Query heads in groups that share a key and a value head.

    With ``num_kv_heads = num_heads`` it is exactly multi-head attention, with 1 exactly multi-query. A state dict
    of transformers' Llama, Qwen2 or Qwen3 attention loads as it is.
    Source: Ainslie et al. 2023 (arXiv:2305.13245).

    Args:
        hidden_size: E.
        num_heads: H.
        num_kv_heads: K; divides H.
        group_size: H / K, in place of ``num_kv_heads``; one of the two is given.
        head_dim: D; ``hidden_size / num_heads`` when None.
        v_head_dim: V; ``head_dim`` when None.
        bias: True for every projection, ``"qkv"`` for Qwen2's way, or projection names.
        dropout: probability of dropping an attention weight while training.
        rope: rotary embedding of queries and keys, or None.
        qk_norm: ``"head"`` for an RMSNorm over each query and key head (Qwen3), ``"full"`` over all heads together.
        norm_eps: of those norms.
        softmax_scale: multiplies the scores; ``1/sqrt(D)`` when None.
        backend: passed to `headwise.kernels.attend`.

    Raises:
        SpecError: the sizes do not fit together.
    """

    spec: GroupedSpec

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        group_size: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        bias: bool | str | Collection[str] = False,
        dropout: float = 0.0,
        rope: Rope | None = None,
        qk_norm: str | None = None,
        norm_eps: float = 1e-6,
        softmax_scale: float | None = None,
        backend: Backend = "auto",
    ) -> None:
        rotary = as_rotary(rope)
        spec = GroupedSpec(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=_kv_heads(num_heads, num_kv_heads, group_size),
            head_dim=_head_dim(hidden_size, num_heads) if head_dim is None else head_dim,
            v_head_dim=v_head_dim,
            bias=grouped_bias(bias),
            qk_norm=qk_norm,
            rope=None if rotary is None else rotary.spec,
            softmax_scale=softmax_scale,
        )
        super().__init__(spec, dropout=dropout, backend=backend)
        E, H, K, D, V = hidden_size, num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim
        self.q_proj = nn.Linear(E, H * D, bias="q_proj" in spec.bias)
        self.k_proj = nn.Linear(E, K * D, bias="k_proj" in spec.bias)
        self.v_proj = nn.Linear(E, K * V, bias="v_proj" in spec.bias)
        self.o_proj = nn.Linear(H * V, E, bias="o_proj" in spec.bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm is not None:
            self.q_norm = RMSNorm(D if qk_norm == "head" else H * D, norm_eps)
            self.k_norm = RMSNorm(D if qk_norm == "head" else K * D, norm_eps)
        self.rope = rotary

    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        """Keys ``[B, K, T, D]`` and values ``[B, K, T, V]``."""
        return (self.spec.num_kv_heads, self.spec.head_dim), (self.spec.num_kv_heads, self.spec.value_dim)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        key_value_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
        position_ids: Tensor | None = None,
        cache: CacheLike | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend.

        Args:
            hidden_states: ``[B, S, E]``.
            key_value_states: ``[B, T, E]`` to attend to instead (cross-attention); a cache is then filled by the
                first call and only read by the next ones.
            attention_mask: bool or 0/1 integers, True = attend; ``[B, T]`` padding or broadcastable to
                ``[B, H, S, T]``, T counting the cached tokens.
            is_causal: bottom-right causal; combines with the mask.
            position_ids: ``[B or 1, S]`` for RoPE; the next positions after the cache when None. The keys of
                cross-attention are at 0 … T − 1.
            cache: read and extended in place.
            return_weights: also return the attention weights ``[B, H, S, T]``.

        Returns:
            ``[B, S, E]``, or that and the weights.
        """
        self._check_hidden("hidden_states", hidden_states)
        query = self._heads(self.q_proj(hidden_states), self.spec.num_heads, self.q_norm)
        S = hidden_states.shape[1]
        past = 0 if cache is None or key_value_states is not None else cache.length
        if self.rope is not None:
            ids = positions(past, hidden_states, position_ids)
            cos, sin = self.rope(ids, query.dtype, past + S)
            query = rotate(query, cos, sin, interleaved=self.rope.spec.interleaved)
        if key_value_states is not None:
            key, value = self._cross(key_value_states, cache)
        else:
            key, value = self._project(hidden_states)
            if self.rope is not None:
                key = rotate(key, cos, sin, interleaved=self.rope.spec.interleaved)
            if cache is not None:
                key, value = cache.update(key, value)
        attended = attend(
            query,
            key,
            value,
            attention_mask,
            self._dropout_p(),
            is_causal,
            self.spec.softmax_scale,
            backend=self.backend,
            return_weights=return_weights,
        )
        if isinstance(attended, tuple):
            return self.o_proj(merge_heads(attended[0])), attended[1]
        out: Tensor = self.o_proj(merge_heads(attended))
        return out

    def _project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        key = self._heads(self.k_proj(states), self.spec.num_kv_heads, self.k_norm)
        return key, split_heads(self.v_proj(states), self.spec.num_kv_heads)

    def _heads(self, projected: Tensor, heads: int, norm: RMSNorm | None) -> Tensor:
        if norm is not None and self.spec.qk_norm == "full":
            projected = norm(projected)
        states = split_heads(projected, heads)
        return norm(states) if norm is not None and self.spec.qk_norm == "head" else states

    def _cross(self, source: Tensor, cache: CacheLike | None) -> tuple[Tensor, Tensor]:
        self._check_hidden("key_value_states", source)
        T = source.shape[1]
        if cache is not None and cache.length:
            if cache.length != T:
                rule = f"must be the {cache.length} tokens the cross-attention cache was filled from"
                raise ArgumentError("key_value_states tokens", T, rule)
            key, value = cache.views()
            return key, value
        key, value = self._project(source)
        if self.rope is not None:
            cos, sin = self.rope(positions(0, source, None), key.dtype, T)
            key = rotate(key, cos, sin, interleaved=self.rope.spec.interleaved)
        if cache is not None:
            key, value = cache.update(key, value)
        return key, value


class MultiHeadAttention(GroupedQueryAttention):
    """Every query head has its own key and value head.

    Source: Vaswani et al. 2017 (arXiv:1706.03762). Keywords as `GroupedQueryAttention`.
    """

    def __init__(self, hidden_size: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(hidden_size, num_heads, num_heads, **kwargs)


class MultiQueryAttention(GroupedQueryAttention):
    """All query heads share one key and one value head.

    Source: Shazeer 2019 (arXiv:1911.02150). Keywords as `GroupedQueryAttention`.
    """

    def __init__(self, hidden_size: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(hidden_size, num_heads, 1, **kwargs)


def from_spec(spec: GroupedSpec, *, dropout: float = 0.0, norm_eps: float = 1e-6) -> GroupedQueryAttention:
    """The layer a spec describes, freshly initialised."""
    for field in ("sinks", "softcap"):
        if getattr(spec, field):
            raise SpecError(field, getattr(spec, field), "is not supported by the layers yet")
    return GroupedQueryAttention(
        spec.hidden_size,
        spec.num_heads,
        spec.num_kv_heads,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        bias=spec.bias,
        dropout=dropout,
        rope=spec.rope,
        qk_norm=spec.qk_norm,
        norm_eps=norm_eps,
        softmax_scale=spec.softmax_scale,
    )


def _kv_heads(num_heads: int, num_kv_heads: int | None, group_size: int | None) -> int:
    if (num_kv_heads is None) == (group_size is None):
        raise SpecError("num_kv_heads, group_size", (num_kv_heads, group_size), "exactly one of the two is given")
    if num_kv_heads is not None:
        return num_kv_heads
    assert group_size is not None
    if group_size < 1 or num_heads % group_size:
        raise SpecError("group_size", group_size, f"must divide num_heads = {num_heads}")
    return num_heads // group_size


def _head_dim(hidden_size: int, num_heads: int) -> int:
    if num_heads < 1 or hidden_size % num_heads:
        raise SpecError("num_heads", num_heads, f"must divide hidden_size = {hidden_size}, or give head_dim")
    return hidden_size // num_heads
