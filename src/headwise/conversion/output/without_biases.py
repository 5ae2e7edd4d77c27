"""What engines need of an MLA layer: rotary pairs that survive rounding in blocks, and no biases.

Engines round a cached key in blocks of channels, each with a step that its largest number sets. A complex factor of a
rotary pair commutes with RoPE, and the queries undo it. Of a pair whose rotary key has a large constant part, which
slow pairs have, both channels are made equal, so that the largest number is small.

Some engines load no biases. A layer whose latent has a norm can be written without them: a function of the inputs
that is near 1 on a text, fitted by ridge regression, stands in for the constant input.

Shapes: E hidden, E' = E + 1 (a constant 1 stands last), R the latent's rank, P rotary dims, H heads, N content dims
of a head, V value dim.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from headwise.conversion.solvers.joint_latent import NOTHING
from headwise.conversion.solvers.latent import with_bias
from headwise.conversion.solvers.layer import Layer, latent_spec
from headwise.conversion.solvers.statistics import Statistics
from headwise.models.specs import as_normed
from headwise.serving.exports.latent_norm import LatentMap, with_norm

_QUERIES, _KEYS = 0.25, 0.375
"""The powers of the mean squares of queries and keys in a factor. Noise that is even over a block asks for ¼ of both,
steps by the largest number for ½ of keys and none of queries; of what was tried on SmolLM2's keys at 4 bits, these
let in least."""

_CENTRE = 512
"""The position at which the constant part of a pair is spread evenly over its two channels. Slow pairs, whose
constant parts are large, hardly turn in some thousand tokens."""

_PAIRS_RIDGE = 1e-3
"""The share of the mean square that every pair has at least, so that one that is zero gets no infinite factor."""


def with_even_pairs(layer: Layer, moments: Tensor, frequencies: Tensor) -> Layer:
    """The MLA layer, float64, that computes the same, and whose rotary key bears rounding by blocks better.

    For example ``with_even_pairs(layer, statistics.inputs, frequencies)``.

    Args:
        layer: MLA without norms of queries and keys, its tensors in any dtype.
        moments: the second moments of the inputs on a text, float64 ``[E', E']``.
        frequencies: the angle by which each pair of the rotary key turns from a token to the next, in radians,
            ``[P/2]``.
    """
    spec, state = latent_spec(layer.spec), {name: tensor.double() for name, tensor in layer.state.items()}
    assert spec.qk_norm is None
    R, N, H = spec.kv_lora_rank, spec.qk_nope_head_dim, spec.num_heads
    if not spec.qk_rope_head_dim:
        return replace(layer, state=state)
    keys = with_bias(state, "kv_a_proj_with_mqa", True)[R:]  # [P, E']
    queries = torch.unflatten(with_bias(state, "q_proj", True), 0, (H, -1))[:, N:]  # [H, P, E']
    asked = torch.stack([_squares(each, moments) for each in queries]).mean(0)
    sizes = asked**_QUERIES / _squares(keys, moments) ** _KEYS
    mean = torch.complex(*torch.unflatten(keys @ moments[:, -1], 0, (2, -1)))
    factors = torch.polar(
        sizes / sizes.log().mean().exp(), math.pi / 4 - mean.angle() - _CENTRE * frequencies.double()
    )
    for name in ("kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias"):
        if name in state:
            state[name] = torch.cat((state[name][:R], _times(state[name][R:], factors)))
    for name in ("q_proj.weight", "q_proj.bias"):
        if name in state:
            by_head = torch.unflatten(state[name], 0, (H, -1))  # [H, N + P, …]
            turned = [_times(each, 1 / factors.conj()) for each in by_head[:, N:]]
            state[name] = torch.cat((by_head[:, :N], torch.stack(turned)), 1).flatten(0, 1)
    return replace(layer, state=state)


def _squares(rows: Tensor, moments: Tensor) -> Tensor:
    """The mean square of each pair of a projection ``[P, E']``, whose real parts come first: ``[P/2]``."""
    squares = torch.unflatten(((rows @ moments) * rows).sum(-1), 0, (2, -1)).sum(0)
    return squares.clamp_min(_PAIRS_RIDGE * squares.mean() + NOTHING)


def _times(rows: Tensor, factors: Tensor) -> Tensor:
    """The rows ``[P, …]`` of pairs, real parts first, times complex factors ``[P/2]``."""
    real, imaginary = torch.unflatten(rows, 0, (2, -1))
    pairs = torch.complex(real, imaginary) * factors.view(-1, *[1] * (rows.dim() - 1))
    return torch.cat((pairs.real, pairs.imag))


_RIDGE = 1e-3
"""The penalty of the fit of a constant, as a share of the inputs' mean square."""


def constant_of_inputs(statistics: Statistics, starts: Tensor | None = None) -> Tensor:
    """The weights ``[E]`` of a linear function of a layer's inputs that is as near as can be to 1 on a text.

    For example ``inputs @ constant_of_inputs(statistics)`` is 1 but for a few percent.

    Each of these has the same weight: all tokens, tokens by how much depends on their keys, and the first tokens of
    texts. A first token is unlike the others, and attention rests on it. Where the function is far from 1 there,
    every token of the text is predicted badly, and the windows of a text begin with few different tokens.

    Args:
        statistics: the means over a text, with its constant input last.
        starts: the layer's inputs at first tokens, which each begin a text, ``[W, E]``; None where they are not
            known.
    """
    seen = [(moments[:-1, :-1], moments[:-1, -1]) for moments in (statistics.inputs, statistics.keys)]  # [E, E], [E]
    if starts is not None:
        wide = starts.to(statistics.inputs)
        seen.append((wide.mT @ wide / len(wide), wide.mean(0)))
    gram, mean = (torch.stack(part).mean(0) for part in zip(*seen, strict=True))
    ridge = _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    weights: Tensor = torch.linalg.solve(gram + ridge, mean)
    return weights * (1 / float(weights @ mean))


def without_biases(layer: Layer, constant: Tensor, gain: Tensor, dtype: torch.dtype) -> Layer:
    """An MLA layer with a norm on its latent and no biases, one channel wider, that computes nearly the same.

    What biases add to values becomes a column of the constant channel, and so does the output's bias, since the
    weights of values sum to 1. What they add to keys is one number in all scores of a query, which the softmax does
    not see. Biases of queries and the rotary key become the constant function of the inputs.

    Args:
        layer: the MLA layer, without a norm of its latent.
        constant: the weights ``[E]`` that `constant_of_inputs` returned.
        gain: the weight of the norm that the layer's inputs come from, ``[E]``; see `with_norm`.
        dtype: the dtype that the weights will be rounded to.
    """
    spec, state = latent_spec(layer.spec), {name: tensor.double() for name, tensor in layer.state.items()}
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
