"""The spec of expert-decoded latent attention: each query's gates choose how the cached latents are decoded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from headwise.errors import SpecError
from headwise.models.specs.base import MAX_HEADS, AttentionSpec, bias_names, check_positive, check_sizes

PROJECTIONS = ("q_proj", "kv_a_proj", "gate_proj", "o_proj")
CONDITIONINGS = ("token", "sequence")


@dataclass(frozen=True, kw_only=True)
class ExpertLatentSpec(AttentionSpec):
    """One layer's latent heads, decoded by a mixture of experts that the query gates.

    For example ``ExpertLatentSpec(hidden_size=512, num_heads=8, head_dim=64, latent_kv_heads=2, kv_dim=16)``.

    Attributes:
        num_heads: H, query heads.
        head_dim: D, width of a query head and of a decoded key or value head.
        latent_kv_heads: K, cached latents for keys (and as many for values); divides H.
        kv_dim: C, width of a cached latent.
        num_experts: X, decoders ``C × D`` of each head, for keys and for values.
        top_k: the number of experts that a gate keeps, without renormalising.
        conditioning: ``"token"`` where each query token has its own gates, or ``"sequence"`` where all share the
            gates of the mean query, which looks ahead and so is neither causal nor cached.
    """

    num_heads: int
    head_dim: int
    latent_kv_heads: int
    kv_dim: int
    num_experts: int = 8
    top_k: int = 2
    conditioning: str = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("num_heads", self.num_heads, most=MAX_HEADS)
        check_sizes(self, "head_dim", "latent_kv_heads", "kv_dim", "num_experts", "top_k")
        if self.num_heads % self.latent_kv_heads:
            raise SpecError("latent_kv_heads", self.latent_kv_heads, f"must divide num_heads = {self.num_heads}")
        if self.top_k > self.num_experts:
            raise SpecError("top_k", self.top_k, f"must be at most num_experts = {self.num_experts}")
        if self.conditioning not in CONDITIONINGS:
            raise SpecError("conditioning", self.conditioning, f"must be one of {', '.join(CONDITIONINGS)}")
        if self.conditioning == "sequence" and self.is_causal:
            raise SpecError("is_causal", True, 'must be false with conditioning = "sequence": its gates look ahead')
        if self.conditioning == "sequence" and self.sliding_window is not None:
            rule = 'must be None with conditioning = "sequence": a window is causal, and its gates look ahead'
            raise SpecError("sliding_window", self.sliding_window, rule)
        if self.rope is not None and self.rope.dim > self.head_dim:
            raise SpecError("rope dim", self.rope.dim, f"must be at most head_dim = {self.head_dim}")
        object.__setattr__(self, "bias", expert_latent_bias(self.bias))

    @property
    def label(self) -> str:
        """A label such as ``experts 2×64 2/8 P16``: latent heads × width, experts kept of all, rotated dims."""
        rotated = "" if self.rope is None else f" P{self.rope.dim}"
        return f"experts {self.latent_kv_heads}×{self.kv_dim} {self.top_k}/{self.num_experts}{rotated}"


def expert_latent_bias(bias: bool | str | Collection[str]) -> tuple[str, ...]:
    """Names of the projections that have a bias; the experts have none."""
    return bias_names(bias, projections=PROJECTIONS, shorthands={"qkv": PROJECTIONS[:2]})
