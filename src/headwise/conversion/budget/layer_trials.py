"""The loss of each layer at some sizes and key weights, and of whole models by an allocation.

The source's layers are solved quickly, without refits. Every layer's loss is estimated on held-out text by the
sensitivities, which see no further than its own output; so every layer is also put by itself into the model at its
even size, and the divergence of the logits that follows corrects its estimates.

Shapes: N pieces of T tokens, E hidden, R latent rank, P rotary dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headwise.conversion.budget.allocation import Node
from headwise.conversion.budget.sizes import sizes_to_try, solutions
from headwise.conversion.budget.trial import Trial
from headwise.conversion.calibration.saved import SavedCalibrator, save_layer
from headwise.conversion.calibration.sensitivity import refuse_no_numbers
from headwise.conversion.calibration.text import TextCalibrator
from headwise.conversion.methods import Evidence
from headwise.conversion.planning.plan import ConversionPlan, LayerSize, Place
from headwise.conversion.solvers.layer import Layer
from headwise.conversion.solvers.metrics import KEY_WEIGHT
from headwise.conversion.solvers.statistics import root
from headwise.conversion.storage.layers import LayerFiles
from headwise.processes import all_sum, barrier, process_count, process_index
from headwise.progress import Progress
from headwise.specs import GroupedSpec, LatentSpec

KEY_WEIGHTS = (KEY_WEIGHT, KEY_WEIGHT / 4, KEY_WEIGHT * 4)
"""How much an error of the keys may count relative to the values', the usual weight first."""


class LayerLosses(NamedTuple):
    """What one layer loses.

    Attributes:
        even: at its even size and the usual key weight.
        key_weight: the one that loses least at that size.
        nodes: at some sizes, with that key weight.
    """

    even: Node
    key_weight: float
    nodes: list[Node]


@dataclass(frozen=True)
class LayerTrials:
    """Trials of single layers and of whole allocations, kept on disk as they are finished.

    Attributes:
        plan: the conversion, its layers of the even sizes.
        calibrator: about to convert layer 0; with sensitivities.
        files: each layer's statistics; within its folder the trials that are finished.
        progress: told of each layer, twice.
    """

    plan: ConversionPlan
    calibrator: TextCalibrator
    files: LayerFiles
    progress: Progress

    def losses(self, trial: Trial) -> list[LayerLosses]:
        """What each layer loses at some sizes and key weights; its statistics are kept.

        Processes take layers in turn. Those that were tried by a run that was killed are not solved again.
        """
        layers, finished = self.plan.before.num_layers, LayerFiles(self.files.folder / "tried")
        source_stream = self.calibrator.source_stream()
        streams: dict[int, Tensor] = {}
        tried: list[list[tuple[int, int]]] = []
        estimates = []
        for index in range(layers):
            self.progress("spreading", index, 2 * layers)
            module = self.calibrator.model.layer(index)
            sizes = self._sizes(index)
            tried.append(sizes)
            losses = torch.zeros(len(sizes) + len(KEY_WEIGHTS) - 1, dtype=torch.float64)
            streams = {at: trial.model.run(index, module, stream) for at, stream in streams.items()}
            is_mine = index % process_count() == process_index()
            kept = None if self.files.load(index) is None else finished.load(index)
            if kept is not None:
                source_stream.skip(index, module)
                if is_mine:
                    losses, streams[index] = kept[0]["losses"], kept[0]["stream"]
            else:
                source, sensitivity = self._source(index), self.calibrator.sensitivity(index)
                assert sensitivity is not None
                statistics = source_stream.statistics(index, module, source, sensitivity)
                if process_index() == 0:
                    save_layer(self.files, index, statistics, sensitivity)
                if is_mine:
                    evidence = Evidence(statistics, sensitivity)
                    losses, streams[index] = self._try(trial, index, module, source, evidence)
                    finished.save(index, {"losses": losses, "stream": streams[index]}, {})
                    del evidence
                del source, statistics
            estimates.append(losses)
            trial.source = trial.model.run(index, module, trial.source)
        refuse_no_numbers(trial.source, layers)
        divergences = _divergences(trial, streams, layers)
        return [
            _corrected(sizes, all_sum(losses).tolist(), divergence)
            for sizes, losses, divergence in zip(tried, estimates, divergences, strict=True)
        ]

    def divergences(self, trial: Trial, allocations: Sequence[Sequence[LayerSize]]) -> list[float]:
        """KL from the source, in nats a token, of the whole model by each allocation, all layers solved quickly.

        Processes take allocations in turn.
        """
        saved, finished = SavedCalibrator(self.files.folder), LayerFiles(self.files.folder / "plans")
        layers = self.plan.before.num_layers
        barrier()
        mine = [at for at in range(len(allocations)) if at % process_count() == process_index()]
        streams = {at: trial.begin() for at in mine}
        past = dict.fromkeys(streams, 0)
        for at in streams:
            if (kept := finished.load(at)) is not None:  # of a run that was killed
                streams[at], past[at] = kept[0]["stream"], kept[1]["layers"]
        for index in range(layers):
            self.progress("spreading", layers + index, 2 * layers)
            if not streams:
                break
            module = trial.model.layer(index)
            if waiting := [at for at in streams if past[at] == index]:
                source, evidence = self._source(index), saved.evidence(Place(index))
            for at in waiting:
                size = allocations[at][index]
                for _, layer in self._solutions(source, [size[:2]], evidence, size.key_weight):
                    streams[at] = trial.replaced(index, module, streams[at], layer)
                past[at] = index + 1
                finished.save(at, {"stream": streams[at]}, {"layers": past[at]})
            trial.source = trial.model.run(index, module, trial.source)
        self.progress("spreading", 2 * layers, 2 * layers)
        return _divergences(trial, streams, len(allocations))

    def _try(
        self, trial: Trial, index: int, module: nn.Module, source: Layer, evidence: Evidence
    ) -> tuple[Tensor, Tensor]:
        """What a layer loses by its own error, and its output on the pieces with the first of its sizes in it.

        Losses are float64, of each size with the usual key weight and then of the first with the others.
        """
        assert evidence.sensitivity is not None
        sizes = self._sizes(index)
        error = trial.errors(index, module, root(evidence.sensitivity).float())
        by_size, stream = {}, trial.source
        for size, layer in self._solutions(source, sizes, evidence, KEY_WEIGHT):
            by_size[size] = error(layer)
            if size == sizes[0]:
                stream = trial.replaced(index, module, trial.source, layer)
        del layer  # before others need the room
        losses = [by_size[size] for size in sizes]
        for key_weight in KEY_WEIGHTS[1:]:
            losses += [error(layer) for _, layer in self._solutions(source, sizes[:1], evidence, key_weight)]
        return torch.tensor(losses, dtype=torch.float64), stream

    def _sizes(self, index: int) -> list[tuple[int, int]]:
        source, even = self.plan.before.layers[index], self.plan.after.layers[index]
        assert isinstance(source, GroupedSpec)
        assert isinstance(even, LatentSpec)
        return sizes_to_try(source, even)

    def _source(self, index: int) -> Layer:
        return self.plan.source_layer(Place(index)).float()

    def _solutions(
        self, source: Layer, sizes: Sequence[tuple[int, int]], evidence: Evidence, key_weight: float
    ) -> Iterator[tuple[tuple[int, int], Layer]]:
        return solutions(source, sizes, evidence, key_weight=key_weight, mix=self.plan.mixes_heads)


def _corrected(sizes: Sequence[tuple[int, int]], estimates: Sequence[float], divergence: float) -> LayerLosses:
    """What a layer loses, its estimates scaled by the divergence that follows at its even size.

    Args:
        sizes: R and P, the even ones first.
        estimates: of each size with the usual key weight, and then of the first with the others.
        divergence: of the logits with the layer at its even size in the model, in nats a token.
    """
    usual, by_weight = estimates[0], [estimates[0], *estimates[len(sizes) :]]
    least = min(by_weight)
    scale = divergence / usual if usual > 0 else 0.0
    saved = least / usual if usual > 0 else 1.0  # at every size, as far as one is known
    nodes = [Node(*size, scale * saved * loss) for size, loss in zip(sizes, estimates[: len(sizes)], strict=True)]
    return LayerLosses(Node(*sizes[0], divergence), KEY_WEIGHTS[by_weight.index(least)], nodes)


def _divergences(trial: Trial, streams: dict[int, Tensor], count: int) -> list[float]:
    """The divergences of all ``count`` streams, each process having some of them."""
    divergences = torch.zeros(count, dtype=torch.float64)
    for at, nats in zip(streams, trial.divergences(list(streams.values())), strict=True):
        divergences[at] = nats
    return list(all_sum(divergences).tolist())
