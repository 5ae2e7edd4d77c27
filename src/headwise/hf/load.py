"""Load a model to run: what headwise wrote, what anyone wrote, or a GGUF file."""

from __future__ import annotations

import warnings
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headwise.arguments import typed
from headwise.checkpoints import (
    DTYPES,
    Checkpoint,
    GgufCheckpoint,
    dtype_name,
    family_of,
    has_family,
    model_path,
    open_checkpoint,
    refuse_kernel,
    refuse_kernels,
    refuse_other_weights,
)
from headwise.errors import ArgumentError, CheckpointError, HeadwiseError, SpecError


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
    wanted = wanted or checkpoint.dtype
    if isinstance(checkpoint, GgufCheckpoint):
        state = {name: checkpoint.read(name) for name in checkpoint.tensors}
        model = model_class(checkpoint.config).from_pretrained(
            None, config=stock_config(checkpoint.config), state_dict=state, dtype=wanted
        )
    else:
        refuse_other_weights(checkpoint.path)
        try:
            loader = model_class(checkpoint.config) if known else transformers.AutoModelForCausalLM
            model, found = loader.from_pretrained(
                checkpoint.path,
                config=stock_config(checkpoint.config),  # or it would read one itself, which nobody has checked
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


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype from its name.

    Raises:
        ArgumentError: it is not a floating dtype's.
    """
    for known in DTYPES.values():
        if dtype in (known, str(known), dtype_name(known)):
            return known
    raise ArgumentError("dtype", str(dtype), "must be float64, float32, float16 or bfloat16")


def stock_config(config: dict[str, Any]) -> Any:
    """transformers' config object for a parsed ``config.json`` (a converted one's included).

    Raises:
        CheckpointError: transformers does not accept it, or it names a kernel of the hub.
    """
    refuse_kernels(config)
    try:
        made = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    except Exception as error:  # its validators raise many kinds
        raise refused("config.json", config.get("model_type"), error) from None
    _refuse_kernels_of(made)
    return made


def _refuse_kernels_of(made: Any) -> None:
    """Refuse a config object that names a kernel of the hub, by whatever way the name came into it."""
    left = [made]
    while left:
        item = left.pop()
        if isinstance(item, PreTrainedConfig):
            for name in ("_attn_implementation", "_experts_implementation"):
                if isinstance(text := getattr(item, name, None), str):
                    refuse_kernel(name, text)
            left += vars(item).values()
        elif isinstance(item, dict | list | tuple):
            left += item.values() if isinstance(item, dict) else item


def model_class(config: dict[str, Any]) -> Any:
    """The class transformers would build for a config: of the family's, the one its ``architectures`` names.

    Raises:
        CheckpointError: it has none that generates text, or names one that is not the family's.
    """
    stock, model_type = stock_config(config), str(config.get("model_type"))
    autos = family_of(model_type).autos if has_family(model_type) else ("AutoModelForCausalLM",)
    try:
        classes = [getattr(transformers, auto)._model_mapping[type(stock)] for auto in autos]
    except KeyError:
        raise CheckpointError("model_type", model_type, "is not a model that generates text") from None
    named = config.get("architectures")
    if len(classes) == 1 or not named:
        return classes[0]
    known = {made.__name__.removeprefix("Headwise"): made for made in classes}
    name = str(named[0]).removeprefix("Headwise")
    if name not in known:
        raise CheckpointError("architectures", name, f"must be one of {', '.join(known)}")
    return known[name]


def auto_class(config: dict[str, Any]) -> str:
    """The name of transformers' Auto class that loads the folder of a config.

    Raises:
        CheckpointError: see `model_class`.
    """
    made, stock, model_type = model_class(config), stock_config(config), str(config.get("model_type"))
    autos = family_of(model_type).autos if has_family(model_type) else ("AutoModelForCausalLM",)
    return next(auto for auto in autos if getattr(transformers, auto)._model_mapping[type(stock)] is made)


def expected_tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape in the model a config describes, tied ones once; nothing is allocated.

    Raises:
        CheckpointError: transformers cannot build it.
    """
    return _meta_tensors(config)[0]


def _meta_tensors(config: dict[str, Any]) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """The parameters' shapes, and the names tied to another of them."""
    made = model_class(config)  # transformers' own refusal names a hundred classes
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes that the shapes will show
            model = made._from_config(stock_config(config))
    except Exception as error:  # a size, an activation or a scaling that only its modules look at
        raise refused("config.json", config.get("model_type"), error) from None
    tied = set(model.all_tied_weights_keys)
    named = model.named_parameters(remove_duplicate=False)
    return {name: tuple(p.shape) for name, p in named if name not in tied}, tied


def check_complete(checkpoint: Checkpoint) -> None:
    """Hold a checkpoint's tensors to the model its config describes.

    Raises:
        CheckpointError: a tensor is missing, of another shape, or of no use to the model.
    """
    layers = checkpoint.spec.num_layers
    if layers > len(checkpoint.tensors):
        rule = f"is more than the {len(checkpoint.tensors)} tensors of {checkpoint.path} can fill"
        raise CheckpointError("num_hidden_layers", layers, rule)
    expected, tied = _meta_tensors(checkpoint.config)
    for name, shape in expected.items():
        if name not in checkpoint.tensors:
            raise CheckpointError("tensor", name, f"is missing from {checkpoint.path}")
        if checkpoint.tensors[name].shape != shape:
            found = checkpoint.tensors[name].shape
            raise CheckpointError(f"{name} shape", found, f"must be {shape} by the config")
    for name in checkpoint.tensors:
        # Old folders store the frequencies, which the config gives anyway.
        if name not in expected and name not in tied and not name.endswith("rotary_emb.inv_freq"):
            rule = f"has no place in the model the config of {checkpoint.path} describes"
            raise CheckpointError("tensor", name, rule)


def refused(field: str, value: object, error: Exception) -> HeadwiseError:
    """What transformers raised, as one line of ours."""
    if isinstance(error, HeadwiseError):
        return error
    reason = shorten(str(error), 300, placeholder=" …")
    return CheckpointError(field, value, f"is refused by transformers: {type(error).__name__}: {reason}")
