"""Expert-decoded latent attention: each query's gates mix the decoders that turn cached latents into keys and values.

Shapes: B batch, S new tokens, T all tokens, H heads, D head dim, K latent heads, C latent width, X experts,
P rotated dims of a head, G rows of gates (S, or 1 when all queries have the same), E hidden.

With ``M_s = Σ_e g_se W_e`` the decoder of query s, its score for token t is ``q_s · (M_s c_t) = (M_sᵀ q_s) · c_t``:
the mixture is applied to the query, and attention reads latents as grouped attention reads keys. The values' side is
the same, after the mixing. Rotation is the exception: ``(R_s q_s) · (R_t M_s c_t)`` has R_t between the two, so the
rotated channels of the keys are decoded (those alone: with P < D the rest stays absorbed), one expert at a time.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.attention.base import (
    AttentionLayer,
    CacheLike,
    Call,
    Rope,
    as_rotary,
    default_head_dim,
    merge_heads,
    per_head,
    rotated,
    split_heads,
)
from headwise.cost.expert_latent import best_impl
from headwise.cost.stages import attended_pairs
from headwise.errors import ArgumentError
from headwise.kernels import Backend, combine_masks, masked_softmax
from headwise.specs.expert_latent import ExpertLatentSpec, expert_latent_bias

Impl = Literal["auto", "expanded", "absorbed"]


class ExpertLatentAttention(AttentionLayer):
    """Latent key and value heads, decoded for each query by the mixture of experts its gates choose.

    A token caches ``2·K·C`` values. Query head i reads latent head ``i // (H / K)``; gates are a softmax over all
    experts of which the ``top_k`` largest are kept as they are, without renormalising. Without gradients no call
    holds more than one decoder's keys or values for a token.

    Args:
        hidden_size: E.
        num_heads: H.
        latent_kv_heads: K; divides H.
        kv_dim: C.
        num_experts: X, decoders ``C × D`` of each head, for keys and for values.
        top_k: gates kept.
        conditioning: ``"token"``: every query token has its own gates, which is causal and can be cached;
            ``"sequence"``: one row of gates from the mean query (of the tokens a padding mask leaves), which looks
            ahead, so a causal call, a cache and a mask with a row a query are refused.
        head_dim: D; ``hidden_size / num_heads`` when None.
        impl: ``expanded`` decodes keys and values, ``absorbed`` folds the decoders into query and output; ``auto``
            takes the fewer FLOPs. The result is the same.
        bias: True for every projection, ``"qkv"``, or projection names; the experts have none.
        dropout: probability of dropping an attention weight while training.
        rope: rotary embedding of the decoded queries and keys, or None. Positions must run on without gaps: those of
            cached tokens are counted back from the new ones'.
        softmax_scale: multiplies the scores; ``1/sqrt(D)`` when None.
        sliding_window: how many of the latest tokens are attended to; all when None.
        backend: passed to `headwise.kernels.attend`; scores that are summed over experts or channels need none.

    Raises:
        SpecError: the sizes do not fit together.
    """

    spec: ExpertLatentSpec

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        latent_kv_heads: int,
        kv_dim: int,
        num_experts: int = 8,
        top_k: int = 2,
        conditioning: Literal["token", "sequence"] = "token",
        head_dim: int | None = None,
        impl: Impl = "auto",
        bias: bool | str | Collection[str] = False,
        dropout: float = 0.0,
        rope: Rope | None = None,
        softmax_scale: float | None = None,
        sliding_window: int | None = None,
        backend: Backend = "auto",
    ) -> None:
        if impl not in ("auto", "expanded", "absorbed"):
            raise ArgumentError("impl", impl, "must be auto, expanded or absorbed")
        rotary = as_rotary(rope)
        spec = ExpertLatentSpec(
            hidden_size=hidden_size,
            num_heads=num_heads,
            head_dim=default_head_dim(hidden_size, num_heads) if head_dim is None else head_dim,
            latent_kv_heads=latent_kv_heads,
            kv_dim=kv_dim,
            num_experts=num_experts,
            top_k=top_k,
            conditioning=conditioning,
            is_causal=conditioning == "token",
            bias=expert_latent_bias(bias),
            rope=None if rotary is None else rotary.spec,
            softmax_scale=softmax_scale,
            sliding_window=sliding_window,
        )
        super().__init__(spec, rope=rotary, dropout=dropout, backend=backend)
        self.impl: Impl = impl
        E, H, D, C = hidden_size, num_heads, spec.head_dim, kv_dim
        self.q_proj = nn.Linear(E, H * D, bias="q_proj" in spec.bias)
        self.kv_a_proj = nn.Linear(E, 2 * latent_kv_heads * C, bias="kv_a_proj" in spec.bias)
        self.gate_proj = nn.Linear(H * D, num_experts, bias="gate_proj" in spec.bias)
        # A head's experts lie one after the other, each as it is absorbed: no call has to rearrange them.
        self.k_experts = nn.Parameter(torch.empty(H, num_experts, D, C))
        self.v_experts = nn.Parameter(torch.empty(H, num_experts, C, D))
        self.o_proj = nn.Linear(H * D, E, bias="o_proj" in spec.bias)
        for experts in (self.k_experts, self.v_experts):
            nn.init.uniform_(experts, -(C**-0.5), C**-0.5)  # as nn.Linear from C features

    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        """Key latents and value latents, each ``[B, K, T, C]``; not rotated."""
        shape = (self.spec.latent_kv_heads, self.spec.kv_dim)
        return shape, shape

    def _refuse(
        self,
        call: Call,
        position_ids: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor] | None,
        cache: CacheLike | None,
    ) -> None:
        if self.rope is not None:
            rule = (
                "must run on without gaps: keys are turned when they are read, by positions counted back from these"
            )
            if position_embeddings is not None:
                raise ArgumentError("position_embeddings", "given", f"must be left to the layer; positions {rule}")
            if (
                position_ids is not None
                and position_ids.shape[-1] > 1
                and bool((position_ids.diff(dim=-1) != 1).any())
            ):
                raise ArgumentError("position_ids", position_ids.tolist(), rule)
        if self.spec.conditioning == "sequence":
            rule = 'must not be given with conditioning="sequence", whose gates see every token; use "token"'
            for name, given in (("is_causal", call.is_causal), ("cache", cache is not None)):
                if given:
                    raise ArgumentError(name, given, rule)
            mask = call.attention_mask
            if mask is not None and mask.dim() == 4 and max(mask.shape[1:3]) > 1:
                raise ArgumentError(
                    "attention_mask shape", tuple(mask.shape), f"with a row for each query or head {rule}"
                )

    def _states_to_cache(self, states: Tensor, rotation: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
        latents = split_heads(self.kv_a_proj(states), 2 * self.spec.latent_kv_heads)
        return torch.split(latents, self.spec.latent_kv_heads, dim=1)

    def _attend(
        self, hidden_states: Tensor, memory: tuple[Tensor, ...], call: Call
    ) -> Tensor | tuple[Tensor, Tensor]:
        key_latent, value_latent = memory
        projected = self.q_proj(hidden_states)
        gates = self._gates(projected, call)
        query = split_heads(projected, self.spec.num_heads)
        S, T = hidden_states.shape[1], key_latent.shape[2]
        impl: str = self.impl
        if impl == "auto":
            pairs = attended_pairs(S, T, causal=call.is_causal, window=self.spec.sliding_window)
            impl = best_impl(self.spec, S, T, pairs)
        mixed, weights = (self._absorbed if impl == "absorbed" else self._expanded)(
            query, gates, key_latent, value_latent, call
        )
        out: Tensor = self.o_proj(merge_heads(mixed))
        return out if weights is None else (out, weights)

    def _gates(self, projected: Tensor, call: Call) -> Tensor:
        """``[B, G, X]``: a softmax over the experts, all but the top_k of it zeroed."""
        if self.spec.conditioning == "sequence":
            projected = self._mean_query(projected, call)
        logits = self.gate_proj(projected)
        gates = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        top = gates.topk(self.spec.top_k, dim=-1)  # before they are rounded, which makes ties
        return torch.zeros_like(gates).scatter(-1, top.indices, top.values).to(logits.dtype)

    def _mean_query(self, projected: Tensor, call: Call) -> Tensor:
        """``[B, 1, H·D]``; padding is no part of the sequence, so masked tokens have no say."""
        if call.attention_mask is None or call.is_cross:
            return projected.mean(1, keepdim=True)
        real = call.attention_mask[:, 0, 0, :, None].expand(*projected.shape[:2], 1)
        total = projected.masked_fill(~real, 0).sum(1, keepdim=True)
        return total / real.sum(1, keepdim=True).clamp(min=1)

    def _expanded(
        self, query: Tensor, gates: Tensor, key_latent: Tensor, value_latent: Tensor, call: Call
    ) -> tuple[Tensor, Tensor | None]:
        """Decode keys and values, then ordinary attention."""
        query = rotated(query, call.rotation, self.rope)
        turn = self._key_rotation(key_latent, call)
        if gates.shape[1] == 1:
            key = rotated(_decoded(key_latent, _mixture(gates, self.k_experts).mT), turn, self.rope)
            value = _decoded(value_latent, _mixture(gates, self.v_experts))
            return self._kernel(query, key, value, call, self._scale())
        weights, visible = self._weights(self._expert_scores(query, gates, self.k_experts, key_latent, turn), call)
        mixed = torch.zeros_like(query)
        for gate, decoder in zip(gates.unbind(-1), self.v_experts.unbind(1), strict=True):
            mixed = mixed + gate[:, None, :, None] * (weights @ _decoded(value_latent, decoder))
        return mixed, visible

    def _absorbed(
        self, query: Tensor, gates: Tensor, key_latent: Tensor, value_latent: Tensor, call: Call
    ) -> tuple[Tensor, Tensor | None]:
        """Fold the mixed decoders into the query and the output; latents are read as they are cached."""
        P = 0 if self.rope is None else self.rope.spec.dim
        content = None
        if self.spec.head_dim > P:
            content = _through_experts(query[..., P:], gates, self.k_experts[:, :, P:])
        if content is not None and P == 0:
            latent, weights = self._kernel(content, key_latent, value_latent, call, self._scale())
        else:
            turned = rotated(query, call.rotation, self.rope)[..., :P]
            turn = self._key_rotation(key_latent, call)
            scores = self._expert_scores(turned, gates, self.k_experts[:, :, :P], key_latent, turn)
            if content is not None:
                scores = scores + _grouped_product(content, key_latent.transpose(2, 3))
            dropped, weights = self._weights(scores, call)
            latent = _grouped_product(dropped, value_latent)
        return _through_experts(latent, gates, self.v_experts), weights

    def _expert_scores(
        self,
        query: Tensor,
        gates: Tensor,
        experts: Tensor,
        key_latent: Tensor,
        turn: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """``[B, H, S, T]``, not scaled: queries ``[B, H, S, d]`` against keys of experts ``[H, X, d, C]``."""
        if gates.shape[1] == 1:
            key = rotated(_decoded(key_latent, _mixture(gates, experts).mT), turn, self.rope)
            return query @ key.transpose(2, 3)
        scores: Tensor | None = None
        for gate, decoder in zip(gates.unbind(-1), experts.unbind(1), strict=True):
            key = rotated(_decoded(key_latent, decoder.mT), turn, self.rope)
            part = (gate[:, None, :, None] * query) @ key.transpose(2, 3)
            scores = part if scores is None else scores + part
        assert scores is not None
        return scores

    def _key_rotation(self, latent: Tensor, call: Call) -> tuple[Tensor, Tensor] | None:
        """cos and sin of the cached tokens, whose positions end where the new tokens' do."""
        if self.rope is None:
            return None
        T = latent.shape[2]
        steps = torch.arange(T, device=latent.device)[None]
        if call.is_cross:
            ids, length = steps, T
        else:
            assert call.position_ids is not None
            ids, length = call.position_ids[:, -1:] - (T - 1) + steps, call.total
        rotation: tuple[Tensor, Tensor] = self.rope(ids, latent.dtype, length)
        return rotation

    def _weights(self, scores: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
        """Softmax of scores ``[B, H, S, T]``; what mixes the values, and what the caller is shown if it asks."""
        B, H, S, T = scores.shape
        window = self.spec.sliding_window
        mask = combine_masks(call.attention_mask, call.is_causal, (B, H, S, T), scores.device, window)
        weights = masked_softmax(scores * self._scale(), mask)
        dropped = F.dropout(weights, self._dropout_p(), training=self._dropout_p() > 0)
        return dropped, dropped if call.return_weights else None

    def _scale(self) -> float:
        scale = self.spec.softmax_scale
        return self.spec.head_dim**-0.5 if scale is None else scale


def _mixture(gates: Tensor, experts: Tensor) -> Tensor:
    """Experts ``[H, X, a, b]`` mixed by one row of gates ``[B, 1, X]``, for each sequence: ``[B, H, a, b]``."""
    H, _, a, b = experts.shape
    mixed = torch.bmm(gates.transpose(0, 1).expand(H, -1, -1), experts.flatten(2))
    return torch.unflatten(mixed, -1, (a, b)).transpose(0, 1)


def _decoded(latent: Tensor, decoder: Tensor) -> Tensor:
    """Latents ``[B, K, T, C]`` through the decoders of heads, ``[H, C, d]`` or ``[B, H, C, d]``: ``[B, H, T, d]``.

    The heads that share a latent are one wide decoder, so that the latent is read once and not copied.
    """
    K, (H, _, d) = latent.shape[1], decoder.shape[-3:]
    wide = torch.unflatten(decoder, -3, (K, H // K)).transpose(-3, -2).flatten(-2)
    decoded = per_head(latent, wide) if wide.dim() == 3 else latent @ wide
    return torch.unflatten(decoded, -1, (H // K, d)).transpose(2, 3).flatten(1, 2)


def _through_experts(x: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """``Σ_e g_e · x W_e``: states ``[B, H, S, a]`` through experts ``[H, X, a, b]``, mixed: ``[B, H, S, b]``.

    One product: x is laid side by side X times, each copy scaled by its gate.
    """
    scaled = (gates[:, None, :, :, None] * x[:, :, :, None, :]).flatten(3)
    return per_head(scaled, experts.flatten(1, 2))


def _grouped_product(x: Tensor, y: Tensor) -> Tensor:
    """``[B, H, S, a]`` by ``[B, K, a, b]``, head i of x by head ``i // (H / K)`` of y, y read in place."""
    B, H, S, a = x.shape
    K = y.shape[1]
    return (x.reshape(B, K, H // K * S, a) @ y).view(B, H, S, y.shape[3])


def from_spec(
    spec: ExpertLatentSpec, *, dropout: float = 0.0, impl: Impl = "auto", backend: Backend = "auto"
) -> ExpertLatentAttention:
    """The layer a spec describes, freshly initialised."""
    names = ("hidden_size", "num_heads", "latent_kv_heads", "kv_dim", "num_experts", "top_k", "conditioning")
    more = ("head_dim", "bias", "rope", "softmax_scale", "sliding_window")
    arguments = {name: getattr(spec, name) for name in (*names, *more)}
    return ExpertLatentAttention(**arguments, dropout=dropout, impl=impl, backend=backend)
