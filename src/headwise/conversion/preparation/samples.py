"""Queries, keys and values of each layer: of a text, or of random inputs where no text is given.

Random inputs need no run of the model.

Shapes: N samples, B windows, W tokens of a window, E hidden size, H query heads, K key–value heads, D head dim, V
value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from headwise.errors import ArgumentError
from headwise.measure.texts.calibration import CalibrationTexts, open_windows
from headwise.models.checkpoints import Checkpoint
from headwise.models.specs import GroupedSpec
from headwise.runtime.attention.rope import RotaryEmbedding, rotate
from headwise.runtime.hf import LayerwiseModel

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


@dataclass(frozen=True, eq=False)
class Projected:
    """Queries, keys and values of a layer, before RoPE turns them by their positions.

    Attributes:
        layer: its spec.
        queries: ``[H, B, W, D]``.
        keys: ``[K, B, W, D]``.
        values: ``[K, B, W, V]``.
        positions: of a window's tokens, ``[W]``.
        bias: of the projection of keys, ``[K · D]``; None where it has none.
    """

    layer: GroupedSpec
    queries: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    bias: Tensor | None

    @property
    def scale(self) -> float:
        """What multiplies products of queries and keys."""
        own = self.layer.softmax_scale
        return self.layer.head_dim**-0.5 if own is None else own

    def rotated(self, side: str, positions: Tensor, shift: Tensor | None = None) -> Tensor:
        """Queries (``q``) or keys (``k``) as they are multiplied, at positions ``[W]``.

        Args:
            side: which.
            positions: of a window's tokens.
            shift: added to keys before that, ``[K, D]``.
        """
        states = self.queries if side == "q" else self.keys
        return self.turned(states if shift is None else states + shift[:, None, None], positions)

    def turned(self, states: Tensor, positions: Tensor) -> Tensor:
        """States ``[…, W, D]`` of four dimensions, as RoPE turns them at positions ``[W]``."""
        return self.turning(positions)(states)

    def turning(self, positions: Tensor, *, backwards: bool = False) -> Callable[[Tensor], Tensor]:
        """What turns states ``[…, W, D]`` of four dimensions as RoPE does, or as its transpose does.

        Args:
            positions: of the tokens, ``[W]``.
            backwards: the transpose.
        """
        if (rope := self.layer.rope) is None:
            return lambda states: states
        cos, sin = RotaryEmbedding(rope)(positions[None], self.queries.dtype, int(positions.max()) + 1)
        return lambda states: rotate(states, cos, -sin if backwards else sin, interleaved=rope.interleaved)


def projected(
    state: Mapping[str, Tensor], layer: GroupedSpec, inputs: Tensor, positions: Tensor, *, eps: float = _EPS
) -> Projected:
    """Queries, keys and values of inputs, in the dtype of these.

    Args:
        state: the layer's attention under headwise's names.
        layer: its spec.
        inputs: ``[B, W, E]``, behind the norm before the attention.
        positions: of a window's tokens, ``[W]``.
        eps: of the norms of queries and keys.
    """

    def taken(name: str) -> Tensor | None:
        return None if (tensor := state.get(name)) is None else tensor.to(inputs.dtype)

    sides = []
    for side, heads in (("q", layer.num_heads), ("k", layer.num_kv_heads), ("v", layer.num_kv_heads)):
        states = linear(inputs, state[f"{side}_proj.weight"].to(inputs.dtype), taken(f"{side}_proj.bias"))
        norm = taken(f"{side}_norm.weight")
        if norm is not None and layer.qk_norm == "full":
            states = rms_norm(states, norm.shape, norm, eps)
        states = torch.unflatten(states, -1, (heads, -1)).movedim(-2, 0)  # [heads, B, W, D]
        if norm is not None and layer.qk_norm == "head":
            states = rms_norm(states, norm.shape, norm, eps)
        sides.append(states)
    return Projected(layer, sides[0], sides[1], sides[2], positions, taken("k_proj.bias"))


_NORM, _EMBEDDING = "blk.{layer}.attn_norm", "token_embd"

Inputs = tuple[Tensor, Tensor]
"""Inputs behind the norm before the attention, ``[B, W, E]``, and the positions of a window's tokens, ``[W]``."""


def layer_inputs(checkpoint: Checkpoint, texts: CalibrationTexts) -> Iterator[Inputs]:
    """Yield the inputs of each layer in turn.

    Args:
        checkpoint: the model.
        texts: to run it on; without any, its weights alone say what inputs are like.

    Raises:
        ArgumentError: without a text, the model's family has no single norm before the attention; or the text is too
            short.
    """
    return _of_a_text(checkpoint, texts) if texts else _of_weights(checkpoint)


def _of_weights(checkpoint: Checkpoint) -> Iterator[Inputs]:
    family, spec = checkpoint.family, checkpoint.spec
    if _NORM not in family.gguf_tensors:
        rule = f"is needed for a {family.model_type}: what its attention reads cannot be told from weights alone"
        raise ArgumentError("calibrate", "()", rule)
    generator = torch.Generator().manual_seed(0)
    most = min(spec.max_position_embeddings or POSITIONS, POSITIONS)
    for index in range(spec.num_layers):
        name = f"{family.gguf_tensors[_NORM].format(layer=index)}.weight"
        norm = checkpoint.read(name).float() + family.gguf_norm_offset
        rows = None
        if index == 0:
            name = f"{family.gguf_tensors[_EMBEDDING]}.weight"
            tokens = common_tokens(checkpoint.tensors[name].shape[0], generator=generator)
            rows = checkpoint.read_rows(name, tokens).float()
        positions = torch.randint(most, (SAMPLES,), generator=generator).sort().values
        yield random_inputs(norm, generator=generator, embedding=rows)[None], positions


@torch.no_grad()
def _of_a_text(checkpoint: Checkpoint, texts: CalibrationTexts) -> Iterator[Inputs]:
    windows = open_windows(checkpoint, texts).ids
    model = LayerwiseModel(checkpoint, torch.float32)
    hidden = model.begin(windows)
    positions = torch.arange(windows.shape[1])
    for index in range(model.num_layers):
        call, hidden = model.trace(index, model.module(index), hidden)
        yield call.inputs, positions
