"""The plan of a conversion: what is read, what each layer becomes and how, decided before any weight is read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headwise.checkpoints import Checkpoint
from headwise.conversion.methods import LONGEST, LayerTarget, Method, choose_method
from headwise.conversion.planning.target import Target, convert_spec, refuse_latent
from headwise.conversion.solvers.layer import NORM_EPS, Layer
from headwise.conversion.solvers.metrics import KEY_WEIGHT
from headwise.errors import ArgumentError
from headwise.hf import check_complete
from headwise.specs import HOSTED_PREFIX, GroupedSpec, LatentSpec, ModelSpec, as_latent

Calibration = Literal["text", "statistics"]

_NEEDS_TEXT = ("spread", "sequence", "refine", "refit")
"""Stages that run the model on a text; saved statistics serve the others."""


@dataclass(frozen=True)
class Place:
    """One attention layer of a model.

    Attributes:
        index: the layer's number.
        cross: whether it is the layer's attention to an encoder's output.
    """

    index: int
    cross: bool = False


class LayerSize(NamedTuple):
    """The size of one MLA layer.

    Attributes:
        rank: R, of the latent.
        rotary: P, the width of the rotary key.
        key_weight: the cost of an error of its keys relative to one of its values.
    """

    rank: int
    rotary: int
    key_weight: float = KEY_WEIGHT


@dataclass(frozen=True, kw_only=True, eq=False)
class ConversionPlan:
    """What is read, what each layer becomes, and how.

    Attributes:
        checkpoint: the source.
        after: the converted model.
        method: how its layers are made.
        dtype: of the output.
        stages: those of the method that are carried out.
        mixes_heads: whether key heads are mixed into rotary channels (the stage ``channels``).
        key_weights: of each MLA layer; None where all have the usual one.
        rotary_channels: bool ``[F, K]``, the channels that every MLA layer keeps rotated; None where each layer
            chooses.
    """

    checkpoint: Checkpoint
    after: ModelSpec
    method: Method
    dtype: torch.dtype
    stages: tuple[str, ...] = ()
    mixes_heads: bool = True
    key_weights: tuple[float, ...] | None = None
    rotary_channels: Tensor | None = None

    @property
    def before(self) -> ModelSpec:
        """The source model."""
        return self.checkpoint.spec

    @property
    def is_exact(self) -> bool:
        """Whether the result computes what the source does, beyond rounding."""
        return self.method.is_exact(self.before, self.after)

    @property
    def places(self) -> tuple[Place, ...]:
        """Every attention layer of the model."""
        return tuple(
            Place(index, cross)
            for cross, layers in ((False, self.after.layers), (True, self.after.cross_layers))
            for index in range(len(layers))
        )

    def source_layer(self, place: Place) -> Layer:
        """One layer of the source with its weights, by the layer's own names, in the dtype they are stored in."""
        return read_layer(self.checkpoint, place)

    def layer_target(self, place: Place) -> LayerTarget:
        """What one layer becomes."""
        spec = (self.after.cross_layers if place.cross else self.after.layers)[place.index]
        assert isinstance(spec, GroupedSpec | LatentSpec)
        return LayerTarget(
            spec,
            key_weight=KEY_WEIGHT if self.key_weights is None else self.key_weights[place.index],
            rotary_channels=self.rotary_channels,
            mixes_heads=self.mixes_heads,
            longest=min(LONGEST, self.before.max_position_embeddings or LONGEST),
        )

    def resized(self, sizes: Sequence[LayerSize]) -> ConversionPlan:
        """The plan with another size for each MLA layer."""
        layers = tuple(
            as_latent(layer, size.rank, size.rotary) for layer, size in zip(self.before.layers, sizes, strict=True)
        )
        key_weights = tuple(size.key_weight for size in sizes)
        return replace(self, after=replace(self.after, layers=layers), key_weights=key_weights)

    def sharing(self, rotary_channels: Tensor | None) -> ConversionPlan:
        """The plan with the same rotary channels for all layers."""
        return replace(self, rotary_channels=rotary_channels)


def make_plan(
    checkpoint: Checkpoint,
    target: Target,
    *,
    method: str | None = None,
    dtype: torch.dtype | None = None,
    without: Collection[str] = (),
    calibration: Calibration | None = "text",
) -> ConversionPlan:
    """The plan of a conversion, with every stage that its method has and that it can use.

    Args:
        checkpoint: the source.
        target: what it is to become.
        method: how a user names the method; the default for the target when None.
        dtype: of the output; the source's when None.
        without: stages left out; ``spread`` goes with ``sensitivity``.
        calibration: what layers are solved from beside their weights; None for nothing.

    Raises:
        ArgumentError: the size is outside what a layer has to give, or the method does not go with the target.
        SpecError: a layer is of a kind that is not converted.
        CheckpointError: the checkpoint lacks tensors that its config claims.
    """
    before = checkpoint.spec
    refuse_latent(before)  # a better reason than that its family has no file
    _ = checkpoint.family  # refused by name, where there is none
    after = convert_spec(before, target)
    check_complete(checkpoint)  # before anything is made of the sizes the config claims
    plan = ConversionPlan(
        checkpoint=checkpoint,
        after=after,
        method=choose_method(method, before, after),
        dtype=dtype or checkpoint.dtype,
        mixes_heads="channels" not in without,
    )
    left_out = {*without, *(_NEEDS_TEXT if calibration == "statistics" else ())}
    stages = () if calibration is None or plan.is_exact else tuple(_stages(plan, left_out))
    return replace(plan, stages=stages)


def _stages(plan: ConversionPlan, without: Collection[str]) -> Iterator[str]:
    """The stages of a plan's method that are carried out, in order."""
    # One cache of several layers to spread, and logits that say what comes of it.
    model = plan.before
    is_decoder = model.is_causal and not model.cross_layers
    can_spread = is_decoder and model.num_layers > 1 and "sensitivity" not in without
    has_rotary_keys = any(isinstance(layer, LatentSpec) and layer.qk_rope_head_dim for layer in plan.after.layers)
    for stage in plan.method.stages:
        is_possible = {"spread": can_spread, "channels": has_rotary_keys}.get(stage, True)
        if is_possible and stage not in without:
            yield stage


def read_layer(checkpoint: Checkpoint, place: Place) -> Layer:
    """One layer's attention of a model, by the layer's own names."""
    spec = (checkpoint.spec.cross_layers if place.cross else checkpoint.spec.layers)[place.index]
    assert isinstance(spec, GroupedSpec)
    was_hosted = str(checkpoint.config["model_type"]).startswith(HOSTED_PREFIX)
    state = checkpoint.family.read_attention(checkpoint.read, place.index, spec, cross=place.cross, hosted=was_hosted)
    norm_eps = checkpoint.config.get("rms_norm_eps")
    return Layer(spec, state, norm_eps=NORM_EPS if norm_eps is None else float(norm_eps))


def refuse_inputs(
    plan: ConversionPlan, texts: Sequence[str | Path], statistics: str | Path | None, without: Collection[str]
) -> None:
    """Refuse texts, statistics and left-out stages that do not go with each other or with the method.

    Args:
        plan: the conversion.
        texts: that are calibrated on.
        statistics: the folder in the place of a text.
        without: stages that are left out.

    Raises:
        ArgumentError: they do not go together.
    """
    method = plan.method
    for field, given in (("calibrate", texts[0] if texts else None), ("statistics", statistics)):
        if given is not None and not method.uses_text:
            raise ArgumentError(field, str(given), f"goes with mla and aligned heads, not with {method.name}")
    if statistics is not None and texts:
        raise ArgumentError("statistics", str(statistics), "goes without calibrate: it stands in for a text")
    rule = None
    if statistics is not None:
        rule = "is a stage of calibrate, and goes without statistics"
    elif plan.is_exact:
        rule = "is a stage of calibrate, and nothing is lost at this size"
    elif not method.stages:
        rule = f"is a stage of headwise's own methods, and {method.name} has none"
    elif not texts:
        rule = "is a stage of calibrate, and no text is given"
    if without and rule is not None:
        raise ArgumentError("without", min(without), rule)
    if method.needs_text and statistics is None and not texts:
        raise ArgumentError("calibrate", None, f"is required: {method.name} finds its channels on a text")
