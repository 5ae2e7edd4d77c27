"""`convert`: a model folder goes in, a smaller-cache model folder comes out."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from headwise.checkpoints import FolderWriter, check_output, dtype_name, open_checkpoint, run_identity
from headwise.checkpoints.gguf import GgufCheckpoint
from headwise.conversion.calibration import begin, refuse_stages, text_identity
from headwise.conversion.job import POOLINGS, Job
from headwise.conversion.plan import parse_target
from headwise.conversion.sequential import STAGES
from headwise.cost import model as cost
from headwise.errors import ArgumentError
from headwise.evaluation import read_source
from headwise.hf import as_dtype
from headwise.measurement import peak_rss_bytes
from headwise.progress import Progress, silent
from headwise.specs import HOSTED_PREFIX


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a conversion did, or would do.

    Attributes:
        model_type: of the result: the family's, or ``headwise_`` and the family's where headwise's layers are in it.
        mechanism: of the result.
        method: how the heads were made: ``copy``, ``repeat``, ``aligned``, ``mean``, ``first_head`` or ``svd``, or by
            which published method.
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
    method: str | None = None,
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
        calibrate: a text, or several, that layers are studied on, where anything can be lost; see
            `headwise.evaluation.read_source`. Without any, weights alone decide.
        calibration_tokens: how many of their tokens.
        method: how heads come to be shared: ``aligned`` (when None), ``mean`` or ``first_head``. For mla a published
            method to compare with: ``mha2mla``, or ``transmla`` (``transmla:F`` with F frequencies to a fold).
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
    job = Job(checkpoint, target, out_dtype, method)
    job.refuse_inputs(texts, without)
    seen = 0
    if dry_run:
        seconds = job.estimate_seconds(calibration_tokens if calibrate is not None else 0)
    else:
        run = run_identity(
            checkpoint,
            target=asdict(target),
            method=job.method,
            dtype=dtype_name(job.dtype),
            calibrate=[text_identity(text) for text in texts],
            tokens=calibration_tokens,
            without=sorted(without),
        )
        with FolderWriter(destination, job.tensors, run=run, overwrite=overwrite) as writer:
            writer.add_companions(checkpoint)
            sequence = None
            if texts and not job.is_lossless:
                sequence = begin(
                    checkpoint,
                    texts,
                    writer.work,
                    tokens=calibration_tokens,
                    without=STAGES if job.published else without,
                    run=run,
                    progress=progress,
                )
                seen = sequence.windows.numel()
            job.write(writer, sequence, progress)
            writer.write_json("config.json", job.config())
        seconds = time.perf_counter() - start
    notes: list[str] = []
    if not texts and not job.is_lossless and job.method not in POOLINGS:
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
