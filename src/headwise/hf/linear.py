"""Linear layers that read their weights at the speed of memory where tokens are few."""

from __future__ import annotations

from torch import Tensor, nn

from headwise.kernels.native import linear


class FewTokensLinear(nn.Linear):
    """torch's linear layer, by headwise's kernel where it serves; a layer is made one by changing its class."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """``[..., in]`` to ``[..., out]``."""
        return linear(input, self.weight, self.bias)


def take_over_linears(model: nn.Module) -> None:
    """Make every plain linear layer of a model read its weights at the speed of memory; weights are not touched.

    Layers that are quantised, adapted or called otherwise (a forward of their own) stay as they are.
    """
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            module.__class__ = FewTokensLinear
