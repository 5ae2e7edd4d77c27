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
from headwise.conversion.calibration import begin, check_texts, refuse_cross_layers, refuse_stages, text_identity
from headwise.conversion.job import POOLINGS, Job, Study
from headwise.conversion.plan import parse_target
from headwise.conversion.ranks import first_enters, rank
from headwise.conversion.saved import SavedStatistics, open_statistics
from headwise.conversion.sequential import Sequential
from headwise.cost import model as cost
from headwise.errors import ArgumentError
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
        method: how the heads were made: ``copy``, ``repeat``, ``aligned``, ``mean``, ``first_head`` or ``svd``.
        kv_bytes_per_token_before: cache bytes a token of the source, in the output's dtype; what a decoder keeps of
            an encoder's output is not in it.
        kv_bytes_per_token_after: of the result.
        parameters_before: learned numbers in the whole source.
        parameters_after: in the result.
        disk_bytes: of the result's weights.
        calibration_tokens: tokens that went into the statistics; 0 for none.
        seconds: it took; with ``dry_run``, it would take, from one layer's solution and a matrix product timed.
        seconds_reading: of these, spent on reading and checking weights and statistics.
        seconds_writing: on writing tensors; the rest went into solving layers and, with a text, running them.
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
    seconds_reading: float
    seconds_writing: float
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
    statistics: str | Path | None = None,
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
        statistics: a folder of `headwise.calibrate` in the place of a text: the model is then not run, and each
            layer is solved by itself, for what the source's own layers hand on to it.
        method: how heads come to be shared: ``aligned`` (when None), ``mean`` or ``first_head``.
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
    texts = check_texts(calibrate, calibration_tokens)
    refuse_stages(without)
    _refuse_with_statistics(statistics, texts, without)
    out_dtype = None if dtype is None else as_dtype(dtype)
    destination = Path(output)
    check_output(destination, overwrite=overwrite)
    checkpoint = open_checkpoint(source)
    refuse_cross_layers(checkpoint, texts)
    real_source = Path(os.path.realpath(checkpoint.path))
    if Path(os.path.realpath(destination)) in (real_source, *real_source.parents):
        raise ArgumentError("output", str(output), "must not be the source, or a folder that holds it")
    job = Job(checkpoint, target, out_dtype, method)
    for field, given in (("calibrate", texts[0] if texts else None), ("statistics", statistics)):
        if given is not None and job.method in POOLINGS:
            raise ArgumentError(field, str(given), f"goes with mla and aligned heads, not with {job.method}")
    saved = None if statistics is None else open_statistics(statistics, checkpoint, progress)

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
            statistics=None if saved is None else saved.identity,
        )
        with first_enters(FolderWriter(destination, job.tensors, run=run, overwrite=overwrite)) as writer:
            study: Study | None = None if job.is_lossless else saved
            if texts and not job.is_lossless:
                study = begin(
                    checkpoint,
                    texts,
                    writer.work,
                    tokens=calibration_tokens,
                    without=without,
                    run=run,
                    progress=progress,
                )
            if study is not None:
                seen = study.tokens if isinstance(study, SavedStatistics) else study.windows.numel()
            if rank() == 0:
                writer.add_companions(checkpoint)
                job.write(writer, study, progress)
                writer.write_json("config.json", job.config())
            elif isinstance(study, Sequential):
                job.follow(writer, study)
        seconds = time.perf_counter() - start
    notes: list[str] = []
    is_studied = bool(texts) or saved is not None
    if not is_studied and not job.is_lossless and job.method not in POOLINGS:
        notes.append("no calibration text: weights alone decided, and quality suffers; give one with calibrate")
    if is_studied and job.is_lossless:
        notes.append("nothing is lost at this size, so no text was needed")
    elif is_studied and not dry_run and seen <= job.before.hidden_size:
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
        seconds_reading=0.0 if dry_run else checkpoint.read_seconds + job.clock.seconds.get("reading", 0.0),
        seconds_writing=0.0 if dry_run else job.clock.seconds.get("writing", 0.0),
        peak_rss_bytes=None if dry_run else peak_rss_bytes(),
        dry_run=dry_run,
        notes=tuple(notes),
    )


def _refuse_with_statistics(
    statistics: str | Path | None, texts: Sequence[str | Path], without: Collection[str]
) -> None:
    """Refuse what says how a text is studied, where no text is."""
    if statistics is not None and texts:
        raise ArgumentError("statistics", str(statistics), "goes without calibrate: it is in the place of a text")
    if statistics is not None and without:
        raise ArgumentError("without", ", ".join(without), "names stages of calibrate, and statistics know none")
