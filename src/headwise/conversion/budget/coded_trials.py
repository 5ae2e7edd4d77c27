"""The loss of each layer with codes: of its sizes, and of the rounding at several numbers of bits.

A smaller rank loses the same parts of every token, and rounding other ones each time; what either does to the model
differs by a factor of its own, which is measured for each layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.conversion.budget.allocation import Node
from headwise.conversion.budget.layer_trials import KEY_WEIGHTS, LayerLosses, LayerTrial, LayerTrials, scaled_nodes
from headwise.conversion.codes.design import design
from headwise.conversion.solvers.device import CPU
from headwise.conversion.solvers.joint_latent import NOTHING
from headwise.conversion.solvers.layer import Layer
from headwise.conversion.solvers.metrics import KEY_WEIGHT
from headwise.models.specs import GroupedSpec, LatentSpec, rotary_width

CODE_BITS = (2.0, 2.5, 3.0, 4.0, 5.0, 6.5)
"""The numbers of bits a value, on average, of the codes that are tried at a layer's even size."""

EVEN_BITS = 3.0
"""The one of them at which a layer's rounding is also measured through the whole model, by the KL of its logits."""

FITTED = 1024
"""The tokens that the scales of a trial's codes are fitted to, once: half as many as a conversion's."""


class CodedTrials(LayerTrials):
    """Trials of single layers with codes; see `LayerTrials`."""

    variants = 2

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
        at = self._solutions(trial.index, trial.source, [sizes[number]], trial.evidence, KEY_WEIGHT)
        streams = torch.stack([coded, *(trial.replaced(layer) for _, layer in at)])
        losses += [*self._by_key_weight(trial, error), *code_losses, float(number)]
        return torch.tensor(losses, dtype=torch.float64, device=CPU), streams

    def _coded(self, trial: LayerTrial, layer: Layer) -> list[Layer]:
        assert isinstance(trial.source.spec, GroupedSpec)
        assert isinstance(layer.spec, LatentSpec)
        sample = self.calibrator.sample
        windows = ((inputs, sample.rotation(trial.source.spec, window)) for window, inputs in trial.inputs.items())
        designed = design(layer.float(), windows, trial.metric, tokens=FITTED)
        values = layer.spec.kv_lora_rank + layer.spec.qk_rope_head_dim
        return [designed.coded(int(values * bits / 8) + 1, rounds=1) for bits in CODE_BITS]

    def _count(self, sizes: Sequence[tuple[int, int]]) -> int:
        return super()._count(sizes) + len(CODE_BITS) + 1

    def _sizes_to_try(self, source: GroupedSpec, even: LatentSpec) -> list[tuple[int, int]]:
        return coded_sizes_to_try(source, even)

    def _corrected(
        self, sizes: Sequence[tuple[int, int]], estimates: Sequence[float], divergences: Sequence[float]
    ) -> LayerLosses:
        """A layer's losses, those of sizes and of rounding scaled by the divergence of one of each.

        Args:
            sizes: R and P of each size, the first size first.
            estimates: as `_try` gives them.
            divergences: of the model with the layer coded, and at a smaller size, in nats a token.
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


ROTARY_PARTS = (1, 3 / 4, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
"""The parts of a source's rotary keys that may keep their rotation."""


def coded_sizes_to_try(source: GroupedSpec, even: LatentSpec) -> list[tuple[int, int]]:
    """R and P of each of a layer's trials with codes, the even size first.

    Codes of few bits leave room for a latent as wide as the source's cache, which loses nothing.
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
        sizes |= {(least + (most - least) * third // 24 * 8, width) for third in range(3)} | {(most, width)}
    return [(R, P), *sorted(sizes - {(R, P)})]
