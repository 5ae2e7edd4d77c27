"""One conversion's plan: what is read, what each layer becomes, what is written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints import Checkpoint, TensorInfo, dtype_name
from headwise.conversion.calibration.streams import STAGES
from headwise.conversion.clock import Clock
from headwise.conversion.planning.target import Target, plan_layers, refuse_latent
from headwise.conversion.solvers.grouped import METHODS, Method
from headwise.conversion.solvers.heads import Layer
from headwise.conversion.solvers.published import PUBLISHED, is_published, refuse_published
from headwise.errors import ArgumentError, CheckpointError
from headwise.hf import check_complete, expected_tensors, model_class
from headwise.specs import (
    HOSTED_PREFIX,
    AttentionSpec,
    GroupedSpec,
    LatentSpec,
    ModelSpec,
    as_latent,
    hosted_attention,
    rotary_width,
)

POOLINGS = ("mean", "first_head")
"""Ways to share heads that no text goes into."""

LONGEST = 2048
"""Without a text: the distance up to which tokens are taken to be attended to."""

FORMAT = 1
"""Version of the ``headwise`` block in a converted ``config.json``."""


class Job:
    """One conversion's plan: what is read, what each layer becomes, what is written.

    Args:
        checkpoint: the source.
        target: what it is to be.
        dtype: of the output; the source's when None.
        method: see `headwise.convert`.
        mixes: whether heads are mixed into rotary channels: the stage ``channels``.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Target,
        dtype: torch.dtype | None,
        method: str | None = None,
        *,
        mixes: bool = True,
    ) -> None:
        self.checkpoint = checkpoint
        self.before = checkpoint.spec
        refuse_latent(self.before)  # a better reason than its family's having no file
        self.family = checkpoint.family
        self.after = plan_layers(self.before, target)
        # A family whose own class has one number of heads is given our layer where that number changes.
        self.hosted = self.after.mechanism == "mla" or (
            not self.family.stock_kv_heads and any(_is_shared(layer) for layer in self.after.layers)
        )
        # Before anything is made of the sizes the config claims.
        check_complete(checkpoint)
        self.published, self.merging = _methods(method)
        if self.published is not None:
            if self.after.mechanism != "mla":
                raise ArgumentError("method", method, "goes with mla")
            refuse_published(self.published, self.before)
        elif method is not None and self.method not in METHODS:
            raise ArgumentError("method", method, "says how heads come to be shared, and none do here")
        self.dtype = dtype or checkpoint.dtype
        self.clock = Clock()
        self.key_weights: tuple[float, ...] | None = None  # of each layer, where they are not all the same
        self.kept: Tensor | None = None  # rotary channels that every layer keeps, where all are to keep the same
        self.mixes = mixes
        self._lay_out()

    def _lay_out(self) -> None:
        self.channels = [
            [0] * (layer.qk_rope_head_dim // 2) for layer in self.after.layers if isinstance(layer, LatentSpec)
        ]
        self.tensors = {
            name: TensorInfo(shape, self.dtype) for name, shape in expected_tensors(self.config()).items()
        }

    def resize(self, sizes: Sequence[tuple[int, int]], key_weights: Sequence[float]) -> None:
        """Give each MLA layer its own R and P, and its keys their weight beside its values."""
        layers = tuple(as_latent(layer, *size) for layer, size in zip(self.before.layers, sizes, strict=True))
        self.after, self.key_weights = replace(self.after, layers=layers), tuple(key_weights)
        self._lay_out()

    @property
    def method(self) -> str:
        """How the new heads are made."""
        if self.after.mechanism == "mla":
            return self.published or "headwise"
        old, new = (_kv_heads(model) for model in (self.before, self.after))
        return "copy" if new == old else "repeat" if new > old else self.merging

    def refuse_inputs(
        self, texts: Sequence[str | Path], statistics: str | Path | None, without: Collection[str]
    ) -> None:
        """Refuse texts, statistics and stages that do not go with each other or with the method.

        Raises:
            ArgumentError: they do not.
        """
        for field, given in (("calibrate", texts[0] if texts else None), ("statistics", statistics)):
            if given is not None and self.method in POOLINGS:
                raise ArgumentError(field, str(given), f"goes with mla and aligned heads, not with {self.method}")
        if statistics is not None and texts:
            raise ArgumentError("statistics", str(statistics), "goes without calibrate: it is in the place of a text")
        rule = None
        if statistics is not None:
            rule = "is a stage of calibrate, and goes without statistics"
        elif self.published or self.method in POOLINGS:
            rule = f"is a stage of headwise's own, and {self.method} has none"
        elif self.is_lossless:
            rule = "is a stage of calibrate, and nothing is lost at this size"
        elif not texts:
            rule = "is a stage of calibrate, and no text is given"
        if without and rule is not None:
            raise ArgumentError("without", min(without), rule)
        if self.published and self.published != "mha2mla" and statistics is None and not texts:
            raise ArgumentError("calibrate", None, f"is required: {self.method} finds its channels on a text")

    def stages(self, statistics: str | Path | None, without: Collection[str]) -> list[str]:
        """Those of `STAGES` that are done.

        Published methods have none, what loses nothing needs none, and some need a text that goes through the model.
        """
        if self.published or self.is_lossless:
            return []
        left_out = {*without}
        if statistics is not None:
            left_out |= {*STAGES} - {"sensitivity", "channels"}
        if not self._can_spread or "sensitivity" in without:
            left_out.add("spread")
        if not any(self.channels):
            left_out.add("channels")
        return [stage for stage in STAGES if stage not in left_out]

    @property
    def _can_spread(self) -> bool:
        """Whether there is a cache of several layers to spread, and logits that say what comes of it."""
        model = self.before
        is_decoder = model.is_causal and not model.cross_layers
        return self.after.mechanism == "mla" and is_decoder and model.num_layers > 1

    @property
    def is_lossless(self) -> bool:
        """Whether the result computes what the source does, beyond rounding."""
        if self.after.mechanism != "mla":
            return self.method not in METHODS
        if self.published:
            return False  # it is done as it was published, whatever there is to lose
        return all(
            new.qk_rope_head_dim == rotary_width(old)
            # What is not rotated is made of E inputs and a constant, however many numbers it is.
            and new.kv_lora_rank
            >= min(
                old.num_kv_heads * (old.head_dim + old.value_dim) - rotary_width(old),
                old.hidden_size + ("kv_a_proj_with_mqa" in new.bias),
            )
            for old, new in zip(
                (*self.before.layers, *self.before.cross_layers),
                (*self.after.layers, *self.after.cross_layers),
                strict=True,
            )
            if isinstance(old, GroupedSpec) and isinstance(new, LatentSpec)
        )

    @property
    def longest(self) -> int:
        """Without a text, the longest distance that counts, in tokens."""
        return min(LONGEST, self.before.max_position_embeddings or LONGEST)

    def config(self) -> dict[str, Any]:
        """The output's ``config.json``."""
        config = {key: value for key, value in self.checkpoint.config.items() if not key.startswith("_")}
        config.pop("torch_dtype", None)
        config["dtype"] = dtype_name(self.dtype)
        config["model_type"] = self.family.model_type
        config.pop("headwise", None)
        if self.hosted:
            config["model_type"] = HOSTED_PREFIX + self.family.model_type
            config["headwise"] = {"format": FORMAT, "attention": hosted_attention(self.after)}
            if self.after.cross_layers:
                config["headwise"]["cross_attention"] = hosted_attention(self.after, cross=True)
            if self.channels:
                config["headwise"]["rope_channels"] = self.channels
        elif self.family.stock_kv_heads:
            config["num_key_value_heads"] = _kv_heads(self.after)
        config["architectures"] = [model_class(config).__name__]
        return config

    def cast(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor in the output's dtype, whose range may be smaller than the source's."""
        cast = tensor.to(self.dtype)
        if not bool(torch.isfinite(cast).all()):
            rule = f"does not fit in {dtype_name(self.dtype)}; choose a wider dtype"
            if not bool(torch.isfinite(tensor).all()):  # no dtype would do
                rule = f"came out {'NaN' if bool(tensor.isnan().any()) else 'infinite'}"
            raise CheckpointError("tensor", name, rule)
        return cast

    def note_channels(self, index: int, channels: list[int]) -> None:
        """The model frequency of each rotary pair of a layer, for the output's config."""
        if self.channels:
            self.channels[index] = channels

    def stored(self, index: int, layer: Layer, *, cross: bool = False) -> dict[str, Tensor]:
        """A converted layer's tensors by the output's names, in its dtype."""
        if isinstance(layer.spec, GroupedSpec) and not self.hosted:
            named = self.family.write_attention(layer.state, index, layer.spec, cross=cross)
        else:
            prefix = self.family.place(index, cross=cross, hosted=True)
            named = {f"{prefix}.{name}": tensor for name, tensor in layer.state.items()}
        return {name: self.cast(name, tensor) for name, tensor in named.items()}

    def names(self, index: int, *, cross: bool) -> list[str]:
        """The output's names of a layer's attention."""
        if self.hosted:
            prefix = self.family.place(index, cross=cross, hosted=True) + "."
            return [name for name in self.tensors if name.startswith(prefix)]
        spec = (self.after.cross_layers if cross else self.after.layers)[index]
        assert isinstance(spec, GroupedSpec)
        return list(self.family.stored_shapes(index, spec, cross=cross))


def _methods(asked: str | None) -> tuple[str | None, Method]:
    """The published method for mla that was asked for, if it is one, and the way to share heads."""
    if asked is None or is_published(asked):
        return asked, METHODS[0]
    if asked not in METHODS:
        raise ArgumentError("method", asked, f"must be one of {', '.join(METHODS)}; or for mla {PUBLISHED}")
    return None, asked


def _is_shared(layer: AttentionSpec) -> bool:
    return isinstance(layer, GroupedSpec) and layer.num_kv_heads < layer.num_heads


def _kv_heads(model: ModelSpec) -> int:
    layer = model.layers[0]
    assert isinstance(layer, GroupedSpec)
    return layer.num_kv_heads
