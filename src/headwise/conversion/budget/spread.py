"""Spread the cache over layers, ranks, rotary dims, keys and values: more to those that lose most without.

The source's layers are solved quickly at a few sizes each, and what each would cost is estimated on held-out text by
the sensitivities. They see no further than a layer's own output; so every layer is also put by itself into the model
at its even size, and what that costs in the end corrects its estimates. At that size it is also tried how much keys
should count beside values. The best plan of one total (`allocation`) is held, as a whole, against the even one, which
stays unless it is beaten.

Shapes: N pieces of T tokens, E hidden, R latent rank, P rotary dims.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.checkpoints.disk import clearly, write_whole
from headwise.conversion.budget.allocation import Node, allocate, curve, step_of
from headwise.conversion.calibration.saved import SavedStatistics, save_layer
from headwise.conversion.calibration.sensitivity import PIECE, refuse_no_numbers
from headwise.conversion.calibration.streams import Sequential
from headwise.conversion.loop import read_layer
from headwise.conversion.planning.plan import Job
from headwise.conversion.solvers.assemble import is_biased, with_bias
from headwise.conversion.solvers.heads import Layer, rotation_tables, sample_rows
from headwise.conversion.solvers.latent import convert_to_latent
from headwise.conversion.solvers.metrics import KEY_WEIGHT, centred
from headwise.conversion.solvers.statistics import Statistics, root
from headwise.conversion.storage.layers import LayerResults
from headwise.hf import LayerwiseModel
from headwise.processes import all_sum, barrier, rank, world_size
from headwise.progress import Progress
from headwise.specs import GroupedSpec, LatentSpec, as_latent, rotary_width

TOKENS = 512
"""Of held-out text: how long a piece is. Layers are tried on one, and whole plans on others."""

PIECES = 2
"""How many a plan is tried on."""

POSITIONS = 128
"""Where what comes out of the model is compared."""

ROWS = 128
"""Queries of a piece that a layer's own error is measured at."""

KEY_WEIGHTS = (KEY_WEIGHT, KEY_WEIGHT / 4, KEY_WEIGHT * 4)
"""How much an error of the keys may count beside the values', the usual weight first."""

MARGIN = 0.02
"""What a plan must promise to save of the loss to be tried."""


@dataclass(frozen=True)
class Spread:
    """A plan, and what it is worth.

    Attributes:
        sizes: R and P of each layer.
        key_weights: how much an error of its keys counts beside one of its values.
        even: R and P of the even plan, in which all have the same key weight.
        predicted: nats a token that layers lose by themselves, in sum: with the even plan, and with the best one.
        measured: mean KL from the source, in nats, of all layers solved quickly, likewise; None where the best plan
            promised too little to be tried.
    """

    sizes: tuple[tuple[int, int], ...]
    key_weights: tuple[float, ...]
    even: tuple[tuple[int, int], ...]
    predicted: tuple[float, float]
    measured: tuple[float, float] | None = None

    @property
    def is_even(self) -> bool:
        """Whether it came to nothing."""
        return self.sizes == self.even and {*self.key_weights} == {KEY_WEIGHT}

    @property
    def note(self) -> str:
        """The same in words."""
        if self.measured is None:
            return "an even plan was kept: spreading the cache over layers promised nothing"
        before, after = self.measured
        values = sorted(sum(size) for size in self.sizes)
        found = f"before any refit KL {after:.3f} nats on held-out text, and {before:.3f} with one size for all"
        if self.is_even:
            return f"an even plan was kept: spreading the cache over layers did not help ({found})"
        return f"the cache is spread over layers, {values[0]} to {values[-1]} values a token ({found})"


def spread_plan(job: Job, study: Sequential, folder: Path, progress: Progress) -> Spread:
    """The plan for a conversion to MLA, found once: a later run in the same folder has the same.

    Args:
        job: the conversion, its layers those of the even plan.
        study: of the source, about to convert layer 0; with sensitivities.
        folder: to keep the plan in, and statistics for as long as it is sought.
        progress: told of each layer, twice.

    Raises:
        CheckpointError: the text makes the model compute no numbers, or the disk is full.
    """
    file = folder / "spread.json"
    if not file.is_file():
        barrier()  # none looks for it after the first has written it
        found = _find(job, study, LayerResults(folder / "spread"), progress)
        if rank() == 0:
            shutil.rmtree(folder / "spread", ignore_errors=True)
            with clearly("plan", file):
                write_whole(file, json.dumps(asdict(found)).encode())
        barrier()
    kept = json.loads(file.read_text())
    sizes, even = (tuple((int(r), int(p)) for r, p in kept[name]) for name in ("sizes", "even"))
    measured = kept["measured"] and tuple(kept["measured"])
    return Spread(sizes, tuple(kept["key_weights"]), even, tuple(kept["predicted"]), measured)


@torch.no_grad()
def _find(job: Job, study: Sequential, results: LayerResults, progress: Progress) -> Spread:
    pieces = held_pieces(study.windows[study.train :], TOKENS, 1 + PIECES)
    tried = _try_layers(job, study, Trial(study.model, pieces[:1]), results, progress)
    even, usual = tuple(one.even[:2] for one in tried), (KEY_WEIGHT,) * len(tried)
    shares = [sum(size) for size in even]
    plan = allocate([curve(one.nodes, share, step_of(shares)) for one, share in zip(tried, shares, strict=True)])
    sizes, key_weights = tuple(node[:2] for node in plan), tuple(one.key_weight for one in tried)
    predicted = sum(one.even.loss for one in tried), sum(node.loss for node in plan)
    if predicted[1] > (1 - MARGIN) * predicted[0]:
        return Spread(even, usual, even, predicted)
    others = pieces[1:] if len(pieces) > 1 else pieces
    plans = list(zip(even, usual, strict=True)), list(zip(sizes, key_weights, strict=True))
    before, after = _try_plans(job, Trial(study.model, others), results, plans, progress)
    if after < before:
        return Spread(sizes, key_weights, even, predicted, (before, after))
    return Spread(even, usual, even, predicted, (before, after))


def held_pieces(windows: Tensor, tokens: int, count: int) -> Tensor:
    """Up to ``count`` pieces ``[N, T]`` of at most ``tokens``, evenly spread over windows ``[n, W]``."""
    length = min(tokens, windows.shape[1])
    whole = windows[:, : windows.shape[1] // length * length].reshape(-1, length)
    count = min(count, len(whole))
    return whole[torch.arange(count) * len(whole) // count]


class Trial:
    """Pieces of text that go through a model whose layers are replaced.

    Args:
        model: the source.
        pieces: ``[N, T]`` token ids.
    """

    def __init__(self, model: LayerwiseModel, pieces: Tensor) -> None:
        # The same model, called for windows of another length.
        self.model, self.pieces = copy.copy(model), pieces
        self.source = self.begin()

    def begin(self) -> Tensor:
        """What goes into layer 0: ``[N, T, E]``."""
        hidden = self.model.begin(self.pieces)
        self.model.release()
        return hidden

    def replaced(self, index: int, module: torch.nn.Module, hidden: Tensor, layer: Layer) -> Tensor:
        """What a layer makes of hidden states with another attention in it."""
        rotation = rotation_tables(self._source_spec(index), self.pieces.shape[1])
        inputs = self.model.attention_inputs(index, module, hidden)
        made = torch.stack([layer.output(one, rotation) for one in inputs])
        return self.model.run(index, module, hidden, attention_output=made)

    def errors(self, index: int, module: torch.nn.Module, metric: Tensor) -> Callable[[Layer], float]:
        """What an attention costs by its own output, in nats a token; ``metric`` is the root of the sensitivity."""
        call, _ = self.model.trace(index, module, self.source)
        rotation = rotation_tables(self._source_spec(index), self.pieces.shape[1])

        def error(layer: Layer) -> float:
            total, count = 0.0, 0
            for at, inputs in enumerate(call.inputs):
                rows = sample_rows(len(inputs), ROWS, at)
                wrong = (layer.output(inputs, rotation, rows) - call.output[at, rows]) @ metric
                total += 0.5 * float(wrong.square().sum())
                count += len(rows)
            return total / count

        return error

    def divergences(self, streams: Sequence[Tensor]) -> list[float]:
        """KL(source ‖ stream) a token, of what the model makes of its last layer's outputs ``[N, T, E]``."""
        every = self.source.flatten(0, 1)
        rows = sample_rows(len(every), POSITIONS)
        totals = [0.0] * len(streams)
        for some in torch.split(rows, PIECE):
            wanted = self.model.finish(every[None, some])[0].float().log_softmax(-1)
            for number, stream in enumerate(streams):
                made = self.model.finish(stream.flatten(0, 1)[None, some])[0].float().log_softmax(-1)
                totals[number] += float(F.kl_div(made, wanted, log_target=True, reduction="sum"))
        self.model.release()
        return [total / len(rows) for total in totals]

    def _source_spec(self, index: int) -> GroupedSpec:
        spec = self.model.checkpoint.spec.layers[index]
        assert isinstance(spec, GroupedSpec)
        return spec


class Costs(NamedTuple):
    """What a layer was found to cost.

    Attributes:
        even: at its even size and the usual key weight.
        key_weight: the one that costs least at that size.
        nodes: at some sizes, with that key weight.
    """

    even: Node
    key_weight: float
    nodes: list[Node]


def _try_layers(job: Job, study: Sequential, trial: Trial, results: LayerResults, progress: Progress) -> list[Costs]:
    """What each layer costs at some sizes and key weights; its statistics are kept.

    Processes take layers in turn. Those that were tried by a run that was killed are not solved again.
    """
    layers, done = job.before.num_layers, LayerResults(results.folder / "tried")
    hidden = study.source_windows()
    streams: dict[int, Tensor] = {}
    tried: list[list[tuple[int, int]]] = []
    losses = []
    for index in range(layers):
        progress("spreading", index, 2 * layers)
        module = study.model.layer(index)
        spec, target = job.before.layers[index], job.after.layers[index]
        assert isinstance(spec, GroupedSpec)
        assert isinstance(target, LatentSpec)
        sizes = sizes_to_try(spec, target)
        tried.append(sizes)
        own = torch.zeros(len(sizes) + len(KEY_WEIGHTS) - 1, dtype=torch.float64)
        streams = {at: trial.model.run(index, module, stream) for at, stream in streams.items()}
        is_mine = index % world_size() == rank()
        kept = None if results.load(index) is None else done.load(index)
        if kept is not None:
            study.pass_source(index, module, hidden)
            if is_mine:
                own, streams[index] = kept[0]["losses"], kept[0]["stream"]
        else:
            source, sensitivity = read_layer(job.checkpoint, index).float(), study.sensitivity(index)
            assert sensitivity is not None
            known = study.source_statistics(index, module, source, hidden)
            if rank() == 0:
                save_layer(results, index, known, sensitivity)
            if is_mine:
                own, streams[index] = _try_layer(job, trial, index, module, source, sizes, known, sensitivity)
                done.save(index, {"losses": own, "stream": streams[index]}, {})
            del source, known
        losses.append(own)
        trial.source = trial.model.run(index, module, trial.source)
    refuse_no_numbers(trial.source, layers)
    found = []
    for sizes, own, true in zip(tried, losses, _divergences(trial, streams, layers), strict=True):
        estimated = all_sum(own).tolist()
        usual, by_weight = estimated[0], [estimated[0], *estimated[len(sizes) :]]
        least = min(by_weight)
        scale = true / usual if usual > 0 else 0.0
        saved = least / usual if usual > 0 else 1.0  # at every size, as far as one is known
        nodes = [Node(*size, scale * saved * loss) for size, loss in zip(sizes, estimated[: len(sizes)], strict=True)]
        found.append(Costs(Node(*sizes[0], true), KEY_WEIGHTS[by_weight.index(least)], nodes))
    return found


def _try_layer(
    job: Job,
    trial: Trial,
    index: int,
    module: torch.nn.Module,
    source: Layer,
    sizes: Sequence[tuple[int, int]],
    known: Statistics,
    sensitivity: Tensor,
) -> tuple[Tensor, Tensor]:
    """What a layer costs, and what the model makes of the pieces up to there with the first of its sizes in it.

    Costs are float64, of each size with the usual key weight and then of the first with the others.
    """
    errors = trial.errors(index, module, root(sensitivity).float())
    found, stream = {}, trial.source
    for size, layer in solutions(source, sizes, known, sensitivity, mix=job.mixes):
        found[size] = errors(layer)
        if size == sizes[0]:
            stream = trial.replaced(index, module, trial.source, layer)
    del layer  # before others need the room
    costs = [found[size] for size in sizes]
    for key_weight in KEY_WEIGHTS[1:]:
        solved = solutions(source, sizes[:1], known, sensitivity, key_weight=key_weight, mix=job.mixes)
        costs += [errors(layer) for _, layer in solved]
    return torch.tensor(costs, dtype=torch.float64), stream


def _try_plans(
    job: Job,
    trial: Trial,
    results: LayerResults,
    plans: Sequence[Sequence[tuple[tuple[int, int], float]]],
    progress: Progress,
) -> list[float]:
    """The divergence of the whole model by each plan of sizes and key weights, all layers solved quickly.

    Processes take plans in turn.
    """
    known, done = SavedStatistics(results.folder, 0, 0, "", ()), LayerResults(results.folder / "plans")
    layers = job.before.num_layers
    barrier()
    streams = {at: trial.begin() for at in range(len(plans)) if at % world_size() == rank()}
    past = dict.fromkeys(streams, 0)
    for at in streams:
        if (kept := done.load(at)) is not None:  # of a run that was killed
            streams[at], past[at] = kept[0]["stream"], kept[1]["layers"]
    for index in range(layers):
        progress("spreading", layers + index, 2 * layers)
        if not streams:
            break
        module = trial.model.layer(index)
        if waiting := [at for at in streams if past[at] == index]:
            source, (statistics, sensitivity) = read_layer(job.checkpoint, index).float(), known.layer(index)
        for at in waiting:
            size, key_weight = plans[at][index]
            for _, layer in solutions(source, [size], statistics, sensitivity, key_weight=key_weight, mix=job.mixes):
                streams[at] = trial.replaced(index, module, streams[at], layer)
            past[at] = index + 1
            done.save(at, {"stream": streams[at]}, {"layers": past[at]})
        trial.source = trial.model.run(index, module, trial.source)
    progress("spreading", 2 * layers, 2 * layers)
    return _divergences(trial, streams, len(plans))


def _divergences(trial: Trial, streams: dict[int, Tensor], count: int) -> list[float]:
    """Of all ``count`` streams, each process having some of them."""
    found = torch.zeros(count, dtype=torch.float64)
    for at, nats in zip(streams, trial.divergences(list(streams.values())), strict=True):
        found[at] = nats
    return list(all_sum(found).tolist())


def sizes_to_try(source: GroupedSpec, even: LatentSpec) -> list[tuple[int, int]]:
    """R and P of a layer's trials, the even size first: half as much to half as much again, half and twice of P."""
    R, P = even.kv_lora_rank, even.qk_rope_head_dim
    whole = source.num_kv_heads * (source.head_dim + source.value_dim)
    widest = min(2 * P, rotary_width(source), whole - R)
    rotary = {P} if P == 0 else {max(P // 4 * 2, 2), P, max(widest // 2 * 2, P)}
    ranks = {max(R // 2, 1), R, max(min(R + R // 2, whole - max(rotary)), R)}
    every = sorted((r, p) for r in ranks for p in rotary)
    return [(R, P), *(size for size in every if size != (R, P))]


def solutions(
    source: Layer,
    sizes: Sequence[tuple[int, int]],
    known: Statistics,
    sensitivity: Tensor,
    *,
    key_weight: float = KEY_WEIGHT,
    mix: bool = True,
) -> Iterator[tuple[tuple[int, int], Layer]]:
    """A layer at some sizes, in float32, one after the other, as each may be large.

    Of each rotary width the largest that is no copy of the layer is solved, and narrower ones are cut from it.
    """
    spec = source.spec
    assert isinstance(spec, GroupedSpec)
    in_order = sorted(sizes, key=lambda size: (size[1], size[0]), reverse=True)
    for _, of_one_width in groupby(in_order, key=lambda size: size[1]):
        widest = None  # before the next one needs the room
        for size in of_one_width:
            target = as_latent(spec, *size)
            if widest is None:
                made = convert_to_latent(
                    source.state,
                    spec,
                    target,
                    statistics=known,
                    sensitivity=sensitivity,
                    key_weight=key_weight,
                    mix=mix,
                )
                widest = Layer(target, *made)
                del made
            yield size, narrowed(widest, target, known).float()
            if target.kv_lora_rank >= _exact_rank(spec, target):  # its numbers have no order to cut them by
                widest = None


def narrowed(layer: Layer, target: LatentSpec, known: Statistics) -> Layer:
    """The first numbers of an MLA layer's latent, its decoders making the best of them.

    Args:
        layer: float64, the best latent of each rank first.
        target: the same with a smaller rank.
        known: what its inputs are like.
    """
    spec, state = layer.spec, layer.state
    assert isinstance(spec, LatentSpec)
    R, r, N = spec.kv_lora_rank, target.kv_lora_rank, spec.qk_nope_head_dim
    if r == R:
        return layer
    biased = is_biased(spec)
    down = with_bias(state, "kv_a_proj_with_mqa", biased)[:R]
    keys = centred(known.keys) if biased else known.keys
    decoders = torch.unflatten(state["kv_b_proj.weight"], 0, (spec.num_heads, -1))
    made = []
    for rows, moments in ((decoders[:, :N], keys), (decoders[:, N:], known.inputs)):
        seen = down @ moments[: down.shape[1], : down.shape[1]] @ down.mT
        # What the numbers left out are, by those kept.
        rest = torch.linalg.lstsq(seen[:r, :r], seen[:r, r:], driver="gelsd").solution.mT
        made.append(rows[..., :r] + rows[..., r:] @ rest)
    kept = [*range(r), *range(R, len(state["kv_a_proj_with_mqa.weight"]))]
    narrow = {name: state[name][kept] for name in state if name.startswith("kv_a_proj_with_mqa.")}
    decoder = torch.cat(made, dim=1).flatten(0, 1)
    return Layer(target, {**state, **narrow, "kv_b_proj.weight": decoder}, layer.channels)


def _exact_rank(source: GroupedSpec, target: LatentSpec) -> int:
    """From which rank on nothing is lost beside the rotation."""
    values = source.num_kv_heads * (source.head_dim + source.value_dim) - target.qk_rope_head_dim
    return min(values, source.hidden_size + ("kv_a_proj_with_mqa" in target.bias))
