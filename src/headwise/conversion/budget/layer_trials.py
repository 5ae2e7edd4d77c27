"""The loss of each layer at several sizes and key weights, and of the whole model with an allocation.

Layers are solved once, without refits. Each layer's loss is estimated on held-out text by its sensitivity, which
covers its own output alone; so each layer at its even size also replaces the source's in the model by itself, and the
divergence of the logits scales its estimates.

Shapes: N pieces of T tokens, E hidden, R latent rank, P rotary dims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from headwise.base.processes import all_sum, barrier, process_count, process_index
from headwise.base.progress import Progress
from headwise.base.threads import side_by_side
from headwise.conversion.budget.allocation import Node
from headwise.conversion.budget.trial import Trial
from headwise.conversion.calibration.saved import read_evidence, save_layer
from headwise.conversion.calibration.sensitivity import refuse_no_numbers
from headwise.conversion.calibration.text import TextCalibrator
from headwise.conversion.methods import Evidence, LatentMethod
from headwise.conversion.planning.plan import ConversionPlan, LayerSize, Place, read_layer
from headwise.conversion.solvers.device import CPU, moved
from headwise.conversion.solvers.layer import Layer
from headwise.conversion.solvers.metrics import KEY_WEIGHT
from headwise.conversion.solvers.normed import seen_by_mla
from headwise.conversion.solvers.statistics import root
from headwise.conversion.storage.layers import LayerFiles
from headwise.models.specs import GroupedSpec, LatentSpec, rotary_width

SPREADING = "spreading the cache"
"""The name of the stage, for progress."""

KEY_WEIGHTS = (KEY_WEIGHT, KEY_WEIGHT / 4, KEY_WEIGHT * 4)
"""The costs of an error of the keys relative to one of the values that are tried, the usual one first."""


class LayerLosses(NamedTuple):
    """The losses of one layer.

    Attributes:
        even: the loss at its even size and the usual key weight.
        key_weight: the key weight that loses least at that size.
        nodes: the losses at several sizes, with that key weight, without codes.
        rounding: numbers of bits a value, on average, and the further loss with such codes; empty without codes.
    """

    even: Node
    key_weight: float
    nodes: list[Node]
    rounding: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class LayerTrial:
    """The trial of one layer.

    Attributes:
        trial: pieces of text, before the layer.
        index: the layer's number.
        module: the layer's module.
        source: its attention, float32.
        evidence: its measurements on a text.
        inputs: the inputs ``[W, E]`` of its attention on some calibration windows.
    """

    trial: Trial
    index: int
    module: nn.Module
    source: Layer
    evidence: Evidence
    inputs: Mapping[int, Tensor]

    @property
    def metric(self) -> Tensor:
        """``[E, E]``, the root of the layer's sensitivity."""
        assert self.evidence.sensitivity is not None
        return root(self.evidence.sensitivity).float()

    def errors(self) -> Callable[[Layer], float]:
        """See `Trial.errors`."""
        return self.trial.errors(self.index, self.module, self.metric)

    def replaced(self, layer: Layer) -> Tensor:
        """See `Trial.replaced`."""
        return self.trial.replaced(self.index, self.module, self.trial.source, layer)


@dataclass(frozen=True)
class LayerTrials:
    """Trials of single layers and of whole allocations, saved to disk as they are finished.

    Attributes:
        plan: the conversion, with the even sizes.
        calibrator: before layer 0, with sensitivities.
        files: the files of each layer's statistics, whose folder also gets the finished trials.
        progress: told of each layer, twice.
    """

    plan: ConversionPlan
    calibrator: TextCalibrator
    files: LayerFiles
    progress: Progress

    variants: ClassVar[int] = 1
    """The number of streams of a layer's trial."""

    def losses(self, trial: Trial) -> list[LayerLosses]:
        """Measure each layer's losses at several sizes and key weights, and save its statistics.

        Processes take layers in turn. Layers that a killed run tried are not solved again.
        """
        layers, finished = self.plan.before.num_layers, LayerFiles(self.files.folder / "tried")
        source_stream = self.calibrator.source_stream()
        streams: dict[int, Tensor] = {}
        layer_sizes: list[list[tuple[int, int]]] = []
        estimates = []
        for index in range(layers):
            saved_trial = None if self.files.load(index) is None else finished.load(index)
            if saved_trial is None:
                self.progress(SPREADING, index, 2 * layers)
            module = self.calibrator.model.module(index)
            sizes = self._sizes(index)
            layer_sizes.append(sizes)
            losses = torch.zeros(self._count(sizes), dtype=torch.float64, device=CPU)
            passes = side_by_side(partial(trial.model.run, index, module), streams.values())
            streams = dict(zip(streams, passes, strict=True))
            is_mine = index % process_count() == process_index()
            if saved_trial is not None:
                source_stream.skip(index, module)
                if is_mine:
                    losses, own = saved_trial[0]["losses"], moved(saved_trial[0]["streams"])
            else:
                source, sensitivity = self._source(index), self.calibrator.sensitivity(index)
                assert sensitivity is not None
                statistics = source_stream.statistics(index, module, source, sensitivity)
                if process_index() == 0:
                    save_layer(self.files, index, statistics, sensitivity)
                if is_mine:
                    evidence = Evidence(statistics, sensitivity)
                    losses, own = self._try(LayerTrial(trial, index, module, source, evidence, source_stream.inputs))
                    finished.save(index, {"losses": losses, "streams": own}, {})
                    del evidence
                del source, statistics
            if is_mine:
                streams |= {index * self.variants + number: stream for number, stream in enumerate(own)}
            estimates.append(losses)
            trial.source = trial.model.run(index, module, trial.source)
        refuse_no_numbers(trial.source, layers)
        divergences = _divergences(trial, streams, layers * self.variants)
        by_layer = [divergences[at : at + self.variants] for at in range(0, len(divergences), self.variants)]
        return [
            self._corrected(sizes, all_sum(losses).tolist(), measured)
            for sizes, losses, measured in zip(layer_sizes, estimates, by_layer, strict=True)
        ]

    def divergences(self, trial: Trial, allocations: Sequence[Sequence[LayerSize]]) -> list[float]:
        """Measure the KL from the source, in nats a token, of the whole model with each allocation, without refits.

        Processes take allocations in turn.
        """
        finished = LayerFiles(self.files.folder / "allocations")
        layers = self.plan.before.num_layers
        barrier()
        mine = [number for number in range(len(allocations)) if number % process_count() == process_index()]
        streams = {number: trial.begin() for number in mine}
        positions = dict.fromkeys(streams, 0)  # how many layers each stream has passed
        for number in streams:
            if (saved_trial := finished.load(number)) is not None:  # from a killed run
                streams[number], positions[number] = moved(saved_trial[0]["stream"]), saved_trial[1]["layers"]
        for index in range(layers):
            if not streams:
                break
            module = trial.model.module(index)
            if waiting := [number for number in streams if positions[number] == index]:
                self.progress(SPREADING, layers + index, 2 * layers)
                source = self._source(index)
                evidence = read_evidence(self.files, index, inputs=seen_by_mla(source)[0].spec.hidden_size)
            for number in waiting:
                size = allocations[number][index]
                for _, layer in self._solutions(index, source, [size[:2]], evidence, size.key_weight):
                    streams[number] = trial.replaced(index, module, streams[number], layer)
                positions[number] = index + 1
                finished.save(number, {"stream": streams[number]}, {"layers": positions[number]})
            trial.source = trial.model.run(index, module, trial.source)
        self.progress(SPREADING, 2 * layers, 2 * layers)
        return _divergences(trial, streams, len(allocations))

    def _try(self, trial: LayerTrial) -> tuple[Tensor, Tensor]:
        """A layer's estimated losses, and the stream ``[1, N, T, E]`` with its attention replaced at its first size.

        Losses are float64: of each size with the usual key weight, then of the first size with the other key weights.
        """
        sizes, error = self._sizes(trial.index), trial.errors()
        by_size, stream = {}, torch.empty(0)
        for size, layer in self._solutions(trial.index, trial.source, sizes, trial.evidence, KEY_WEIGHT):
            by_size[size] = error(layer)
            if size == sizes[0]:
                stream = trial.replaced(layer)
        del layer  # freed before others are solved
        losses = [by_size[size] for size in sizes] + self._by_key_weight(trial, error)
        return torch.tensor(losses, dtype=torch.float64, device=CPU), stream[None]

    def _by_key_weight(self, trial: LayerTrial, error: Callable[[Layer], float]) -> list[float]:
        """The loss of the first size with each other key weight."""
        sizes = self._sizes(trial.index)[:1]
        return [
            error(layer)
            for key_weight in KEY_WEIGHTS[1:]
            for _, layer in self._solutions(trial.index, trial.source, sizes, trial.evidence, key_weight)
        ]

    def _count(self, sizes: Sequence[tuple[int, int]]) -> int:
        """The number of losses that a layer's trial has."""
        return len(sizes) + len(KEY_WEIGHTS) - 1

    def _corrected(
        self, sizes: Sequence[tuple[int, int]], estimates: Sequence[float], divergences: Sequence[float]
    ) -> LayerLosses:
        """A layer's losses: its estimates, scaled by the divergence of the model with the layer at its even size.

        Args:
            sizes: R and P of each size, the even size first.
            estimates: the estimate of each size with the usual key weight, then of the first with the others.
            divergences: the logits' divergence, in nats a token, with each of the trial's streams.
        """
        usual, by_weight = estimates[0], [estimates[0], *estimates[len(sizes) :]]
        scale = max(divergences[0], 0.0) / usual if usual > 0 else 0.0
        nodes, key_weight = scaled_nodes(sizes, estimates, by_weight, scale)
        return LayerLosses(Node(*sizes[0], divergences[0]), key_weight, nodes)

    def _sizes(self, index: int) -> list[tuple[int, int]]:
        source, even = self.plan.before.layers[index], self.plan.after.layers[index]
        assert isinstance(source, GroupedSpec)
        assert isinstance(even, LatentSpec)
        return self._sizes_to_try(source, even)

    def _sizes_to_try(self, source: GroupedSpec, even: LatentSpec) -> list[tuple[int, int]]:
        """R and P of each of a layer's trials, the even size first."""
        return sizes_to_try(source, even)

    def _source(self, index: int) -> Layer:
        return read_layer(self.plan.checkpoint, Place(index)).float()

    def _solutions(
        self, index: int, source: Layer, sizes: Sequence[tuple[int, int]], evidence: Evidence, key_weight: float
    ) -> Iterator[tuple[tuple[int, int], Layer]]:
        """The method's solutions of a layer, float32, one at a time."""
        method = self.plan.method
        assert isinstance(method, LatentMethod)
        target = replace(self.plan.layer_target(Place(index)), key_weight=key_weight)
        for size, layer in method.solve_sizes(source, sizes, target, evidence):
            yield size, layer.float()


def sizes_to_try(source: GroupedSpec, even: LatentSpec) -> list[tuple[int, int]]:
    """R and P of each of a layer's trials, the even size first: R/2 to 3R/2 by P/2 to 2P."""
    R, P = even.kv_lora_rank, even.qk_rope_head_dim
    total = source.num_kv_heads * (source.head_dim + source.value_dim)
    widest_rotary = min(2 * P, rotary_width(source), total - R)
    rotary_widths = {P} if P == 0 else {max(P // 4 * 2, 2), P, max(widest_rotary // 2 * 2, P)}
    ranks = {max(R // 2, 1), R, max(min(R + R // 2, total - max(rotary_widths)), R)}
    sizes = sorted((r, p) for r in ranks for p in rotary_widths)
    return [(R, P), *(size for size in sizes if size != (R, P))]


def scaled_nodes(
    sizes: Sequence[tuple[int, int]], estimates: Sequence[float], by_weight: Sequence[float], scale: float
) -> tuple[list[Node], float]:
    """The losses of a layer's sizes with the key weight that loses least, and that weight.

    Args:
        sizes: R and P of each size.
        estimates: the estimate of each size with the usual key weight.
        by_weight: the estimate of the first size with each of `KEY_WEIGHTS`.
        scale: what estimates are multiplied by.
    """
    usual, least = by_weight[0], min(by_weight)
    gain = least / usual if usual > 0 else 1.0  # of the best key weight; measured at one size, applied to all
    nodes = [Node(*size, scale * gain * loss) for size, loss in zip(sizes, estimates[: len(sizes)], strict=True)]
    return nodes, KEY_WEIGHTS[by_weight.index(least)]


def _divergences(trial: Trial, streams: dict[int, Tensor], count: int) -> list[float]:
    """The divergences of all ``count`` streams, of which each process has some."""
    divergences = torch.zeros(count, dtype=torch.float64, device=CPU)
    for number, nats in zip(streams, trial.divergences(list(streams.values())), strict=True):
        divergences[number] = nats
    return list(all_sum(divergences).tolist())
