"""One list of rotary channels for all layers, as deepseek_v3 needs it, and what sharing it costs.

A layer's channels are mixtures of its key heads, at each frequency the most asked-for first
(`rope_channels.concentrate`). The list says which of them keep their rotation; each layer mixes its own heads into
them.

Shapes: K key heads, F frequencies, E hidden.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headwise.conversion.calibration.base import Calibrator
from headwise.conversion.methods import Evidence, LayerTarget, Method
from headwise.conversion.planning.plan import ConversionPlan
from headwise.conversion.solvers.assemble import projections
from headwise.conversion.solvers.joint_latent import NOTHING
from headwise.conversion.solvers.latent import rotary_channels
from headwise.conversion.solvers.layer import Layer, State
from headwise.conversion.solvers.rope_channels import keep_rotation
from headwise.conversion.solvers.statistics import Statistics
from headwise.progress import Progress
from headwise.specs import GroupedSpec, LatentSpec


@torch.no_grad()
def choose_shared_channels(plan: ConversionPlan, calibrator: Calibrator, progress: Progress) -> Tensor:
    """The channels that all layers together would lose most without, bool ``[F, K]``.

    What a layer loses is an error of its scores times how much of its output, in the metric of the loss, turns on
    them: nats, so that layers can be added up. With a text it is measured where sensitivities are, on a few windows
    that go once through the source. Without one, layers count alike.

    Args:
        plan: a conversion to MLA whose layers keep rotary keys of one width.
        calibrator: of the source.
        progress: told of each layer.
    """
    energies, losses, pairs = [], [], 0
    layers = plan.before.num_layers
    for index, (source, evidence) in enumerate(calibrator.source_evidence(plan)):
        progress("planning", index, layers)
        spec, target = source.spec, plan.after.layers[index]
        assert isinstance(spec, GroupedSpec)
        assert isinstance(target, LatentSpec)
        longest = plan.layer_target(plan.places[index]).longest
        statistics = evidence.statistics or Statistics.nothing(spec.hidden_size, spec.num_heads, longest)
        energy, lost = rotary_losses(source.state, spec, target, statistics, mix=plan.mixes_heads)
        # Without a text, layers count alike; one whose keys are nothing does not count.
        whole = max(float(energy.sum()), NOTHING) if evidence.statistics is None else 1.0
        pairs = target.qk_rope_head_dim // 2
        energies.append(energy / whole)
        losses.append(lost / whole)
    progress("planning", layers, layers)
    return keep_rotation(torch.stack(energies).sum(0), torch.stack(losses).sum(0), pairs)


def rotary_losses(
    state: State, source: GroupedSpec, target: LatentSpec, statistics: Statistics, *, mix: bool = True
) -> tuple[Tensor, Tensor]:
    """Each channel's energy, and the part of it that the scores lose without its rotation: ``[F, K]`` both."""
    w_q, w_k, _ = projections(state, target)
    rotary = rotary_channels(w_q, w_k, source, statistics, mix=mix)
    return rotary.channels.energy, rotary.lost


def compare_own_channels(
    method: Method, source: Layer, target: LayerTarget, evidence: Evidence, shared: Layer, calibrator: Calibrator
) -> dict[str, float]:
    """What a layer loses with the channels that all share, and with those it needs most, before any refit.

    Args:
        method: that solved the layer.
        source: the layer.
        target: what it becomes, with shared channels.
        evidence: what is known of it.
        shared: the solution.
        calibrator: at that layer.

    Returns:
        ``shared`` and ``own``, nats a token on held-out windows; nothing where there are none.
    """
    if target.rotary_channels is None or not calibrator.is_sequential:
        return {}
    own = method.solve(source, replace(target, rotary_channels=None), evidence)
    losses = calibrator.losses(shared, own)
    return {} if losses is None else dict(zip(("shared", "own"), losses, strict=True))
