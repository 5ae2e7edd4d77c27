"""The spec of MLA: multi-head latent attention with a decoupled rotary key."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from headwise.errors import SpecError
from headwise.models.specs.base import AttentionSpec, bias_names, check_positive, check_sizes


@dataclass(frozen=True, kw_only=True)
class LatentSpec(AttentionSpec):
    """Multi-head latent attention of one layer.

    For example ``LatentSpec(hidden_size=512, num_heads=8, kv_lora_rank=128, qk_nope_head_dim=64,
    qk_rope_head_dim=32, v_head_dim=64).label`` is ``"MLA 128 + 32"``.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.

    Attributes:
        num_heads: H, query heads.
        kv_lora_rank: R, width of the cached latent that keys and values are decoded from.
        qk_nope_head_dim: N, a head's query–key dims without rotation; 0 when all of them rotate.
        qk_rope_head_dim: P, width of the rotary key that all heads share; 0 in a model without RoPE.
        v_head_dim: V, width of a value head.
        q_lora_rank: width of the query latent, or None for a plain query projection.
        latent_norm: whether latents pass through an RMSNorm before they are used (and cached).
        qk_norm: the kind of norm of queries and keys, as in `GroupedSpec`, where MLA stands behind one; else None.
            The latent is then a linear map of normed keys and of values, and each head's query one of that head's
            normed query.
        num_kv_heads: K, the key–value heads whose keys are normed; None without ``qk_norm``.
        head_dim: D, the width of the query and key heads that are normed; None without ``qk_norm``.
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    latent_norm: bool = True
    qk_norm: str | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "num_heads", "kv_lora_rank", "v_head_dim")
        if self.q_lora_rank is not None:
            check_positive("q_lora_rank", self.q_lora_rank)
        check_sizes(self, "qk_nope_head_dim", "qk_rope_head_dim", least=0)
        if not self.qk_head_dim:
            raise SpecError("qk_nope_head_dim", 0, "must be at least 1 where qk_rope_head_dim = 0")
        if self.qk_rope_head_dim % 2:
            raise SpecError("qk_rope_head_dim", self.qk_rope_head_dim, "must be even: rotation works on pairs")
        if self.rope is not None and self.rope.dim != self.qk_rope_head_dim:
            raise SpecError("rope dim", self.rope.dim, f"must equal qk_rope_head_dim = {self.qk_rope_head_dim}")
        object.__setattr__(self, "bias", latent_bias(self.bias, self.q_lora_rank))
        self._check_norms()

    def _check_norms(self) -> None:
        if self.qk_norm is None:
            for name in ("num_kv_heads", "head_dim"):
                if getattr(self, name) is not None:
                    raise SpecError(name, getattr(self, name), "goes with qk_norm")
            return
        if self.qk_norm not in ("head", "full"):
            raise SpecError("qk_norm", self.qk_norm, 'must be None, "head" or "full"')
        check_sizes(self, "num_kv_heads", "head_dim")
        if self.q_lora_rank is not None or any(name != "o_proj" for name in self.bias):
            rule = "goes with no query latent, and no bias but that of the output"
            raise SpecError("qk_norm", self.qk_norm, rule)

    @property
    def qk_head_dim(self) -> int:
        """A head's whole query–key width."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mechanism(self) -> str:
        """Always ``mla``."""
        return "mla"

    @property
    def label(self) -> str:
        """A label such as ``MLA 512 + 64``: widths of the latent and the rotary key; ``MLA 512`` without RoPE."""
        rope = f" + {self.qk_rope_head_dim}" if self.qk_rope_head_dim else ""
        return f"MLA {self.kv_lora_rank}{rope}"


def latent_bias(bias: bool | str | Collection[str], q_lora_rank: int | None) -> tuple[str, ...]:
    """Names of the projections that have a bias.

    ``"hf"`` stands for those of transformers' ``attention_bias`` (q_a, kv_a, o), ``"qkv"`` for those of a converted
    Qwen2 (the query and kv_a projections).
    """
    query = ("q_proj",) if q_lora_rank is None else ("q_a_proj", "q_b_proj")
    projections = (*query, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    hf = (*(() if q_lora_rank is None else ("q_a_proj",)), "kv_a_proj_with_mqa", "o_proj")
    shorthands = {"hf": hf, "qkv": (query[-1], "kv_a_proj_with_mqa")}
    return bias_names(bias, projections=projections, shorthands=shorthands)
