"""One plan for all layers, as deepseek_v3 needs it: which rotary channels every layer keeps, and what that costs.

A layer's channels are mixtures of its key heads, at each frequency the most asked-for first
(`rope_channels.concentrate`). A plan says which of them keep their rotation; what is mixed into them is each layer's.

Shapes: K key heads, F frequencies, E hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headwise.conversion.calibration.saved import SavedStatistics
from headwise.conversion.calibration.streams import Sequential, Solver, Step, output_cost
from headwise.conversion.loop import Study, read_layer
from headwise.conversion.planning.plan import Job
from headwise.conversion.solvers.assemble import projections
from headwise.conversion.solvers.heads import Layer, State, rotation_tables
from headwise.conversion.solvers.joint_latent import NOTHING
from headwise.conversion.solvers.latent import convert_to_latent, rotary_channels
from headwise.conversion.solvers.rope_channels import keep_rotation
from headwise.conversion.solvers.statistics import Statistics
from headwise.conversion.storage.layers import LayerResults
from headwise.processes import rank
from headwise.progress import Progress
from headwise.specs import GroupedSpec, LatentSpec


@torch.no_grad()
def common_channels(job: Job, study: Study | None, progress: Progress) -> Tensor:
    """The channels that all layers together would lose most without, bool ``[F, K]``.

    What a layer loses is an error of its scores times how much of its output, in the metric of the loss, turns on
    them: nats, so that layers can be added up. With a text it is seen where sensitivities are, on a few windows that
    go once through the source. Without any study layers count alike.

    Args:
        job: a conversion to MLA whose layers keep rotary keys of one width.
        study: of the source; None for weights alone.
        progress: told of each layer.
    """
    energies, losses, pairs = [], [], 0
    hidden = study.source_windows() if isinstance(study, Sequential) else {}
    layers = job.before.num_layers
    for index, target in enumerate(job.after.layers):
        progress("planning", index, layers)
        source = read_layer(job.checkpoint, index)
        spec = source.spec
        assert isinstance(spec, GroupedSpec)
        assert isinstance(target, LatentSpec)
        if isinstance(study, SavedStatistics):
            known, _ = study.layer(index)
        elif study is not None:
            known = study.source_statistics(index, study.model.layer(index), source.float(), hidden)
        else:
            known = Statistics.nothing(spec.hidden_size, spec.num_heads, job.longest)
        own, lost = rotary_losses(source.state, spec, target, known, mix=job.mixes)
        # Without a text, layers count alike; one whose keys are nothing does not count.
        whole = max(float(own.sum()), NOTHING) if study is None else 1.0
        pairs = target.qk_rope_head_dim // 2
        energies.append(own / whole)
        losses.append(lost / whole)
    progress("planning", layers, layers)
    return keep_rotation(torch.stack(energies).sum(0), torch.stack(losses).sum(0), pairs)


def rotary_losses(
    state: State, source: GroupedSpec, target: LatentSpec, known: Statistics, *, mix: bool = True
) -> tuple[Tensor, Tensor]:
    """Each channel's energy, and what of it the scores lose without its rotation: ``[F, K]`` both."""
    w_q, w_k, _ = projections(state, target)
    rotary = rotary_channels(w_q, w_k, source, known, mix=mix)
    return rotary.channels.energy, rotary.lost


class SharedPlan(Sequential):
    """A conversion whose layers share a plan, and that notes what each would cost with a plan of its own."""

    def layer(self, index: int, source: Layer, solve: Solver, keep: Callable[[Step], None]) -> Step:
        """See `Sequential.layer`; both costs are on held-out windows and before any refit."""
        costs: dict[str, float] = {}
        spec = source.spec
        assert isinstance(spec, GroupedSpec)
        rotation = rotation_tables(spec, self.windows.shape[1])

        def both(statistics: Statistics, sensitivity: Tensor | None) -> Layer:
            shared = solve(statistics, sensitivity)
            assert isinstance(shared.spec, LatentSpec)
            made, channels = convert_to_latent(
                source.state,
                spec,
                shared.spec,
                statistics=statistics,
                sensitivity=sensitivity,
                mix="channels" in self.stages,
            )
            cost = output_cost(sensitivity, spec.hidden_size)

            def held(layer: Layer) -> float:
                return float(self._held_nats(lambda at: layer.output(self.inputs.read(at), rotation), cost).mean())

            costs["shared"] = held(shared.float())
            costs["own"] = held(Layer(shared.spec, made, channels).float())
            return shared

        def keep_both(step: Step) -> None:
            if rank() == 0:
                self.plans.save(index, {}, costs)
            keep(step)

        return super().layer(index, source, both, keep_both)

    @property
    def plans(self) -> LayerResults:
        """Each layer's costs."""
        return LayerResults(self.streams.folder / "plans")

    def plan_costs(self) -> dict[str, float]:
        """What all layers cost: ``shared`` and ``own``."""
        kept = [self.plans.load(index) for index in range(self.position)]
        return {name: sum(found[1][name] for found in kept if found is not None) for name in ("shared", "own")}
