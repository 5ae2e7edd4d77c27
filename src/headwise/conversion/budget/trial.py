"""Replace layers of a model by solutions, and measure the error of the layers' outputs and of the logits.

Shapes: N pieces of T tokens, E hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.conversion.calibration.sensitivity import PIECE
from headwise.conversion.solvers.layer import Layer, rotation_tables, sample_rows
from headwise.models.specs import GroupedSpec
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


class Trial:
    """Pieces of text that go through a model whose layers are replaced.

    Args:
        model: the source.
        pieces: ``[N, T]`` token ids.
        weights: ``[N]``, what an error costs in each piece beside the others; the same in all when left out.
        rows: the number of tokens of each piece at which errors are measured, and next-token distributions compared.
    """

    def __init__(
        self, model: LayerwiseModel, pieces: Tensor, weights: Tensor | None = None, *, rows: int = ROWS
    ) -> None:
        # A copy, whose `begin` is for pieces, which are shorter than calibration windows.
        self.model, self.pieces, self.rows = copy.copy(model), pieces, rows
        self.weights = torch.ones(len(pieces), dtype=torch.float64) if weights is None else weights.double()
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
        rotation = rotation_tables(self._source_spec(index), torch.arange(self.pieces.shape[1]))
        inputs = self.model.attention_inputs(index, module, hidden)
        output = torch.stack([layer.output(piece, rotation) for piece in inputs])
        return self.model.run(index, module, hidden, attention_output=output)

    def errors(self, index: int, module: torch.nn.Module, metric: Tensor) -> Callable[[Layer], float]:
        """A function that estimates the cost of replacing a layer's attention by its output, in nats a token.

        Args:
            index: the layer's number.
            module: the layer's module.
            metric: ``[E, E]``, the root of the sensitivity.
        """
        call, _ = self.model.trace(index, module, self.source)
        rotation = rotation_tables(self._source_spec(index), torch.arange(self.pieces.shape[1]))

        def error(layer: Layer) -> float:
            total, weights = 0.0, [float(weight) for weight in self.weights]
            for piece, inputs in enumerate(call.inputs):
                rows = sample_rows(len(inputs), self.rows, piece)
                difference = (layer.output(inputs, rotation, rows) - call.output[piece, rows]) @ metric
                total += 0.5 * weights[piece] * float(difference.square().sum()) / len(rows)
            return total / sum(weights)

        return error

    def divergences(self, streams: Sequence[Tensor]) -> list[float]:
        """The mean KL(source ‖ stream) a token, in nats, of each stream of last layers' outputs ``[N, T, E]``."""
        source = self.source.flatten(0, 1)  # [N T, E]
        rows = sample_rows(len(source), self.rows * len(self.pieces))
        weights = self.weights.to(rows.device)[rows // self.source.shape[1]]  # of each row
        totals = [0.0] * len(streams)
        for positions, costs in zip(torch.split(rows, PIECE), torch.split(weights, PIECE), strict=True):
            # In float64: a small divergence in float32 can come out below 0, and a layer then gains by losing more.
            reference = self.model.finish(source[None, positions])[0].double().log_softmax(-1)
            for number, stream in enumerate(streams):
                log_probs = self.model.finish(stream.flatten(0, 1)[None, positions])[0].double().log_softmax(-1)
                nats = F.kl_div(log_probs, reference, log_target=True, reduction="none").sum(-1)
                totals[number] += float(costs @ nats)
        self.model.release()
        return [total / float(weights.sum()) for total in totals]

    def _source_spec(self, index: int) -> GroupedSpec:
        spec = self.model.checkpoint.spec.layers[index]
        assert isinstance(spec, GroupedSpec)
        return spec
