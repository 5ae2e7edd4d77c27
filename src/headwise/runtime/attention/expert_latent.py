"""Expert-decoded latent attention: each query's gates mix the decoders of cached latents into keys and values.

Shapes: B batch, S new tokens, T all tokens, H heads, D head dim, K latent heads, C latent width, X experts,
P rotated dims of a head, G rows of gates (S, or 1 when all queries share one row), E hidden.

Let ``M_s = Σ_e g_se W_e`` be the decoder of query s. Its score for token t is ``q_s · (M_s c_t) = (M_sᵀ q_s) · c_t``:
the mixture is applied to the query, and attention reads latents as grouped attention reads keys. Likewise values are
decoded after they are mixed. Rotation is the exception: in ``(R_s q_s) · (R_t M_s c_t)`` the rotation R_t stands
between query and decoder, so the rotated channels of the keys are decoded, one expert at a time; with P < D the other
channels stay absorbed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.costs.formulas.expert_latent import best_impl
from headwise.costs.formulas.stages import attended_pairs
from headwise.errors import ArgumentError
from headwise.models.specs.expert_latent import ExpertLatentSpec, expert_latent_bias
from headwise.runtime.attention.base import (
    Attended,
    AttentionLayer,
    CacheLike,
    Call,
    Cut,
    HeadSplit,
    Rope,
    Weighed,
    as_rotary,
    constructor_arguments,
    default_head_dim,
    merge_heads,
    per_head,
    rotated,
    split_heads,
)
from headwise.runtime.attention.rope import Rotation
from headwise.runtime.kernels import Backend, combine_masks, masked_softmax

Impl = Literal["auto", "expanded", "absorbed"]


class ExpertLatentAttention(AttentionLayer):
    """Latent key and value heads, decoded for each query by the mixture of experts that its gates choose.

    For example ``ExpertLatentAttention(512, 8, latent_kv_heads=2, kv_dim=16)(torch.randn(1, 10, 512),
    is_causal=True)``.

    A token caches ``2·K·C`` values. Query head i reads latent head ``i // (H / K)``. Gates are a softmax over all
    experts, of which the ``top_k`` largest are kept without renormalising. Without gradients, no call holds the keys
    or values of more than one decoder for a token.

    Args:
        hidden_size: E.
        num_heads: H.
        latent_kv_heads: K; divides H.
        kv_dim: C.
        num_experts: X, decoders ``C × D`` of each head, for keys and for values.
        top_k: the number of experts that a gate keeps, without renormalising.
        conditioning: ``"token"``: every query token has its own gates, which is causal and can be cached;
            ``"sequence"``: one row of gates from the mean query (of the tokens that a padding mask leaves). As that
            looks ahead, a causal call, a cache and a mask with a row for each query raise an error.
        head_dim: D; ``hidden_size / num_heads`` when None.
        impl: ``expanded`` decodes keys and values, ``absorbed`` folds the decoders into query and output; ``auto``
            takes the one with fewer FLOPs. The result is the same up to rounding.
        bias: True for every projection, ``"qkv"``, or projection names; the experts have none.
        dropout: probability of dropping an attention weight while training.
        rope: rotary embedding of the decoded queries and keys, or None. Positions must have no gaps: those of cached
            tokens are counted back from the new tokens'.
        softmax_scale: multiplies the scores; ``1/sqrt(D)`` when None.
        sliding_window: how many of the latest tokens are attended to; all when None.
        backend: passed to `headwise.runtime.kernels.attend`; not used for scores that are sums over experts or
            channels.

    Raises:
        SpecError: the sizes do not fit together.
    """

    spec: ExpertLatentSpec

    caches_rotated = False

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
        # A head's experts lie one after the other, each in the layout that absorption needs: no call rearranges them.
        self.k_experts = nn.Parameter(torch.empty(H, num_experts, D, C))
        self.v_experts = nn.Parameter(torch.empty(H, num_experts, C, D))
        self.o_proj = nn.Linear(H * D, E, bias="o_proj" in spec.bias)
        for experts in (self.k_experts, self.v_experts):
            nn.init.uniform_(experts, -(C**-0.5), C**-0.5)  # as nn.Linear from C features

    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        """Key latents and value latents, each ``[B, K, T, C]``, without rotation."""
        shape = (self.spec.latent_kv_heads, self.spec.kv_dim)
        return shape, shape

    def head_split(self) -> HeadSplit:
        """Ranks share heads, and latent heads as far as there are; gates depend on all heads' queries."""
        H, K = self.spec.num_heads, self.spec.latent_kv_heads
        cuts = {
            "q_proj": Cut(0, H),
            "kv_a_proj": Cut(0, K, sections=2),
            "gate_proj": Cut(1, H),
            "k_experts": Cut(0, H),
            "v_experts": Cut(0, H),
            "o_proj": Cut(1, H),
        }
        return HeadSplit(cuts, shared_sums=("gate_proj",))

    def _refuse(
        self, call: Call, position_ids: Tensor | None, position_embeddings: Rotation | None, cache: CacheLike | None
    ) -> None:
        if self.rope is not None:
            rule = "must have no gaps: keys are rotated when they are read, by positions counted back from these"
            if position_embeddings is not None:
                raise ArgumentError(
                    "position_embeddings", "given", f"must be None: the layer computes its own; positions {rule}"
                )
            if (
                position_ids is not None
                and position_ids.shape[-1] > 1
                and bool((position_ids.diff(dim=-1) != 1).any())
            ):
                raise ArgumentError("position_ids", position_ids.tolist(), rule)
        if self.spec.conditioning == "sequence":
            rule = 'must not be given with conditioning="sequence", whose gates see every token; use "token"'
            for name, is_given in (("is_causal", call.is_causal), ("cache", cache is not None)):
                if is_given:
                    raise ArgumentError(name, is_given, rule)
            mask = call.attention_mask
            if mask is not None and mask.dim() == 4 and max(mask.shape[1:3]) > 1:
                raise ArgumentError(
                    "attention_mask shape", tuple(mask.shape), f"with a row for each query or head {rule}"
                )

    def _states_to_cache(self, states: Tensor, rotation: Rotation | None) -> tuple[Tensor, ...]:
        latents = split_heads(self.kv_a_proj(states), 2 * self.spec.latent_kv_heads)  # [B, 2·K, S, C]
        return torch.split(latents, self.spec.latent_kv_heads, dim=1)  # [B, K, S, C] each

    def _attend(self, hidden_states: Tensor, memory: tuple[Tensor, ...], call: Call) -> Attended:
        key_latent, value_latent = memory  # [B, K, T, C] each
        projected = self.q_proj(hidden_states)  # [B, S, H·D]
        gates = self._gates(projected, call)  # [B, G, X]
        query = split_heads(projected, self.spec.num_heads)  # [B, H, S, D]
        S, T = hidden_states.shape[1], key_latent.shape[2]
        impl: str = self.impl
        if impl == "auto":
            pairs = attended_pairs(S, T, causal=call.is_causal, window=self.spec.sliding_window)
            impl = best_impl(self.spec, S, T, pairs)
        mixed, weights = (self._absorbed if impl == "absorbed" else self._expanded)(
            query, gates, key_latent, value_latent, call
        )
        out: Tensor = self.o_proj(merge_heads(mixed))  # [B, S, E]
        return out if weights is None else (out, weights)

    def _gates(self, projected: Tensor, call: Call) -> Tensor:
        """Gates ``[B, G, X]``: a softmax over the experts, of which all but the ``top_k`` largest are set to 0."""
        if self.spec.conditioning == "sequence":
            projected = self._mean_query(projected, call)
        logits = self.gate_proj(projected)
        gates = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        top = gates.topk(self.spec.top_k, dim=-1)  # before they are rounded, which would make ties
        return torch.zeros_like(gates).scatter(-1, top.indices, top.values).to(logits.dtype)

    def _mean_query(self, projected: Tensor, call: Call) -> Tensor:
        """The mean query ``[B, 1, H·D]`` of the tokens that are not padding."""
        if call.attention_mask is None or call.is_cross:
            return projected.mean(1, keepdim=True)
        is_real = call.attention_mask[:, 0, 0, :, None].expand(*projected.shape[:2], 1)  # [B, S, 1]
        total = projected.masked_fill(~is_real, 0).sum(1, keepdim=True)
        return total / is_real.sum(1, keepdim=True).clamp(min=1)

    def _expanded(
        self, query: Tensor, gates: Tensor, key_latent: Tensor, value_latent: Tensor, call: Call
    ) -> Weighed:
        """Decode keys and values, then attend to them: ``[B, H, S, D]``, and the weights or None."""
        query = rotated(query, call.rotation, self.rope)
        rotation = self._key_rotation(key_latent, call)
        if gates.shape[1] == 1:
            key = rotated(
                _decode(key_latent, _mixture(gates, self.k_experts).mT), rotation, self.rope
            )  # [B, H, T, D]
            value = _decode(value_latent, _mixture(gates, self.v_experts))  # [B, H, T, D]
            return self._kernel(query, key, value, call, self._scale())
        scores = self._expert_scores(query, gates, self.k_experts, key_latent, rotation)
        weights, returned = self._weights(scores, call)  # [B, H, S, T]
        mixed = torch.zeros_like(query)
        for gate, decoder in zip(gates.unbind(-1), self.v_experts.unbind(1), strict=True):
            mixed = mixed + gate[:, None, :, None] * (weights @ _decode(value_latent, decoder))
        return mixed, returned

    def _absorbed(
        self, query: Tensor, gates: Tensor, key_latent: Tensor, value_latent: Tensor, call: Call
    ) -> Weighed:
        """Fold the mixed decoders into the query and the output: ``[B, H, S, D]``, and the weights or None.

        Latents are read as they are cached.
        """
        P = 0 if self.rope is None else self.rope.spec.dim
        content = None
        if self.spec.head_dim > P:
            content = _through_experts(query[..., P:], gates, self.k_experts[:, :, P:])  # [B, H, S, C]
        if content is not None and P == 0:
            latent, weights = self._kernel(content, key_latent, value_latent, call, self._scale())
        else:
            rotary = rotated(query, call.rotation, self.rope)[..., :P]  # [B, H, S, P]
            rotation = self._key_rotation(key_latent, call)
            scores = self._expert_scores(rotary, gates, self.k_experts[:, :, :P], key_latent, rotation)
            if content is not None:
                scores = scores + _grouped_product(content, key_latent.transpose(2, 3))
            applied, weights = self._weights(scores, call)
            latent = _grouped_product(applied, value_latent)  # [B, H, S, C]
        return _through_experts(latent, gates, self.v_experts), weights

    def _expert_scores(
        self, query: Tensor, gates: Tensor, experts: Tensor, key_latent: Tensor, rotation: Rotation | None
    ) -> Tensor:
        """Scores ``[B, H, S, T]``, not scaled, of queries ``[B, H, S, d]`` and keys from experts ``[H, X, d, C]``."""
        if gates.shape[1] == 1:
            key = rotated(_decode(key_latent, _mixture(gates, experts).mT), rotation, self.rope)  # [B, H, T, d]
            return query @ key.transpose(2, 3)
        scores: Tensor | None = None
        for gate, decoder in zip(gates.unbind(-1), experts.unbind(1), strict=True):
            key = rotated(_decode(key_latent, decoder.mT), rotation, self.rope)  # [B, H, T, d]
            part = (gate[:, None, :, None] * query) @ key.transpose(2, 3)
            scores = part if scores is None else scores + part
        assert scores is not None
        return scores

    def _key_rotation(self, latent: Tensor, call: Call) -> Rotation | None:
        """cos and sin ``[B or 1, T, P/2]`` of the tokens attended to, whose last position is the new tokens' last."""
        if self.rope is None:
            return None
        T = latent.shape[2]
        steps = torch.arange(T, device=latent.device)[None]
        if call.is_cross:
            ids, length = steps, T
        else:
            assert call.position_ids is not None
            ids, length = call.position_ids[:, -1:] - (T - 1) + steps, call.total
        rotation: Rotation = self.rope(ids, latent.dtype, length)
        return rotation

    def _weights(self, scores: Tensor, call: Call) -> Weighed:
        """Softmax of scores ``[B, H, S, T]``: the weights that mix the values, and those to return, or None."""
        B, H, S, T = scores.shape
        window = self.spec.sliding_window
        mask = combine_masks(call.attention_mask, call.is_causal, (B, H, S, T), scores.device, window)
        weights = masked_softmax(scores * self._scale(), mask)
        weights = F.dropout(weights, self._dropout_p(), training=self._dropout_p() > 0)
        return weights, weights if call.return_weights else None

    def _scale(self) -> float:
        scale = self.spec.softmax_scale
        return self.spec.head_dim**-0.5 if scale is None else scale


def _mixture(gates: Tensor, experts: Tensor) -> Tensor:
    """Experts ``[H, X, a, b]`` mixed by one row of gates for each sequence ``[B, 1, X]``: ``[B, H, a, b]``."""
    H, _, a, b = experts.shape
    mixed = torch.bmm(gates.transpose(0, 1).expand(H, -1, -1), experts.flatten(2))  # [H, B, a·b]
    return torch.unflatten(mixed, -1, (a, b)).transpose(0, 1)


def _decode(latent: Tensor, decoder: Tensor) -> Tensor:
    """Decode latents ``[B, K, T, C]`` by a matrix for each head, ``[H, C, d]`` or ``[B, H, C, d]``: ``[B, H, T, d]``.

    The decoders of heads that share a latent are joined into a wide one, so that the latent is read once and not
    copied.
    """
    K, (H, _, d) = latent.shape[1], decoder.shape[-3:]
    wide = torch.unflatten(decoder, -3, (K, H // K)).transpose(-3, -2).flatten(-2)  # [.., K, C, H/K·d]
    decoded = per_head(latent, wide) if wide.dim() == 3 else latent @ wide  # [B, K, T, H/K·d]
    return torch.unflatten(decoded, -1, (H // K, d)).transpose(2, 3).flatten(1, 2)


def _through_experts(x: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """``Σ_e g_e · x W_e`` for states ``[B, H, S, a]`` and experts ``[H, X, a, b]``: ``[B, H, S, b]``.

    It is one product: x is repeated X times side by side, each copy scaled by its gate.
    """
    scaled = (gates[:, None, :, :, None] * x[:, :, :, None, :]).flatten(3)  # [B, H, S, X·a]
    return per_head(scaled, experts.flatten(1, 2))


def _grouped_product(x: Tensor, y: Tensor) -> Tensor:
    """``[B, H, S, a]`` times ``[B, K, a, b]``: head i of x by head ``i // (H / K)`` of y, which is not copied."""
    B, H, S, a = x.shape
    K = y.shape[1]
    return (x.reshape(B, K, H // K * S, a) @ y).view(B, H, S, y.shape[3])


def from_spec(
    spec: ExpertLatentSpec, *, dropout: float = 0.0, impl: Impl = "auto", backend: Backend = "auto"
) -> ExpertLatentAttention:
    """Build the layer that a spec describes, freshly initialised."""
    arguments = constructor_arguments(spec, ExpertLatentAttention)
    return ExpertLatentAttention(**arguments, dropout=dropout, impl=impl, backend=backend)
