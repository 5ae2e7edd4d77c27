"""Load a model to run: what headwise wrote, what anyone wrote, or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headwise.checkpoints import Checkpoint, GgufCheckpoint, model_path, open_checkpoint
from headwise.errors import ArgumentError, CheckpointError


def load(source: str | Path, *, dtype: torch.dtype | str | None = None, device: str | None = None) -> Any:
    """A transformers model, ready to run, from any source that has weights.

    Args:
        source: a model folder (converted or not), a ``.gguf``, ``smollm2-135m`` or ``hf://owner/name``.
        dtype: of the weights in memory, a torch dtype or its name; as stored when None.
        device: where to put it; the CPU when None.

    Raises:
        ArgumentError: there is no such source, or dtype.
        CheckpointError: its files are missing, damaged, pickles, quantised or ask for code of their own.
    """
    checkpoint = open_checkpoint(model_path(source))
    # Read what the config describes before transformers does: a refusal in one line rather than a stack.
    check_complete(checkpoint)
    as_stored = checkpoint.dtype if dtype is None else as_dtype(dtype)
    if isinstance(checkpoint, GgufCheckpoint):
        state = {name: checkpoint.read(name) for name in checkpoint.tensors}
        model = model_class(checkpoint.config).from_pretrained(
            None, config=stock_config(checkpoint.config), state_dict=state, dtype=as_stored
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            dtype=as_stored,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    model = model.eval()
    return model if device is None else model.to(device)


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype from its name.

    Raises:
        ArgumentError: it is not a floating dtype's.
    """
    value = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if value not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise ArgumentError("dtype", str(dtype), "must be float64, float32, float16 or bfloat16")
    return value


def stock_config(config: dict[str, Any]) -> Any:
    """transformers' config object for a parsed ``config.json`` (a converted one's included).

    Raises:
        CheckpointError: transformers does not accept it.
    """
    try:
        return CONFIG_MAPPING[config["model_type"]].from_dict(config)
    except Exception as error:  # its validators raise many kinds
        reason = " ".join(str(error).split())
        raise CheckpointError(
            "config.json", config.get("model_type"), f"is refused by transformers: {reason}"
        ) from None


def model_class(config: dict[str, Any]) -> Any:
    """The class transformers would build for a config."""
    return AutoModelForCausalLM._model_mapping[type(stock_config(config))]


def expected_tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape in the model a config describes, tied ones once; nothing is allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(stock_config(config))
    tied = set(model.all_tied_weights_keys)
    return {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False) if name not in tied}


def check_complete(checkpoint: Checkpoint) -> None:
    """Hold a checkpoint's tensors to the model its config describes.

    Raises:
        CheckpointError: a tensor is missing, of another shape, or of no use to the model.
    """
    expected = expected_tensors(checkpoint.config)
    for name, shape in expected.items():
        if name not in checkpoint.tensors:
            raise CheckpointError("tensor", name, f"is missing from {checkpoint.path}")
        if checkpoint.tensors[name].shape != shape:
            found = checkpoint.tensors[name].shape
            raise CheckpointError(f"{name} shape", found, f"must be {shape} by the config")
