"""Linear layers of a loaded model by headwise's kernels: a module's class is changed in place."""

from __future__ import annotations

from torch import Tensor, nn

from headwise.runtime.kernels.native import linear, linear_of_many


class FewTokensLinear(nn.Linear):
    """torch's linear layer with headwise's kernel where that applies; made by changing a layer's class."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Map ``[..., in]`` to ``[..., out]``."""
        return linear(input, self.weight, self.bias)


class ManyTokensLinear(nn.Linear):
    """torch's linear layer, in float32 where the processor cannot multiply bfloat16; made like `FewTokensLinear`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Map ``[..., in]`` to ``[..., out]``."""
        return linear_of_many(input, self.weight, self.bias)


def take_over_linears(model: nn.Module, kind: type[nn.Linear] = FewTokensLinear) -> None:
    """Change the class of every plain linear layer of a model; parameters are the same objects.

    Layers that are quantised, adapted or have a ``forward`` of their own are left as they are.

    Args:
        model: the model, which is changed in place.
        kind: the class.
    """
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            module.__class__ = kind
