"""A layer's feed-forward network: dense, or a router over experts."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.errors import SpecError
from headwise.specs.base import positive


@dataclass(frozen=True, kw_only=True)
class FeedForwardSpec:
    """One layer's feed-forward network.

    Source: Shazeer 2020 (gated), Shazeer et al. 2017 (experts), DeepSeekMoE (shared experts).

    Attributes:
        hidden_size: E.
        intermediate_size: width of the dense network, or of each expert.
        gated: three matrices (gate, up, down) rather than two.
        bias: every matrix of the network, or of each expert, carries one.
        num_experts: experts to choose from; None for a dense network.
        experts_per_token: how many a token goes through.
        shared_intermediate_size: width of all experts together that every token goes through.
        shared_gate: a learned gate on them (Qwen2-MoE).
        router_bias: the router's logits carry a bias (gpt-oss).
        score_correction: a number an expert that balances the choice and is no weight of it (DeepSeek-V3).
    """

    hidden_size: int
    intermediate_size: int
    gated: bool = True
    bias: bool = False
    num_experts: int | None = None
    experts_per_token: int | None = None
    shared_intermediate_size: int | None = None
    shared_gate: bool = False
    router_bias: bool = False
    score_correction: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size"):
            positive(name, getattr(self, name))
        for name in ("num_experts", "experts_per_token", "shared_intermediate_size"):
            if (value := getattr(self, name)) is not None:
                positive(name, value)
        if self.num_experts is None:
            if self.experts_per_token or self.shared_intermediate_size:
                raise SpecError("num_experts", None, "is required where there are experts")
        elif self.experts_per_token is None or self.experts_per_token > self.num_experts:
            rule = f"must be at least 1 and at most num_experts = {self.num_experts}"
            raise SpecError("experts_per_token", self.experts_per_token, rule)
