"""Tokens that begin a text, each a text of its own beside the windows of a calibration text.

Many models rest their attention on the first token of a text, whatever it is: within a few layers its state grows to
hundreds of times the size of any other, and later tokens attend to it where they look for nothing. At that token
attention returns the token's own values. Where these are wrong, its state does not grow, and the whole text is
predicted badly; and windows begin with so few different tokens that nothing else keeps a conversion from that.

Shapes: W tokens of a window, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.conversion.calibration.windows import CalibrationWindows
from headwise.conversion.solvers.device import CPU, moved
from headwise.conversion.solvers.layer import Layer, Rotation
from headwise.conversion.solvers.refit import Cost, OutputRefit, WeighedTokens

DRAWN = 64
"""The number of first tokens that each step of the descent draws at random."""

SHARE = 0.05
"""The weight of their mean cost, beside that of the tokens of windows."""

_BOS_EVERY = 4
"""One first token in so many is the one that the tokenizer puts before any text, if it puts one."""


def start_ids(windows: CalibrationWindows) -> Tensor:
    """W token ids that begin a text each: of the text's different tokens, drawn at random, and one before any text.

    For example ``start_ids(plain_windows(torch.arange(8)[None]))``.

    Args:
        windows: the windows of a text.
    """
    found: Tensor = torch.unique(windows.trained.ids)
    drawn = found[torch.randperm(len(found), generator=torch.Generator().manual_seed(0))]
    ids = drawn[torch.arange(windows.width) % len(drawn)]
    if windows.begin:
        ids[::_BOS_EVERY] = windows.ids[0, 0]
    return ids


@dataclass(frozen=True)
class Starts:
    """The first tokens in the layer that is being converted.

    Attributes:
        inputs: ``[W, E]``, the attention's inputs.
        wanted: ``[W, E]``, the outputs that the attention should have.
        rotation: the rotary tables of any window.
        cost: the cost of an error of an output.
    """

    inputs: Tensor
    wanted: Tensor
    rotation: Rotation | None
    cost: Cost

    def error(self, layer: Layer) -> Tensor:
        """The error of a layer's outputs, ``[W, E]``."""
        return layer.own_output(self.inputs, self.rotation).float() - self.wanted

    def limited(self, layer: Layer) -> Starts:
        """With a limit to the cost by a layer's errors; see `Cost.limited`."""
        return replace(self, cost=self.cost.limited(self.cost.plain(self.error(layer))))

    def drawn(self, count: int, generator: torch.Generator) -> Starts:
        """Some of the tokens, at random."""
        rows = moved(torch.randperm(len(self.inputs), generator=generator, device=CPU)[:count])
        return replace(self, inputs=self.inputs[rows], wanted=self.wanted[rows])

    def weighed(self, refit: OutputRefit, layer: Layer, beside: int) -> WeighedTokens:
        """The tokens for a refit of a layer's output projection; they count `SHARE` of the tokens ``beside`` them."""
        tokens = refit.weighed(layer.own_values(self.inputs, self.rotation), self.wanted, self.cost)
        return tokens._replace(weighted=tokens.weighted * (SHARE * beside / len(self.inputs)))
