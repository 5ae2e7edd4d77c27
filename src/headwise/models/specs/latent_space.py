"""The spec of latent-space attention: heads in a space narrower than the queries'."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from headwise.errors import SpecError
from headwise.models.specs.base import MAX_HEADS, AttentionSpec, bias_names, check_positive, check_sizes

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "v_out_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class LatentSpaceSpec(AttentionSpec):
    """One layer's keys and values, projected to a latent of which each head has an equal part.

    For example ``LatentSpaceSpec(hidden_size=512, num_heads=8, latent_dim=128, head_dim=64).label`` is
    ``"latent-space 128"``.

    Queries are projected to their full width, and each head is cut to the width of a latent head. The mixed values
    are projected up to the queries' width before the output projection.

    Attributes:
        num_heads: H, query heads; divides ``latent_dim``.
        latent_dim: R, width of all key (and of all value) heads together.
        head_dim: D, width of a query head as projected, of which the first R/H are used.
    """

    num_heads: int
    latent_dim: int
    head_dim: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("num_heads", self.num_heads, most=MAX_HEADS)
        check_sizes(self, "latent_dim", "head_dim")
        if self.latent_dim % self.num_heads:
            raise SpecError("latent_dim", self.latent_dim, f"must be a multiple of num_heads = {self.num_heads}")
        if self.latent_head_dim > self.head_dim:
            rule = f"must be at most num_heads · head_dim = {self.num_heads * self.head_dim}: queries are cut to it"
            raise SpecError("latent_dim", self.latent_dim, rule)
        if self.rope is not None and self.rope.dim > self.latent_head_dim:
            raise SpecError("rope dim", self.rope.dim, f"must be at most latent_dim / H = {self.latent_head_dim}")
        object.__setattr__(self, "bias", latent_space_bias(self.bias))

    @property
    def latent_head_dim(self) -> int:
        """R/H, width of a latent head."""
        return self.latent_dim // self.num_heads

    @property
    def label(self) -> str:
        """A label such as ``latent-space 256``: the latent's width."""
        return f"latent-space {self.latent_dim}"


def latent_space_bias(bias: bool | str | Collection[str]) -> tuple[str, ...]:
    """Names of the projections that have a bias."""
    return bias_names(bias, projections=PROJECTIONS, shorthands={"qkv": PROJECTIONS[:3]})
