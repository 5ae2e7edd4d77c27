"""The layout of the folder that a conversion writes: its config, its tensors, and which layer each belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints import TensorInfo, dtype_name
from headwise.conversion.planning.plan import ConversionPlan, Place
from headwise.conversion.solvers.layer import Layer
from headwise.errors import CheckpointError
from headwise.hf import expected_tensors, model_class
from headwise.specs import HOSTED_PREFIX, AttentionSpec, GroupedSpec, LatentSpec, hosted_attention

FORMAT = 1
"""Version of the ``headwise`` block in a converted ``config.json``."""


@dataclass(frozen=True, eq=False)
class OutputLayout:
    """The folder of a plan's result in its own family's format, or in headwise's where that has no place for it.

    Attributes:
        plan: the conversion.
    """

    plan: ConversionPlan

    @cached_property
    def is_hosted(self) -> bool:
        """Whether headwise's layers stand in the family's model: for MLA, and where it has no number of KV heads."""
        after, family = self.plan.after, self.plan.checkpoint.family
        return after.mechanism == "mla" or (
            not family.stock_kv_heads and any(_is_shared(layer) for layer in after.layers)
        )

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor of the folder, in its order."""
        return {name: TensorInfo(shape, self.plan.dtype) for name, shape in expected_tensors(self.config()).items()}

    @cached_property
    def owner(self) -> dict[str, Place]:
        """The attention layer of each tensor that belongs to one, in the folder's order."""
        owner = {name: place for place in self.plan.places for name in self._names(place)}
        return {name: owner[name] for name in self.tensors if name in owner}

    def config(self, channels: Mapping[int, list[int]] | None = None) -> dict[str, Any]:
        """The folder's ``config.json``.

        Args:
            channels: the model frequency of each rotary pair, of each MLA layer; zeros where it is not known yet.
        """
        checkpoint, after = self.plan.checkpoint, self.plan.after
        family = checkpoint.family
        config = {key: value for key, value in checkpoint.config.items() if not key.startswith("_")}
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
                known = channels or {}
                config["headwise"]["rope_channels"] = [known.get(i, [0] * count) for i, count in enumerate(pairs)]
        elif family.stock_kv_heads:
            layer = after.layers[0]
            assert isinstance(layer, GroupedSpec)
            config["num_key_value_heads"] = layer.num_kv_heads
        config["architectures"] = [model_class(config).__name__]
        return config

    def stored(self, place: Place, layer: Layer) -> dict[str, Tensor]:
        """A converted layer's tensors by the folder's names, in its dtype."""
        family = self.plan.checkpoint.family
        if isinstance(layer.spec, GroupedSpec) and not self.is_hosted:
            named = family.write_attention(layer.state, place.index, layer.spec, cross=place.cross)
        else:
            prefix = family.place(place.index, cross=place.cross, hosted=True)
            named = {f"{prefix}.{name}": tensor for name, tensor in layer.state.items()}
        return {name: self.cast(name, tensor) for name, tensor in named.items()}

    def cast(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor in the folder's dtype, whose range may be smaller than the source's.

        Raises:
            CheckpointError: a number does not fit.
        """
        dtype = self.plan.dtype
        cast = tensor.to(dtype)
        if not bool(torch.isfinite(cast).all()):
            rule = f"does not fit in {dtype_name(dtype)}; choose a wider dtype"
            if not bool(torch.isfinite(tensor).all()):  # no dtype would do
                rule = f"came out {'NaN' if bool(tensor.isnan().any()) else 'infinite'}"
            raise CheckpointError("tensor", name, rule)
        return cast

    def _names(self, place: Place) -> list[str]:
        """The folder's names of one layer's attention."""
        family = self.plan.checkpoint.family
        if self.is_hosted:
            prefix = family.place(place.index, cross=place.cross, hosted=True) + "."
            return [name for name in self.tensors if name.startswith(prefix)]
        spec = self.plan.layer_target(place).spec
        assert isinstance(spec, GroupedSpec)
        return list(family.stored_shapes(place.index, spec, cross=place.cross))


def _is_shared(layer: AttentionSpec) -> bool:
    return isinstance(layer, GroupedSpec) and layer.num_kv_heads < layer.num_heads
