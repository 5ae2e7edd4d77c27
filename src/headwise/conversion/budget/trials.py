"""The loss of each layer at several sizes and bits, and of the model with an allocation.

Layers are solved once, without refits, and replaced in the model. Each layer's loss is estimated on held-out text by
its sensitivity, which covers its own output alone; so each layer at its even size also replaces the source's in the
model by itself, and the divergence of the logits scales its estimates. At each rotary width one latent is solved, and
smaller ranks are cut from it: its channels come best first.

With codes, the rounding at several numbers of bits is measured too. A smaller rank loses the same parts of every
token, and rounding other ones each time; what either does to the model differs by a factor of its own, which is
measured for each layer.

Shapes: N pieces of T tokens, E hidden, R latent rank, P rotary dims.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from headwise.base.processes import all_sum, barrier, process_count, process_index
from headwise.base.progress import Progress
from headwise.base.threads import map_in_threads
from headwise.conversion.budget.allocation import Node
from headwise.conversion.calibration.saved import read_evidence, save_layer
from headwise.conversion.calibration.source import PIECE, refuse_no_numbers
from headwise.conversion.calibration.text import TextCalibrator
from headwise.conversion.codes import design
from headwise.conversion.methods import Evidence, LatentMethod
from headwise.conversion.plan import ConversionPlan, LayerSize, Place, read_layer
from headwise.conversion.solvers.device import CPU, to_device
from headwise.conversion.solvers.joint_latent import NOTHING
from headwise.conversion.solvers.layer import (
    KEY_WEIGHT,
    Layer,
    Rotation,
    grouped_spec,
    latent_spec,
    rotation_tables,
    sample_rows,
    seen_by_mla,
)
from headwise.conversion.solvers.statistics import factor
from headwise.conversion.storage import LayerFiles
from headwise.models.specs import GroupedSpec, LatentSpec, rotary_width
from headwise.runtime.hf import LayerwiseModel

ROWS = 128
"""The number of queries of a piece at which a layer's own error is measured, and of next-token distributions that are
compared, where the user of a trial names none."""


def held_pieces(windows: Tensor, tokens: int, count: int) -> Tensor:
    """Up to ``count`` pieces ``[N, T]`` of at most ``tokens``, evenly spread over windows ``[n, W]``."""
    length = min(tokens, windows.shape[1])
    pieces = windows[:, : windows.shape[1] // length * length].reshape(-1, length)
    count = min(count, len(pieces))
    return pieces[torch.arange(count) * len(pieces) // count]


LARGE = 80.0
"""The largest difference of logits whose exponential is surely a number in float32."""


def small_divergence(probabilities: Tensor, difference: Tensor) -> Tensor:
    """KL of each position, in nats, from the difference of two models' logits, exact where that is small.

    The difference of logarithms of probabilities in float32 can come out below 0, and a layer then gains by losing
    more. No term of this sum is below 0: ``log1p(sum(p * (expm1(d) - d)))``, where d has the mean 0 under p.

    Args:
        probabilities: those of the reference, ``[n, V]``.
        difference: the other model's logits less the reference's, ``[n, V]``; it is overwritten.
    """
    difference -= (probabilities * difference).sum(-1, keepdim=True)
    if float(difference.max()) > LARGE:
        return (probabilities.double().log() + difference.double()).logsumexp(-1).float()
    return torch.log1p(difference.expm1().sub_(difference).clamp_min_(0).mul_(probabilities).sum(-1))


class Trial:
    """Pieces of text that go through a model whose layers are replaced.

    Args:
        model: the source model.
        pieces: the token ids of the pieces, ``[N, T]``.
        weights: the weight of an error in each piece, ``[N]``; the same for all when left out.
        rows: the number of tokens of each piece at which errors are measured, and next-token distributions compared.
        streamed: the number of the first pieces that replaced layers pass on to later ones, for streams; all when
            None. Passing them through every later layer is the largest part of a trial's time.
    """

    def __init__(
        self,
        model: LayerwiseModel,
        pieces: Tensor,
        weights: Tensor | None = None,
        *,
        rows: int = ROWS,
        streamed: int | None = None,
    ) -> None:
        # A copy, whose `begin` is for pieces, which are shorter than calibration windows.
        self.model, self.pieces, self.rows = copy.copy(model), pieces, rows
        self.weights = torch.ones(len(pieces), dtype=torch.float64) if weights is None else weights.double()
        self.streamed = streamed or len(pieces)
        self.source = self.begin()

    def begin(self) -> Tensor:
        """The inputs of layer 0, ``[N, T, E]``."""
        hidden = self.model.begin(self.pieces)
        self.model.release()
        return hidden

    def replaced(self, index: int, module: torch.nn.Module, hidden: Tensor, layer: Layer) -> Tensor:
        """A layer's output ``[N, T, E]`` with its attention replaced.

        Args:
            index: the layer's number.
            module: the layer's module.
            hidden: the layer's inputs, ``[N, T, E]``.
            layer: the attention to use in place of its own.
        """
        rotation = self._rotation(index)
        inputs = self.model.attention_inputs(index, module, hidden)
        output = torch.stack([layer.output(piece, rotation) for piece in inputs])
        return self.model.run(index, module, hidden, attention_output=output)

    def errors(self, index: int, module: torch.nn.Module, metric: Tensor) -> Callable[[Layer], float]:
        """A function that estimates the cost of replacing a layer's attention by its output, in nats a token.

        Args:
            index: the layer's number.
            module: the layer's module.
            metric: a factor L of the layer's sensitivity L Lᵀ, ``[E, E]``.
        """
        call, _ = self.model.trace(index, module, self.source)
        rotation = self._rotation(index)

        def error(layer: Layer) -> float:
            total, weights = 0.0, [float(weight) for weight in self.weights]
            for piece, inputs in enumerate(call.inputs):
                rows = sample_rows(len(inputs), self.rows, piece)
                difference = (layer.output(inputs, rotation, rows) - call.output[piece, rows]) @ metric
                total += 0.5 * weights[piece] * float(difference.square().sum()) / len(rows)
            return total / sum(weights)

        return error

    def divergences(self, streams: Sequence[Tensor]) -> list[float]:
        """The mean KL(source ‖ stream) a token, in nats, of each stream of last layers' outputs ``[N, T, E]``.

        However few pieces are streamed, as many rows of them are compared as of all of them together.
        """
        source = self.source[: self.streamed].flatten(0, 1)  # [N T, E]
        rows = sample_rows(len(source), self.rows * len(self.pieces))
        weights = self.weights.to(rows.device)[rows // self.source.shape[1]]  # of each row
        totals = [0.0] * len(streams)
        for positions, costs in zip(torch.split(rows, PIECE), torch.split(weights, PIECE), strict=True):
            reference = self.model.finish(source[None, positions])[0].float()
            probabilities = reference.softmax(-1)
            for number, stream in enumerate(streams):
                logits = self.model.finish(stream.flatten(0, 1)[None, positions])[0].float()
                totals[number] += float(costs @ small_divergence(probabilities, logits.sub_(reference)).double())
        self.model.release()
        return [total / float(weights.sum()) for total in totals]

    def _rotation(self, index: int) -> Rotation | None:
        spec = grouped_spec(self.model.checkpoint.spec.layers[index])
        return rotation_tables(spec, torch.arange(self.pieces.shape[1]))


SPREADING = "spreading the cache"
"""The name of the stage, for progress."""

KEY_WEIGHTS = (KEY_WEIGHT, KEY_WEIGHT / 4, KEY_WEIGHT * 4)
"""The costs of an error of the keys relative to one of the values that are tried, the usual one first."""


def sizes_to_try(source: GroupedSpec, even: LatentSpec) -> list[tuple[int, int]]:
    """R and P of each of a layer's trials, the even size first: R/2 to 3R/2 by P/2 to 2P."""
    R, P = even.kv_lora_rank, even.qk_rope_head_dim
    total = source.num_kv_heads * (source.head_dim + source.value_dim)
    widest_rotary = min(2 * P, rotary_width(source), total - R)
    rotary_widths = {P} if P == 0 else {max(P // 4 * 2, 2), P, max(widest_rotary // 2 * 2, P)}
    ranks = {max(R // 2, 1), R, max(min(R + R // 2, total - max(rotary_widths)), R)}
    sizes = sorted((r, p) for r in ranks for p in rotary_widths)
    return [(R, P), *(size for size in sizes if size != (R, P))]


class LayerLosses(NamedTuple):
    """The losses of one layer.

    Attributes:
        even: the loss at its even size and the usual key weight.
        key_weight: the key weight that loses least at that size.
        nodes: the losses at several sizes, with that key weight, without codes.
        rounding: pairs of the mean number of bits a value and the further loss with such codes; empty without codes.
    """

    even: Node
    key_weight: float
    nodes: list[Node]
    rounding: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class LayerTrial:
    """The trial of one layer.

    Attributes:
        trial: the pieces of text, as they arrive at the layer.
        index: the layer's number.
        module: the layer's module.
        source: the layer's attention in the source, float32.
        evidence: the layer's measurements on a text.
        inputs: the inputs of the layer's attention, ``[W, E]``, on some calibration windows, by the window's number.
    """

    trial: Trial
    index: int
    module: nn.Module
    source: Layer
    evidence: Evidence
    inputs: Mapping[int, Tensor]

    @cached_property
    def metric(self) -> Tensor:
        """``[E, E]``, a factor L of the layer's sensitivity L Lᵀ."""
        assert self.evidence.sensitivity is not None
        return factor(self.evidence.sensitivity).float()

    def errors(self) -> Callable[[Layer], float]:
        """See `Trial.errors`."""
        return self.trial.errors(self.index, self.module, self.metric)

    def replaced(self, layer: Layer) -> Tensor:
        """The stream of a layer, ``[N, T, E]``; see `Trial.replaced`."""
        return self.trial.replaced(self.index, self.module, self.trial.source[: self.trial.streamed], layer)


@dataclass(frozen=True)
class LayerTrials:
    """Trials of single layers and of allocations, saved to disk as they are finished.

    Attributes:
        plan: the plan of the conversion, with the even sizes.
        calibrator: the calibrator, before layer 0 and with sensitivities.
        files: the files of each layer's statistics, whose folder also gets the finished trials.
        progress: the callback that is told of each layer, twice.
    """

    plan: ConversionPlan
    calibrator: TextCalibrator
    files: LayerFiles
    progress: Progress

    variants: ClassVar[int] = 1
    """The number of streams of a layer's trial."""

    extra: ClassVar[int] = 0
    """The number of a trial's losses beside those of sizes and key weights."""

    rounds: ClassVar[int] = 2
    """How often all layers are gone through: once for the trials of layers, and once for those of allocations."""

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
                self.progress(SPREADING, index, self.rounds * layers)
            module = self.calibrator.model.module(index)
            sizes = self._sizes(index)
            layer_sizes.append(sizes)
            # Zeros where another process tries the layer: the sum over processes is then each layer's losses.
            losses = torch.zeros(len(sizes) + len(KEY_WEIGHTS) - 1 + self.extra, dtype=torch.float64, device=CPU)
            # Streams of earlier layers pass this one before its own streams join them, which begin behind it.
            passes = map_in_threads(partial(trial.model.run, index, module), streams.values())
            streams = dict(zip(streams, passes, strict=True))
            is_mine = index % process_count() == process_index()
            # Every process moves the source's stream, also past layers that are not its own to try.
            if saved_trial is not None:
                source_stream.skip(index, module)
                if is_mine:
                    losses, own = saved_trial[0]["losses"], to_device(saved_trial[0]["streams"])
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
        self.progress(SPREADING, layers, self.rounds * layers)
        by_layer = [divergences[at : at + self.variants] for at in range(0, len(divergences), self.variants)]
        return [
            self._corrected(sizes, all_sum(losses).tolist(), measured)
            for sizes, losses, measured in zip(layer_sizes, estimates, by_layer, strict=True)
        ]

    def divergences(self, trial: Trial, allocations: Sequence[Sequence[LayerSize]]) -> list[float]:
        """Measure the KL from the source, in nats a token, of the model with each allocation, without refits.

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
                streams[number], positions[number] = to_device(saved_trial[0]["stream"]), saved_trial[1]["layers"]
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

    def _corrected(
        self, sizes: Sequence[tuple[int, int]], estimates: Sequence[float], divergences: Sequence[float]
    ) -> LayerLosses:
        """A layer's losses: its estimates, scaled by the divergence of the model with the layer at its even size.

        Args:
            sizes: the rank R and the rotary width P of each size, the even size first.
            estimates: the estimated loss of each size with the usual key weight, then of the first size with each
                other one.
            divergences: the divergence of the logits, in nats a token, with each of the trial's streams.
        """
        usual, by_weight = estimates[0], [estimates[0], *estimates[len(sizes) :]]
        scale = max(divergences[0], 0.0) / usual if usual > 0 else 0.0
        nodes, key_weight = scaled_nodes(sizes, estimates, by_weight, scale)
        return LayerLosses(Node(*sizes[0], divergences[0]), key_weight, nodes)

    sizes_to_try = staticmethod(sizes_to_try)
    """The function that lists R and P of each of a layer's trials, the even size first."""

    def _sizes(self, index: int) -> list[tuple[int, int]]:
        source, even = self.plan.before.layers[index], self.plan.after.layers[index]
        return self.sizes_to_try(grouped_spec(source), latent_spec(even))

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


def scaled_nodes(
    sizes: Sequence[tuple[int, int]], estimates: Sequence[float], by_weight: Sequence[float], scale: float
) -> tuple[list[Node], float]:
    """The losses of a layer's sizes with the key weight that loses least, and that weight.

    Args:
        sizes: the rank R and the rotary width P of each size.
        estimates: the estimated loss of each size with the usual key weight.
        by_weight: the estimated loss of the first size with each of `KEY_WEIGHTS`.
        scale: the factor that estimates are multiplied by to give nats a token.
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


CODE_BITS = (2.0, 2.5, 3.0, 4.0, 5.0, 6.5)
"""The numbers of bits a value, on average, of the codes that are tried at a layer's even size."""

EVEN_BITS = 3.0
"""The one of `CODE_BITS` at which a layer's rounding is also measured by the KL of the model's logits."""

FITTED = 256
"""The tokens that the scales of a trial's codes are fitted to: a quarter of a conversion's."""


ROTARY_PARTS = (1, 3 / 4, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
"""The parts of a source's rotary keys that may keep their rotation."""


def coded_sizes_to_try(source: GroupedSpec, even: LatentSpec) -> list[tuple[int, int]]:
    """R and P of each of a layer's trials with codes, the even size first.

    Codes of few bits cost so little that a latent as wide as the source's cache, which loses nothing, can be tried.
    """
    R, P = even.kv_lora_rank, even.qk_rope_head_dim
    values, rotary = R + P, rotary_width(source)
    total = source.num_kv_heads * (source.head_dim + source.value_dim)
    most_values = min(total, values + values // 2)
    widths = {int(part * rotary) // 2 * 2 for part in ROTARY_PARTS if rotary}
    widths = {P, *(width for width in widths if 0.12 * values <= width <= 0.55 * most_values)}
    sizes = {(R, P)}
    for width in sorted(widths):
        least = min(max(8, values // 4 // 8 * 8), total - width)
        most = min(max(most_values - width, least + 8), total - width)
        sizes |= {(least, width), (least + (most - least) // 16 * 8, width), (most, width)}
    return [(R, P), *sorted(sizes - {(R, P)})]


class CodedTrials(LayerTrials):
    """Trials of single layers with codes; see `LayerTrials`."""

    variants, extra, rounds = 2, len(CODE_BITS) + 1, 1
    sizes_to_try = staticmethod(coded_sizes_to_try)

    def _try(self, trial: LayerTrial) -> tuple[Tensor, Tensor]:
        """A layer's estimated losses, and two streams ``[2, N, T, E]``.

        Losses are those of `LayerTrials`, then of the first size with codes of `CODE_BITS`, and last the number of
        the smaller size of the second stream. The streams are of the first size with codes of `EVEN_BITS`, and of a
        smaller size that loses about as much.
        """
        sizes, error = self._sizes(trial.index), trial.errors()
        by_size: dict[tuple[int, int], float] = {}
        code_losses: list[float] = []
        coded = torch.empty(0)
        for size, layer in self._solutions(trial.index, trial.source, sizes, trial.evidence, KEY_WEIGHT):
            by_size[size] = error(layer)
            if size == sizes[0]:
                layers = self._coded(trial, layer)
                code_losses = [error(layer) for layer in layers]
                coded = trial.replaced(layers[CODE_BITS.index(EVEN_BITS)])
        losses = [by_size[size] for size in sizes]
        number = _smaller(losses, code_losses[CODE_BITS.index(EVEN_BITS)])
        # Solved once more: solutions come one at a time, as each may be large, and none was kept.
        at = self._solutions(trial.index, trial.source, [sizes[number]], trial.evidence, KEY_WEIGHT)
        streams = torch.stack([coded, *(trial.replaced(layer) for _, layer in at)])
        losses += [*self._by_key_weight(trial, error), *code_losses, float(number)]
        return torch.tensor(losses, dtype=torch.float64, device=CPU), streams

    def _coded(self, trial: LayerTrial, layer: Layer) -> list[Layer]:
        sample, own, spec = self.calibrator.sample, grouped_spec(trial.source.spec), latent_spec(layer.spec)
        windows = ((inputs, sample.rotation(own, window)) for window, inputs in trial.inputs.items())
        designed = design(layer.float(), windows, trial.metric, tokens=FITTED)
        values = spec.kv_lora_rank + spec.qk_rope_head_dim
        return [*map_in_threads(designed.coded, (int(values * bits / 8) + 1 for bits in CODE_BITS))]

    def _corrected(
        self, sizes: Sequence[tuple[int, int]], estimates: Sequence[float], divergences: Sequence[float]
    ) -> LayerLosses:
        """A layer's losses: those of sizes and those of rounding, each scaled by a divergence that was measured.

        Args:
            sizes: the rank R and the rotary width P of each size, the even size first.
            estimates: the estimated losses in the order in which `_try` returns them.
            divergences: the divergences of the logits, in nats a token: with the even size in codes, then with a
                smaller size and no codes.
        """
        weights = len(sizes) + len(KEY_WEIGHTS) - 1
        number, coded = int(estimates[-1]), estimates[weights:-1]
        whole, smaller = estimates[0], estimates[number]
        scale = max(divergences[1], 0.0) / smaller if smaller > 0 else 0.0
        tried = coded[CODE_BITS.index(EVEN_BITS)]
        rounding = max(tried - whole, 1e-3 * tried, NOTHING)
        # Of the first stream's divergence, what its size does not explain; at least a part of it.
        rounding_scale = max(divergences[0] - scale * whole, 0.2 * divergences[0]) / rounding
        nodes, key_weight = scaled_nodes(sizes, estimates, [whole, *estimates[len(sizes) : weights]], scale)
        losses = [rounding_scale * max(loss - whole, 1e-3 * loss) for loss in coded]
        even = Node(*sizes[0], divergences[0])
        return LayerLosses(even, key_weight, nodes, list(zip(CODE_BITS, losses, strict=True)))


def _smaller(losses: Sequence[float], target: float) -> int:
    """The number of the size, other than the first, whose loss is nearest to a target; losses of 0 do not count."""
    numbers = [number for number, loss in enumerate(losses) if number and loss > 0]
    return min(numbers, key=lambda number: abs(math.log(losses[number] / max(target, NOTHING))), default=0)
