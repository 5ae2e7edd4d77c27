"""Queries, keys and values of a layer: of inputs that a text has, or of random ones where no text is given.

Shapes: N samples, B windows, W tokens of a window, E hidden size, H query heads, K key–value heads, D head dim, V
value dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.attention.rope import RotaryEmbedding, rotate
from headwise.specs import GroupedSpec

SAMPLES = 512
"""Inputs of a layer that are tried."""

POSITIONS = 4096
"""Random inputs stand at positions below this, or below the model's last."""

_EPS = 1e-6


def random_inputs(norm: Tensor, *, generator: torch.Generator, embedding: Tensor | None = None) -> Tensor:
    """Inputs of a layer's attention, ``[N, E]``, where no text is given.

    Behind its norm a layer's input has a mean square of 1 times the norm's weights; its directions are taken as
    random. The first layer's inputs are known: the tokens' embeddings.

    Args:
        norm: the weights of the norm before the attention, ``[E]``.
        generator: of random numbers.
        embedding: rows of the embedding to take in the place of random directions, ``[N, E]``.
    """
    rows = torch.randn(SAMPLES, len(norm), generator=generator) if embedding is None else embedding
    return rows / (rows.square().mean(-1, keepdim=True) + _EPS).sqrt() * norm


def common_tokens(vocabulary: int, *, generator: torch.Generator) -> Tensor:
    """Token ids ``[N]``, as often as texts have them: the share of token n falls with 1 / n (Zipf's law).

    Tokenizers number tokens about in the order of how often they occur.

    Args:
        vocabulary: the number of tokens.
        generator: of random numbers.
    """
    drawn = torch.rand(SAMPLES, generator=generator) * torch.log(torch.tensor(float(vocabulary)))
    return drawn.exp().long().clamp(0, vocabulary - 1)


def as_cached(
    state: Mapping[str, Tensor], layer: GroupedSpec, inputs: Tensor, positions: Tensor, *, eps: float = _EPS
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[H, B, W, D]``, keys ``[K, B, W, D]`` and values ``[K, B, W, V]`` of inputs, rotated by position.

    Args:
        state: the layer's attention under headwise's names.
        layer: its spec.
        inputs: ``[B, W, E]``, behind the norm before the attention.
        positions: of a window's tokens, ``[W]``.
        eps: of the norms of queries and keys.
    """
    sides = []
    for side, heads in (("q", layer.num_heads), ("k", layer.num_kv_heads)):
        states = inputs @ state[f"{side}_proj.weight"].float().T
        if (bias := state.get(f"{side}_proj.bias")) is not None:
            states = states + bias.float()
        norm = state.get(f"{side}_norm.weight")
        if norm is not None and layer.qk_norm == "full":
            states = _normed(states, norm, eps)
        states = torch.unflatten(states, -1, (heads, layer.head_dim)).movedim(-2, 0)  # [heads, B, W, D]
        if norm is not None and layer.qk_norm == "head":
            states = _normed(states, norm, eps)
        if layer.rope is not None:
            length = int(positions.max()) + 1
            cos, sin = RotaryEmbedding(layer.rope)(positions[None], torch.float32, length)
            states = rotate(states, cos, sin, interleaved=layer.rope.interleaved)
        sides.append(states)
    values = inputs @ state["v_proj.weight"].float().T
    if (bias := state.get("v_proj.bias")) is not None:
        values = values + bias.float()
    return sides[0], sides[1], torch.unflatten(values, -1, (layer.num_kv_heads, -1)).movedim(-2, 0)


def _normed(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return states / (states.square().mean(-1, keepdim=True) + eps).sqrt() * weight.float()
