"""Put an RMSNorm on the latent of a map, which leaves the map as it is: by one more channel, a constant.

Where one channel of a latent is a constant far above the others, its root mean square is that constant over
``sqrt(R')``, whatever the others are: the norm is a fixed scale, which the map's second half undoes. The constant
also carries the second half's bias, as a column.

The constant comes from a bias of the map's first half. Where biases are not allowed, it is a linear function of the
inputs that is near 1 on a text (`headwise.conversion.output.without_biases`): inputs come from an RMSNorm, and have
a mean.

Shapes: E hidden, R the latent's rank, R' its rank with the constant, O outputs, H heads, V value dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NORM_EPS = 1e-6
"""The epsilon of the latents' norms, which does not follow ``rms_norm_eps``."""

_WIDE_HEADROOM = 1024.0
"""The ratio of the constant to the longest latent: the norm changes latents by at most 5e-7."""

_HEADROOM = {torch.float16: 8.0}
"""The ratio in dtypes of a smaller range, in which other channels would underflow beside a larger constant."""

CONSTANT_WEIGHT = 2.0**-6
"""The norm's weight of the constant, which is cached as sqrt(R') times this: below the other channels, so that it
does not set the step of a block in an engine's small cache. A power of two rounds nothing."""


class LatentMap(NamedTuple):
    """A map through a latent: ``up (down x + down_bias) + up_bias`` with down ``[R, E]`` and up ``[O, R]``."""

    down: Tensor
    down_bias: Tensor
    up: Tensor
    up_bias: Tensor | None


class NormedMap(NamedTuple):
    """A map through a normed latent c: ``up (norm · c / rms(c))``, ``c = down x + down_bias``, the constant last."""

    down: Tensor
    down_bias: Tensor
    norm: Tensor
    up: Tensor


def with_norm(
    latent: LatentMap, rank: int, gain: Tensor, dtype: torch.dtype, constant: Tensor | None = None
) -> NormedMap:
    """Add an RMSNorm to a map's latent without changing the map, for inputs that come from an RMSNorm.

    The output of that norm is at most ``gain · sqrt(E)`` long, so that the constant follows from weights alone.

    Args:
        latent: the map; float64.
        rank: R', the number of the new latent's channels, at least R + 1.
        gain: ``[E]``, the weight of the norm that the inputs come from.
        dtype: the dtype that the weights will be rounded to.
        constant: ``[E]``, the weights of a function of the inputs that is near 1, in place of a bias of 1.
    """
    R, E = latent.down.shape
    zeros = latent.down.new_zeros
    longest = _spectral_norm(latent.down * gain.abs()) * E**0.5 + float(latent.down_bias.norm())
    ideal = _HEADROOM.get(dtype, _WIDE_HEADROOM) * (longest or 1.0)
    largest = min(torch.finfo(dtype).max / 4, 1e15)  # its square is finite in float32
    # A power of two multiplies without rounding; the decoder corrects the rounding of the constant itself.
    scale = 2.0 ** torch.tensor(min(ideal, largest) / rank**0.5).log2().ceil()
    value = rounded(scale * rank**0.5, dtype)
    rms = (value**2 / rank + NORM_EPS) ** 0.5
    norm = torch.full((rank,), float(scale), dtype=torch.float64)
    norm[-1] = CONSTANT_WEIGHT
    up = torch.cat((latent.up * (rms / scale), zeros(len(latent.up), rank - R)), dim=1)
    if latent.up_bias is not None:
        up[:, -1] = latent.up_bias / rounded(value / rms, dtype) / CONSTANT_WEIGHT
    bias = torch.cat((latent.down_bias, zeros(rank - R)))
    down = torch.cat((latent.down, zeros(rank - R, E)))
    if constant is None:
        bias[-1] = value
    else:
        down[-1] = constant * value
    return NormedMap(down=down, down_bias=bias, norm=norm, up=up)


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A number, float64, as a dtype holds it."""
    return value.to(dtype).double()


def _spectral_norm(matrix: Tensor) -> float:
    """The largest singular value of a matrix."""
    gram = matrix @ matrix.mT if matrix.shape[0] <= matrix.shape[1] else matrix.mT @ matrix
    return float(torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt())
