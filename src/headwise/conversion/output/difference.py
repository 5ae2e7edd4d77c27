"""The difference between two folders of one model, by their logits."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.checkpoints import Checkpoint
from headwise.hf import LayerwiseModel


@torch.no_grad()
def logits_difference(first: Checkpoint, second: Checkpoint, ids: Tensor) -> float:
    """The largest difference of two models' logits, in float32, with one layer of one of them in memory at a time.

    Args:
        first: a folder whose layers are where Llama's are.
        second: another.
        ids: ``[B, W]`` tokens.
    """
    models, states = [], []
    for checkpoint in (first, second):
        place = "model.layers.{layer}"
        model = LayerwiseModel(checkpoint, torch.float32, layer=place, attention=f"{place}.self_attn")
        hidden = model.begin(ids)
        for index in range(model.num_layers):
            hidden = model.run(index, model.module(index), hidden)
        model.release()
        models.append(model)
        states.append(hidden)
    pieces = zip(*(model.finish_in_pieces(hidden) for model, hidden in zip(models, states, strict=True)), strict=True)
    return max(float((one - other).abs().max()) for one, other in pieces)
