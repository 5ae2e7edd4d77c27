"""Spread one total of cached values over layers, ranks, rotary dims, keys and values by what they would lose.

The losses of single layers (`layer_trials`) give the best allocation of the total (`allocation`). As a whole it is
held against the even one, which stays unless it is beaten.

Shapes: R latent rank, P rotary dims.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from headwise.checkpoints.disk import clearly, write_whole
from headwise.conversion.budget.allocation import allocate, curve, step_of
from headwise.conversion.budget.layer_trials import LayerTrials
from headwise.conversion.budget.trial import Trial, held_pieces
from headwise.conversion.calibration.text import TextCalibrator
from headwise.conversion.planning.plan import ConversionPlan, LayerSize
from headwise.conversion.solvers.metrics import KEY_WEIGHT
from headwise.conversion.storage.layers import LayerFiles
from headwise.processes import barrier, process_index
from headwise.progress import Progress

TOKENS = 512
"""Tokens in a piece of held-out text. Layers are tried on one piece, and whole allocations on others."""

PIECES = 2
"""How many pieces an allocation is tried on."""

MARGIN = 0.02
"""The share of the loss that an allocation must promise to save to be tried."""


@dataclass(frozen=True)
class Spread:
    """An allocation of the cache to layers, and its worth.

    Attributes:
        sizes: R and P of each layer.
        key_weights: the cost of an error of its keys relative to one of its values.
        even: R and P of the even allocation, in which all have the same key weight.
        predicted: nats a token that layers lose by themselves, in sum: with the even allocation, and with the best.
        measured: mean KL from the source, in nats, of all layers solved quickly, likewise; None where the best
            allocation promised too little to be tried.
    """

    sizes: tuple[tuple[int, int], ...]
    key_weights: tuple[float, ...]
    even: tuple[tuple[int, int], ...]
    predicted: tuple[float, float]
    measured: tuple[float, float] | None = None

    @property
    def is_even(self) -> bool:
        """Whether the even allocation was kept."""
        return self.sizes == self.even and {*self.key_weights} == {KEY_WEIGHT}

    @property
    def note(self) -> str:
        """The outcome in words."""
        if self.measured is None:
            return "an even plan was kept: spreading the cache over layers promised nothing"
        before, after = self.measured
        values = sorted(sum(size) for size in self.sizes)
        divergences = f"before any refit KL {after:.3f} nats on held-out text, and {before:.3f} with one size for all"
        if self.is_even:
            return f"an even plan was kept: spreading the cache over layers did not help ({divergences})"
        return f"the cache is spread over layers, {values[0]} to {values[-1]} values a token ({divergences})"

    @property
    def layer_sizes(self) -> list[LayerSize]:
        """The allocation, as a plan takes it."""
        return [LayerSize(*size, weight) for size, weight in zip(self.sizes, self.key_weights, strict=True)]


def find_spread(plan: ConversionPlan, calibrator: TextCalibrator, folder: Path, progress: Progress) -> Spread:
    """The allocation for a conversion to MLA, searched once: a later run in the same folder has the same.

    Args:
        plan: the conversion, its layers of the even sizes.
        calibrator: about to convert layer 0; with sensitivities.
        folder: to keep the allocation in, and statistics for as long as it is searched.
        progress: told of each layer, twice.

    Raises:
        CheckpointError: the text makes the model compute no numbers, or the disk is full.
    """
    file = folder / "spread.json"
    if not file.is_file():
        barrier()  # none looks for it after the first has written it
        trials = LayerTrials(plan, calibrator, LayerFiles(folder / "spread"), progress)
        spread = _search(trials)
        if process_index() == 0:
            shutil.rmtree(folder / "spread", ignore_errors=True)
            with clearly("plan", file):
                write_whole(file, json.dumps(asdict(spread)).encode())
        barrier()
    kept = json.loads(file.read_text())
    sizes, even = (tuple((int(r), int(p)) for r, p in kept[name]) for name in ("sizes", "even"))
    measured = kept["measured"] and tuple(kept["measured"])
    return Spread(sizes, tuple(kept["key_weights"]), even, tuple(kept["predicted"]), measured)


@torch.no_grad()
def _search(trials: LayerTrials) -> Spread:
    calibrator = trials.calibrator
    pieces = held_pieces(calibrator.windows[calibrator.train :], TOKENS, 1 + PIECES)
    layers = trials.losses(Trial(calibrator.model, pieces[:1]))
    even = [LayerSize(*layer.even[:2]) for layer in layers]
    shares = [size.rank + size.rotary for size in even]
    step = step_of(shares)
    nodes = allocate([curve(layer.nodes, share, step) for layer, share in zip(layers, shares, strict=True)])
    best = [LayerSize(*node[:2], layer.key_weight) for node, layer in zip(nodes, layers, strict=True)]
    predicted = sum(layer.even.loss for layer in layers), sum(node.loss for node in nodes)
    if predicted[1] > (1 - MARGIN) * predicted[0]:
        return _spread(even, even, predicted, None)
    others = pieces[1:] if len(pieces) > 1 else pieces
    before, after = trials.divergences(Trial(calibrator.model, others), [even, best])
    return _spread(best if after < before else even, even, predicted, (before, after))


def _spread(
    sizes: list[LayerSize],
    even: list[LayerSize],
    predicted: tuple[float, float],
    measured: tuple[float, float] | None,
) -> Spread:
    weights = tuple(size.key_weight for size in sizes)
    return Spread(tuple(s[:2] for s in sizes), weights, tuple(s[:2] for s in even), predicted, measured)
