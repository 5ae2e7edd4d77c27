"""One conversion's plan: what is read, what each layer becomes, what is written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints import Checkpoint, FolderWriter, TensorInfo, dtype_name
from headwise.conversion.calibration import WINDOW
from headwise.conversion.grouped import METHODS, Method, convert_to_grouped
from headwise.conversion.heads import Layer
from headwise.conversion.latent import convert_to_latent
from headwise.conversion.plan import Target, plan_layers, refuse_latent
from headwise.conversion.published import PUBLISHED, convert_as_published, is_published, refuse_published
from headwise.conversion.results import LayerResults
from headwise.conversion.sequential import Sequential, Solver, Step
from headwise.conversion.statistics import Statistics
from headwise.errors import ArgumentError, CheckpointError
from headwise.hf import check_complete, expected_tensors, model_class
from headwise.progress import Progress
from headwise.specs import (
    HOSTED_PREFIX,
    AttentionSpec,
    GroupedSpec,
    LatentSpec,
    ModelSpec,
    hosted_attention,
    rotary_width,
)

POOLINGS = ("mean", "first_head")
"""Ways to share heads that no text goes into."""

FORMAT = 1
"""Version of the ``headwise`` block in a converted ``config.json``."""


class Job:
    """One conversion's plan: what is read, what each layer becomes, what is written."""

    def __init__(
        self, checkpoint: Checkpoint, target: Target, dtype: torch.dtype | None, merging: str | None = None
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
        self.published, self.merging = _methods(merging)
        if self.published is not None:
            if self.after.mechanism != "mla":
                raise ArgumentError("method", merging, "goes with mla")
            refuse_published(self.published, self.before)
        elif merging is not None and self.method not in METHODS:
            raise ArgumentError("method", merging, "says how heads come to be shared, and none do here")
        self.dtype = dtype or checkpoint.dtype
        self.kept: Tensor | None = None  # rotary channels that every layer keeps, where all are to keep the same
        self.channels = [
            [0] * (layer.qk_rope_head_dim // 2) for layer in self.after.layers if isinstance(layer, LatentSpec)
        ]
        self.tensors = {
            name: TensorInfo(shape, self.dtype) for name, shape in expected_tensors(self.config()).items()
        }

    @property
    def method(self) -> str:
        """How the new heads are made."""
        if self.after.mechanism == "mla":
            return self.published or "svd"
        old, new = (_kv_heads(model) for model in (self.before, self.after))
        return "copy" if new == old else "repeat" if new > old else self.merging

    def refuse_inputs(self, texts: Sequence[str | Path], without: Collection[str]) -> None:
        """Refuse texts and stages that do not go with the method.

        Raises:
            ArgumentError: they do not.
        """
        if texts and self.method in POOLINGS:
            raise ArgumentError(
                "calibrate", str(texts[0]), f"goes with mla and aligned heads, not with {self.method}"
            )
        if self.published and without:
            raise ArgumentError("without", min(without), f"is a stage of headwise's own, and {self.method} has none")
        if self.published and self.published != "mha2mla" and not texts:
            raise ArgumentError("calibrate", None, f"is required: {self.method} finds its channels on a text")

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
        """The longest distance looked at, in tokens: of a window, or of all the model's positions."""
        return min(WINDOW, self.before.max_position_embeddings or WINDOW)

    def source_state(self, index: int, *, cross: bool = False) -> dict[str, Tensor]:
        """One layer's attention in the source, by the layer's own names."""
        spec = (self.before.cross_layers if cross else self.before.layers)[index]
        assert isinstance(spec, GroupedSpec)
        was_hosted = str(self.checkpoint.config["model_type"]).startswith(HOSTED_PREFIX)
        return self.family.read_attention(self.checkpoint.read, index, spec, cross=cross, hosted=was_hosted)

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

    def fill(self, writer: FolderWriter, sequence: Sequential | None, progress: Progress) -> None:
        """Write the whole folder; see `write`."""
        writer.add_companions(self.checkpoint)
        self.write(writer, sequence, progress)
        writer.write_json("config.json", self.config())

    def write(self, writer: FolderWriter, sequence: Sequential | None, progress: Progress) -> None:
        """Add every tensor of the output that is missing, one layer in memory at a time.

        Args:
            writer: of the output.
            sequence: the conversion on a text, which all layers go through in turn; None for weights alone.
            progress: told of each layer.
        """
        results = None if sequence is None else LayerResults(writer.work / "layers")
        owner = {
            name: (index, cross)
            for cross, specs in ((False, self.after.layers), (True, self.after.cross_layers))
            for index in range(len(specs))
            for name in self._names(index, cross=cross)
        }
        done: tuple[int, bool] | None = None
        layer: dict[str, Tensor] = {}
        for name in self.tensors:
            if name not in owner:
                if not writer.has(name):
                    writer.add(name, self._cast(name, self.checkpoint.read(name)))
                continue
            if owner[name] != done:
                done = index, cross = owner[name]
                progress("converting", index, self.before.num_layers)
                layer = self.convert_layer(index, sequence, results, cross=cross)
            if not writer.has(name):
                writer.add(name, self._cast(name, layer[name]))
        progress("converting", self.before.num_layers, self.before.num_layers)

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor in the output's dtype, whose range may be smaller than the source's."""
        cast = tensor.to(self.dtype)
        if not bool(torch.isfinite(cast).all()):
            rule = f"does not fit in {dtype_name(self.dtype)}; choose a wider dtype"
            raise CheckpointError("tensor", name, rule)
        return cast

    def convert_layer(
        self,
        index: int,
        sequence: Sequential | None = None,
        results: LayerResults | None = None,
        *,
        cross: bool = False,
    ) -> dict[str, Tensor]:
        """One layer's new attention, by the output's names; with ``cross``, that to an encoder's output."""
        before, after = (m.cross_layers if cross else m.layers for m in (self.before, self.after))
        source, target = before[index], after[index]
        assert isinstance(source, GroupedSpec)
        state = self.source_state(index, cross=cross)

        def solve(statistics: Statistics | None, sensitivity: Tensor | None) -> Layer:
            if isinstance(target, LatentSpec):
                if self.published:
                    made, channels = convert_as_published(
                        self.published, state, source, target, statistics=statistics
                    )
                    return Layer(target, made, channels)
                made, channels = convert_to_latent(
                    state,
                    source,
                    target,
                    statistics=statistics,
                    sensitivity=sensitivity,
                    longest=self.longest,
                    kept=self.kept,
                )
                return Layer(target, made, channels)
            assert isinstance(target, GroupedSpec)
            made = convert_to_grouped(
                state, source, target, method=self.merging, statistics=statistics, sensitivity=sensitivity
            )
            return Layer(target, made)

        if sequence is None or results is None or cross:
            layer = solve(None, None)
        else:
            assert isinstance(target, LatentSpec | GroupedSpec)
            layer = _on_text(index, Layer(source, state).float(), target, solve, sequence, results)
        if isinstance(target, LatentSpec):
            if not cross:
                self.channels[index] = layer.channels
        elif not self.hosted:
            assert isinstance(target, GroupedSpec)
            return self.family.write_attention(layer.state, index, target, cross=cross)
        prefix = self.family.place(index, cross=cross, hosted=True)
        return {f"{prefix}.{name}": tensor for name, tensor in layer.state.items()}

    def _names(self, index: int, *, cross: bool) -> list[str]:
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


def _on_text(
    index: int,
    source: Layer,
    target: LatentSpec | GroupedSpec,
    solve: Solver,
    sequence: Sequential,
    results: LayerResults,
) -> Layer:
    """One layer of a conversion on a text, unless an earlier run has been past it.

    Raises:
        CheckpointError: what that run kept is damaged.
    """
    if sequence.position > index:
        kept = results.load(index)
        if kept is None:
            rule = f"was lost of a run that had converted it; remove {results.folder.parent.parent} and convert again"
            raise CheckpointError("layer", index, rule)
        return Layer(target, kept[0], kept[1]["channels"])

    def keep(step: Step) -> None:
        about = {"channels": step.layer.channels, "errors": step.errors, "chosen": step.chosen}
        results.save(index, step.layer.state, about)

    return sequence.layer(index, source, solve, keep).layer
