"""`convert`: a model folder goes in, a smaller-cache model folder comes out."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from headwise.arguments import typed
from headwise.checkpoints import (
    Checkpoint,
    FolderWriter,
    TensorInfo,
    check_output,
    dtype_name,
    open_checkpoint,
    run_identity,
)
from headwise.checkpoints.gguf import GgufCheckpoint
from headwise.conversion.budget.spread import Spread
from headwise.conversion.calibration.saved import open_statistics
from headwise.conversion.calibration.streams import Sequential, begin, refuse_stages
from headwise.conversion.estimate import estimate_seconds
from headwise.conversion.loop import Study
from headwise.conversion.output.card import card_facts, model_card, parameters_of
from headwise.conversion.output.formats import StockReport, plan_folder, write_folder
from headwise.conversion.planning.plan import POOLINGS, Job
from headwise.conversion.planning.target import parse_target
from headwise.conversion.proof import WINDOWS, Exam, find_exam, prove
from headwise.conversion.unsolvable import refuse_unsolvable
from headwise.cost import model as cost
from headwise.errors import ArgumentError
from headwise.evaluation import Evaluation
from headwise.hf import as_dtype
from headwise.measurement import peak_rss_bytes
from headwise.processes import first_enters, rank
from headwise.progress import Progress, silent
from headwise.specs import read_config
from headwise.texts.calibration import check_texts, refuse_cross_layers

OPEN = "how the cache is spread over layers is found on the text; parameters and disk depend on it"
"""What a dry run cannot know."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a conversion did, or would do.

    Attributes:
        model_type: of the result: the family's, or ``headwise_`` and the family's where headwise's layers are in it.
        mechanism: of the result.
        method: how the heads were made: ``copy``, ``repeat``, ``aligned``, ``mean``, ``first_head``, or for mla
            ``headwise`` or which published method.
        kv_bytes_per_token_before: cache bytes a token of the source, in the output's dtype; what a decoder keeps of
            an encoder's output is not in it.
        kv_bytes_per_token_after: of the result.
        parameters_before: learned numbers in the whole source.
        parameters_after: in the result.
        disk_bytes: of the result's weights.
        calibration_tokens: tokens of text that were looked at, those held out among them; 0 for none.
        calibration_window: tokens in each window of them.
        seconds: it took, without the evaluation; with ``dry_run``, it would take (`estimate_seconds`).
        seconds_reading: of these, spent on reading and checking weights and statistics.
        seconds_writing: on writing tensors; the rest went into solving layers and, with a text, running them.
        peak_rss_bytes: most resident memory of the process when the folder was there; None with ``dry_run``.
        evaluation: the result beside its source, on text it was not calibrated on; None where it was skipped.
        stock: what it cost to be a stock folder; None but for ``format="deepseek"``.
        spread: how an MLA's cache was spread over layers; None where that was not tried.
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
    calibration_tokens: int = 0
    calibration_window: int = 0
    seconds: float
    seconds_reading: float = 0.0
    seconds_writing: float = 0.0
    peak_rss_bytes: int | None = None
    dry_run: bool = False
    evaluation: Evaluation | None = None
    stock: StockReport | None = None
    spread: Spread | None = None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return asdict(self)


@typed
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
    calibration_tokens: int | None = None,
    calibration_window: int | None = None,
    statistics: str | Path | None = None,
    method: str | None = None,
    without: Collection[str] = (),
    dtype: str | None = None,
    format: Literal["headwise", "deepseek"] = "headwise",  # noqa: A002
    evaluate: bool | str | Path | Sequence[str | Path] = True,
    evaluation_windows: int = WINDOWS,
    dry_run: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Conversion:
    """Convert a model's attention and write the result as a model folder.

    MHA results are stock folders of the source's family, and GQA and MQA results where that has numbers of key–value
    heads. Others, and MLA, are the family's model with headwise's attention: ``headwise.load``, or ``import
    headwise.hf`` and transformers, run them.

    Args:
        source: a model folder, ``.gguf``, ``smollm2-135m`` or ``hf://owner/name``.
        output: the folder to write; must not exist, or be empty, unless ``overwrite``.
        to: ``mha``, ``gqa:K``, ``mqa`` or ``mla``.
        kv_budget: for mla: the fraction of the source's cache to keep, above 0 and at most 1 (1 is lossless).
        kv_lora_rank: for mla, with ``qk_rope_head_dim``: the widths themselves.
        qk_rope_head_dim: see ``kv_lora_rank``.
        calibrate: a text, or several, that layers are studied on, where anything can be lost; see
            `headwise.evaluation.read_source`. Without any, weights alone decide.
        calibration_tokens: how many of their tokens; 16 384 when None.
        calibration_window: tokens in each window of them; 1024 when None, or as many as the model or a text has.
        statistics: a folder of `headwise.calibrate` in the place of a text: the model is then not run, and each
            layer is solved by itself, for what the source's own layers hand on to it.
        method: how heads come to be shared: ``aligned`` (when None), ``mean`` or ``first_head``. For mla a published
            method to compare with: ``mha2mla``, or ``transmla`` (``transmla:F`` with F frequencies to a fold).
        without: stages of calibration to leave out, of `headwise.conversion.STAGES`; ``spread`` goes with
            ``sensitivity``.
        dtype: of the output; the source's (float32 for quantised GGUF) when None.
        format: of mla results: ``headwise``, or ``deepseek`` for a stock ``deepseek_v3`` folder, which has one plan
            for all layers and loads where there is no headwise.
        evaluate: whether to end by measuring the result beside its source, or the text, or texts, to do it on.
            Unless named it is what the calibration leaves of its own, or Python's language reference. What cannot
            be evaluated is said in a note.
        evaluation_windows: of each text, of 2048 tokens or as many as the model has positions; shorter where a single
            text that is named has fewer.
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
    texts = check_texts(calibrate, calibration_tokens, calibration_window)
    if evaluation_windows < 1:
        raise ArgumentError("evaluation_windows", evaluation_windows, "must be at least 1")
    refuse_stages(without)
    out_dtype = None if dtype is None else as_dtype(dtype)
    destination = Path(output)
    check_output(destination, overwrite=overwrite)
    checkpoint = open_checkpoint(source)
    refuse_cross_layers(checkpoint, texts)
    _refuse_source(destination, checkpoint)
    job = Job(checkpoint, target, out_dtype, method, mixes="channels" not in without)
    job.refuse_inputs(texts.sources, statistics, without)
    planned, tensors = plan_folder(job, format)
    saved = None if statistics is None else open_statistics(statistics, checkpoint, progress)

    exam, skipped = Exam(), None
    if not (evaluate is False and format == "headwise") and not (dry_run and isinstance(evaluate, bool)):
        exam, skipped = find_exam(
            checkpoint,
            evaluate,
            calibrate=texts,
            studied=() if saved is None else saved.studied,
            windows=evaluation_windows,
        )
    stages = job.stages(statistics, [*without, *(["spread"] if format == "deepseek" else [])])
    is_studied = bool(texts) or saved is not None
    about: dict[str, Any] = {"source": str(source), "tensors": tensors}
    if dry_run:
        seconds = estimate_seconds(
            job,
            texts if saved is None else saved,
            stages=stages,
            shared_plan=format == "deepseek",
            progress=progress,
        )
        notes = _notes(job, None, format=format, is_studied=is_studied) + (
            [OPEN] if texts and "spread" in stages else []
        )
        return _report(job, planned, **about, output=str(output), seconds=seconds, dry_run=True, notes=notes)

    run = run_identity(
        checkpoint,
        target=asdict(target),
        method=job.method,
        dtype=dtype_name(job.dtype),
        format=format,
        calibrate=texts.identity(),
        without=sorted(without),
        statistics=None if saved is None else saved.identity,
    )

    def begun(folder: Path, make: type[Sequential]) -> Study | None:
        if job.is_lossless:
            return None
        if not texts:
            return saved
        return begin(
            checkpoint,
            texts,
            folder,
            stages=stages,
            run=run,
            make=make,
            progress=progress,
        )

    provisional = format == "headwise"
    with (
        first_enters(
            FolderWriter(destination, tensors, run=run, overwrite=overwrite, provisional=provisional)
        ) as writer,
        refuse_unsolvable(checkpoint),
    ):
        made = write_folder(job, writer, format, begun, run=run, exam=exam, progress=progress)
        notes = _notes(job, made.tokens, format=format, is_studied=is_studied) + made.notes(
            in_nats="sensitivity" in stages
        )
        about |= {"calibration_tokens": made.tokens, "calibration_window": made.window, "notes": notes}
        about["tensors"] = tensors if made.spread is None else job.tensors
        read = texts.sources if saved is None else saved.texts
        report = _report(
            job,
            made.config,
            **{**about, "notes": [*notes, *writer.notes]},  # what was found here is nothing for the card
            output=str(output),
            seconds=time.perf_counter() - start,
            seconds_reading=checkpoint.read_seconds + job.clock.seconds.get("reading", 0.0),
            seconds_writing=job.clock.seconds.get("writing", 0.0),
            peak_rss_bytes=peak_rss_bytes(),
            stock=made.stock,
            spread=made.spread,
        )
        facts = card_facts(job, made.config, **about, calibration=read, stages=stages)
        if rank() == 0:
            # Before the folder is in its place: a run that is killed here measures again, and converts nothing twice.
            if evaluate is not False:
                found = skipped and f"not evaluated: {skipped}"
                report = _with_proof(report, found or prove(writer.folder, report.source, exam, progress))
            if report.evaluation is not None:  # else the card is told nothing of this machine
                facts = replace(facts, evaluation=report.evaluation.to_dict(), seconds=report.seconds)
            writer.write_text("README.md", model_card(facts))
    return report


def _refuse_source(output: Path, checkpoint: Checkpoint) -> None:
    """Refuse to write over what is read."""
    source = Path(os.path.realpath(checkpoint.path))
    if Path(os.path.realpath(output)) in (source, *source.parents):
        raise ArgumentError("output", str(output), "must not be the source, or a folder that holds it")


def _with_proof(report: Conversion, found: Evaluation | str) -> Conversion:
    """The same with what the evaluation found, or why there is none."""
    if isinstance(found, str):
        return replace(report, notes=(*report.notes, found))
    return replace(report, evaluation=replace(found, model=report.output))


def _report(
    job: Job, config: dict[str, Any], tensors: Mapping[str, TensorInfo], *, notes: Sequence[str], **known: Any
) -> Conversion:
    """What is to be said of a result, by its config and its tensors."""
    after, dtype = read_config(config), dtype_name(job.dtype)
    return Conversion(
        model_type=config["model_type"],
        mechanism=after.mechanism,
        label=after.label,
        method=job.method,
        dtype=dtype,
        kv_bytes_per_token_before=cost.cache_bytes_per_token(job.before, dtype),
        kv_bytes_per_token_after=cost.cache_bytes_per_token(after, dtype),
        parameters_before=parameters_of(job.checkpoint.tensors),
        parameters_after=parameters_of(tensors),
        disk_bytes=sum(info.nbytes for info in tensors.values()),
        notes=tuple(notes),
        **known,
    )


def _notes(job: Job, seen: int | None, *, format: str, is_studied: bool) -> list[str]:  # noqa: A002
    """What a user should know; ``seen`` tokens were calibrated on, None if that is not known yet."""
    notes = []
    if not is_studied and not job.is_lossless and job.method not in POOLINGS:
        notes.append("no calibration text: weights alone decided, and quality suffers; give one with calibrate")
    if is_studied and job.is_lossless:
        notes.append("nothing is lost at this size, so no text was needed")
    elif is_studied and seen is not None and seen <= job.before.hidden_size:
        inputs = job.before.hidden_size
        notes.append(f"only {seen} calibration tokens for {inputs} inputs: they decide little, and quality suffers")
    if format == "deepseek":
        notes.append("a deepseek_v3 latent has one number more than was asked for, a constant that its norm needs")
    if isinstance(job.checkpoint, GgufCheckpoint) and job.checkpoint.quantization is not None:
        notes.append(f"the source is dequantised from {job.checkpoint.quantization}")
    return notes
