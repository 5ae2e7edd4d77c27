"""`convert`: a model folder goes in, a smaller-cache model folder comes out."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints import Checkpoint, FolderWriter, TensorInfo, check_output, dtype_name, open_checkpoint
from headwise.checkpoints.gguf import GgufCheckpoint
from headwise.conversion.calibration import WINDOW, begin, refuse_stages
from headwise.conversion.grouped import convert_to_grouped
from headwise.conversion.heads import Layer
from headwise.conversion.latent import convert_to_latent
from headwise.conversion.plan import Target, parse_target, plan_layers, refuse_latent
from headwise.conversion.sequential import Sequential
from headwise.conversion.statistics import Statistics
from headwise.cost import model as cost
from headwise.errors import ArgumentError, CheckpointError
from headwise.evaluation import read_source
from headwise.hf import as_dtype, check_complete, expected_tensors, model_class
from headwise.measurement import matmul_flops_per_second, peak_rss_bytes
from headwise.progress import Progress, silent
from headwise.specs import (
    HOSTED_PREFIX,
    AttentionSpec,
    GroupedSpec,
    LatentSpec,
    ModelSpec,
    hosted_attention,
    rotary_width,
)

FORMAT = 1
"""Version of the ``headwise`` block in a converted ``config.json``."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a conversion did, or would do.

    Attributes:
        model_type: of the result: the family's, or ``headwise_`` and the family's where headwise's layers are in it.
        mechanism: of the result.
        method: how the heads were made: ``copy``, ``repeat``, ``mean`` or ``svd``.
        kv_bytes_per_token_before: cache bytes a token of the source, in the output's dtype; what a decoder keeps of
            an encoder's output is not in it.
        kv_bytes_per_token_after: of the result.
        parameters_before: learned numbers in the whole source.
        parameters_after: in the result.
        disk_bytes: of the result's weights.
        calibration_tokens: tokens that went into the statistics; 0 for none.
        seconds: it took; with ``dry_run``, it would take, from one layer's solution and a matrix product timed.
        peak_rss_bytes: most resident memory of the process so far; None with ``dry_run``.
        notes: what a user should know of the result.
    """

    source: str
    output: str
    model_type: str
    mechanism: str
    label: str
    method: str
    dtype: str
    kv_bytes_per_token_before: int
    kv_bytes_per_token_after: int
    parameters_before: int
    parameters_after: int
    disk_bytes: int
    calibration_tokens: int
    seconds: float
    peak_rss_bytes: int | None
    dry_run: bool
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return asdict(self)


@torch.inference_mode(False)  # layers are studied by their derivatives, whatever the caller is doing
def convert(
    source: str | Path,
    output: str | Path,
    *,
    to: str,
    kv_budget: float | None = None,
    kv_lora_rank: int | None = None,
    qk_rope_head_dim: int | None = None,
    calibrate: str | Path | Sequence[str | Path] | None = None,
    calibration_tokens: int = 16_384,
    without: Collection[str] = (),
    dtype: str | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Conversion:
    """Convert a model's attention and write the result as a model folder.

    MHA, GQA and MQA results are stock folders of the source's family. MLA results are the family's model with
    headwise's attention: ``headwise.load``, or ``import headwise.hf`` and transformers, run them.

    Args:
        source: a model folder, ``.gguf``, ``smollm2-135m`` or ``hf://owner/name``.
        output: the folder to write; must not exist, or be empty, unless ``overwrite``.
        to: ``mha``, ``gqa:K``, ``mqa`` or ``mla``.
        kv_budget: for mla: the fraction of the source's cache to keep, above 0 and at most 1 (1 is lossless).
        kv_lora_rank: for mla, with ``qk_rope_head_dim``: the widths themselves.
        qk_rope_head_dim: see ``kv_lora_rank``.
        calibrate: a text, or several, that layers are studied on (mla); see `headwise.evaluation.read_source`.
            Without any, weights alone decide.
        calibration_tokens: how many of their tokens.
        without: stages of calibration to leave out, of `headwise.conversion.STAGES`.
        dtype: of the output; the source's (float32 for quantised GGUF) when None.
        dry_run: only say what it would take; nothing is written.
        overwrite: replace a model folder at ``output``.
        progress: told of each layer.

    Raises:
        ArgumentError: an argument is outside its rule.
        SpecError: the source's attention is of a kind that is not converted.
        CheckpointError: the source cannot be read, or the output cannot be written.
    """
    start = time.perf_counter()
    target = parse_target(to, kv_budget=kv_budget, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim)
    if calibrate is not None and target.mechanism != "mla":
        raise ArgumentError("calibrate", str(calibrate), f"goes with mla; {to} is made from the weights alone")
    if calibration_tokens < 2:
        raise ArgumentError("calibration_tokens", calibration_tokens, "must be at least 2")
    texts = [calibrate] if isinstance(calibrate, str | Path) else list(calibrate or ())
    for text in texts:
        read_source(text, characters=1)  # or refused, before any work
    refuse_stages(without)
    out_dtype = None if dtype is None else as_dtype(dtype)
    destination = Path(output)
    check_output(destination, overwrite=overwrite)
    checkpoint = open_checkpoint(source)
    if calibrate is not None and checkpoint.spec.cross_layers:
        rule = f"is text, and a {checkpoint.spec.model_type} model decodes what its encoder heard"
        raise ArgumentError("calibrate", str(calibrate), rule)
    real_source = Path(os.path.realpath(checkpoint.path))
    if Path(os.path.realpath(destination)) in (real_source, *real_source.parents):
        raise ArgumentError("output", str(output), "must not be the source, or a folder that holds it")
    job = _Job(checkpoint, target, out_dtype)

    seen = 0
    if dry_run:
        seconds = job.estimate_seconds(calibration_tokens if calibrate is not None else 0)
    else:
        with FolderWriter(destination, job.tensors, overwrite=overwrite) as writer:
            writer.add_companions(checkpoint)
            with TemporaryDirectory(prefix=f".{destination.name}.headwise-", dir=destination.parent) as folder:
                sequence = None
                if texts and not job.is_lossless:
                    sequence = begin(
                        checkpoint,
                        texts,
                        Path(folder),
                        tokens=calibration_tokens,
                        without=without,
                        progress=progress,
                    )
                    seen = sequence.windows.numel()
                for name, tensor in job.run(sequence, progress):
                    writer.add(name, tensor)
            writer.write_json("config.json", job.config())
        seconds = time.perf_counter() - start
    notes = []
    if target.mechanism == "mla" and calibrate is None and not job.is_lossless:
        notes.append("no calibration text: weights alone decided, and quality suffers; give one with calibrate")
    if texts and job.is_lossless:
        notes.append("nothing is lost at this size, so no text was needed")
    elif texts and not dry_run and seen <= job.before.hidden_size:
        inputs = job.before.hidden_size
        notes.append(f"only {seen} calibration tokens for {inputs} inputs: they decide little, and quality suffers")
    if isinstance(checkpoint, GgufCheckpoint) and checkpoint.quantization is not None:
        notes.append(f"the source is dequantised from {checkpoint.quantization}")
    written = dtype_name(job.dtype)
    return Conversion(
        source=str(source),
        output=str(output),
        model_type=(HOSTED_PREFIX if job.hosted else "") + job.family.model_type,
        mechanism=job.after.mechanism,
        label=job.after.layers[0].label,
        method=job.method,
        dtype=written,
        kv_bytes_per_token_before=cost.cache_bytes_per_token(job.before, written),
        kv_bytes_per_token_after=cost.cache_bytes_per_token(job.after, written),
        parameters_before=sum(info.numel for info in checkpoint.tensors.values()),
        parameters_after=sum(info.numel for info in job.tensors.values()),
        disk_bytes=sum(info.nbytes for info in job.tensors.values()),
        calibration_tokens=seen,
        seconds=seconds,
        peak_rss_bytes=None if dry_run else peak_rss_bytes(),
        dry_run=dry_run,
        notes=tuple(notes),
    )


class _Job:
    """One conversion's plan: what is read, what each layer becomes, what is written."""

    def __init__(self, checkpoint: Checkpoint, target: Target, dtype: torch.dtype | None) -> None:
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
        self.dtype = dtype or checkpoint.dtype
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
            return "svd"
        old, new = (_kv_heads(model) for model in (self.before, self.after))
        return "copy" if new == old else "repeat" if new > old else "mean"

    @property
    def is_lossless(self) -> bool:
        """Whether the result computes what the source does, beyond rounding."""
        if self.method != "svd":
            return self.method != "mean"
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

    def run(self, sequence: Sequential | None, progress: Progress) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the output, in its order, one layer in memory at a time."""
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
                yield name, self._cast(name, self.checkpoint.read(name))
                continue
            if owner[name] != done:
                done = index, cross = owner[name]
                progress("converting", index, self.before.num_layers)
                layer = self.convert_layer(index, None if cross else sequence, cross=cross)
            yield name, self._cast(name, layer[name])
        progress("converting", self.before.num_layers, self.before.num_layers)

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor in the output's dtype, whose range may be smaller than the source's."""
        cast = tensor.to(self.dtype)
        if not bool(torch.isfinite(cast).all()):
            rule = f"does not fit in {dtype_name(self.dtype)}; choose a wider dtype"
            raise CheckpointError("tensor", name, rule)
        return cast

    def convert_layer(self, index: int, sequence: Sequential | None, *, cross: bool = False) -> dict[str, Tensor]:
        """One layer's new attention, by the output's names; with ``cross``, that to an encoder's output."""
        before, after = (m.cross_layers if cross else m.layers for m in (self.before, self.after))
        source, target = before[index], after[index]
        assert isinstance(source, GroupedSpec)
        was_hosted = str(self.checkpoint.config["model_type"]).startswith(HOSTED_PREFIX)
        state = self.family.read_attention(self.checkpoint.read, index, source, cross=cross, hosted=was_hosted)
        if isinstance(target, LatentSpec):
            longest = min(WINDOW, self.before.max_position_embeddings or WINDOW)

            def solve(statistics: Statistics | None, sensitivity: Tensor | None) -> list[Layer]:
                made, channels = convert_to_latent(
                    state, source, target, statistics=statistics, sensitivity=sensitivity, longest=longest
                )
                return [Layer(target, made, channels)]

            if sequence is None:
                layer = solve(None, None)[0]
            else:
                layer = sequence.layer(index, Layer(source, state).float(), solve).layer
            out = dict(layer.state)
            if not cross:
                self.channels[index] = layer.channels
        else:
            assert isinstance(target, GroupedSpec)
            out = convert_to_grouped(state, source, target)
            if not self.hosted:
                return self.family.write_attention(out, index, target, cross=cross)
        prefix = self.family.place(index, cross=cross, hosted=True)
        return {f"{prefix}.{name}": tensor for name, tensor in out.items()}

    def _names(self, index: int, *, cross: bool) -> list[str]:
        """The output's names of a layer's attention."""
        if self.hosted:
            prefix = self.family.place(index, cross=cross, hosted=True) + "."
            return [name for name in self.tensors if name.startswith(prefix)]
        spec = (self.after.cross_layers if cross else self.after.layers)[index]
        assert isinstance(spec, GroupedSpec)
        return list(self.family.stored_shapes(index, spec, cross=cross))

    def estimate_seconds(self, calibration_tokens: int) -> float:
        """One layer is solved and timed; calibration is its FLOPs at the rate of a matrix product timed here."""
        self.convert_layer(0, None)  # the first solution also starts the libraries up
        start = time.perf_counter()
        self.convert_layer(0, None)
        solving = (time.perf_counter() - start) * self.before.num_layers
        start = time.perf_counter()
        name = max(self.checkpoint.tensors, key=lambda name: self.checkpoint.tensors[name].nbytes)
        self.checkpoint.read(name).to(self.dtype)
        per_byte = (time.perf_counter() - start) / self.checkpoint.tensors[name].nbytes
        # Each byte is read, checked, and written again at about the rate it is read.
        copying = 2 * per_byte * sum(info.nbytes for info in self.checkpoint.tensors.values())
        parameters = sum(info.numel for info in self.checkpoint.tensors.values())
        calibrating = 0.0
        if calibration_tokens:
            # A model's forward pass reaches about half of what one large product does.
            calibrating = 2 * 2 * parameters * calibration_tokens / matmul_flops_per_second()
        return solving + copying + calibrating


def _is_shared(layer: AttentionSpec) -> bool:
    return isinstance(layer, GroupedSpec) and layer.num_kv_heads < layer.num_heads


def _kv_heads(model: ModelSpec) -> int:
    layer = model.layers[0]
    assert isinstance(layer, GroupedSpec)
    return layer.num_kv_heads
