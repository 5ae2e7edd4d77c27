"""Compare two folders of one model by their logits."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.models.checkpoints import Checkpoint
from headwise.runtime.hf import LayerwiseModel


@torch.no_grad()
def logits_difference(
    first: Checkpoint, second: Checkpoint, ids: Tensor, device: torch.device | None = None
) -> float:
    """The largest absolute difference of two models' logits, in float32, with one layer in memory at a time.

    Args:
        first: a folder whose layers have Llama's names.
        second: the other folder, likewise.
        ids: ``[B, W]`` token ids.
        device: to compute on; the CPU when None.
    """
    models, states = [], []
    for checkpoint in (first, second):
        place = "model.layers.{layer}"
        model = LayerwiseModel(checkpoint, torch.float32, device=device, layer=place, attention=f"{place}.self_attn")
        hidden = model.begin(ids)
        for index in range(model.num_layers):
            hidden = model.run(index, model.module(index), hidden)  # [B, W, E]
        model.release()
        models.append(model)
        states.append(hidden)
    pieces = zip(*(model.finish_in_pieces(hidden) for model, hidden in zip(models, states, strict=True)), strict=True)
    return max(float((first_logits - second_logits).abs().max()) for first_logits, second_logits in pieces)
