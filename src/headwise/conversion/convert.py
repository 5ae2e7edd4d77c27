"""`convert`: a model folder goes in, a smaller-cache model folder comes out."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from headwise.checkpoints import FolderWriter, TensorInfo, check_output, dtype_name, open_checkpoint, run_identity
from headwise.checkpoints.disk import write_whole
from headwise.checkpoints.gguf import GgufCheckpoint
from headwise.conversion.calibration import begin, refuse_stages, text_identity
from headwise.conversion.card import CardFacts, card_facts, model_card, parameters_of
from headwise.conversion.estimate import estimate_seconds
from headwise.conversion.formats import StockReport, plan_folder, write_folder
from headwise.conversion.job import POOLINGS, Job
from headwise.conversion.plan import parse_target
from headwise.conversion.proof import WINDOWS, Exam, find_exam, prove
from headwise.conversion.sequential import STAGES, Sequential
from headwise.cost import model as cost
from headwise.errors import ArgumentError
from headwise.evaluation import Evaluation, read_source
from headwise.hf import as_dtype
from headwise.measurement import peak_rss_bytes
from headwise.progress import Progress, silent
from headwise.specs import read_config


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
        seconds: it took, without the evaluation; with ``dry_run``, it would take (`estimate_seconds`).
        peak_rss_bytes: most resident memory of the process when the folder was there; None with ``dry_run``.
        evaluation: the result beside its source, on text it was not calibrated on; None where it was skipped.
        stock: what it cost to be a stock folder; None but for ``format="deepseek"``.
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
    seconds: float
    peak_rss_bytes: int | None = None
    dry_run: bool = False
    evaluation: Evaluation | None = None
    stock: StockReport | None = None
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
    format: Literal["headwise", "deepseek"] = "headwise",  # noqa: A002
    evaluate: bool | str | Path | Sequence[str | Path] = True,
    evaluation_windows: int = WINDOWS,
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
        format: of mla results: ``headwise``, or ``deepseek`` for a stock ``deepseek_v3`` folder, which has one plan
            for all layers and loads where there is no headwise.
        evaluate: whether to end by measuring the result beside its source, or the text, or texts, to do it on.
            Unless named it is what the calibration leaves of its own, or Python's language reference. What cannot
            be evaluated is said in a note.
        evaluation_windows: of each text, of 2048 tokens or as many as the model has positions.
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
    for field, value, least in (
        ("calibration_tokens", calibration_tokens, 2),
        ("evaluation_windows", evaluation_windows, 1),
    ):
        if value < least:
            raise ArgumentError(field, value, f"must be at least {least}")
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
    planned, tensors = plan_folder(job, format)

    exam, skipped = Exam(), None
    if not (evaluate is False and format == "headwise") and not (dry_run and isinstance(evaluate, bool)):
        how = {"tokens": calibration_tokens, "windows": evaluation_windows}
        exam, skipped = find_exam(checkpoint, evaluate, calibrate=texts, **how)
    left_out = STAGES if job.published else without
    study: dict[str, Any] = {"tokens": calibration_tokens, "without": left_out, "progress": progress}
    about: dict[str, Any] = {"source": str(source), "tensors": tensors}
    if dry_run:
        seconds = estimate_seconds(job, texts, shared_plan=format == "deepseek", **study)
        notes = _notes(job, texts, None)
        return _report(job, planned, **about, output=str(output), seconds=seconds, dry_run=True, notes=notes)

    decides: dict[str, Any] = {"target": asdict(target), "method": job.method, "dtype": dtype_name(job.dtype)}
    decides |= {"calibrate": [text_identity(text) for text in texts], "tokens": calibration_tokens}
    run = run_identity(checkpoint, **decides, format=format, without=sorted(without))

    def begun(folder: Path, make: type[Sequential]) -> Sequential | None:
        if not texts or job.is_lossless:
            return None
        return begin(checkpoint, texts, folder, run=run, make=make, **study)

    with FolderWriter(destination, tensors, run=run, overwrite=overwrite) as writer:
        made = write_folder(job, writer, format, begun, run=run, exam=exam, progress=progress)
        notes = _notes(job, texts, made.tokens)
        if made.stock is not None:
            notes += made.stock.notes(in_nats="sensitivity" not in without)
        about |= {"calibration_tokens": made.tokens, "notes": notes}
        facts = card_facts(job, made.config, **about, calibration=texts, without=without)
        writer.write_text("README.md", model_card(facts))
    about |= {"output": str(output), "seconds": time.perf_counter() - start, "peak_rss_bytes": peak_rss_bytes()}
    report = _report(job, made.config, **about, stock=made.stock)
    if evaluate is False:
        return report
    if skipped is not None:  # the card says that nothing was measured, and of this machine nothing
        return replace(report, notes=(*report.notes, f"not evaluated: {skipped}"))
    return _proven(report, facts, exam, progress)


def _proven(report: Conversion, facts: CardFacts, exam: Exam, progress: Progress) -> Conversion:
    """The same with what the evaluation found, which the folder's card is told too."""
    folder = Path(report.output)
    proof = prove(folder, report.source, exam, progress)
    if isinstance(proof, str):
        return replace(report, notes=(*report.notes, proof))
    facts = replace(facts, evaluation=proof.to_dict(), seconds=report.seconds)
    write_whole(folder / "README.md", model_card(facts).encode())
    return replace(report, evaluation=proof)


def _report(
    job: Job, config: dict[str, Any], tensors: Mapping[str, TensorInfo], *, notes: Sequence[str], **known: Any
) -> Conversion:
    """What is to be said of a result, by its config and its tensors."""
    after, dtype = read_config(config), dtype_name(job.dtype)
    return Conversion(
        model_type=config["model_type"],
        mechanism=after.mechanism,
        label=after.layers[0].label,
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


def _notes(job: Job, texts: Sequence[str | Path], seen: int | None) -> list[str]:
    """What a user should know; ``seen`` tokens were calibrated on, None if that is not known yet."""
    notes = []
    if not texts and not job.is_lossless and job.method not in POOLINGS:
        notes.append("no calibration text: weights alone decided, and quality suffers; give one with calibrate")
    if texts and job.is_lossless:
        notes.append("nothing is lost at this size, so no text was needed")
    elif texts and seen is not None and seen <= job.before.hidden_size:
        inputs = job.before.hidden_size
        notes.append(f"only {seen} calibration tokens for {inputs} inputs: they decide little, and quality suffers")
    if isinstance(job.checkpoint, GgufCheckpoint) and job.checkpoint.quantization is not None:
        notes.append(f"the source is dequantised from {job.checkpoint.quantization}")
    return notes
