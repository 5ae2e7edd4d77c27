"""The spec of a layer's feed-forward network: dense, or a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.errors import SpecError
from headwise.models.specs.base import positive


@dataclass(frozen=True, kw_only=True)
class FeedForwardSpec:
    """One layer's feed-forward network.

    For example ``FeedForwardSpec(hidden_size=4096, intermediate_size=14336)``.

    Source: Shazeer 2020 (gated), Shazeer et al. 2017 (experts), DeepSeekMoE (shared experts).

    Attributes:
        hidden_size: E.
        intermediate_size: width of the dense network, or of each expert.
        gated: whether there are three matrices (gate, up, down) rather than two.
        bias: whether every matrix of the network, or of each expert, has a bias.
        num_experts: experts that the router chooses from; None for a dense network.
        experts_per_token: how many of them a token uses.
        shared_intermediate_size: width of the shared experts, which every token uses, together.
        shared_gate: whether they have a learned gate (Qwen2-MoE).
        router_bias: whether the router's logits have a bias (gpt-oss).
        score_correction: whether each expert has a number that balances how often it is chosen, and does not weigh
            its output (DeepSeek-V3).
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
