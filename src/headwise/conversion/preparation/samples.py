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
"""The number of a layer's inputs that are tried."""

POSITIONS = 4096
"""Random inputs stand at positions below this, or below the model's last."""

_EPS = 1e-6


def random_inputs(norm: Tensor, *, generator: torch.Generator, embedding: Tensor | None = None) -> Tensor:
    """Random inputs of a layer's attention, ``[N, E]``, for where no text is given.

    Behind its norm a layer's input has a mean square of 1 times the norm's weights; its directions are taken as
    random. The first layer's inputs are known: the tokens' embeddings.

    Args:
        norm: the weights of the norm before the attention, ``[E]``.
        generator: the generator of random numbers.
        embedding: the rows of the embedding to take in the place of random directions, ``[N, E]``.
    """
    rows = torch.randn(SAMPLES, len(norm), generator=generator) if embedding is None else embedding
    return rows / (rows.square().mean(-1, keepdim=True) + _EPS).sqrt() * norm


def common_tokens(vocabulary: int, *, generator: torch.Generator) -> Tensor:
    """Random token ids ``[N]``, as often as texts have them: the share of token n falls with 1 / n (Zipf's law).

    Tokenizers number tokens about in the order of how often they occur.

    Args:
        vocabulary: the number of tokens in the vocabulary.
        generator: the generator of random numbers.
    """
    drawn = torch.rand(SAMPLES, generator=generator) * torch.log(torch.tensor(float(vocabulary)))
    return drawn.exp().long().clamp(0, vocabulary - 1)


@dataclass(frozen=True, eq=False)
class Projected:
    """Queries, keys and values of a layer, before RoPE turns them by their positions.

    Attributes:
        layer: the layer's spec.
        queries: the queries, ``[H, B, W, D]``.
        keys: the keys, ``[K, B, W, D]``.
        values: the values, ``[K, B, W, V]``.
        positions: the positions of a window's tokens, ``[W]``.
        bias: the bias of the projection of keys, ``[K · D]``; None where it has none.
    """

    layer: GroupedSpec
    queries: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    bias: Tensor | None

    @property
    def scale(self) -> float:
        """The factor that multiplies products of queries and keys."""
        own = self.layer.softmax_scale
        return self.layer.head_dim**-0.5 if own is None else own

    def rotated(self, side: str, positions: Tensor, shift: Tensor | None = None) -> Tensor:
        """Queries (``q``) or keys (``k``) as they are multiplied, at positions ``[W]``.

        Args:
            side: the side, ``q`` or ``k``.
            positions: the positions of a window's tokens, ``[W]``.
            shift: the numbers that are added to keys before that, ``[K, D]``.
        """
        states = self.queries if side == "q" else self.keys
        return self.turning(positions)(states if shift is None else states + shift[:, None, None])

    def turning(self, positions: Tensor, *, backwards: bool = False) -> Callable[[Tensor], Tensor]:
        """The function that turns states ``[…, W, D]`` of four dimensions as RoPE does, or as its transpose does.

        Args:
            positions: the positions of the tokens, ``[W]``.
            backwards: whether the function is the transpose.
        """
        if (rope := self.layer.rope) is None:
            return lambda states: states
        cos, sin = RotaryEmbedding(rope)(positions[None], self.queries.dtype, int(positions.max()) + 1)
        return lambda states: rotate(states, cos, -sin if backwards else sin, interleaved=rope.interleaved)


def projected(state: Mapping[str, Tensor], layer: GroupedSpec, inputs: Tensor, positions: Tensor) -> Projected:
    """Queries, keys and values of inputs, in the dtype of these.

    Args:
        state: the tensors of the layer's attention under headwise's names.
        layer: the layer's spec.
        inputs: the inputs, ``[B, W, E]``, behind the norm before the attention.
        positions: the positions of a window's tokens, ``[W]``.
    """

    def taken(name: str) -> Tensor | None:
        return None if (tensor := state.get(name)) is None else tensor.to(inputs.dtype)

    sides = []
    for side, heads in (("q", layer.num_heads), ("k", layer.num_kv_heads), ("v", layer.num_kv_heads)):
        states = linear(inputs, state[f"{side}_proj.weight"].to(inputs.dtype), taken(f"{side}_proj.bias"))
        norm = taken(f"{side}_norm.weight")
        if norm is not None and layer.qk_norm == "full":
            states = rms_norm(states, norm.shape, norm, _EPS)
        states = torch.unflatten(states, -1, (heads, -1)).movedim(-2, 0)  # [heads, B, W, D]
        if norm is not None and layer.qk_norm == "head":
            states = rms_norm(states, norm.shape, norm, _EPS)
        sides.append(states)
    return Projected(layer, sides[0], sides[1], sides[2], positions, taken("k_proj.bias"))


_NORM, _EMBEDDING = "blk.{layer}.attn_norm", "token_embd"

Inputs = tuple[Tensor, Tensor]
"""Inputs behind the norm before the attention, ``[B, W, E]``, and the positions of a window's tokens, ``[W]``."""


def layer_inputs(checkpoint: Checkpoint, texts: CalibrationTexts) -> Iterator[Inputs]:
    """Yield the inputs of each layer in turn.

    Args:
        checkpoint: the model whose layers' inputs are wanted.
        texts: the texts to run the model on; without any, inputs are modelled from its weights alone.

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
