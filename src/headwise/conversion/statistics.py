"""What a model's attention layers see on real text: the second moments of their inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints import family_of, load_tokenizer, model_path
from headwise.errors import CheckpointError
from headwise.evaluation import check_vocabulary, cut_windows, read_text, token_ids
from headwise.hf import load
from headwise.progress import Progress, silent

WINDOW = 2048


@torch.inference_mode()
def input_moments(
    source: str | Path, text: str | Path, *, tokens: int = 16_384, progress: Progress = silent
) -> tuple[list[Tensor], int]:
    """E[x̃ x̃ᵀ] of every layer's attention input, with x̃ the input and a constant 1.

    Args:
        source: the model.
        text: a UTF-8 file.
        tokens: how many to look at, in windows of 2048 (shorter where the model or the text is).
        progress: told of each window.

    Returns:
        One ``[E + 1, E + 1]`` float64 matrix a layer, and the number of tokens that went into it.

    Raises:
        ArgumentError: the text cannot be read or has fewer than two tokens.
        CheckpointError: the model is damaged, or computes NaN on the text.
    """
    content = read_text(text, name="calibrate")
    tokenizer = load_tokenizer(model_path(source))
    model = load(source, dtype="float32")
    ids = token_ids(tokenizer, content, at_most=tokens)
    longest = min(WINDOW, getattr(model.config, "max_position_embeddings", None) or WINDOW)
    count = max(-(-min(tokens, len(ids)) // longest), 1)
    window = max(min(tokens, len(ids)) // count, 2)
    batches = cut_windows(ids, window=window, windows=count, name="calibrate")
    check_vocabulary({"model": model}, int(batches.max()))

    family = family_of(model.config.model_type)
    size = model.config.hidden_size + 1
    moments = [torch.zeros(size, size, dtype=torch.float64) for _ in range(model.config.num_hidden_layers)]

    def watch(total: Tensor) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states = (args[0] if args else kwargs["hidden_states"]).flatten(0, 1).double()
            seen = torch.cat((states, states.new_ones(len(states), 1)), dim=1)
            total.addmm_(seen.mT, seen)

        return hook

    handles = [
        model.base_model.get_submodule(family.bare().place(index)).register_forward_pre_hook(
            watch(total), with_kwargs=True
        )
        for index, total in enumerate(moments)
    ]
    for index, batch in enumerate(batches):
        progress("calibrating", index, len(batches))
        model.base_model(batch[None], use_cache=False)
    progress("calibrating", len(batches), len(batches))
    for handle in handles:
        handle.remove()
    count = batches.numel()
    for index, total in enumerate(moments):
        if not bool(torch.isfinite(total).all()):
            rule = f"makes the model compute NaN or infinite values before layer {index}"
            raise CheckpointError("calibrate", str(text), rule)
    return [total / count for total in moments], count
