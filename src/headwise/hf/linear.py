"""Linear layers whose products of few tokens are limited by memory bandwidth alone."""

from __future__ import annotations

from torch import Tensor, nn

from headwise.kernels.native import linear


class FewTokensLinear(nn.Linear):
    """torch's linear layer with headwise's kernel where that applies; made by changing a layer's class."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Map ``[..., in]`` to ``[..., out]``."""
        return linear(input, self.weight, self.bias)


def take_over_linears(model: nn.Module) -> None:
    """Change every plain linear layer of a model to a `FewTokensLinear`; parameters are the same objects.

    Layers that are quantised, adapted or have a ``forward`` of their own are left as they are.

    Args:
        model: changed in place.
    """
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            module.__class__ = FewTokensLinear
