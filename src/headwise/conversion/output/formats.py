"""The formats of the output folder: headwise's own, and those that are exported from it.

A format that is exported is written from a folder in headwise's own format, and the logits of both are compared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headwise.base.progress import Progress
from headwise.conversion.output.layout import OutputLayout
from headwise.conversion.plan import ConversionPlan
from headwise.conversion.solvers.layer import latent_spec
from headwise.conversion.solvers.rope_channels import keep_comb, keep_rotation
from headwise.errors import ArgumentError, SpecError
from headwise.models.checkpoints import Checkpoint, FolderWriter, GgufFile, TensorInfo, dtype_name, tokenizer_fields
from headwise.models.checkpoints.writer import MODEL
from headwise.models.specs import GGUF_ARCHITECTURES, LatentSpec
from headwise.runtime.hf import LayerwiseModel, tensors_of
from headwise.runtime.quantization.ggml import BLOCK
from headwise.serving.exports.deepseek import add_deepseek, deepseek_config, parse_padding
from headwise.serving.exports.gguf import engine_config, engine_tensors, gguf_type


@torch.no_grad()
def logits_difference(
    first: Checkpoint, second: Checkpoint, ids: Tensor, device: torch.device | None = None
) -> float:
    """The largest absolute difference of two models' logits, in float32, with one layer in memory at a time.

    Args:
        first: a folder whose layers have Llama's names.
        second: the other folder, whose layers have Llama's names too.
        ids: the token ids, ``[B, W]``.
        device: the device to compute on; the CPU when None.
    """
    models, states = [], []
    for checkpoint in (first, second):
        place = "model.layers.{layer}"
        model = LayerwiseModel(checkpoint, torch.float32, device=device, layer=place, attention=f"{place}.self_attn")
        hidden = model.begin(ids)
        for index in range(model.num_layers):
            hidden = model.run(index, model.module(index), hidden)  # [B, W, E]
        model.release()
        models.append(model)
        states.append(hidden)
    pieces = zip(*(model.finish_in_pieces(hidden) for model, hidden in zip(models, states, strict=True)), strict=True)
    return max(float((first_logits - second_logits).abs().max()) for first_logits, second_logits in pieces)


class OutputFormat(ABC):
    """A format of the output folder.

    Attributes:
        name: the name that users give after ``--format``.
        is_exported: whether it is written from a folder in headwise's own format.
        note: a note for the user about every folder of this format; none when empty.
        may_lack_biases: whether its MLA layers can be without biases.
        lacks_biases: whether its MLA layers must be without biases.
        mark: the file that every folder of this format has.
        pads: whether its layers can be filled up with zeros.
        pad_to: the R and P that they are filled up to; None where they are not.
        has_constant: whether a latent of the size that the user asks for has a constant channel among its own.
        block: the number of channels that MLA's latent and rotary key are multiples of, where a budget is large
            enough.
    """

    name: ClassVar[str]
    is_exported: ClassVar[bool] = True
    note: ClassVar[str] = ""
    may_lack_biases: ClassVar[bool] = False
    lacks_biases: ClassVar[bool] = False
    has_constant: ClassVar[bool] = False
    block: ClassVar[int] = 1
    mark: ClassVar[str] = MODEL
    pads: ClassVar[bool] = False
    pad_to: tuple[int, int] | None = None
    keep = staticmethod(keep_rotation)
    """The function that chooses the rotary channels that all layers share."""

    def notes(self, plan: ConversionPlan) -> list[str]:
        """The notes for the user about the format and what it makes of a plan."""
        return [self.note] if self.note else []

    @abstractmethod
    def config(self, layout: OutputLayout) -> dict[str, Any]:
        """The folder's config before its rotary channels are chosen.

        Raises:
            ArgumentError: the result cannot have the format.
            SpecError: the format cannot hold the source's family.
        """

    def check(self, layout: OutputLayout) -> None:
        """Refuse a result that the format cannot hold, before any work.

        Raises:
            ArgumentError: the result cannot have the format.
            CheckpointError: the format cannot hold the source's tokenizer.
            SpecError: the format cannot hold the source's family.
        """
        self.config(layout)

    def tensors(self, layout: OutputLayout) -> dict[str, TensorInfo]:
        """All tensors of the model, those of transformers' class, in the folder's order."""
        return tensors_of(self.config(layout), layout.plan.dtype)

    def announced(self, layout: OutputLayout) -> dict[str, TensorInfo]:
        """The tensors that are written as safetensors."""
        return self.tensors(layout)

    def weight_bytes(self, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], plan: ConversionPlan) -> int:
        """The bytes that the weights take on the disk."""
        return sum(info.nbytes for info in tensors.values())

    def exported_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The folder's config, from that of a folder in headwise's own format."""
        return dict(config)

    def export(
        self, writer: FolderWriter, checkpoint: Checkpoint, plan: ConversionPlan, progress: Progress
    ) -> dict[str, Any]:
        """Add everything that the folder lacks, from a folder in headwise's own format.

        Returns:
            The config of the model.
        """
        raise NotImplementedError


class HeadwiseFormat(OutputFormat):
    """The source family's own format where that can hold the result, and headwise's elsewhere."""

    name = "headwise"
    is_exported = False

    def config(self, layout: OutputLayout) -> dict[str, Any]:
        """See `OutputLayout.config`."""
        return layout.config()

    def tensors(self, layout: OutputLayout) -> dict[str, TensorInfo]:
        """See `OutputLayout.tensors`."""
        return layout.tensors


class DeepseekFormat(OutputFormat):
    """Stock ``deepseek_v3`` as engines load it: one size for all layers, and plain RoPE."""

    name = "deepseek"
    note = "one channel of each deepseek_v3 latent is a constant that its norm needs"
    may_lack_biases = has_constant = pads = True
    for_engines: ClassVar[bool] = True
    keep = staticmethod(keep_comb)

    def config(self, layout: OutputLayout) -> dict[str, Any]:
        """See `deepseek_config`."""
        plan = layout.plan
        if plan.after.mechanism != "mla":
            rule = f"goes with mla; {plan.after.mechanism} results are stock already"
            raise ArgumentError("format", self.name, rule)
        if not plan.method.shares_channels:
            rule = f"goes with headwise's own method; {plan.method.spelling} chooses rotary channels layer by layer"
            raise ArgumentError("format", self.name, rule)
        if not self.for_engines:
            return self.exported_config(layout.config())
        self._refuse_rope(plan)
        # One comb in the place of the one that will be chosen.
        pairs = [layer.qk_rope_head_dim // 2 for layer in plan.after.layers if isinstance(layer, LatentSpec)]
        return self.exported_config(layout.config({layer: list(range(count)) for layer, count in enumerate(pairs)}))

    def _refuse_rope(self, plan: ConversionPlan) -> None:
        """Refuse rotary keys that plain RoPE cannot have.

        Raises:
            ArgumentError: a rotary key has more pairs than a head has frequencies.
            SpecError: the source's frequencies are scaled.
        """
        for before, after in zip(plan.before.layers, plan.after.layers, strict=True):
            if before.rope is None or before.rope.rope_type != "default":
                kind = None if before.rope is None else before.rope.rope_type
                rule = "engines compute plain RoPE beside MLA; deepseek-longrope, for transformers, holds others"
                raise SpecError("rope_type", kind, rule)
            rotary = latent_spec(after).qk_rope_head_dim
            if rotary > before.rope.dim:
                rule = f"must be at most {before.rope.dim} for {self.name}"
                raise ArgumentError(
                    "qk_rope_head_dim", rotary, f"{rule}: plain RoPE has each frequency of a head once"
                )

    def exported_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `deepseek_config`."""
        return deepseek_config(config, for_engines=self.for_engines, pad_to=self.pad_to)

    def export(
        self, writer: FolderWriter, checkpoint: Checkpoint, plan: ConversionPlan, progress: Progress
    ) -> dict[str, Any]:
        """See `add_deepseek`."""
        config = self.exported_config(_full_config(checkpoint))
        add_deepseek(writer, checkpoint, config, progress)
        return config


class DeepseekLongropeFormat(DeepseekFormat):
    """Stock ``deepseek_v3`` for transformers alone: any list of rotary channels that all layers share."""

    name = "deepseek-longrope"
    note = "each deepseek_v3 latent has one channel more than requested, a constant that its norm needs"
    may_lack_biases = has_constant = for_engines = pads = False
    keep = staticmethod(keep_rotation)


class GgufFormat(OutputFormat):
    """One GGUF file, as llama.cpp loads it: stock layers as their family's, MLA as ``deepseek2`` without biases."""

    name = "gguf"
    note = "model.gguf is the whole model, its tokenizer included"
    may_lack_biases = lacks_biases = has_constant = True
    mark = "model.gguf"
    block = BLOCK
    kind: ClassVar[str | None] = None
    """The type of matrices; None for the model's dtype."""
    keep = staticmethod(keep_comb)

    def notes(self, plan: ConversionPlan) -> list[str]:
        """See `OutputFormat.notes`; whether llama.cpp takes its quantised caches for MLA of these sizes."""
        notes = super().notes(plan)
        first = plan.after.layers[0]
        if not isinstance(first, LatentSpec):
            return notes
        R, P = first.kv_lora_rank, first.qk_rope_head_dim
        if R % BLOCK or P % BLOCK:
            rule = f"a latent of {R} and a rotary key of {P}: llama.cpp refuses its quantised caches"
            return [*notes, f"{rule} (such as -ctk q8_0) unless both are multiples of {BLOCK}"]
        why = f"{R} + {P} values a token, multiples of {BLOCK}: llama.cpp takes its quantised caches too"
        options = "-fa on -ctk q8_0 -ctv q8_0 --no-context-shift"
        return [*notes, f"{why}, keys and values of one type, and never shifted ({options})"]

    def config(self, layout: OutputLayout) -> dict[str, Any]:
        """The config of the model that the file holds: stock, or from `deepseek_config`. See `GgufFile`."""
        if layout.plan.after.mechanism == "mla":
            return DEEPSEEK.config(layout)
        if layout.is_hosted:
            rule = f"is not written as GGUF; can: {', '.join(GGUF_ARCHITECTURES)}"
            raise SpecError("model_type", layout.plan.checkpoint.family.model_type, rule)
        return layout.config()

    def announced(self, layout: OutputLayout) -> dict[str, TensorInfo]:
        """No tensors: the file is written at once, by `export`."""
        return {}

    def check(self, layout: OutputLayout) -> None:
        """See `OutputFormat.check`."""
        config = self.config(layout)
        self._file(config, self.tensors(layout), layout.plan)

    def exported_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `config`."""
        return engine_config(config)

    def export(
        self, writer: FolderWriter, checkpoint: Checkpoint, plan: ConversionPlan, progress: Progress
    ) -> dict[str, Any]:
        """Write the file."""
        config = self.exported_config(_full_config(checkpoint))
        tensors = tensors_of(config, plan.dtype)
        file = self._file(config, tensors, plan)
        writer.write_file(self.mark, lambda path: file.write(path, engine_tensors(checkpoint, config, progress)))
        return config

    def weight_bytes(self, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], plan: ConversionPlan) -> int:
        """See `OutputFormat.weight_bytes`."""
        return GgufFile(engine_config(config), tensors, self.kind or gguf_type(plan.dtype)).nbytes

    def _file(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], plan: ConversionPlan) -> GgufFile:
        kind = self.kind or gguf_type(plan.dtype)
        config = engine_config(config)
        return GgufFile(config, tensors, kind, tokenizer_fields(plan.checkpoint, config["vocab_size"]))


class GgufQ8Format(GgufFormat):
    """The same in eight bits: blocks of 32 numbers with a scale, llama.cpp's ``q8_0``."""

    name = "gguf-q8_0"
    kind = "q8_0"


def _full_config(checkpoint: Checkpoint) -> dict[str, Any]:
    return {**checkpoint.config, "dtype": dtype_name(checkpoint.dtype)}


DEEPSEEK = DeepseekFormat()
_FORMATS: dict[str, OutputFormat] = {
    folder_format.name: folder_format
    for folder_format in (HeadwiseFormat(), DEEPSEEK, DeepseekLongropeFormat(), GgufFormat(), GgufQ8Format())
}
FORMATS = tuple(_FORMATS)
"""The names of the formats."""


def output_format(name: str, pad_to: str | None = None) -> OutputFormat:
    """The output format that has a name.

    Args:
        name: the name of the format, as a user gives it.
        pad_to: the sizes ``R+P`` to fill layers up to with zeros; None where layers are not filled up.

    Raises:
        ArgumentError: no format has the name, or it cannot be filled up.
    """
    if name not in _FORMATS:
        raise ArgumentError("format", name, f"must be {' or '.join(FORMATS)}")
    found = copy(_FORMATS[name])
    if pad_to is not None:
        if not found.pads:
            raise ArgumentError("pad_to", pad_to, "goes with format deepseek")
        found.pad_to = parse_padding(pad_to)
    return found


@dataclass(frozen=True, kw_only=True)
class StockReport:
    """The loss that a stock folder's format causes.

    Attributes:
        text: the text that the two formats were compared on; None if there was none.
        tokens: the number of its tokens.
        logits_difference: the largest difference between the two formats' logits, in float32.
        shared_plan_error: the loss of the layers with shared rotary channels, before any refit: in nats a token on
            held-out windows, estimated and summed over layers (without sensitivities, half the squared error of their
            outputs); None without a text.
        own_plan_error: the loss that the layers would have if each kept its own choice of channels.
    """

    text: str | None = None
    tokens: int = 0
    logits_difference: float | None = None
    shared_plan_error: float | None = None
    own_plan_error: float | None = None

    def notes(self) -> list[str]:
        """The loss in words, for a user."""
        if self.logits_difference is None:
            return []
        differ = f"float32 logits differ by at most {self.logits_difference:.1e} from headwise's own format's"
        return [f"{differ}, on {self.tokens:,} tokens of text"]
