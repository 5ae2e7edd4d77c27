"""Put an RMSNorm on the latent of a map, which leaves the map as it is: by one more channel, a constant.

Where one channel of a latent is a constant far above the others, its root mean square is that constant over
``sqrt(R')``, whatever the others are: the norm is a fixed scale, which the map's second half undoes. The constant
also carries the second half's bias, as a column.

The constant comes from a bias of the map's first half. Where biases are not allowed, it is a linear function of the
inputs that is near 1 on a text (`constant_of_inputs`): inputs come from an RMSNorm, and have a mean.

Shapes: E hidden, R the latent's rank, R' its rank with the constant, O outputs, H heads, V value dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.conversion.solvers.layer import Layer
from headwise.conversion.solvers.statistics import Statistics
from headwise.specs import LatentSpec, as_normed

NORM_EPS = 1e-6
"""The epsilon of the latents' norms, which does not follow ``rms_norm_eps``."""

_WIDE_HEADROOM = 1024.0
"""The ratio of the constant to the longest latent: the norm changes latents by at most 5e-7."""

_HEADROOM = {torch.float16: 8.0}
"""The ratio in dtypes of a smaller range, in which other channels would underflow beside a larger constant."""

CONSTANT_WEIGHT = 2.0**-6
"""The norm's weight of the constant, which is cached as sqrt(R') times this: below the other channels, so that it
does not set the step of a block in an engine's small cache. A power of two rounds nothing."""

_RIDGE = 1e-3
"""The penalty of the fit of a constant, as a share of the inputs' mean square."""


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


def constant_of_inputs(statistics: Statistics, starts: Tensor | None = None) -> Tensor:
    """The weights ``[E]`` of a linear function of a layer's inputs that is as near as can be to 1 on a text.

    For example ``inputs @ constant_of_inputs(statistics)`` is 1 but for a few percent.

    Each of these has the same weight: all tokens, tokens by how much depends on their keys, and the first tokens of
    texts. A first token is unlike the others, and attention rests on it. Where the function is far from 1 there, the
    whole text is predicted badly, and the windows of a text begin with few different tokens.

    Args:
        statistics: means over a text, with its constant input last.
        starts: ``[W, E]``, the layer's inputs at tokens that begin a text each, where they are known.
    """
    seen = [(moments[:-1, :-1], moments[:-1, -1]) for moments in (statistics.inputs, statistics.keys)]  # [E, E], [E]
    if starts is not None:
        wide = starts.to(statistics.inputs)
        seen.append((wide.mT @ wide / len(wide), wide.mean(0)))
    gram, mean = (torch.stack(part).mean(0) for part in zip(*seen, strict=True))
    ridge = _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    weights: Tensor = torch.linalg.solve(gram + ridge, mean)
    return weights * (1 / float(weights @ mean))


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


def without_biases(layer: Layer, constant: Tensor, gain: Tensor, dtype: torch.dtype) -> Layer:
    """An MLA layer with a norm on its latent and no biases, one channel wider, that computes nearly the same.

    What biases add to values becomes a column of the constant channel, and so does the output's bias, since the
    weights of values sum to 1. What they add to keys is one number in all scores of a query, which the softmax does
    not see. Biases of queries and the rotary key become the constant function of the inputs.

    Args:
        layer: the layer, without a norm of its latent.
        constant: from `constant_of_inputs`.
        gain: ``[E]``, see `with_norm`.
        dtype: the dtype that the weights will be rounded to.
    """
    spec, state = layer.spec, {name: tensor.double() for name, tensor in layer.state.items()}
    assert isinstance(spec, LatentSpec)
    R, H, N = spec.kv_lora_rank, spec.num_heads, spec.qk_nope_head_dim
    down, up = state["kv_a_proj_with_mqa.weight"], state["kv_b_proj.weight"]
    bias = state.get("kv_a_proj_with_mqa.bias", down.new_zeros(len(down)))
    up_bias = state.get("kv_b_proj.bias", up.new_zeros(len(up))) + up @ bias[:R]
    by_head = up_bias.view(H, -1).clone()  # [H, N + V]
    by_head[:, :N] = 0
    if "o_proj.bias" in state:
        output = state["o_proj.weight"]  # [E, H·V]
        values = torch.linalg.lstsq(output, state["o_proj.bias"][:, None]).solution[:, 0]  # [H·V]
        by_head[:, N:] += values.view(H, -1)
    zeros = down.new_zeros(R)
    normed = with_norm(LatentMap(down[:R], zeros, up, by_head.flatten()), R + 1, gain.double(), dtype, constant)
    query = state["q_proj.weight"]
    if "q_proj.bias" in state:
        query = query + torch.outer(state["q_proj.bias"], constant)
    tensors = {
        "q_proj.weight": query,
        "kv_a_proj_with_mqa.weight": torch.cat((normed.down, down[R:] + torch.outer(bias[R:], constant))),
        "kv_a_layernorm.weight": normed.norm,
        "kv_b_proj.weight": normed.up,
        "o_proj.weight": state["o_proj.weight"],
    }
    return replace(layer, spec=as_normed(spec), state=tensors)


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A number, float64, as a dtype holds it."""
    return value.to(dtype).double()


def _spectral_norm(matrix: Tensor) -> float:
    """The largest singular value of a matrix."""
    gram = matrix @ matrix.mT if matrix.shape[0] <= matrix.shape[1] else matrix.mT @ matrix
    return float(torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt())
