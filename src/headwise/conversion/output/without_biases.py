"""An MLA layer without biases, whose latent has a norm: what engines load that know of no biases.

Shapes: E hidden, R the latent's rank, H heads, N key dim without RoPE, V value dim.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headwise.conversion.solvers.layer import Layer
from headwise.conversion.solvers.statistics import Statistics
from headwise.models.specs import LatentSpec, as_normed
from headwise.serving.exports.latent_norm import LatentMap, with_norm

_RIDGE = 1e-3
"""The penalty of the fit of a constant, as a share of the inputs' mean square."""


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
