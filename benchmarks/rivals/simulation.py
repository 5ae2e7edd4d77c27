"""A model whose attention reads what a method would read from its cache.

The cache itself is not allocated: keys and values of a window are replaced by what the method would keep of them, and
the method says how many bytes that is.

Shapes: S tokens of a window, E hidden size, H query heads, K key–value heads, D dims of a head, F = D/2 frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import rotate_half

from headwise.measure.evaluation import score_window

BF16 = 2
"""Bytes of a number that is not quantised."""


class Rotary(NamedTuple):
    """cos and sin ``[1, S, D]`` of a window's positions; the two halves of the dims are equal."""

    cos: Tensor
    sin: Tensor


class Rival(Protocol):
    """One layer's attention with a method's cache."""

    def __call__(self, attention: Any, hidden: Tensor, rotary: Rotary) -> Tensor:
        """The attention's output ``[1, S, E]``.

        Args:
            attention: the model's attention, with its own projections.
            hidden: ``[1, S, E]``, its inputs.
            rotary: the model's rotary tables.
        """


@dataclass(frozen=True)
class Design:
    """A method's cache for a whole model.

    Attributes:
        layers: each layer's attention.
        token_bytes: bytes of a token in the caches of all layers.
        settings: the method's choices, as JSON-able values.
    """

    layers: Sequence[Rival]
    token_bytes: float
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """What a method is given to design a cache.

    Attributes:
        model: the source, a llama model of transformers in float32.
        statistics: of the source on the calibration windows; see `calibration`.
        windows: ``[N, S]``, the calibration windows.
        valid: windows that choose between a method's settings.
        work: a folder for what is worth keeping between runs.
    """

    model: Any
    statistics: Mapping[str, Tensor]
    windows: Tensor
    valid: Tensor
    work: Path

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.model.model.layers)

    @property
    def width(self) -> int:
        """K·D, the outputs of the key projection, and of the value projection."""
        return int(self.model.config.num_key_value_heads * self.model.config.head_dim)

    @property
    def full(self) -> int:
        """Bytes of a token in a bf16 cache of the model as it is."""
        return 2 * self.layers * self.width * BF16

    def moments(self, index: int) -> Tensor:
        """``[E, E]``, the sum of x xᵀ over the inputs of a layer's attention, float64."""
        return self.statistics[f"{index}.moments"]

    def weights(self, name: str) -> list[Tensor]:
        """The weights of a projection of every layer, float64."""
        return [getattr(layer.self_attn, name).weight.detach().double() for layer in self.model.model.layers]


class RivalAttention(nn.Module):
    """A layer's attention in the place of the model's own."""

    def __init__(self, attention: nn.Module, rival: Rival) -> None:
        super().__init__()
        self.attention, self.rival = attention, rival

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> tuple[Tensor, None]:
        """The output of the attention, and None for its weights."""
        return self.rival(self.attention, hidden_states, Rotary(*position_embeddings)), None


@contextmanager
def simulated(model: Any, layers: Sequence[Rival]) -> Iterator[None]:
    """Put a method's attention into a llama model; the model's own is put back at the end."""
    originals = [layer.self_attn for layer in model.model.layers]
    for layer, original, rival in zip(model.model.layers, originals, layers, strict=True):
        layer.self_attn = RivalAttention(original, rival)
    try:
        yield
    finally:
        for layer, original in zip(model.model.layers, originals, strict=True):
            layer.self_attn = original


def grouped_attention(
    attention: Any, hidden: Tensor, keys: Tensor, values: Tensor, rotary: Rotary, rotated: Tensor | None = None
) -> Tensor:
    """The output ``[1, S, E]`` of causal attention over keys that are rotated here.

    Args:
        attention: the model's attention, whose queries and output projection are used.
        hidden: ``[1, S, E]``.
        keys: ``[1, S, K·D]``, before rotation.
        values: ``[1, S, K·D]``.
        rotary: the model's rotary tables.
        rotated: bool ``[K, F]``, the frequencies that each key head is rotated at; all when None.
    """
    D = attention.head_dim
    query, key, value = (split_heads(x, D) for x in (attention.q_proj(hidden), keys, values))
    cos, sin = (table[:, None] for table in rotary)  # [1, 1, S, D]
    query_cos, query_sin = cos, sin
    if rotated is not None:
        mask = torch.cat((rotated, rotated), -1)[None, :, None]  # [1, K, 1, D]
        cos, sin = cos.where(mask, torch.ones(())), sin.where(mask, torch.zeros(()))
        group = query.shape[1] // key.shape[1]
        query_cos, query_sin = (table.repeat_interleave(group, 1) for table in (cos, sin))
    query = query * query_cos + rotate_half(query) * query_sin
    key = key * cos + rotate_half(key) * sin
    mixed = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=attention.scaling, enable_gqa=True
    )
    output: Tensor = attention.o_proj(mixed.transpose(1, 2).flatten(2))
    return output


def split_heads(states: Tensor, head_dim: int) -> Tensor:
    """``[1, S, n·D]`` as ``[1, n, S, D]``."""
    return states.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def mean_nll(model: Any, windows: Tensor, *, coarse: bool = False) -> float:
    """The mean loss of a model on windows ``[N, S]``, in nats a token.

    Args:
        model: of transformers.
        windows: token ids.
        coarse: whether matrices are multiplied in bfloat16, to choose between settings in a third of the time.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=coarse):
        return float(torch.stack([score_window({"model": model}, ids)["nll"].mean() for ids in windows]).mean())
