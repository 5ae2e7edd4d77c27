"""Check by names and shapes, before a tensor is read, that a checkpoint fills the model its config describes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from headwise.costs.formulas import model as cost
from headwise.errors import CheckpointError, SpecError
from headwise.models.checkpoints import Checkpoint, TensorInfo, has_family
from headwise.models.specs import HOSTED_PREFIX, GroupedSpec
from headwise.runtime.hf.models import model_class, refused, stock_config

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
