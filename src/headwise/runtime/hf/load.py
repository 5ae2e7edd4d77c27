"""Load a model to run it: a converted folder, any other model folder, or a GGUF file."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from headwise.base.processes import process_count, process_index
from headwise.base.type_checks import checked_types
from headwise.costs.formulas import model as cost
from headwise.errors import ArgumentError, CheckpointError, SpecError
from headwise.models.checkpoints import (
    DTYPES,
    Checkpoint,
    GgufCheckpoint,
    TensorInfo,
    dtype_name,
    has_family,
    model_path,
    open_checkpoint,
    refuse_other_weights,
)
from headwise.models.specs import HOSTED_PREFIX, GroupedSpec
from headwise.runtime.attention.rope import changes_at, follow, rotaries_by_length, warn_of_change
from headwise.runtime.hf.codes import set_codes
from headwise.runtime.hf.models import config_in, model_class, refused, stock_config
from headwise.runtime.quantization.transform_code import read_codes

_DEPTHS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "n_layer", "n_layers", "num_layers")
"""Config fields that hold a number of layers."""


def expected_tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The parameters of the model that a config describes, without allocating them.

    For example ``expected_tensors(open_checkpoint("./model").config)["model.norm.weight"]``.

    Args:
        config: a parsed ``config.json``.

    Returns:
        Shapes by parameter name; of tied parameters only one.

    Raises:
        CheckpointError: transformers cannot build the model.
    """
    return _meta_tensors(config)[0]


def tensors_of(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, TensorInfo]:
    """All tensors of a config's model, in its order, as they are stored in one dtype.

    For example ``tensors_of(open_checkpoint("./model").config, torch.bfloat16)["model.norm.weight"]``.

    Args:
        config: a parsed ``config.json``.
        dtype: the dtype of all tensors.

    Raises:
        CheckpointError: transformers cannot build the model.
    """
    return {name: TensorInfo(shape, dtype) for name, shape in expected_tensors(dict(config)).items()}


def _meta_tensors(config: dict[str, Any]) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """The parameters' shapes, and the names of the parameters that are tied to another."""
    architecture = model_class(config)  # refuses with a shorter message than transformers, which lists 100 classes
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about sizes, which the comparison of shapes reports
            model = architecture._from_config(stock_config(config))
    except Exception as error:  # a size, activation or scaling that only the modules check
        raise refused("config.json", config.get("model_type"), error) from None
    tied = set(model.all_tied_weights_keys)
    named = model.named_parameters(remove_duplicate=False)
    return {name: tuple(p.shape) for name, p in named if name not in tied}, tied


def check_complete(checkpoint: Checkpoint) -> None:
    """Check that a checkpoint has the tensors of the model its config describes, and in its layers no other.

    Tensors beside the layers that the model has no place for, such as BERT's pooler, are left out, with a note.

    For example ``check_complete(open_checkpoint("./model"))``.

    A shape that does not fit, or a tensor that is missing, is thus named before hours of work on the others.

    Args:
        checkpoint: the checkpoint of any model that transformers has.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is not in the model.
    """
    _check_depth(checkpoint)
    # Attention first, by the family's names: building a model of thousands of layers to learn its names takes a
    # minute, which a config with too many layers should not cost.
    if has_family(str(checkpoint.config.get("model_type"))):
        for name, shape in _attention_shapes(checkpoint):
            _check_tensor(checkpoint, name, shape)
    expected, tied = _meta_tensors(checkpoint.config)
    for name, shape in expected.items():
        _check_tensor(checkpoint, name, shape)
    # Old folders store the rotary frequencies, which newer models compute from the config.
    extra = [
        name
        for name in checkpoint.tensors
        if name not in expected and name not in tied and not name.endswith("rotary_emb.inv_freq")
    ]
    rule = f"has no place in the model the config of {checkpoint.path} describes"
    for name in extra:
        if checkpoint.layer_of(name) is not None:  # a layer of another kind than the config says
            raise CheckpointError("tensor", name, rule)
    checkpoint.leave_out(extra, "tensors without a place in the model")  # such as another task's head


def check_values(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose tensors are far too few for the model its config describes.

    For families that have no file in `headwise.models.families`. transformers reports their missing
    tensors
    only after it has built the model and allocated those tensors, and a config can ask for any number of them. The
    tensors' names are not known to headwise, so their elements are counted instead.

    Args:
        checkpoint: the checkpoint to check.

    Raises:
        CheckpointError: the tensors have fewer than half of the model's elements, there are fewer tensors than
            layers, or fewer elements than the experts need.
    """
    _check_depth(checkpoint)
    stored, spec = sum(info.numel for info in checkpoint.tensors.values()), checkpoint.spec
    try:
        expected = cost.weights(spec).total
    except SpecError:  # the feed-forward networks are not known
        expected = cost.parameters(spec)
    if stored < expected / 2:
        rule = f"are fewer than half of the {expected:,} that the config of {checkpoint.path} describes"
        raise CheckpointError("weights", f"{stored:,} numbers", rule)
    for field, value in checkpoint.config.items():
        if "expert" in field and type(value) is int and value * spec.hidden_size > stored:
            rule = f"is more than the {stored:,} numbers of {checkpoint.path} can fill"
            raise CheckpointError(field, value, rule)


def _check_depth(checkpoint: Checkpoint) -> None:
    """Refuse a config with more layers than the checkpoint has tensors.

    Raises:
        CheckpointError: the config has more layers.
    """
    count = len(checkpoint.tensors)
    depths = {"num_hidden_layers": checkpoint.spec.num_layers}
    for field, layers in (depths | {field: checkpoint.config.get(field) for field in _DEPTHS}).items():
        if type(layers) is int and layers > count:
            rule = f"is more than the {count} tensors of {checkpoint.path} can fill"
            raise CheckpointError(field, layers, rule)


def _attention_shapes(checkpoint: Checkpoint) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of every layer's attention tensors; none for a converted folder, whose names differ."""
    if str(checkpoint.config.get("model_type")).startswith(HOSTED_PREFIX):
        return
    family, spec = checkpoint.family, checkpoint.spec
    for cross, layers in ((False, spec.layers), (True, spec.cross_layers)):
        for index, layer in enumerate(layers):
            if isinstance(layer, GroupedSpec):
                yield from family.stored_shapes(index, layer, cross=cross).items()


def _check_tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    if name not in checkpoint.tensors:
        raise CheckpointError("tensor", name, f"is missing from {checkpoint.path}")
    if checkpoint.tensors[name].shape != shape:
        raise CheckpointError(f"{name} shape", checkpoint.tensors[name].shape, f"must be {shape} by the config")


@checked_types
def load(source: str | Path, *, dtype: torch.dtype | str | None = None, device: str | None = None) -> Any:
    """Load a transformers model from any source that has weights.

    For example ``load("./smollm2-half", dtype="bfloat16").generate(**tokenizer("Once", return_tensors="pt"))``.

    Args:
        source: a model folder (converted or not), a ``.gguf``, ``smollm2-135m`` or ``hf://owner/name``.
        dtype: the dtype of the weights in memory, a torch dtype or its name; the stored dtype when None.
        device: the device to load the model on; the CPU when None.

    Returns:
        The model, in evaluation mode.

    Raises:
        ArgumentError: the source or the device does not exist, or the dtype is not known.
        CheckpointError: files are missing, damaged, pickled or quantised, or need code from the folder.
    """
    wanted, place = None if dtype is None else as_dtype(dtype), as_device(device)
    checkpoint = open_checkpoint(model_path(source))
    is_family = has_family(checkpoint.config.get("model_type"))
    if is_family:
        check_complete(checkpoint)
    else:
        refuse_encoder(checkpoint)
        check_values(checkpoint)
    wanted = wanted or checkpoint.dtype
    if isinstance(checkpoint, GgufCheckpoint):
        state = {name: checkpoint.read(name) for name in checkpoint.tensors}
        config = config_in(wanted, checkpoint.config)
        try:
            model, loading = model_class(checkpoint.config).from_pretrained(
                None, config=config, state_dict=state, dtype=wanted, output_loading_info=True
            )
        except Exception as error:  # such as a tensor of another shape
            raise refused("file", str(source), error) from None
        model.name_or_path = str(checkpoint.path)
    else:
        refuse_other_weights(checkpoint.path)
        config = config_in(wanted, checkpoint.config)
        try:
            loader = model_class(checkpoint.config) if is_family else transformers.AutoModelForCausalLM
            model, loading = loader.from_pretrained(
                checkpoint.path,
                config=config,  # without it, transformers reads the file again, unchecked
                dtype=wanted,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except Exception as error:  # such as a generation_config.json that is not JSON
            raise refused("folder", str(source), error) from None
    # For other families only transformers knows which tensors are missing: it may rename or fuse them.
    for name in sorted(set(loading["missing_keys"]) - checkpoint.zeros):
        raise CheckpointError("tensor", name, f"is missing from {checkpoint.path}")
    check_finite(model)
    _check_cache(model)
    if not isinstance(checkpoint, GgufCheckpoint):
        set_codes(model, read_codes(checkpoint.path, checkpoint.spec.num_layers), checkpoint)
    follow_lengths(model)
    model = model.eval()
    return model if device is None else model.to(place)


def follow_lengths(model: Any) -> None:
    """Make rotary frequencies a function of the present text, and warn where a cache cannot follow them.

    For example ``follow_lengths(AutoModel.from_pretrained("./model"))``; `load` calls it.

    Args:
        model: a transformers model; nothing changes where frequencies do not depend on the length.
    """
    if (length := changes_at(model)) is not None:
        for rotary in rotaries_by_length(model):
            follow(rotary, partial(_warn_of_cached, length))


def _warn_of_cached(length: int, first: int) -> None:
    """Warn of new frequencies in a call whose first token has a position above 0, and so a cache."""
    if first:
        warn_of_change(length)


def as_device(device: str | None) -> torch.device:
    """A torch device by its name.

    For example ``as_device(None)`` is ``torch.device("cpu")``.

    Of several processes each has a GPU of its own by the name ``cuda``, as far as there are.

    Args:
        device: the name, such as ``cuda:0``; the CPU when None.

    Raises:
        ArgumentError: torch has no such device on this machine.
    """
    rule = "must be a device that torch has here, such as cpu or cuda"
    if device == "cuda" and process_count() > 1 and torch.cuda.is_available():
        # The rank on this machine, as torchrun gives it. No process touches another's GPU.
        rank = int(os.environ.get("LOCAL_RANK", process_index()))
        device = f"cuda:{rank % torch.cuda.device_count()}"
    try:
        named = torch.device("cpu" if device is None else device)
        torch.empty(0, device=named)
    except (RuntimeError, AssertionError):  # a torch without CUDA asserts
        raise ArgumentError("device", device, rule) from None
    if named.type == "meta":  # its tensors have no values
        raise ArgumentError("device", device, rule)
    return named


def open_decoder(source: str | Path) -> Checkpoint:
    """Open the checkpoint of a text decoder, and check its config before transformers reads it.

    For example ``open_decoder("smollm2-135m").config["model_type"]`` is ``"llama"``.

    Args:
        source: a model folder, ``.gguf`` or other source with weights.

    Raises:
        SpecError: the config is not understood, or the model is no text decoder.
        CheckpointError: files are missing or damaged.
    """
    checkpoint = open_checkpoint(model_path(source))
    refuse_encoder(checkpoint)
    return checkpoint


def refuse_encoder(checkpoint: Checkpoint) -> None:
    """Refuse a model that is no text decoder.

    Raises:
        SpecError: the model is an encoder, or has a decoder with cross-attention.
        CheckpointError: transformers does not accept the config.
    """
    if not checkpoint.spec.is_causal:
        raise SpecError("model_type", checkpoint.spec.model_type, "is an encoder; only decoders can be run")
    if checkpoint.spec.cross_layers:
        raise SpecError(
            "model_type", checkpoint.spec.model_type, "attends to an encoder's output, and not to text alone"
        )
    stock_config(checkpoint.config)


def check_finite(model: Any) -> None:
    """Refuse a model with NaN or infinite weights.

    Args:
        model: a loaded model.

    Raises:
        CheckpointError: a weight is NaN or infinite, in the file or in the dtype it was loaded in.
    """
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            rule = f"holds NaN or infinite values in {dtype_name(parameter.dtype)}"
            raise CheckpointError("tensor", name, rule)


def check_logits(logits: Tensor, model: Any) -> None:
    """Refuse logits from which nothing follows: of NaN, as of activations that overflow, or without a finite largest.

    For example ``check_logits(model(ids).logits, model)``.

    Args:
        logits: ``[…, V]``, or costs in nats that were computed from them.
        model: the model that computed them.

    Raises:
        CheckpointError: the logits are of that kind.
    """
    if not bool(logits.amax(-1).isfinite().all()):
        rule = f"computes NaN or infinite logits in {dtype_name(model.dtype)}, from which nothing follows"
        raise CheckpointError("model", model.name_or_path, rule)


def _check_cache(model: Any) -> None:
    """Refuse a config from which transformers cannot make a cache, even if the model itself can be built.

    The cache reads fields that some models ignore, such as a sliding window or the types of layers.

    Raises:
        CheckpointError: the cache cannot be made.
    """
    if not model.can_generate():
        return
    try:
        DynamicCache(config=model.config)
    except Exception as error:
        raise refused("config.json", model.config.model_type, error) from None


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype by its name.

    For example ``as_dtype("bfloat16")`` is ``torch.bfloat16``.

    Args:
        dtype: a dtype, or a name such as ``float32`` or ``torch.float32``.

    Raises:
        ArgumentError: the name or dtype is no floating dtype that headwise supports.
    """
    for supported in DTYPES.values():
        if dtype in (supported, str(supported), dtype_name(supported)):
            return supported
    raise ArgumentError("dtype", str(dtype), "must be float64, float32, float16 or bfloat16")
