"""Replace layers of a model by solutions, and measure what comes out of it.

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
from headwise.hf import LayerwiseModel
from headwise.specs import GroupedSpec

POSITIONS = 128
"""How many positions' distributions are compared."""

ROWS = 128
"""How many queries of a piece a layer's own error is measured at."""


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
        """The inputs of layer 0, ``[N, T, E]``."""
        hidden = self.model.begin(self.pieces)
        self.model.release()
        return hidden

    def replaced(self, index: int, module: torch.nn.Module, hidden: Tensor, layer: Layer) -> Tensor:
        """A layer's output ``[N, T, E]`` with another attention in its place.

        Args:
            index: the layer's number.
            module: the layer.
            hidden: its inputs, ``[N, T, E]``.
            layer: the attention.
        """
        rotation = rotation_tables(self._source_spec(index), self.pieces.shape[1])
        inputs = self.model.attention_inputs(index, module, hidden)
        output = torch.stack([layer.output(piece, rotation) for piece in inputs])
        return self.model.run(index, module, hidden, attention_output=output)

    def errors(self, index: int, module: torch.nn.Module, metric: Tensor) -> Callable[[Layer], float]:
        """A function that gives the cost of another attention by its own output, in nats a token.

        Args:
            index: the layer's number.
            module: the layer.
            metric: ``[E, E]``, the root of the sensitivity.
        """
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
        """The mean KL(source ‖ stream) a token, in nats, of each stream of last layers' outputs ``[N, T, E]``."""
        every = self.source.flatten(0, 1)  # [N T, E]
        rows = sample_rows(len(every), POSITIONS)
        totals = [0.0] * len(streams)
        for some in torch.split(rows, PIECE):
            wanted = self.model.finish(every[None, some])[0].float().log_softmax(-1)
            for number, stream in enumerate(streams):
                log_probs = self.model.finish(stream.flatten(0, 1)[None, some])[0].float().log_softmax(-1)
                totals[number] += float(F.kl_div(log_probs, wanted, log_target=True, reduction="sum"))
        self.model.release()
        return [total / len(rows) for total in totals]

    def _source_spec(self, index: int) -> GroupedSpec:
        spec = self.model.checkpoint.spec.layers[index]
        assert isinstance(spec, GroupedSpec)
        return spec
