"""Cost of a feed-forward network: ``2EW`` weights, ``3EW`` gated, for each of its experts; 2 FLOPs a weight used."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.costs.formulas.stages import Linear, Stage, Vector
from headwise.models.specs.model import FeedForwardSpec


@dataclass(frozen=True)
class Part:
    """One kind of network in a layer: its stages, how many are stored, and how many of them a token uses."""

    name: str
    stages: tuple[Stage, ...]
    stored: int = 1
    used: int = 1

    @property
    def parameters(self) -> int:
        """The number of learned parameters of one network."""
        return sum(stage.parameters for stage in self.stages)

    @property
    def flops(self) -> int:
        """FLOPs of one network for one token."""
        return sum(2 * stage.in_features * stage.out_features for stage in self.stages if isinstance(stage, Linear))


def parts(spec: FeedForwardSpec) -> tuple[Part, ...]:
    """The networks of a layer; their names are fields of `headwise.costs.formulas.model.Weights` and `Flops`."""
    network = _network(spec, spec.intermediate_size, spec.bias)
    if spec.num_experts is None or spec.experts_per_token is None:
        return (Part("feed_forward", network),)
    E, n = spec.hidden_size, spec.num_experts
    router = (Linear("router", E, n, spec.router_bias), Vector("score correction", n if spec.score_correction else 0))
    networks = [Part("experts", network, n, spec.experts_per_token), Part("router", router)]
    if spec.shared_intermediate_size is not None:
        gate = (Linear("shared gate", E, 1),) if spec.shared_gate else ()
        networks.append(Part("shared_experts", (*_network(spec, spec.shared_intermediate_size, False), *gate)))
    return tuple(networks)


def _network(spec: FeedForwardSpec, width: int, bias: bool) -> tuple[Linear, ...]:
    E = spec.hidden_size
    gate = (Linear("gate_proj", E, width, bias),) if spec.gated else ()
    return (*gate, Linear("up_proj", E, width, bias), Linear("down_proj", width, E, bias))
