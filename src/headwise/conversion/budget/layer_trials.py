"""The loss of each layer at several sizes and key weights, and of the whole model with an allocation.

Layers are solved once, without refits. Each layer's loss is estimated on held-out text by its sensitivity, which
covers its own output alone; so each layer at its even size also replaces the source's in the model by itself, and the
divergence of the logits scales its estimates.

Shapes: N pieces of T tokens, E hidden, R latent rank, P rotary dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headwise.conversion.budget.allocation import Node
from headwise.conversion.budget.trial import Trial
from headwise.conversion.calibration.saved import read_evidence, save_layer
from headwise.conversion.calibration.sensitivity import refuse_no_numbers
from headwise.conversion.calibration.text import TextCalibrator
from headwise.conversion.methods import Evidence, LatentMethod
from headwise.conversion.planning.plan import ConversionPlan, LayerSize, Place, read_layer
from headwise.conversion.solvers.code_design import design
from headwise.conversion.solvers.layer import Layer, rotation_tables
from headwise.conversion.solvers.metrics import KEY_WEIGHT
from headwise.conversion.solvers.statistics import root
from headwise.conversion.storage.layers import LayerFiles
from headwise.processes import all_sum, barrier, process_count, process_index
from headwise.progress import Progress
from headwise.specs import GroupedSpec, LatentSpec, rotary_width

KEY_WEIGHTS = (KEY_WEIGHT, KEY_WEIGHT / 4, KEY_WEIGHT * 4)
"""The costs of an error of the keys relative to one of the values that are tried, the usual one first."""


CODE_BITS = (2.0, 2.5, 3.0, 4.0, 5.0, 6.5)
"""The numbers of bits a value, on average, of the codes that are tried at a layer's even size."""

EVEN_BITS = 3.0
"""The one of them that the whole model is run with."""


class LayerLosses(NamedTuple):
    """The losses of one layer.

    Attributes:
        even: the loss at its even size and the usual key weight.
        key_weight: the key weight that loses least at that size.
        nodes: the losses at several sizes, with that key weight, without codes.
        rounding: the further loss at the even size with codes of `CODE_BITS` bits a value, on average; empty for a
            cache without codes.
    """

    even: Node
    key_weight: float
    nodes: list[Node]
    rounding: list[float]


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
            self.progress("spreading the cache", index, 2 * layers)
            module = self.calibrator.model.module(index)
            sizes = self._sizes(index)
            layer_sizes.append(sizes)
            count = len(sizes) + len(KEY_WEIGHTS) - 1 + (len(CODE_BITS) if self._is_coded else 0)
            losses = torch.zeros(count, dtype=torch.float64)
            streams = {replaced: trial.model.run(index, module, stream) for replaced, stream in streams.items()}
            is_mine = index % process_count() == process_index()
            saved_trial = None if self.files.load(index) is None else finished.load(index)
            if saved_trial is not None:
                source_stream.skip(index, module)
                if is_mine:
                    losses, streams[index] = saved_trial[0]["losses"], saved_trial[0]["stream"]
            else:
                source, sensitivity = self._source(index), self.calibrator.sensitivity(index)
                assert sensitivity is not None
                statistics = source_stream.statistics(index, module, source, sensitivity)
                if process_index() == 0:
                    save_layer(self.files, index, statistics, sensitivity)
                if is_mine:
                    evidence = Evidence(statistics, sensitivity)
                    inputs = source_stream.inputs
                    losses, streams[index] = self._try(trial, index, module, source, evidence, inputs)
                    finished.save(index, {"losses": losses, "stream": streams[index]}, {})
                    del evidence
                del source, statistics
            estimates.append(losses)
            trial.source = trial.model.run(index, module, trial.source)
        refuse_no_numbers(trial.source, layers)
        divergences = _divergences(trial, streams, layers)
        return [
            _corrected(sizes, all_sum(losses).tolist(), divergence)
            for sizes, losses, divergence in zip(layer_sizes, estimates, divergences, strict=True)
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
                streams[number], positions[number] = saved_trial[0]["stream"], saved_trial[1]["layers"]
        for index in range(layers):
            self.progress("spreading the cache", layers + index, 2 * layers)
            if not streams:
                break
            module = trial.model.module(index)
            if waiting := [number for number in streams if positions[number] == index]:
                source, evidence = self._source(index), read_evidence(self.files, index)
            for number in waiting:
                size = allocations[number][index]
                for _, layer in self._solutions(index, source, [size[:2]], evidence, size.key_weight):
                    streams[number] = trial.replaced(index, module, streams[number], layer)
                positions[number] = index + 1
                finished.save(number, {"stream": streams[number]}, {"layers": positions[number]})
            trial.source = trial.model.run(index, module, trial.source)
        self.progress("spreading the cache", 2 * layers, 2 * layers)
        return _divergences(trial, streams, len(allocations))

    def _try(
        self,
        trial: Trial,
        index: int,
        module: nn.Module,
        source: Layer,
        evidence: Evidence,
        inputs: Mapping[int, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """A layer's estimated losses, and its output ``[N, T, E]`` with its attention replaced at its first size.

        Losses are float64: of each size with the usual key weight, then of the first size with the other key weights.
        """
        assert evidence.sensitivity is not None
        sizes = self._sizes(index)
        metric = root(evidence.sensitivity).float()
        error = trial.errors(index, module, metric)
        code_losses: list[float] = []
        by_size, stream = {}, trial.source
        for size, layer in self._solutions(index, source, sizes, evidence, KEY_WEIGHT):
            by_size[size] = error(layer)
            if size == sizes[0]:
                if self._is_coded:
                    assert isinstance(source.spec, GroupedSpec)
                    rotation = rotation_tables(source.spec, self.calibrator.window)
                    designed = design(layer.float(), inputs.values(), rotation, metric)
                    layers = [designed.coded(int(sum(size) * bits / 8)) for bits in CODE_BITS]
                    code_losses = [error(layer) for layer in layers]
                    stream = trial.replaced(index, module, trial.source, layers[CODE_BITS.index(EVEN_BITS)])
                else:
                    stream = trial.replaced(index, module, trial.source, layer)
        del layer  # freed before others are solved
        losses = [by_size[size] for size in sizes]
        for key_weight in KEY_WEIGHTS[1:]:
            losses += [error(layer) for _, layer in self._solutions(index, source, sizes[:1], evidence, key_weight)]
        return torch.tensor([*losses, *code_losses], dtype=torch.float64), stream

    @property
    def _is_coded(self) -> bool:
        return self.plan.spends_bytes

    def _sizes(self, index: int) -> list[tuple[int, int]]:
        source, even = self.plan.before.layers[index], self.plan.after.layers[index]
        assert isinstance(source, GroupedSpec)
        assert isinstance(even, LatentSpec)
        if self._is_coded:
            return coded_sizes_to_try(source, even)
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


def coded_sizes_to_try(source: GroupedSpec, even: LatentSpec) -> list[tuple[int, int]]:
    """R and P of each of a layer's trials with codes, the even size first."""
    R, P = even.kv_lora_rank, even.qk_rope_head_dim
    total, rotary = source.num_kv_heads * (source.head_dim + source.value_dim), rotary_width(source)
    values = R + P
    rotary_widths = sorted(
        {
            P,
            *(
                w
                for w in (rotary, rotary // 2, rotary // 4, rotary // 8, rotary // 16)
                if w and w % 2 == 0 and 0.12 * values <= w <= 0.5 * values
            ),
        }
    )
    least = max(8, values // 4 // 8 * 8)
    sizes = {(R, P)}
    for width in rotary_widths:
        most = max(min(total - width, values), least + 8)
        ranks = {least, least + (most - least) // 24 * 8, least + (most - least) // 12 * 8, most}
        sizes |= {(rank, width) for rank in ranks}
    return [(R, P), *sorted(sizes - {(R, P)})]


def _corrected(sizes: Sequence[tuple[int, int]], estimates: Sequence[float], divergence: float) -> LayerLosses:
    """A layer's losses: its estimates, scaled by the divergence of the model with the layer at its even size.

    Args:
        sizes: R and P of each size, the even size first.
        estimates: the estimate of each size with the usual key weight, then of the first with the other key weights.
        divergence: the logits' divergence with the layer at its even size in the model, in nats a token.
    """
    ends = len(sizes), len(sizes) + len(KEY_WEIGHTS) - 1
    usual, by_weight, coded = estimates[0], [estimates[0], *estimates[ends[0] : ends[1]]], estimates[ends[1] :]
    least = min(by_weight)
    tried = coded[CODE_BITS.index(EVEN_BITS)] if coded else usual
    scale = divergence / tried if tried > 0 else 0.0
    gain = least / usual if usual > 0 else 1.0  # of the best key weight; measured at one size, applied to all
    nodes = [Node(*size, scale * gain * loss) for size, loss in zip(sizes, estimates[: len(sizes)], strict=True)]
    rounding = [scale * max(loss - usual, 1e-9) for loss in coded]
    return LayerLosses(Node(*sizes[0], divergence), KEY_WEIGHTS[by_weight.index(least)], nodes, rounding)


def _divergences(trial: Trial, streams: dict[int, Tensor], count: int) -> list[float]:
    """The divergences of all ``count`` streams, of which each process has some."""
    divergences = torch.zeros(count, dtype=torch.float64)
    for number, nats in zip(streams, trial.divergences(list(streams.values())), strict=True):
        divergences[number] = nats
    return list(all_sum(divergences).tolist())
