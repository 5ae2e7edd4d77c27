"""The spec of MHA, MQA and GQA: query heads in groups that share a key–value head."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from headwise.errors import SpecError
from headwise.models.specs.base import (
    MAX_HEADS,
    AttentionSpec,
    bias_names,
    check_positive,
    check_positive_number,
    check_sizes,
)

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class GroupedSpec(AttentionSpec):
    """Multi-head (K = H), multi-query (K = 1) or grouped-query attention of one layer.

    For example ``GroupedSpec(hidden_size=512, num_heads=8, num_kv_heads=2, head_dim=64).label`` is
    ``"GQA 8/2 × 64"``.

    Source: Vaswani et al. 2017 (MHA), Shazeer 2019 (MQA), Ainslie et al. 2023 (GQA), Hu et al. 2024 (MFA).

    Attributes:
        num_heads: H, query heads.
        num_kv_heads: K, key–value heads; divides H.
        head_dim: D, width of a query or key head, which may differ from E/H.
        v_head_dim: V, width of a value head; ``head_dim`` when None.
        qk_norm: ``"head"`` for an RMSNorm over each query and key head (Qwen3), ``"full"`` for one over all
            heads together (OLMo 2), or None.
        sinks: whether each head has a learned logit that takes part in the softmax and attends to nothing (gpt-oss).
        softcap: scores pass through ``softcap * tanh(score / softcap)`` (Gemma 2), or None.
        output_projection: whether there is an ``o_proj``; if not, the heads' values are the output.
        output_gate: whether the query projection also computes a gate of each head's output (Qwen3-Next).
        q_lora_rank: width of the latent that queries are projected from, behind a norm; None for a plain projection.
            With one key–value head it is multi-matrix factorization attention (MFA, Step-3).
        shares_kv: whether the layer reads an earlier layer's keys and values, and caches none (Gemma 3n).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    qk_norm: str | None = None
    sinks: bool = False
    softcap: float | None = None
    output_projection: bool = True
    output_gate: bool = False
    q_lora_rank: int | None = None
    shares_kv: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("num_heads", self.num_heads, most=MAX_HEADS)
        check_sizes(self, "num_kv_heads", "head_dim")
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        check_positive("v_head_dim", self.value_dim)
        if self.num_heads % self.num_kv_heads:
            raise SpecError("num_kv_heads", self.num_kv_heads, f"must divide num_heads = {self.num_heads}")
        if self.rope is not None and self.rope.dim > self.head_dim:
            raise SpecError("rope dim", self.rope.dim, f"must be at most head_dim = {self.head_dim}")
        if self.softcap is not None:
            check_positive_number("softcap", self.softcap)
        if self.qk_norm not in (None, "head", "full"):
            raise SpecError("qk_norm", self.qk_norm, 'must be None, "head" or "full"')
        object.__setattr__(self, "bias", grouped_bias(self.bias, output_projection=self.output_projection))
        if self.q_lora_rank is not None:
            check_positive("q_lora_rank", self.q_lora_rank)
            if "q_proj" in self.bias or self.output_gate:
                raise SpecError("q_lora_rank", self.q_lora_rank, "goes without a bias of q_proj and an output gate")

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.v_head_dim if self.v_head_dim is not None else self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads per key–value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def mechanism(self) -> str:
        """``mha``, ``mqa`` or ``gqa``, by the number of key–value heads; ``single_head`` where there is one head."""
        if self.num_heads == 1:
            return "single_head"
        if self.num_kv_heads == self.num_heads:
            return "mha"
        return "mqa" if self.num_kv_heads == 1 else "gqa"

    @property
    def label(self) -> str:
        """A label such as ``GQA 32/8 × 128``: heads, key–value heads, head dim."""
        if self.num_heads == 1:
            return f"single head × {self.head_dim}"
        shared = " shared" if self.shares_kv else ""
        return f"{self.mechanism.upper()} {self.num_heads}/{self.num_kv_heads} × {self.head_dim}{shared}"


def grouped_bias(bias: bool | str | Collection[str], *, output_projection: bool = True) -> tuple[str, ...]:
    """Names of the projections that have a bias; ``"qkv"`` stands for those of Qwen2."""
    projections = PROJECTIONS if output_projection else PROJECTIONS[:3]
    return bias_names(bias, projections=projections, shorthands={"qkv": PROJECTIONS[:3], "hf": projections})
