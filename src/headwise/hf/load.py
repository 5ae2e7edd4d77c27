"""Load a model to run: what headwise wrote, what anyone wrote, or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from headwise.arguments import typed
from headwise.checkpoints import (
    DTYPES,
    Checkpoint,
    GgufCheckpoint,
    dtype_name,
    has_family,
    model_path,
    open_checkpoint,
    refuse_other_weights,
)
from headwise.errors import ArgumentError, CheckpointError, SpecError
from headwise.hf.complete import check_complete, check_values
from headwise.hf.config import model_class, refused, stock_config


@typed
def load(source: str | Path, *, dtype: torch.dtype | str | None = None, device: str | None = None) -> Any:
    """A transformers model, ready to run, from any source that has weights.

    Args:
        source: a model folder (converted or not), a ``.gguf``, ``smollm2-135m`` or ``hf://owner/name``.
        dtype: of the weights in memory, a torch dtype or its name; as stored when None.
        device: where to put it; the CPU when None.

    Raises:
        ArgumentError: there is no such source, dtype or device.
        CheckpointError: its files are missing, damaged, pickles, quantised or ask for code of their own.
    """
    wanted, place = None if dtype is None else as_dtype(dtype), as_device(device)
    checkpoint = open_checkpoint(model_path(source))
    known = has_family(checkpoint.config.get("model_type"))
    if known:
        check_complete(checkpoint)
    else:
        refuse_encoder(checkpoint)
        check_values(checkpoint)
    wanted = wanted or checkpoint.dtype
    if isinstance(checkpoint, GgufCheckpoint):
        state = {name: checkpoint.read(name) for name in checkpoint.tensors}
        model = model_class(checkpoint.config).from_pretrained(
            None, config=stock_config(checkpoint.config), state_dict=state, dtype=wanted
        )
    else:
        refuse_other_weights(checkpoint.path)
        config = stock_config(checkpoint.config)
        if wanted == torch.float64 and config._experts_implementation is None:
            config._experts_implementation = "eager"  # the usual one multiplies no float64
        try:
            loader = model_class(checkpoint.config) if known else transformers.AutoModelForCausalLM
            model, found = loader.from_pretrained(
                checkpoint.path,
                config=config,  # or it would read one itself, which nobody has checked
                dtype=wanted,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except Exception as error:  # such as a generation_config.json that is no JSON
            raise refused("folder", str(source), error) from None
        # Of a family without a file here, whose tensors transformers may rename or fuse, only it knows.
        for name in sorted(found["missing_keys"]):
            raise CheckpointError("tensor", name, f"is missing from {checkpoint.path}")
    check_finite(model)
    _check_cache(model)
    model = model.eval()
    return model if device is None else model.to(place)


def as_device(device: str | None) -> torch.device:
    """A torch device that this machine has; the CPU when None.

    Raises:
        ArgumentError: it has none of that name.
    """
    rule = "must be a device that torch has here, such as cpu or cuda"
    try:
        found = torch.device("cpu" if device is None else device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError):  # a torch without CUDA asserts
        raise ArgumentError("device", device, rule) from None
    if found.type == "meta":  # no numbers come out of it
        raise ArgumentError("device", device, rule)
    return found


def open_decoder(source: str | Path) -> Checkpoint:
    """Open a source and read what its config describes, before transformers does: a refusal is one line, not a stack.

    Raises:
        SpecError: it is not understood, or does not continue text.
        CheckpointError: its files are missing or damaged.
    """
    checkpoint = open_checkpoint(model_path(source))
    refuse_encoder(checkpoint)
    return checkpoint


def refuse_encoder(checkpoint: Checkpoint) -> None:
    """Refuse what is no text decoder.

    Raises:
        SpecError: it is an encoder, or decodes what an encoder heard.
        CheckpointError: transformers does not accept its config.
    """
    if not checkpoint.spec.is_causal:
        raise SpecError("model_type", checkpoint.spec.model_type, "is an encoder; only decoders can be run")
    if checkpoint.spec.cross_layers:
        raise SpecError(
            "model_type", checkpoint.spec.model_type, "attends to an encoder's output, and not to text alone"
        )
    stock_config(checkpoint.config)


def check_finite(model: Any) -> None:
    """Refuse a model that could only answer NaN.

    Raises:
        CheckpointError: a weight is NaN or infinite, in the file or in the dtype it was loaded in.
    """
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            rule = f"holds NaN or infinite values in {dtype_name(parameter.dtype)}"
            raise CheckpointError("tensor", name, rule)


def _check_cache(model: Any) -> None:
    """Refuse a config by which transformers can make no cache: a window or a kind of layer that its model ignores.

    Raises:
        CheckpointError: so it is.
    """
    if not model.can_generate():
        return
    try:
        DynamicCache(config=model.config)
    except Exception as error:
        raise refused("config.json", model.config.model_type, error) from None


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype from its name.

    Raises:
        ArgumentError: it is not a floating dtype's.
    """
    for known in DTYPES.values():
        if dtype in (known, str(known), dtype_name(known)):
            return known
    raise ArgumentError("dtype", str(dtype), "must be float64, float32, float16 or bfloat16")
