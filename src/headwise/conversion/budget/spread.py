"""The rank allocation: divide one total of cached values among layers, and choose rotary channels for all of them.

The losses of single layers at several sizes (`trials`) give the best allocation of the total to latents and rotary
keys (`allocation`). The sum of single layers' losses leaves out what errors of several layers do together, so that
the model with all layers of that allocation is compared with the even one on held-out text; the even one stays unless
it is beaten. An allocation that is not predicted to save `MARGIN` is not tried, and with codes the prediction
decides.

deepseek_v3 needs one list of rotary channels for all layers. A layer's channels are mixtures of its key heads, at
each frequency in falling order of energy (`rope_channels.concentrate`). The list says which channels keep their
rotation; each layer mixes its own heads into them. Each layer is also solved with the channels that it would have
chosen, to tell what sharing costs.

Shapes: R latent rank, P rotary dims, K key heads, F frequencies, E hidden.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from headwise.base.disk import storage_errors, write_whole
from headwise.base.processes import barrier, process_index
from headwise.base.progress import Progress
from headwise.conversion.budget.allocation import allocate, coded_curve, curve, step_of
from headwise.conversion.budget.trials import EVEN_BITS, CodedTrials, LayerLosses, LayerTrials, Trial, held_pieces
from headwise.conversion.calibration.candidates import Calibrator, LayerData
from headwise.conversion.calibration.text import TextCalibrator
from headwise.conversion.calibration.windows import repeating_pieces
from headwise.conversion.codes import whole_shares
from headwise.conversion.methods import Evidence, Method
from headwise.conversion.plan import ConversionPlan, LayerSize
from headwise.conversion.solvers.device import CPU, computing_on
from headwise.conversion.solvers.joint_latent import NOTHING
from headwise.conversion.solvers.latent import projections, rotary_channels
from headwise.conversion.solvers.layer import KEY_WEIGHT, Layer, LayerTarget, State, grouped_spec, latent_spec
from headwise.conversion.solvers.rope_channels import keep_rotation
from headwise.conversion.solvers.statistics import Statistics
from headwise.conversion.storage import LayerFiles
from headwise.costs.formulas.layer import cache_values
from headwise.errors import ArgumentError
from headwise.models.specs import GroupedSpec, LatentSpec, as_latent

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
    which go once through the source. Without a text, all layers count equally.

    Args:
        plan: the plan of a conversion to MLA, with one rotary width for all layers.
        calibrator: the calibrator that gives the evidence of each layer.
        progress: the callback that is told of each layer.
        keep: the function that chooses the channels by all layers' energies and losses; see `keep_rotation`.
    """
    energies, losses, pairs = [], [], 0
    layers = plan.before.num_layers
    for index, (source, evidence) in enumerate(calibrator.source_evidence(plan)):
        progress(CHOOSING, index, layers)
        spec, target = grouped_spec(source.spec), latent_spec(plan.after.layers[index])
        longest = plan.layer_target(plan.places[index]).longest
        statistics = evidence.statistics or Statistics.nothing(spec.hidden_size, spec.num_heads, longest)
        energy, loss = rotary_losses(source.state, spec, target, statistics, mix=plan.mixes_heads)
        # Without a text, layers count equally; one whose keys are zero does not count.
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
    method: Method, source: Layer, target: LayerTarget, evidence: Evidence, shared: Layer, data: LayerData | None
) -> dict[str, float]:
    """Compare a layer's loss with the shared channels and with its own choice of channels, before any refit.

    Args:
        method: the method that solved the layer.
        source: the source layer with its weights.
        target: the converted layer, with shared channels.
        evidence: the layer's measurements on a text, if there is one.
        shared: the solution with shared channels.
        data: the layer on the windows of a text, if there is one.

    Returns:
        The losses ``shared`` and ``own`` in nats a token on held-out windows; empty without a text or without shared
        channels.
    """
    if target.rotary_channels is None or data is None:
        return {}
    unshared = method.solve(source, replace(target, rotary_channels=None), evidence)
    return {"shared": data.loss(shared), "own": data.loss(unshared)}


TRIAL_TOKENS = 512
"""Tokens in a piece of held-out text. Single layers are tried on one piece, or with codes on `PIECES`; allocations
on `PIECES` others."""

PIECES = 2
"""The number of pieces that an allocation is tried on, and with codes the errors of each layer; the model behind a
layer is run on the first of them."""

RECALL_WEIGHT = 1 / 3
"""The cost of an error where passages are repeated, beside that in text. Of 0, 1/3 and 1, perplexity is lowest at 0,
and at 1/3 lower than at 1; in how many facts are found, 1/3 and 1 could not be told apart."""

CODE_STEP = 2
"""The bytes a token of one step of an allocation of bytes."""

TRUST = 0.5
"""The power to which layers keep their distance from the geometric mean of what rounding loses. Of 0, 0.5, 0.8 and 1,
it lost least on two texts."""

_LEAST_PART = 1e-6
"""The least loss by rounding that a layer counts with, as a part of the largest layer's."""

MARGIN = 0.02
"""The share of the even allocation's loss that another allocation must be predicted to save to be tried."""


@dataclass(frozen=True)
class Spread:
    """An allocation of the cache to layers, with its predicted and measured losses.

    Attributes:
        sizes: the rank R and the rotary width P of each layer.
        key_weights: the key weight of each layer: the cost of an error of its keys relative to one of its values.
        even: the rank R and the rotary width P of each layer in the even allocation, in which all layers have one key
            weight.
        predicted: the sums of single layers' losses, in nats a token: first of the even allocation, then of the best
            one.
        measured: the mean KL from the source, in nats a token, of the model with all layers replaced and none
            refitted, in the same order; None where the best allocation was not predicted to save enough to be tried.
        token_bytes: the bytes of a token's codes in each layer's cache; None for a cache without codes.
    """

    sizes: tuple[tuple[int, int], ...]
    key_weights: tuple[float, ...]
    even: tuple[tuple[int, int], ...]
    predicted: tuple[float, float]
    measured: tuple[float, float] | None = None
    token_bytes: tuple[int, ...] | None = None

    @property
    def is_even(self) -> bool:
        """Whether the even allocation was kept."""
        return self.sizes == self.even and {*self.key_weights} == {KEY_WEIGHT}

    @property
    def note(self) -> str:
        """The outcome in words."""
        if self.token_bytes is not None:
            bits = [8 * count / sum(size) for count, size in zip(self.token_bytes, self.sizes, strict=True)]
            values = sorted(sum(size) for size in self.sizes)
            return (
                f"bytes are spread over layers, ranks and bits: {values[0]} to {values[-1]} values a layer, "
                f"{min(bits):.1f} to {max(bits):.1f} bits each"
            )
        if self.measured is None:
            return "all layers have one size: spreading the cache over them was predicted to save too little"
        even, best = self.measured
        values = sorted(sum(size) for size in self.sizes)
        divergences = f"before any refit KL {best:.3f} nats in trials on text, and {even:.3f} with one size for all"
        if self.is_even:
            return f"all layers have one size: spreading the cache over them did not help ({divergences})"
        return f"the cache is spread over layers, {values[0]} to {values[-1]} values a token ({divergences})"

    @property
    def layer_sizes(self) -> list[LayerSize]:
        """The allocation, for `ConversionPlan.resized`."""
        counts: Sequence[int | None] = self.token_bytes or (None,) * len(self.sizes)
        return [
            LayerSize(*size, weight, count)
            for size, weight, count in zip(self.sizes, self.key_weights, counts, strict=True)
        ]


def find_spread(plan: ConversionPlan, calibrator: TextCalibrator, folder: Path, progress: Progress) -> Spread:
    """Find the allocation for a conversion to MLA; a later run in the same folder reads it from there.

    Args:
        plan: the plan of the conversion, with the even sizes.
        calibrator: the calibrator, before layer 0 and with sensitivities.
        folder: the folder that the allocation is saved in, and statistics while it is searched.
        progress: the callback that is told of each layer, twice.

    Raises:
        CheckpointError: the text makes the model compute NaN or infinite values.
        StorageError: the disk is full.
    """
    file = folder / "spread.json"
    if not file.is_file():
        barrier()  # every process has looked for the file before the first one writes it
        kind = CodedTrials if plan.spends_bytes else LayerTrials
        trials = kind(plan, calibrator, LayerFiles(folder / "spread"), progress)
        spread = _search(trials)
        if process_index() == 0:
            shutil.rmtree(folder / "spread", ignore_errors=True)
            with storage_errors("allocation", file):
                write_whole(file, json.dumps(asdict(spread)).encode())
        barrier()
    saved = json.loads(file.read_text())
    sizes, even = (tuple((int(r), int(p)) for r, p in saved[name]) for name in ("sizes", "even"))
    measured = saved["measured"] and tuple(saved["measured"])
    counts = saved["token_bytes"] and tuple(saved["token_bytes"])
    return Spread(sizes, tuple(saved["key_weights"]), even, tuple(saved["predicted"]), measured, counts)


@torch.no_grad()
def _search(trials: LayerTrials) -> Spread:
    calibrator = trials.calibrator
    pieces = held_pieces(calibrator.windows.held_out.text.ids, TRIAL_TOKENS, 1 + PIECES)
    # What a layer's codes lose is close to what another's do, and takes more text to tell apart.
    tried = pieces[: PIECES if trials.plan.spends_bytes else 1]
    layers = trials.losses(_trial(trials, tried))
    if trials.plan.spends_bytes:
        with computing_on(CPU):
            return _coded(trials.plan, layers)
    even = [LayerSize(*layer.even[:2]) for layer in layers]
    shares = [size.rank + size.rotary for size in even]
    step = step_of(shares)
    with computing_on(CPU):
        nodes = allocate([curve(layer.nodes, share, step) for layer, share in zip(layers, shares, strict=True)])
    best = [LayerSize(*node[:2], layer.key_weight) for node, layer in zip(nodes, layers, strict=True)]
    predicted = sum(layer.even.loss for layer in layers), sum(node.loss for node in nodes)
    sizes, measured = even, None
    if predicted[1] <= (1 - MARGIN) * predicted[0]:
        other_pieces = pieces[1:] if len(pieces) > 1 else pieces
        even_kl, best_kl = trials.divergences(_trial(trials, other_pieces), [even, best])
        sizes, measured = best if best_kl < even_kl else even, (even_kl, best_kl)
    weights = tuple(size.key_weight for size in sizes)
    return Spread(tuple(s[:2] for s in sizes), weights, tuple(s[:2] for s in even), predicted, measured)


def _trial(trials: LayerTrials, pieces: Tensor) -> Trial:
    """A trial of pieces of text, and of as many that repeat passages of themselves.

    Ordinary text seldom asks which of several passages that begin with the same words to go on with. By text alone,
    the layers that find the right one would get too little of the cache. (With codes neither passages nor more rows
    were measured.)
    """
    model = trials.calibrator.model
    if trials.plan.spends_bytes:
        return Trial(model, pieces, streamed=1)
    repeating = (
        repeating_pieces(pieces, trials.calibrator.windows.begin) if "recall" in trials.plan.stages else pieces[:0]
    )
    weights = torch.tensor([1.0] * len(pieces) + [RECALL_WEIGHT] * len(repeating))
    return Trial(model, torch.cat([pieces, repeating]), weights, rows=TRIAL_TOKENS)


def _coded(plan: ConversionPlan, layers: Sequence[LayerLosses]) -> Spread:
    """The allocation of bytes to layers: sizes and bits in one."""
    assert plan.token_bytes is not None
    curves = [
        coded_curve(layer.nodes, rounding, cache_values(source), share, CODE_STEP)
        for layer, rounding, source, share in zip(
            layers, _roundings(layers), plan.before.layers, plan.token_bytes, strict=True
        )
    ]
    try:
        nodes = allocate(curves)
    except ArgumentError:  # no size has two bits for each value in so few bytes; the even ones have at least one
        sizes = tuple(layer.even[:2] for layer in layers)
        loss = sum(layer.even.loss for layer in layers)
        return Spread(sizes, (KEY_WEIGHT,) * len(sizes), sizes, (loss, loss), None, plan.token_bytes)
    left = sum(plan.token_bytes) - sum(node.token_bytes or 0 for node in nodes)
    specs = [as_latent(own, node.rank, node.rotary) for own, node in zip(plan.before.layers, nodes, strict=True)]
    token_bytes = whole_shares([(node.token_bytes or 0) + left / len(nodes) for node in nodes], specs)
    even = [next((c.node for c in curve if c.steps == 0), curve[0].node) for curve in curves]
    predicted = sum(node.loss for node in even), sum(node.loss for node in nodes)
    sizes, even_sizes = (tuple((node.rank, node.rotary) for node in own) for own in (nodes, even))
    return Spread(sizes, tuple(layer.key_weight for layer in layers), even_sizes, predicted, None, token_bytes)


def _roundings(layers: Sequence[LayerLosses]) -> list[list[tuple[float, float]]]:
    """The loss by rounding in each layer at each number of bits, from measurements on little text.

    All layers get the mean course over bits; of its own level, each keeps the power `TRUST` of the distance from the
    mean (both means are geometric).
    """
    bits = [number for number, _ in layers[0].rounding]
    losses = torch.tensor([[loss for _, loss in layer.rounding] for layer in layers], dtype=torch.float64)
    # A layer whose output nothing depends on loses nothing, which has no logarithm.
    logs = losses.maximum((_LEAST_PART * losses.amax(0)).clamp_min(NOTHING)).log()
    levels = logs[:, bits.index(EVEN_BITS)]
    course = (logs - levels[:, None]).mean(0)
    levels = levels.mean() + TRUST * (levels - levels.mean())
    return [list(zip(bits, row, strict=True)) for row in (levels[:, None] + course).exp().tolist()]
