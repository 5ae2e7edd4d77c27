"""Whether a checkpoint's tensors are those of the model its config describes, before anything is read."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from headwise.checkpoints import Checkpoint
from headwise.cost import model as cost
from headwise.errors import CheckpointError, SpecError
from headwise.hf.config import model_class, refused, stock_config
from headwise.specs import HOSTED_PREFIX, GroupedSpec

_DEPTHS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "n_layer", "n_layers", "num_layers")
"""Fields of configs that say how many layers are built."""


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
    _check_depth(checkpoint)
    # By name first: thousands of layers take a minute to build, and those that no tensor fills need not be.
    for name, shape in _attention_shapes(checkpoint):
        _check_tensor(checkpoint, name, shape)
    expected, tied = _meta_tensors(checkpoint.config)
    for name, shape in expected.items():
        _check_tensor(checkpoint, name, shape)
    for name in checkpoint.tensors:
        # Old folders store the frequencies, which the config gives anyway.
        if name not in expected and name not in tied and not name.endswith("rotary_emb.inv_freq"):
            rule = f"has no place in the model the config of {checkpoint.path} describes"
            raise CheckpointError("tensor", name, rule)


def check_values(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint of a family without a file here that cannot fill the model its config describes.

    transformers finds which tensors are missing once it has built the model, and made the missing ones: their number
    is what the config says, and nothing else bounds it. Their names are its own business, so numbers are counted.

    Raises:
        CheckpointError: the tensors have fewer than half of the numbers, or fewer than there are layers or experts.
    """
    _check_depth(checkpoint)
    stored, spec = sum(info.numel for info in checkpoint.tensors.values()), checkpoint.spec
    try:
        expected = cost.weights(spec).total
    except SpecError:  # what stands around the attention is not known
        expected = cost.parameters(spec)
    if stored < expected / 2:
        rule = f"are fewer than half of the {expected:,} that the config of {checkpoint.path} describes"
        raise CheckpointError("weights", f"{stored:,} numbers", rule)
    for field, value in checkpoint.config.items():
        if "expert" in field and type(value) is int and value * spec.hidden_size > stored:
            rule = f"is more than the {stored:,} numbers of {checkpoint.path} can fill"
            raise CheckpointError(field, value, rule)


def _check_depth(checkpoint: Checkpoint) -> None:
    """Refuse more layers than there are tensors."""
    count = len(checkpoint.tensors)
    depths = {"num_hidden_layers": checkpoint.spec.num_layers}
    for field, layers in (depths | {field: checkpoint.config.get(field) for field in _DEPTHS}).items():
        if type(layers) is int and layers > count:
            rule = f"is more than the {count} tensors of {checkpoint.path} can fill"
            raise CheckpointError(field, layers, rule)


def _attention_shapes(checkpoint: Checkpoint) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of every layer's attention in a family's own folders; a converted one's are its own."""
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
