"""RMSNorm, rounded as transformers' models round it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """``weight · x / rms(x)``, the mean square taken at least in float32.

    For example ``RMSNorm(512)(torch.randn(1, 10, 512))``.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim; the dtype stays."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide.to(x.dtype)).to(x.dtype)  # under autocast the weight's dtype is wider than x's

    def extra_repr(self) -> str:
        """The width and eps, for ``print(model)``."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
