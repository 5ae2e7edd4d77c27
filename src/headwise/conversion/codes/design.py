"""Design the static code of a layer's cache: its basis, scales and bits for each channel.

Shapes: T tokens of a window, R latent rank, P rotary dims, W = R + P cached values, E hidden.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from headwise.conversion.codes.basis import channel_statistics, decorrelated
from headwise.conversion.codes.scales import ROUNDS, SAMPLE, ScaleTable, allot, fit_scales
from headwise.conversion.solvers.layer import Layer, Rotation
from headwise.runtime.quantization.transform_code import code_shape


@dataclass(frozen=True)
class Design:
    """A layer in the basis of its code, and all that codes of any size are made from.

    Attributes:
        layer: the layer, float32, without a code.
        table: the scales of its channels.
    """

    layer: Layer
    table: ScaleTable

    def coded(self, token_bytes: int, *, rounds: int = ROUNDS) -> Layer:
        """The layer with a code of so many bytes a token, or the next fewer; see `allot`."""
        return replace(self.layer, code=allot(self.table, *code_shape(self.layer.spec), token_bytes, rounds=rounds))


def design(
    layer: Layer, windows: Iterable[tuple[Tensor, Rotation | None]], root: Tensor, *, tokens: int = SAMPLE
) -> Design:
    """Design the code of a layer's cache.

    Args:
        layer: the layer, float32.
        windows: the inputs ``[T, E]`` of each window, and its rotary tables.
        root: ``[E, E]``, the root of the sensitivity.
        tokens: the number of tokens that scales are fitted to.
    """
    statistics = channel_statistics(layer, windows, root)
    turned, basis = decorrelated(layer, statistics)
    values = statistics.values.double() @ basis.mT
    return Design(turned.float(), fit_scales(values, code_shape(layer.spec)[1], statistics.importance, tokens=tokens))
