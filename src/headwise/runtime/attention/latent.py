"""Multi-head latent attention (MLA): keys and values decoded from a cached latent, or absorbed and never decoded.

Shapes: B batch, S new tokens, T all tokens, H heads, R latent rank, N content (nope) dims, P rope dims,
V value dim, E hidden. Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor, nn

from headwise.costs.formulas.latent import best_impl
from headwise.costs.formulas.stages import attended_pairs
from headwise.errors import ArgumentError
from headwise.models.specs.base import RopeSpec
from headwise.models.specs.latent import LatentSpec, latent_bias
from headwise.runtime.attention.base import (
    Attended,
    AttentionLayer,
    Call,
    Cut,
    HeadSplit,
    RMSNorm,
    Rope,
    Weighed,
    as_rotary,
    constructor_arguments,
    merge_heads,
    per_head,
    rotated,
    split_heads,
)
from headwise.runtime.attention.rope import Rotation
from headwise.runtime.kernels import Backend

Impl = Literal["auto", "expanded", "absorbed"]


class MultiHeadLatentAttention(AttentionLayer):
    """Keys and values from a low-rank latent, and one rotary key that all heads share.

    A token caches its latent and rotary key, ``R + P`` values, whatever the number of heads. A state dict of
    transformers' DeepSeek-V3 attention loads without renaming.

    Args:
        hidden_size: E.
        num_heads: H.
        kv_lora_rank: R.
        qk_nope_head_dim: N, query–key dims of a head without rotation; may be 0.
        qk_rope_head_dim: P.
        v_head_dim: V.
        q_lora_rank: width of the query latent, or None for a plain query projection.
        latent_norm: whether latents are normed by RMSNorm.
        impl: ``expanded`` decodes keys and values of every head from the latents; ``absorbed`` folds the
            decoders into the query and the output, and reads only latents; ``auto`` takes the one with fewer FLOPs.
        bias: True for every projection, ``"hf"`` for those of transformers' ``attention_bias``, ``"qkv"``, or names.
        dropout: probability of dropping an attention weight while training.
        rope: rotary embedding of width P; interleaved with base 10000 when None, as DeepSeek's.
        norm_eps: epsilon of the latents' norms, and of those of queries and keys.
        softmax_scale: multiplies the scores; ``1/sqrt(N + P)`` when None.
        sliding_window: how many of the latest tokens are attended to; all when None.
        qk_norm: see `LatentSpec`, as for ``num_kv_heads`` and ``head_dim``: queries and keys are projected and normed
            first, as in `GroupedQueryAttention`, and the latent is a map of normed keys and of values.
        num_kv_heads: K, with ``qk_norm``.
        head_dim: D, with ``qk_norm``.
        backend: passed to `headwise.runtime.kernels.attend`.

    Raises:
        SpecError: the sizes do not fit together.

    >>> layer = MultiHeadLatentAttention(
    ...     512, 8, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
    ... )
    >>> layer.new_cache(batch_size=1, max_length=1024).buffers[0].shape
    torch.Size([1, 1, 1024, 160])
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
        sliding_window: int | None = None,
        qk_norm: str | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
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
            sliding_window=sliding_window,
            qk_norm=qk_norm,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        super().__init__(spec, rope=rotary, dropout=dropout, backend=backend)
        self.impl: Impl = impl
        # Names and their order of rows are those of transformers' DeepSeek-V3, whose state dicts load as they are.
        # Modules that a layer does not have are None, so that every name can be asked for.
        E, H, R, P, N, V = (hidden_size, num_heads, kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim)
        self.q_proj: nn.Linear | None = None
        self.q_a_proj: nn.Linear | None = None
        self.q_b_proj: nn.Linear | None = None
        self.q_a_layernorm: RMSNorm | None = None
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.k_proj: nn.Linear | None = None
        self.v_proj: nn.Linear | None = None
        kv_inputs = E  # with norms of keys the latent is a map of normed keys and of values, not of the inputs
        if spec.qk_norm is not None:
            kv_inputs = self._project_heads(norm_eps)
        elif q_lora_rank is None:
            self.q_proj = nn.Linear(E, H * (N + P), bias="q_proj" in spec.bias)
        else:
            self.q_a_proj = nn.Linear(E, q_lora_rank, bias="q_a_proj" in spec.bias)
            self.q_a_layernorm = RMSNorm(q_lora_rank, norm_eps) if latent_norm else None
            self.q_b_proj = nn.Linear(q_lora_rank, H * (N + P), bias="q_b_proj" in spec.bias)
        self.kv_a_proj_with_mqa = nn.Linear(kv_inputs, R + P, bias="kv_a_proj_with_mqa" in spec.bias)
        self.kv_a_layernorm = RMSNorm(R, norm_eps) if latent_norm else None
        self.kv_b_proj = nn.Linear(R, H * (N + V), bias="kv_b_proj" in spec.bias)
        self.o_proj = nn.Linear(H * V, E, bias="o_proj" in spec.bias)

    def _project_heads(self, norm_eps: float) -> int:
        """Make the projections and norms of a layer with ``qk_norm``; the width that its latent is a map of."""
        spec = self.spec
        assert spec.num_kv_heads is not None
        assert spec.head_dim is not None
        E, H, K, D, V = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim
        is_whole = spec.qk_norm == "full"
        self.q_proj, self.q_norm = nn.Linear(E, H * D, bias=False), RMSNorm(H * D if is_whole else D, norm_eps)
        self.k_proj, self.k_norm = nn.Linear(E, K * D, bias=False), RMSNorm(K * D if is_whole else D, norm_eps)
        self.v_proj = nn.Linear(E, K * V, bias=False)
        # The rows of each head are a map of that head's own query.
        self.q_b_proj = nn.Linear(D, H * spec.qk_head_dim, bias=False)
        return K * (D + V)

    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        """One tensor ``[B, 1, T, R + P]``: the latent, then the rotary key.

        They lie side by side because absorbed attention reads the whole row as its key, and the first R columns as
        its value, without a copy.
        """
        return ((1, self.spec.kv_lora_rank + self.spec.qk_rope_head_dim),)

    def head_split(self) -> HeadSplit:
        """Ranks share heads; all hold the latent, and what it is computed from."""
        H = self.spec.num_heads
        heads = "q_proj" if self.q_proj is not None else "q_b_proj"
        cuts = {heads: Cut(0, H), "kv_b_proj": Cut(0, H), "o_proj": Cut(1, H)}
        if self.spec.qk_norm is None:
            return HeadSplit(cuts)
        cuts["q_b_proj"] = Cut(0, H)
        if self.spec.qk_norm != "full":
            return HeadSplit(cuts)
        return HeadSplit(cuts | {"q_norm": Cut(0, H)}, norms=("q_norm",))

    def _states_to_cache(self, states: Tensor, rotation: Rotation | None) -> tuple[Tensor]:
        widths = (self.spec.kv_lora_rank, self.spec.qk_rope_head_dim)
        latent, k_rope = self.kv_a_proj_with_mqa(self._keys_and_values(states)).split_with_sizes(
            widths, dim=-1
        )  # [B, S, R], [B, S, P]
        if self.kv_a_layernorm is not None:
            latent = self.kv_a_layernorm(latent)
        k_rope = rotated(k_rope.unsqueeze(1), rotation, self.rope)  # [B, 1, S, P]
        return (torch.cat((latent.unsqueeze(1), k_rope), dim=-1),)  # [B, 1, S, R + P]

    def _attend(self, hidden_states: Tensor, memory: tuple[Tensor, ...], call: Call) -> Attended:
        (latent,) = memory  # [B, 1, T, R + P]
        q_nope, q_rope = self._queries(hidden_states, call.rotation)
        impl: str = self.impl
        if impl == "auto":
            S, T = hidden_states.shape[1], latent.shape[2]
            pairs = attended_pairs(S, T, causal=call.is_causal, window=self.spec.sliding_window)
            impl = best_impl(self.spec, S, T, pairs)
        mixed, weights = (self._absorbed if impl == "absorbed" else self._expanded)(q_nope, q_rope, latent, call)
        out: Tensor = self.o_proj(merge_heads(mixed))
        return out if weights is None else (out, weights)

    def _queries(self, hidden_states: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """The content ``[B, H, S, N]`` and the rotated dims ``[B, H, S, P]`` of the queries."""
        if self.spec.qk_norm is None:
            query = split_heads(self._query(hidden_states), self.spec.num_heads)  # [B, H, S, N + P]
        else:
            query = self._query_behind_norm(hidden_states)
        q_nope, q_rope = query.split_with_sizes((self.spec.qk_nope_head_dim, self.spec.qk_rope_head_dim), dim=-1)
        return q_nope, rotated(q_rope, rotation, self.rope)

    def _keys_and_values(self, states: Tensor) -> Tensor:
        """What the latent is a map of: states ``[B, S, E]``, or normed keys and values ``[B, S, K·(D + V)]``."""
        if self.spec.qk_norm is None:
            return states
        assert self.k_norm is not None
        assert self.k_proj is not None
        assert self.v_proj is not None
        return torch.cat((self._normed(self.k_proj(states), self.k_norm), self.v_proj(states)), dim=-1)

    def _query_behind_norm(self, hidden_states: Tensor) -> Tensor:
        """Queries ``[B, H, S, N + P]``, each a map of its head's normed query."""
        assert self.q_proj is not None
        assert self.q_norm is not None
        assert self.q_b_proj is not None
        query = split_heads(self._normed(self.q_proj(hidden_states), self.q_norm), self.spec.num_heads)
        return per_head(query, torch.unflatten(self.q_b_proj.weight, 0, (self.spec.num_heads, -1)).transpose(1, 2))

    def _normed(self, projected: Tensor, norm: RMSNorm) -> Tensor:
        """Projected queries or keys ``[B, S, heads·D]`` with their norm."""
        if self.spec.qk_norm == "full":
            whole: Tensor = norm(projected)
            return whole
        assert self.spec.head_dim is not None
        return norm(torch.unflatten(projected, -1, (-1, self.spec.head_dim))).flatten(-2)  # type: ignore[no-any-return]

    def _query(self, hidden_states: Tensor) -> Tensor:
        """Projected queries ``[B, S, H·(N + P)]``, through the query latent where there is one."""
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

    def _expanded(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, call: Call) -> Weighed:
        """Decode every head's keys and values from the latents, then attend to them.

        Returns:
            Mixed values ``[B, H, S, V]``, and the weights or None.
        """
        spec = self.spec
        c, k_rope = torch.split(latent, [spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)  # [B, 1, T, R], [.., P]
        decoded = split_heads(self.kv_b_proj(c[:, 0]), spec.num_heads)  # [B, H, T, N + V]
        k_nope, value = torch.split(decoded, [spec.qk_nope_head_dim, spec.v_head_dim], dim=-1)
        key = torch.cat((k_nope, k_rope.expand(-1, spec.num_heads, -1, -1)), dim=-1)  # [B, H, T, N + P]
        return self._kernel(torch.cat((q_nope, q_rope), dim=-1), key, value, call, self._scale())

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, call: Call) -> Weighed:
        """Attend to the latents themselves: multi-query attention with one key ``[c, k_rope]`` and value c.

        ``q·(U c) = (Uᵀ q)·c`` and ``Σ w (U c) = U (Σ w c)``, with U a head's rows of kv_b_proj. A key bias adds
        the same number to all scores of a query, which the softmax cancels; a value bias is added, multiplied by the
        sum of the weights.

        Returns:
            Mixed values ``[B, H, S, V]``, and the weights or None.
        """
        R = self.spec.kv_lora_rank
        value = latent.narrow(-1, 0, R)  # [B, 1, T, R]
        if self.kv_b_proj.bias is not None:
            # A column of ones adds up each row's weights: 1, or 0 where nothing is seen, or what dropout left of it.
            value = torch.cat((value, torch.ones_like(latent[..., :1])), dim=-1)
        query = self._absorbed_query(q_nope, q_rope)
        key = latent if self.spec.qk_nope_head_dim else latent[..., R:]
        mixed, weights = self._kernel(query, key, value, call, self._scale())
        return self._decoded_values(mixed), weights

    def _absorbed_query(self, q_nope: Tensor, q_rope: Tensor) -> Tensor:
        """Queries of latents and rotary keys ``[B, H, S, R + P]``, or ``[B, H, S, P]`` where they have no content."""
        if not self.spec.qk_nope_head_dim:
            return q_rope
        return torch.cat((per_head(q_nope, self._decoders()[0]), q_rope), dim=-1)

    def _decoded_values(self, mixed: Tensor) -> Tensor:
        """Values ``[B, H, S, V]`` of mixed latents ``[B, H, S, R]``, or R + 1 with the sums of weights for a bias."""
        R, decoders = self.spec.kv_lora_rank, self._decoders()[1].transpose(1, 2)
        if self.kv_b_proj.bias is None:
            return per_head(mixed, decoders)
        bias = torch.unflatten(self.kv_b_proj.bias, 0, (self.spec.num_heads, -1))[:, self.spec.qk_nope_head_dim :]
        return per_head(mixed[..., :R], decoders) + mixed[..., R:] * bias[:, None]

    def _decoders(self) -> tuple[Tensor, Tensor]:
        """The rows of kv_b_proj of each head's keys ``[H, N, R]`` and values ``[H, V, R]``."""
        spec = self.spec
        decoders = torch.unflatten(self.kv_b_proj.weight, 0, (spec.num_heads, -1))
        keys, values = decoders.split_with_sizes((spec.qk_nope_head_dim, spec.v_head_dim), dim=1)
        return keys, values

    def _scale(self) -> float:
        scale = self.spec.softmax_scale
        return self.spec.qk_head_dim**-0.5 if scale is None else scale


def from_spec(
    spec: LatentSpec, *, dropout: float = 0.0, norm_eps: float = 1e-6, impl: Impl = "auto", backend: Backend = "auto"
) -> MultiHeadLatentAttention:
    """Build the layer that a spec describes, freshly initialised."""
    arguments = constructor_arguments(spec, MultiHeadLatentAttention)
    layer = MultiHeadLatentAttention(**arguments, dropout=dropout, norm_eps=norm_eps, impl=impl, backend=backend)
    if spec.rope is None:  # a rotary key that is not rotated (Kimi Linear), or that the hosting model rotates
        layer.rope, layer.spec = None, spec
    return layer
