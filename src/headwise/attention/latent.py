"""Multi-head latent attention: keys and values decoded from a cached latent, or never decoded at all.

Shapes: B batch, S new tokens, T all tokens, H heads, R latent rank, N content (nope) dims, P rope dims,
V value dim, E hidden. Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import torch
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
from headwise.attention.rope import RotaryEmbedding, rotate
from headwise.cost.latent import best_impl
from headwise.errors import ArgumentError
from headwise.kernels import Backend, attend
from headwise.specs.base import RopeSpec
from headwise.specs.latent import LatentSpec, latent_bias

Impl = Literal["auto", "expanded", "absorbed"]


class MultiHeadLatentAttention(AttentionLayer):
    """Keys and values from a low-rank latent, and one rotary key that all heads share.

    A token caches its latent and rotary key, ``R + P`` values, whatever the number of heads. A state dict of
    transformers' DeepSeek-V3 attention loads as it is.

    Args:
        hidden_size: E.
        num_heads: H.
        kv_lora_rank: R.
        qk_nope_head_dim: N, query–key dims of a head without rotation; may be 0.
        qk_rope_head_dim: P.
        v_head_dim: V.
        q_lora_rank: width of the query latent, or None for a plain query projection.
        latent_norm: RMSNorm on the latents.
        impl: ``expanded`` decodes keys and values of every head from the latents; ``absorbed`` folds the
            decoders into the query and the output, and reads only latents; ``auto`` takes the fewer FLOPs.
        bias: True for every projection, ``"hf"`` for those of transformers' ``attention_bias``, ``"qkv"``, or names.
        dropout: probability of dropping an attention weight while training.
        rope: rotary embedding of width P; interleaved with base 10000 when None, as DeepSeek's.
        norm_eps: of the latents' norms.
        softmax_scale: multiplies the scores; ``1/sqrt(N + P)`` when None.
        backend: passed to `headwise.kernels.attend`.

    Raises:
        SpecError: the sizes do not fit together.
    """

    spec: LatentSpec

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None = None,
        latent_norm: bool = True,
        impl: Impl = "auto",
        bias: bool | str | Collection[str] = False,
        dropout: float = 0.0,
        rope: Rope | None = None,
        norm_eps: float = 1e-6,
        softmax_scale: float | None = None,
        backend: Backend = "auto",
    ) -> None:
        if impl not in ("auto", "expanded", "absorbed"):
            raise ArgumentError("impl", impl, "must be auto, expanded or absorbed")
        if rope is None and qk_rope_head_dim >= 2 and qk_rope_head_dim % 2 == 0:
            rope = RopeSpec(dim=qk_rope_head_dim, interleaved=True)
        rotary = as_rotary(rope)
        spec = LatentSpec(
            hidden_size=hidden_size,
            num_heads=num_heads,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            q_lora_rank=q_lora_rank,
            latent_norm=latent_norm,
            bias=latent_bias(bias, q_lora_rank),
            rope=None if rotary is None else rotary.spec,
            softmax_scale=softmax_scale,
        )
        super().__init__(spec, dropout=dropout, backend=backend)
        assert rotary is not None
        self.impl: Impl = impl
        self.rope: RotaryEmbedding = rotary
        E, H, R, P, N, V = (
            hidden_size,
            num_heads,
            kv_lora_rank,
            qk_rope_head_dim,
            qk_nope_head_dim,
            v_head_dim,
        )
        self.q_proj: nn.Linear | None = None
        self.q_a_proj: nn.Linear | None = None
        self.q_b_proj: nn.Linear | None = None
        self.q_a_layernorm: RMSNorm | None = None
        if q_lora_rank is None:
            self.q_proj = nn.Linear(E, H * (N + P), bias="q_proj" in spec.bias)
        else:
            self.q_a_proj = nn.Linear(E, q_lora_rank, bias="q_a_proj" in spec.bias)
            self.q_a_layernorm = RMSNorm(q_lora_rank, norm_eps) if latent_norm else None
            self.q_b_proj = nn.Linear(q_lora_rank, H * (N + P), bias="q_b_proj" in spec.bias)
        self.kv_a_proj_with_mqa = nn.Linear(E, R + P, bias="kv_a_proj_with_mqa" in spec.bias)
        self.kv_a_layernorm = RMSNorm(R, norm_eps) if latent_norm else None
        self.kv_b_proj = nn.Linear(R, H * (N + V), bias="kv_b_proj" in spec.bias)
        self.o_proj = nn.Linear(H * V, E, bias="o_proj" in spec.bias)

    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        """One tensor ``[B, 1, T, R + P]``: the latent, then the rotary key."""
        return ((1, self.spec.kv_lora_rank + self.spec.qk_rope_head_dim),)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        key_value_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
        position_ids: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
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
            position_ids: ``[B or 1, S]``; the next positions after the cache when None. The keys of
                cross-attention are at 0 … T − 1.
            position_embeddings: cos and sin ``[B or 1, S, P/2]`` of the new tokens, in place of the layer's own.
            cache: read and extended in place.
            return_weights: also return the attention weights ``[B, H, S, T]``.

        Returns:
            ``[B, S, E]``, or that and the weights.
        """
        self._check_hidden("hidden_states", hidden_states)
        S = hidden_states.shape[1]
        past = 0 if cache is None or key_value_states is not None else cache.length
        if position_embeddings is None:
            ids = positions(past, hidden_states, position_ids)
            position_embeddings = self.rope(ids, hidden_states.dtype, past + S)
        query = split_heads(self._query(hidden_states), self.spec.num_heads)
        q_nope, q_rope = torch.split(query, [self.spec.qk_nope_head_dim, self.spec.qk_rope_head_dim], dim=-1)
        q_rope = rotate(q_rope, *position_embeddings, interleaved=self.rope.spec.interleaved)

        if key_value_states is not None:
            latent = self._cross(key_value_states, cache)
        else:
            latent = self._latent(hidden_states, position_embeddings)
            if cache is not None:
                (latent,) = cache.update(latent)

        impl: str = self.impl
        if impl == "auto":
            impl = best_impl(self.spec, S, latent.shape[2])
        attended = (self._absorbed if impl == "absorbed" else self._expanded)(
            q_nope, q_rope, latent, attention_mask, is_causal, return_weights
        )
        if isinstance(attended, tuple):
            return self.o_proj(merge_heads(attended[0])), attended[1]
        out: Tensor = self.o_proj(merge_heads(attended))
        return out

    def _query(self, hidden_states: Tensor) -> Tensor:
        if self.q_proj is not None:
            projected: Tensor = self.q_proj(hidden_states)
            return projected
        assert self.q_a_proj is not None
        assert self.q_b_proj is not None
        compressed = self.q_a_proj(hidden_states)
        if self.q_a_layernorm is not None:
            compressed = self.q_a_layernorm(compressed)
        out: Tensor = self.q_b_proj(compressed)
        return out

    def _latent(self, states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """What is cached: ``[B, 1, S, R + P]``."""
        latent, k_rope = self.kv_a_proj_with_mqa(states).split(
            (self.spec.kv_lora_rank, self.spec.qk_rope_head_dim), dim=-1
        )
        if self.kv_a_layernorm is not None:
            latent = self.kv_a_layernorm(latent)
        k_rope = rotate(k_rope[:, None], *position_embeddings, interleaved=self.rope.spec.interleaved)
        return torch.cat((latent[:, None], k_rope), dim=-1)

    def _cross(self, source: Tensor, cache: CacheLike | None) -> Tensor:
        self._check_hidden("key_value_states", source)
        T = source.shape[1]
        if cache is not None and cache.length:
            if cache.length != T:
                rule = f"must be the {cache.length} tokens the cross-attention cache was filled from"
                raise ArgumentError("key_value_states tokens", T, rule)
            return cache.views()[0]
        embeddings = self.rope(positions(0, source, None), source.dtype, T)
        latent = self._latent(source, embeddings)
        return latent if cache is None else cache.update(latent)[0]

    def _expanded(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        attention_mask: Tensor | None,
        is_causal: bool,
        return_weights: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Decode every head's keys and values from the latents, then ordinary attention."""
        spec = self.spec
        c, k_rope = torch.split(latent, [spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        decoded = split_heads(self.kv_b_proj(c[:, 0]), spec.num_heads)
        k_nope, value = torch.split(decoded, [spec.qk_nope_head_dim, spec.v_head_dim], dim=-1)
        key = torch.cat((k_nope, k_rope.expand(-1, spec.num_heads, -1, -1)), dim=-1)
        return attend(
            torch.cat((q_nope, q_rope), dim=-1),
            key,
            value,
            attention_mask,
            self._dropout_p(),
            is_causal,
            self._scale(),
            backend=self.backend,
            return_weights=return_weights,
        )

    def _absorbed(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        attention_mask: Tensor | None,
        is_causal: bool,
        return_weights: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend to the latents themselves: multi-query attention with one key ``[c, k_rope]`` and value c.

        ``q·(U c) = (Uᵀ q)·c`` and ``Σ w (U c) = U (Σ w c)``, with U a head's rows of kv_b_proj. A key bias adds
        the same to all scores of a query, which the softmax cancels; a value bias is added by the weights' sum.
        """
        spec = self.spec
        R, N = spec.kv_lora_rank, spec.qk_nope_head_dim
        decoders = torch.unflatten(self.kv_b_proj.weight, 0, (spec.num_heads, N + spec.v_head_dim))
        value_bias = None
        if self.kv_b_proj.bias is not None:
            value_bias = torch.unflatten(self.kv_b_proj.bias, 0, (spec.num_heads, -1))[:, N:]
        value = latent[..., :R]
        if value_bias is not None:
            # A column of ones gathers each row's sum of weights: 1, or 0 for an empty row, or what dropout left.
            value = torch.cat((value, torch.ones_like(latent[..., :1])), dim=-1)
        if N:
            query, key = torch.cat((q_nope @ decoders[:, :N], q_rope), dim=-1), latent
        else:
            query, key = q_rope, latent[..., R:]
        attended = attend(
            query,
            key,
            value,
            attention_mask,
            self._dropout_p(),
            is_causal,
            self._scale(),
            backend=self.backend,
            return_weights=return_weights,
        )
        mixed, weights = attended if isinstance(attended, tuple) else (attended, None)
        out = mixed[..., :R] @ decoders[:, N:].transpose(1, 2)
        if value_bias is not None:
            out = out + mixed[..., R:] * value_bias[:, None]
        return out if weights is None else (out, weights)

    def _scale(self) -> float:
        scale = self.spec.softmax_scale
        return self.spec.qk_head_dim**-0.5 if scale is None else scale


def from_spec(
    spec: LatentSpec, *, dropout: float = 0.0, norm_eps: float = 1e-6, impl: Impl = "auto"
) -> MultiHeadLatentAttention:
    """The layer a spec describes, freshly initialised."""
    arguments = constructor_arguments(spec)
    return MultiHeadLatentAttention(**arguments, rope=spec.rope, dropout=dropout, norm_eps=norm_eps, impl=impl)


def constructor_arguments(spec: LatentSpec) -> dict[str, Any]:
    """The layer's arguments that a spec has under the same names; its ``rope`` is left to the caller."""
    names = ("hidden_size", "num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    more = ("q_lora_rank", "latent_norm", "bias", "softmax_scale")
    return {name: getattr(spec, name) for name in (*names, *more)}
