"""The plan of a conversion: source, target, method and stages, decided before any weight is read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from headwise.base.options import GROUPED_STAGES, SPREAD_BELOW, STAGES, ConvertOptions
from headwise.conversion.codes import whole_shares
from headwise.conversion.methods import Method, choose_method
from headwise.conversion.solvers.device import CPU, to_device
from headwise.conversion.solvers.layer import (
    KEY_WEIGHT,
    LONGEST,
    NORM_EPS,
    Layer,
    LayerTarget,
    grouped_spec,
    latent_spec,
)
from headwise.costs.formulas import formulas
from headwise.costs.formulas.target import Target, code_bytes, convert_spec, refuse_codes, refuse_latent
from headwise.errors import ArgumentError
from headwise.models.checkpoints import Checkpoint
from headwise.models.specs import (
    HOSTED_PREFIX,
    AttentionSpec,
    GroupedSpec,
    LatentSpec,
    ModelSpec,
    as_latent,
    as_normed,
    split_in_blocks,
)
from headwise.runtime.hf import check_complete, stock_config

Calibration = Literal["text", "statistics"]

ENOUGH_BITS = 4.5
"""The bits for each value of the source's cache above which ranks are left as they are."""

CONVERSION = 3
"""The number of the way of converting, part of a run's identity; it rises when equal options come to convert
otherwise, so that kept work of the old way is not taken for that of the new one."""

_FROM_STATISTICS = ("sensitivity", "channels")
"""The stages that can use saved statistics; the others need a text, and a model that runs on it."""


@dataclass(frozen=True)
class Place:
    """The place of one attention layer in a model.

    Attributes:
        index: the layer's number.
        cross: whether it is the layer's cross-attention.
    """

    index: int
    cross: bool = False


class LayerSize(NamedTuple):
    """The size of one MLA layer.

    Attributes:
        rank: the width R of the latent.
        rotary: the width P of the rotary key.
        key_weight: the cost of an error of its keys relative to one of its values.
        token_bytes: the bytes of a token's codes; None for a cache without codes.
    """

    rank: int
    rotary: int
    key_weight: float = KEY_WEIGHT
    token_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ConversionPlan:
    """The source, the converted model, and the method that converts its layers.

    Attributes:
        checkpoint: the source.
        after: the converted model's spec.
        method: the method that converts each layer.
        dtype: the dtype of the output.
        stages: the method's stages that are carried out.
        mixes_heads: whether key heads are mixed into rotary channels (the stage ``channels``).
        key_weights: the key weight of each MLA layer (`LayerSize`); None if all have the usual one.
        rotary_channels: the channels that keep their rotation in every MLA layer, bool ``[F, K]``; None if each layer
            chooses its own.
        token_bytes: the bytes of a token's codes in each layer's cache; None for a cache without codes.
        bits: the bits of a value on average, where the user sets them; None where sizes and bits are chosen together.
        device: the device that the source is run on and its layers are solved on.
        bias_free: whether MLA layers have no biases, and a norm on a latent of which one channel is a constant.
    """

    checkpoint: Checkpoint
    after: ModelSpec
    method: Method
    dtype: torch.dtype
    stages: tuple[str, ...] = ()
    mixes_heads: bool = True
    key_weights: tuple[float, ...] | None = None
    rotary_channels: Tensor | None = None
    token_bytes: tuple[int, ...] | None = None
    bits: float | None = None
    device: torch.device = CPU
    bias_free: bool = False

    @property
    def before(self) -> ModelSpec:
        """The source model's spec."""
        return self.checkpoint.spec

    @property
    def is_exact(self) -> bool:
        """Whether the result computes what the source computes, apart from rounding."""
        return self.token_bytes is None and not self.bias_free and self.method.is_exact(self.before, self.after)

    @property
    def spends_bytes(self) -> bool:
        """Whether ranks, rotary widths and bits are chosen together, for a number of bytes.

        With `ENOUGH_BITS` for each of the source's values, no smaller rank is worth what it loses.
        """
        if self.token_bytes is None or self.bits is not None or "spread" not in self.method.stages:
            return False
        values = [formulas(layer).cache_values(layer) for layer in self.before.layers]
        return any(8 * count < ENOUGH_BITS * own for count, own in zip(self.token_bytes, values, strict=True))

    @property
    def possible_stages(self) -> tuple[str, ...]:
        """The stages of the method; those that make up for codes where the method has none."""
        return self.method.stages or (GROUPED_STAGES if self.token_bytes is not None else ())

    @property
    def code_bytes(self) -> int | None:
        """Cache bytes a token, all layers, of a cache that is stored in codes; None without codes."""
        return None if self.token_bytes is None else sum(self.token_bytes)

    @property
    def places(self) -> tuple[Place, ...]:
        """The places of all attention layers, cross-attention last."""
        return tuple(
            Place(index, cross)
            for cross, layers in ((False, self.after.layers), (True, self.after.cross_layers))
            for index in range(len(layers))
        )

    def layer_target(self, place: Place) -> LayerTarget:
        """The target of one layer."""
        spec = (self.after.cross_layers if place.cross else self.after.layers)[place.index]
        assert isinstance(spec, GroupedSpec | LatentSpec)
        if self.bias_free:
            spec = latent_spec(spec)
            spec = as_latent(self.before.layers[place.index], spec.kv_lora_rank - 1, spec.qk_rope_head_dim)
        key_weight = KEY_WEIGHT if self.key_weights is None else self.key_weights[place.index]
        longest = min(LONGEST, self.before.max_position_embeddings or LONGEST)
        return LayerTarget(spec, key_weight, self.rotary_channels, self.mixes_heads, longest)

    def resized(self, sizes: Sequence[LayerSize]) -> ConversionPlan:
        """The plan with another size for each MLA layer."""
        layers = tuple(
            as_latent(layer, size.rank, size.rotary) for layer, size in zip(self.before.layers, sizes, strict=True)
        )
        key_weights = tuple(size.key_weight for size in sizes)
        after = replace(self.after, layers=layers)
        counts = tuple(size.token_bytes for size in sizes if size.token_bytes is not None)
        if self.bits is not None:
            counts = tuple(_code_bytes(self.bits, size.rank + size.rotary) for size in sizes)
        return replace(self, after=after, key_weights=key_weights, token_bytes=counts or None)


def make_plan(
    checkpoint: Checkpoint,
    target: Target,
    *,
    method: str | None = None,
    dtype: torch.dtype | None = None,
    without: Collection[str] = (),
    calibration: Calibration | None = "text",
    device: torch.device = CPU,
    bias_free: bool = False,
) -> ConversionPlan:
    """Plan a conversion with all stages that its method has and that apply.

    Args:
        checkpoint: the source.
        target: the mechanism and size to convert to.
        method: the user's spelling of the method; the default for the target when None.
        dtype: the dtype of the output; the source's when None.
        without: the stages to leave out; without ``sensitivity``, ``spread`` is left out too.
        calibration: the kind of evidence that layers are solved from; None for weights alone.
        device: the device that the source is run on and its layers are solved on.
        bias_free: whether MLA layers have no biases; see `ConversionPlan`.

    Raises:
        ArgumentError: a layer cannot have the size, or the method does not go with the target.
        SpecError: a layer is of a kind that is not converted.
        CheckpointError: the checkpoint lacks tensors that its config names.
    """
    before = checkpoint.spec
    refuse_latent(before)  # first: this reason is clearer than that the family has no file
    _ = checkpoint.family  # refuses a family without a file by name
    after = convert_spec(before, target)
    if target.has_constant and after.mechanism == "mla":
        pairs = zip(before.layers, after.layers, strict=True)
        after = replace(after, layers=tuple(_with_constant(*pair, target, bias_free) for pair in pairs))
    check_complete(checkpoint)  # before anything as large as the config claims is built
    plan = ConversionPlan(
        checkpoint=checkpoint,
        after=after,
        method=choose_method(method, before, after),
        dtype=dtype or checkpoint.dtype,
        mixes_heads="channels" not in without,
        device=device,
        bias_free=bias_free,
    )
    if target.is_coded:
        refuse_codes(after)
        plan = replace(plan, token_bytes=_shares(before, after, target), bits=target.bits)
    needs_text = set(STAGES) - set(_FROM_STATISTICS)
    left_out = {*without, *(needs_text if calibration == "statistics" else ())}
    stages = () if calibration is None or plan.is_exact else tuple(_stages(plan, left_out, target.spreads))
    return replace(plan, stages=stages)


def _with_constant(source: AttentionSpec, layer: AttentionSpec, target: Target, bias_free: bool) -> LatentSpec:
    """The spec of a layer whose latent gets a constant channel, here or, unless it is without biases, later.

    Of a budget, the rotary key gets its usual share, up to each frequency of a head once: plain RoPE has no more.
    Both are multiples of a block where the target asks for it, and the budget is large enough.

    Raises:
        ArgumentError: the latent has no channel besides the constant.
    """
    rank, rotary = latent_spec(layer).kv_lora_rank, latent_spec(layer).qk_rope_head_dim
    if target.kv_budget is not None and source.rope is not None:
        rank, rotary = rank + max(rotary - source.rope.dim, 0), min(rotary, source.rope.dim)
        if target.block > 1:
            rank, rotary = split_in_blocks(grouped_spec(source), rank + rotary, target.block) or (rank, rotary)
    if rank < 2:
        raise ArgumentError("kv_lora_rank", rank, "must be at least 2: one channel of the latent is a constant")
    solved = as_latent(source, rank - 1, rotary)
    return as_normed(solved) if bias_free else solved


def _shares(before: ModelSpec, after: ModelSpec, target: Target) -> tuple[int, ...]:
    """The bytes a token of each layer's codes in the even allocation, before ranks are allocated to layers."""
    shares: list[float] = []
    for old, new in zip(before.layers, after.layers, strict=True):
        values = formulas(new).cache_values(new)
        if target.bits is not None:
            shares.append(_code_bytes(target.bits, values))
        else:
            assert target.kv_bytes is not None
            share = code_bytes(old, target.kv_bytes)
            if share < _code_bytes(1, values):
                rule = f"leaves less than a bit for each of {values} values that a layer caches"
                raise ArgumentError("kv_bytes", target.kv_bytes, rule)
            shares.append(min(share, _code_bytes(8, values)))
    return whole_shares(shares, cast(Sequence[GroupedSpec | LatentSpec], after.layers))


def _code_bytes(bits: float, values: int) -> int:
    """The bytes of codes of so many bits on average, with at least a bit for each value, and a byte for the gains."""
    return max(int(bits * values / 8), -(-values // 8)) + 1


def _stages(plan: ConversionPlan, without: Collection[str], spread: bool) -> Iterator[str]:
    """The stages of a plan's method that are carried out, in order."""
    # Spreading needs several layers that share the cache, and logits to measure the result by.
    model = plan.before
    is_decoder = model.is_causal and not model.cross_layers
    is_whole = plan.method.is_exact(model, plan.after) and not plan.spends_bytes  # nothing to spread
    before, after = (sum(formulas(layer).cache_values(layer) for layer in one.layers) for one in (model, plan.after))
    is_worth_it = spread or plan.spends_bytes or after < SPREAD_BELOW * before
    can_spread = is_decoder and model.num_layers > 1 and "sensitivity" not in without and not is_whole and is_worth_it
    has_fit = not {"refine", "refit"} <= {*without}
    has_rotary_keys = any(isinstance(layer, LatentSpec) and layer.qk_rope_head_dim for layer in plan.after.layers)
    is_possible = {
        "recall": is_decoder,
        "starts": is_decoder and has_fit,
        "spread": can_spread,
        "channels": has_rotary_keys,
    }
    for stage in plan.possible_stages:
        if is_possible.get(stage, True) and stage not in without:
            yield stage


def read_layer(checkpoint: Checkpoint, place: Place) -> Layer:
    """Read one attention layer of a model, by the layer's own names, in its stored dtype, to the block's device."""
    spec = grouped_spec((checkpoint.spec.cross_layers if place.cross else checkpoint.spec.layers)[place.index])
    was_hosted = str(checkpoint.config["model_type"]).startswith(HOSTED_PREFIX)
    state = checkpoint.family.read_attention(checkpoint.read, place.index, spec, cross=place.cross, hosted=was_hosted)
    state = {name: to_device(tensor) for name, tensor in state.items()}
    config = stock_config(checkpoint.config).get_text_config()
    return Layer(spec, state, norm_eps=float(getattr(config, "rms_norm_eps", NORM_EPS)))


def refuse_inputs(
    plan: ConversionPlan,
    options: ConvertOptions,
    texts: Sequence[str | Path],
    *,
    is_exported: bool,
    may_lack_biases: bool,
) -> None:
    """Refuse options that do not go with each other, with the method, or with the folder's format.

    This is the one place for such rules, apart from what a method says of a target (`choose_method`) and a format of
    a family and its layers (`OutputFormat.check`).

    Args:
        plan: the plan of the conversion.
        options: the user's options.
        texts: the calibration texts.
        is_exported: whether the folder is written from one in headwise's own format.
        may_lack_biases: whether the folder's MLA layers can be without biases.

    Raises:
        ArgumentError: the options do not go together.
    """
    statistics = options.statistics
    if options.bias_free and not (may_lack_biases and plan.after.mechanism == "mla"):
        raise ArgumentError("bias_free", True, "goes with mla in format deepseek or gguf")
    if plan.bias_free and not texts and statistics is None:
        field, value = ("bias_free", True) if options.bias_free else ("format", options.format)
        rule = "needs a text to calibrate on, or statistics: without biases a constant is a function of the inputs"
        raise ArgumentError(field, value, rule)
    if plan.token_bytes is not None and is_exported:
        rule = "has no place for the codes of a cache; leave out kv_bytes and bits, or the format"
        raise ArgumentError("format", options.format, rule)
    _refuse_evidence(plan, texts, statistics)
    _refuse_stages(plan, texts, statistics, options.without)
    if plan.token_bytes is not None and not texts:
        raise ArgumentError("calibrate", None, "is required: the codes of a cache are designed on a text")
    if plan.method.needs_text and statistics is None and not texts:
        raise ArgumentError("calibrate", None, f"is required: {plan.method.name} finds its channels on a text")
    if options.spread and "spread" not in plan.stages:
        rule = "needs a decoder, mla of fewer values than the source has, calibrate, and headwise's own format"
        raise ArgumentError("spread", True, rule)


def _refuse_evidence(plan: ConversionPlan, texts: Sequence[str | Path], statistics: str | Path | None) -> None:
    """Refuse a text or statistics that a method does not use, or that cannot be used together."""
    for field, value in (("calibrate", texts[0] if texts else None), ("statistics", statistics)):
        if value is not None and not plan.method.uses_text and plan.token_bytes is None:
            raise ArgumentError(field, str(value), f"goes with mla and aligned heads, not with {plan.method.name}")
    has_norms = any(isinstance(layer, LatentSpec) and layer.qk_norm is not None for layer in plan.after.layers)
    if statistics is not None and has_norms:
        rule = "is of layers' inputs, and mla of a layer with qk_norm is solved behind its norms: calibrate on a text"
        raise ArgumentError("statistics", str(statistics), rule)
    if statistics is not None and texts:
        raise ArgumentError("statistics", str(statistics), "cannot be used with calibrate: it replaces the text")


def _refuse_stages(
    plan: ConversionPlan, texts: Sequence[str | Path], statistics: str | Path | None, without: Collection[str]
) -> None:
    """Refuse to leave out stages that would not be carried out anyway."""
    absent, rule = set(without).difference(plan.possible_stages), None
    if statistics is not None:
        rule = "is a stage of calibrate, and cannot be used with statistics"
    elif plan.is_exact:
        rule = "is a stage of calibrate, and nothing is lost at this size"
    elif not plan.possible_stages:
        rule = f"is a stage of headwise's own methods, and {plan.method.name} has none"
    elif absent:
        rule = f"is no stage of {plan.method.name}, which has {', '.join(plan.possible_stages)}"
    elif not texts:
        rule = "is a stage of calibrate, and no text is given"
    if without and rule is not None:
        raise ArgumentError("without", min(absent or without), rule)
