"""Multi-head, multi-query and grouped-query attention: one layer, which differs in its number of key–value heads.

Shapes: B batch, S new tokens, T all tokens, H query heads, K key–value heads, D head dim, V value dim, E hidden.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from headwise.errors import SpecError
from headwise.models.specs.grouped import GroupedSpec, grouped_bias
from headwise.runtime.attention.base import (
    Attended,
    AttentionLayer,
    Call,
    Cut,
    HeadSplit,
    RMSNorm,
    Rope,
    as_rotary,
    constructor_arguments,
    default_head_dim,
    merge_heads,
    rotated,
    split_heads,
)
from headwise.runtime.attention.rope import Rotation
from headwise.runtime.kernels import Backend


class GroupedQueryAttention(AttentionLayer):
    """Query heads in groups that share a key and a value head.

    With ``num_kv_heads = num_heads`` it is multi-head attention, with 1 it is multi-query attention. A state dict of
    transformers' Llama, Qwen2 or Qwen3 attention loads without renaming.
    Source: Ainslie et al. 2023 (arXiv:2305.13245).

    Args:
        hidden_size: E.
        num_heads: H.
        num_kv_heads: K; divides H.
        group_size: H / K, instead of ``num_kv_heads``; exactly one of the two is given.
        head_dim: D; ``hidden_size / num_heads`` when None.
        v_head_dim: V; ``head_dim`` when None.
        bias: True for every projection, ``"qkv"`` for those of Qwen2, or projection names.
        dropout: probability of dropping an attention weight while training.
        rope: rotary embedding of queries and keys, or None.
        qk_norm: ``"head"`` for an RMSNorm over each query and key head (Qwen3), ``"full"`` for one over all heads.
        norm_eps: epsilon of those norms.
        softmax_scale: multiplies the scores; ``1/sqrt(D)`` when None.
        sliding_window: how many of the latest tokens are attended to; all when None.
        output_projection: False leaves out ``o_proj``: the output is then the heads' values, ``[B, S, H·V]``.
        backend: passed to `headwise.runtime.kernels.attend`.

    Raises:
        SpecError: the sizes do not fit together.

    >>> layer = GroupedQueryAttention(512, 8, num_kv_heads=2)
    >>> layer(torch.randn(1, 10, 512), is_causal=True).shape
    torch.Size([1, 10, 512])
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
        sliding_window: int | None = None,
        output_projection: bool = True,
        backend: Backend = "auto",
    ) -> None:
        rotary = as_rotary(rope)
        spec = GroupedSpec(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=_kv_heads(num_heads, num_kv_heads, group_size),
            head_dim=default_head_dim(hidden_size, num_heads) if head_dim is None else head_dim,
            v_head_dim=v_head_dim,
            bias=grouped_bias(bias, output_projection=output_projection),
            qk_norm=qk_norm,
            rope=None if rotary is None else rotary.spec,
            softmax_scale=softmax_scale,
            sliding_window=sliding_window,
            output_projection=output_projection,
        )
        super().__init__(spec, rope=rotary, dropout=dropout, backend=backend)
        E, H, K, D, V = hidden_size, num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim
        self.q_proj = nn.Linear(E, H * D, bias="q_proj" in spec.bias)
        self.k_proj = nn.Linear(E, K * D, bias="k_proj" in spec.bias)
        self.v_proj = nn.Linear(E, K * V, bias="v_proj" in spec.bias)
        self.o_proj: nn.Linear | None = None
        if output_projection:
            self.o_proj = nn.Linear(H * V, E, bias="o_proj" in spec.bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm is not None:
            self.q_norm = RMSNorm(D if qk_norm == "head" else H * D, norm_eps)
            self.k_norm = RMSNorm(D if qk_norm == "head" else K * D, norm_eps)

    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        """Keys ``[B, K, T, D]`` and values ``[B, K, T, V]``."""
        return (self.spec.num_kv_heads, self.spec.head_dim), (self.spec.num_kv_heads, self.spec.value_dim)

    def head_split(self) -> HeadSplit:
        """Ranks share query heads, and key–value heads as far as there are."""
        H, K = self.spec.num_heads, self.spec.num_kv_heads
        cuts = {"q_proj": Cut(0, H), "k_proj": Cut(0, K), "v_proj": Cut(0, K), "o_proj": Cut(1, H)}
        if self.spec.qk_norm != "full":
            return HeadSplit(cuts)
        return HeadSplit(cuts | {"q_norm": Cut(0, H), "k_norm": Cut(0, K)}, norms=("q_norm", "k_norm"))

    def _states_to_cache(self, states: Tensor, rotation: Rotation | None) -> tuple[Tensor, ...]:
        key = self._heads(self.k_proj(states), self.spec.num_kv_heads, self.k_norm)
        return rotated(key, rotation, self.rope), split_heads(self.v_proj(states), self.spec.num_kv_heads)

    def _attend(self, hidden_states: Tensor, memory: tuple[Tensor, ...], call: Call) -> Attended:
        query = self._heads(self.q_proj(hidden_states), self.spec.num_heads, self.q_norm)  # [B, H, S, D]
        key, value = memory  # [B, K, T, D], [B, K, T, V]
        mixed, weights = self._kernel(
            rotated(query, call.rotation, self.rope), key, value, call, self.spec.softmax_scale
        )
        out = merge_heads(mixed)  # [B, S, H·V]
        if self.o_proj is not None:
            out = self.o_proj(out)
        return out if weights is None else (out, weights)

    def _heads(self, projected: Tensor, heads: int, norm: RMSNorm | None) -> Tensor:
        """Split projected states ``[B, S, heads·D]`` into heads ``[B, heads, S, D]``, with the layer's norm."""
        if norm is not None and self.spec.qk_norm == "full":
            projected = norm(projected)
        states = split_heads(projected, heads)
        return norm(states) if norm is not None and self.spec.qk_norm == "head" else states


class SelfAttention(GroupedQueryAttention):
    """Attention with a single head: a query, a key and a value projection.

    For example ``SelfAttention(512, head_dim=64)(torch.randn(1, 10, 512), is_causal=True)``.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.1. Other keywords are those of
    `GroupedQueryAttention`.

    Args:
        hidden_size: E.
        head_dim: width of the query and the key; E when None.
        v_head_dim: width of the value; ``head_dim`` when None.
        output_projection: whether a projection back to E follows; if not, the output is ``[B, S, v_head_dim]``.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        *,
        output_projection: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            hidden_size, 1, 1, head_dim=head_dim, v_head_dim=v_head_dim, output_projection=output_projection, **kwargs
        )


class MultiHeadAttention(GroupedQueryAttention):
    """Every query head has its own key and value head.

    For example ``MultiHeadAttention(512, 8)(torch.randn(1, 10, 512), is_causal=True)``.

    Source: Vaswani et al. 2017 (arXiv:1706.03762). Keywords are those of `GroupedQueryAttention`.
    """

    def __init__(self, hidden_size: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(hidden_size, num_heads, num_heads, **kwargs)


class MultiQueryAttention(GroupedQueryAttention):
    """All query heads share one key and one value head.

    For example ``MultiQueryAttention(512, 8)(torch.randn(1, 10, 512), is_causal=True)``.

    Source: Shazeer 2019 (arXiv:1911.02150). Keywords are those of `GroupedQueryAttention`.
    """

    def __init__(self, hidden_size: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(hidden_size, num_heads, 1, **kwargs)


def from_spec(
    spec: GroupedSpec, *, dropout: float = 0.0, norm_eps: float = 1e-6, backend: Backend = "auto"
) -> GroupedQueryAttention:
    """Build the layer that a spec describes, freshly initialised.

    Raises:
        SpecError: the spec has attention sinks or a softcap, which the layer does not support.
    """
    for field in ("sinks", "softcap"):
        if getattr(spec, field):
            raise SpecError(field, getattr(spec, field), "is not supported by the layers yet")
    arguments = constructor_arguments(spec, GroupedQueryAttention)
    return GroupedQueryAttention(**arguments, dropout=dropout, norm_eps=norm_eps, backend=backend)


def _kv_heads(num_heads: int, num_kv_heads: int | None, group_size: int | None) -> int:
    if (num_kv_heads is None) == (group_size is None):
        raise SpecError("num_kv_heads, group_size", (num_kv_heads, group_size), "exactly one of the two is given")
    if num_kv_heads is not None:
        return num_kv_heads
    assert group_size is not None
    if group_size < 1 or num_heads % group_size:
        raise SpecError("group_size", group_size, f"must divide num_heads = {num_heads}")
    return num_heads // group_size
