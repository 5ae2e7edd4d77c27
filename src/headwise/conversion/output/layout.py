"""The layout of the folder that a conversion writes: its config, its tensors, and the layer that each belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headwise.conversion.plan import ConversionPlan, Place
from headwise.conversion.solvers.device import CPU
from headwise.conversion.solvers.layer import Layer, grouped_spec
from headwise.errors import CheckpointError
from headwise.models.checkpoints import TensorInfo, dtype_name
from headwise.models.specs import HOSTED_PREFIX, GroupedSpec, LatentSpec, hosted_attention, text_part
from headwise.runtime.hf import model_class, stock_config, tensors_of

_OF_A_LOADED_MODEL = ("_attn_implementation", "_commit_hash", "_experts_implementation", "_name_or_path")
"""The beginnings of a config's fields that say where a model came from and how it was run, and not what it is."""

FORMAT = 1
"""The version of the ``headwise`` block in a converted ``config.json``."""


@dataclass(frozen=True, eq=False)
class OutputLayout:
    """The folder of a plan's result, in its own family's format or, where that cannot hold it, in headwise's.

    Attributes:
        plan: the plan of the conversion.
    """

    plan: ConversionPlan

    @cached_property
    def is_hosted(self) -> bool:
        """Whether headwise's layers replace the family's: for MLA, and in families without a number of KV heads."""
        after, family = self.plan.after, self.plan.checkpoint.family
        shares_heads = (isinstance(own, GroupedSpec) and own.num_kv_heads < own.num_heads for own in after.layers)
        return after.mechanism == "mla" or (not family.stock_kv_heads and any(shares_heads))

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors of the folder, in the folder's order."""
        return {stored: info for stored, (_, info) in self._stored.items()}

    def read_name(self, stored: str) -> str:
        """The source's name of a tensor that is carried over, by its name in the folder."""
        return self._stored[stored][0]

    @cached_property
    def _stored(self) -> dict[str, tuple[str, TensorInfo]]:
        """The source's name, the shape and the dtype of each tensor, by its name in the folder.

        A stock folder stores experts one by one where the source does, as engines ask for them.
        """
        whole = tensors_of(self.config(), self.plan.dtype)
        if self.is_hosted:  # whose class transformers joins nothing for
            return {name: (name, info) for name, info in whole.items()}
        stored: dict[str, tuple[str, TensorInfo]] = {}
        for name, info in whole.items():
            for part, own in self.plan.checkpoint.joined.get(name, {name: info}).items():
                written = part
                for today, former in self.plan.checkpoint.family.written.items():
                    written = written.replace(today, former)
                stored[written] = (part, TensorInfo(own.shape, self.plan.dtype))
        return stored

    @cached_property
    def owner(self) -> dict[str, Place]:
        """The attention layer of each tensor that belongs to one, by the tensor's name, in the folder's order."""
        owner = {name: place for place in self.plan.places for name in self._names(place)}
        return {name: owner[name] for name in self.tensors if name in owner}

    def config(self, channels: Mapping[int, list[int]] | None = None) -> dict[str, Any]:
        """The folder's ``config.json``.

        Args:
            channels: the model frequency of each rotary pair, by MLA layer; zeros stand for layers that are not
                solved yet.
        """
        checkpoint, after = self.plan.checkpoint, self.plan.after
        family = checkpoint.family
        config = {key: value for key, value in checkpoint.config.items() if not key.startswith(_OF_A_LOADED_MODEL)}
        config.pop("torch_dtype", None)
        config["dtype"] = dtype_name(self.plan.dtype)
        config["model_type"] = family.model_type
        config.pop("headwise", None)
        if self.is_hosted:
            config["model_type"] = HOSTED_PREFIX + family.model_type
            config["headwise"] = {"format": FORMAT, "attention": hosted_attention(after)}
            if after.cross_layers:
                config["headwise"]["cross_attention"] = hosted_attention(after, cross=True)
            pairs = [layer.qk_rope_head_dim // 2 for layer in after.layers if isinstance(layer, LatentSpec)]
            if pairs:
                frequencies = channels or {}
                config["headwise"]["rope_channels"] = [
                    frequencies.get(index, [0] * count) for index, count in enumerate(pairs)
                ]
        elif family.stock_kv_heads:
            heads = {"num_key_value_heads": grouped_spec(after.layers[0]).num_kv_heads}
            is_nested = text_part(config) is not config
            config |= {"text_config": config["text_config"] | heads} if is_nested else heads
        config["architectures"] = [model_class(config).__name__]
        config = _with_one_rope(config)
        return _with_former_rope_keys(config) if family.former_rope and not self.is_hosted else config

    def stored(self, place: Place, layer: Layer) -> dict[str, Tensor]:
        """A converted layer's tensors by the folder's names, in its dtype."""
        family = self.plan.checkpoint.family
        if isinstance(layer.spec, GroupedSpec) and not self.is_hosted:
            tensors = family.write_attention(layer.state, place.index, layer.spec, cross=place.cross)
        else:
            prefix = family.place(place.index, cross=place.cross, hosted=True)
            tensors = {f"{prefix}.{name}": tensor for name, tensor in layer.state.items()}
        return {name: self.cast(name, tensor) for name, tensor in tensors.items()}

    def cast(self, name: str, tensor: Tensor) -> Tensor:
        """Cast a tensor to the folder's dtype, on the CPU, whose range may be smaller than the source's.

        Raises:
            CheckpointError: a number does not fit, or is NaN or infinite.
        """
        dtype = self.plan.dtype
        cast = tensor.to(CPU, dtype)
        if not bool(torch.isfinite(cast).all()):
            rule = f"does not fit in {dtype_name(dtype)}; choose a wider dtype"
            if not bool(torch.isfinite(tensor).all()):  # fits no dtype
                rule = f"came out {'NaN' if bool(tensor.isnan().any()) else 'infinite'}"
            raise CheckpointError("tensor", name, rule)
        return cast

    def _names(self, place: Place) -> list[str]:
        """The folder's names of the tensors of one layer's attention."""
        family = self.plan.checkpoint.family
        if self.is_hosted:
            prefix = family.place(place.index, cross=place.cross, hosted=True) + "."
            return [name for name in self.tensors if name.startswith(prefix)]
        spec = grouped_spec(self.plan.layer_target(place).spec)
        return list(family.stored_shapes(place.index, spec, cross=place.cross))


def _with_one_rope(config: dict[str, Any]) -> dict[str, Any]:
    """A config without ``rope_scaling`` beside ``rope_parameters``, of which engines would read one or the other."""
    if text_part(config) is not config:
        return {**config, "text_config": _with_one_rope(config["text_config"])}
    if not (config.get("rope_parameters") and config.get("rope_scaling")):
        return config
    one = {"rope_parameters": stock_config(config).rope_parameters}
    return {name: value for name, value in {**config, **one}.items() if name != "rope_scaling"}


def _with_former_rope_keys(config: dict[str, Any]) -> dict[str, Any]:
    """A stock config with RoPE as transformers 4 wrote it besides, where transformers 5 alone reads it so far.

    MLX-LM reads these keys only, and takes a base of 10,000 where they are missing.
    """
    if not config.get("rope_parameters"):
        return config
    rope = stock_config(config).rope_parameters
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    former = {"rope_theta": rope["rope_theta"], "rope_scaling": None if rope["rope_type"] == "default" else scaling}
    return {**former, **config, **former, "rope_parameters": rope}
