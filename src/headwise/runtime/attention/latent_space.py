"""Latent-space attention: keys and values of narrow heads, and queries cut to their width.

Shapes: B batch, S new tokens, T all tokens, H heads, D query head dim, R latent width of all heads, E hidden.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from headwise.models.specs.latent_space import LatentSpaceSpec, latent_space_bias
from headwise.runtime.attention.base import (
    Attended,
    AttentionLayer,
    Call,
    Cut,
    HeadSplit,
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


class LatentSpaceAttention(AttentionLayer):
    """Heads that compare and mix in a latent space of ``latent_dim``, then project up to the queries' width.

    For example ``LatentSpaceAttention(512, 8, latent_dim=128)(torch.randn(1, 10, 512), is_causal=True)``.

    A token caches ``2R`` values. Query dims beyond the R/H of a latent head are projected and dropped, as in the
    mechanism's source; MHA with ``head_dim = R/H`` can compute the same functions with fewer parameters.

    Args:
        hidden_size: E.
        num_heads: H.
        latent_dim: R, a multiple of H; half the queries' width, ``H·D/2``, when None.
        head_dim: D; ``hidden_size / num_heads`` when None.
        bias: True for every projection, ``"qkv"``, or projection names.
        dropout: probability of dropping an attention weight while training.
        rope: rotary embedding of the latent heads, or None.
        softmax_scale: multiplies the scores; ``1/sqrt(R/H)`` when None.
        sliding_window: how many of the latest tokens are attended to; all when None.
        backend: passed to `headwise.runtime.kernels.attend`.

    Raises:
        SpecError: the sizes do not fit together.
    """

    spec: LatentSpaceSpec

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        latent_dim: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool | str | Collection[str] = False,
        dropout: float = 0.0,
        rope: Rope | None = None,
        softmax_scale: float | None = None,
        sliding_window: int | None = None,
        backend: Backend = "auto",
    ) -> None:
        rotary = as_rotary(rope)
        head_dim = default_head_dim(hidden_size, num_heads) if head_dim is None else head_dim
        spec = LatentSpaceSpec(
            hidden_size=hidden_size,
            num_heads=num_heads,
            latent_dim=num_heads * head_dim // 2 if latent_dim is None else latent_dim,
            head_dim=head_dim,
            bias=latent_space_bias(bias),
            rope=None if rotary is None else rotary.spec,
            softmax_scale=softmax_scale,
            sliding_window=sliding_window,
        )
        super().__init__(spec, rope=rotary, dropout=dropout, backend=backend)
        E, R, width = hidden_size, spec.latent_dim, num_heads * head_dim
        self.q_proj = nn.Linear(E, width, bias="q_proj" in spec.bias)
        self.k_proj = nn.Linear(E, R, bias="k_proj" in spec.bias)
        self.v_proj = nn.Linear(E, R, bias="v_proj" in spec.bias)
        self.v_out_proj = nn.Linear(R, width, bias="v_out_proj" in spec.bias)
        self.o_proj = nn.Linear(width, E, bias="o_proj" in spec.bias)

    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        """Keys and values, each ``[B, H, T, R/H]``."""
        shape = (self.spec.num_heads, self.spec.latent_head_dim)
        return shape, shape

    def head_split(self) -> HeadSplit:
        """Ranks share heads up to the sum that projects all of them up; every rank computes the output projection."""
        H = self.spec.num_heads
        cuts = {"q_proj": Cut(0, H), "k_proj": Cut(0, H), "v_proj": Cut(0, H), "v_out_proj": Cut(1, H)}
        return HeadSplit(cuts, sums="v_out_proj", after=("o_proj",))

    def _states_to_cache(self, states: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        key, value = (split_heads(project(states), self.spec.num_heads) for project in (self.k_proj, self.v_proj))
        return rotated(key, rotation, self.rope), value

    def _attend(self, hidden_states: Tensor, memory: tuple[Tensor, ...], call: Call) -> Attended:
        query = split_heads(self.q_proj(hidden_states), self.spec.num_heads)  # [B, H, S, D]
        query = query[..., : self.spec.latent_head_dim]  # [B, H, S, R/H]
        key, value = memory  # [B, H, T, R/H] each
        mixed, weights = self._kernel(
            rotated(query, call.rotation, self.rope), key, value, call, self.spec.softmax_scale
        )
        out: Tensor = self.o_proj(self.v_out_proj(merge_heads(mixed)))
        return out if weights is None else (out, weights)


def from_spec(spec: LatentSpaceSpec, *, dropout: float = 0.0, backend: Backend = "auto") -> LatentSpaceAttention:
    """Build the layer that a spec describes, freshly initialised."""
    arguments = constructor_arguments(spec, LatentSpaceAttention)
    return LatentSpaceAttention(**arguments, dropout=dropout, backend=backend)
