"""Choose one list of rotary channels for all layers, as deepseek_v3 needs it, and measure the cost of sharing it.

A layer's channels are mixtures of its key heads, at each frequency in falling order of energy
(`rope_channels.concentrate`). The list says which channels keep their rotation; each layer mixes its own heads into
them.

Shapes: K key heads, F frequencies, E hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headwise.base.progress import Progress
from headwise.conversion.calibration.base import Calibrator
from headwise.conversion.methods import Evidence, LayerTarget, Method
from headwise.conversion.planning.plan import ConversionPlan
from headwise.conversion.solvers.assemble import projections
from headwise.conversion.solvers.joint_latent import NOTHING
from headwise.conversion.solvers.latent import rotary_channels
from headwise.conversion.solvers.layer import Layer, State
from headwise.conversion.solvers.rope_channels import keep_rotation
from headwise.conversion.solvers.statistics import Statistics
from headwise.models.specs import GroupedSpec, LatentSpec

CHOOSING = "choosing rotary channels"
"""The name of the stage, for progress."""


@torch.no_grad()
def choose_shared_channels(
    plan: ConversionPlan,
    calibrator: Calibrator,
    progress: Progress,
    *,
    keep: Callable[[Tensor, Tensor, int], Tensor] = keep_rotation,
) -> Tensor:
    """Choose the channels whose rotation is worth most to all layers together, bool ``[F, K]``.

    A layer's loss is the error of its scores, weighted by how much its output depends on them in the metric of the
    loss: nats, so that layers add up. With a text it is measured on the windows that sensitivities are measured on,
    which go once through the source. Without one, layers count alike.

    Args:
        plan: a conversion to MLA, with one rotary width for all layers.
        calibrator: gives the evidence of each layer.
        progress: told of each layer.
        keep: chooses the channels by all layers' energies and losses; see `keep_rotation`.
    """
    energies, losses, pairs = [], [], 0
    layers = plan.before.num_layers
    for index, (source, evidence) in enumerate(calibrator.source_evidence(plan)):
        progress(CHOOSING, index, layers)
        spec, target = source.spec, plan.after.layers[index]
        assert isinstance(spec, GroupedSpec)
        assert isinstance(target, LatentSpec)
        longest = plan.layer_target(plan.places[index]).longest
        statistics = evidence.statistics or Statistics.nothing(spec.hidden_size, spec.num_heads, longest)
        energy, loss = rotary_losses(source.state, spec, target, statistics, mix=plan.mixes_heads)
        # Without a text, layers count alike; one whose keys are zero does not count.
        scale = max(float(energy.sum()), NOTHING) if evidence.statistics is None else 1.0
        pairs = target.qk_rope_head_dim // 2
        energies.append(energy / scale)
        losses.append(loss / scale)
    progress(CHOOSING, layers, layers)
    return keep(torch.stack(energies).sum(0), torch.stack(losses).sum(0), pairs)


def rotary_losses(
    state: State, source: GroupedSpec, target: LatentSpec, statistics: Statistics, *, mix: bool = True
) -> tuple[Tensor, Tensor]:
    """Each channel's energy, and the part of it that scores lose without the channel's rotation: both ``[F, K]``."""
    w_q, w_k, _ = projections(state, target)
    rotary = rotary_channels(w_q, w_k, source, statistics, mix=mix)
    return rotary.channels.energy, rotary.lost


def compare_own_channels(
    method: Method, source: Layer, target: LayerTarget, evidence: Evidence, shared: Layer, calibrator: Calibrator
) -> dict[str, float]:
    """Compare a layer's loss with the shared channels and with its own choice of channels, before any refit.

    Args:
        method: the method that solved the layer.
        source: the layer.
        target: the converted layer, with shared channels.
        evidence: the layer's evidence.
        shared: the solution with shared channels.
        calibrator: the calibrator, at that layer.

    Returns:
        ``shared`` and ``own``, nats a token on held-out windows; empty without a text.
    """
    if target.rotary_channels is None or not calibrator.is_sequential:
        return {}
    unshared = method.solve(source, replace(target, rotary_channels=None), evidence)
    losses = calibrator.losses(shared, unshared)
    return {} if losses is None else dict(zip(("shared", "own"), losses, strict=True))
