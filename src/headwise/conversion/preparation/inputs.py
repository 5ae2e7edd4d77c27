"""The inputs of each layer's attention: those of a text, or random ones that need no run of the model.

Shapes: B windows, W tokens of a window, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.conversion.preparation.samples import POSITIONS, SAMPLES, common_tokens, random_inputs
from headwise.errors import ArgumentError
from headwise.measure.texts.calibration_texts import CalibrationTexts, open_windows
from headwise.models.checkpoints import Checkpoint
from headwise.runtime.hf import LayerwiseModel

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
