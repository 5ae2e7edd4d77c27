"""`convert`: convert a model folder into one with a smaller cache, and evaluate the result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from headwise.base.documents import MEASURED
from headwise.base.options import ConvertOptions, takes_options
from headwise.base.processes import entered_first, on_main_process, process_count
from headwise.base.progress import Progress, TimedProgress, silent
from headwise.base.type_checks import checked_types
from headwise.conversion.calibration.saved import SavedCalibrator, open_statistics
from headwise.conversion.estimate import estimate_stages
from headwise.conversion.output.card import CardFacts, base_model_of, last_name, layout_of, model_card, source_license
from headwise.conversion.output.formats import OutputFormat, output_format
from headwise.conversion.output.layout import OutputLayout
from headwise.conversion.plan import CONVERSION, ConversionPlan, make_plan, refuse_inputs
from headwise.conversion.report import COMPARING, Conversion, balance, compare_plain, measured_json
from headwise.conversion.solvers.device import computing_on, own_device, peak_bytes, refuse_unsolvable, reset_peak
from headwise.conversion.write_folder import ConversionInputs, WrittenFolder, write_folder
from headwise.costs.formulas.model import cache_bytes_per_token
from headwise.costs.formulas.target import Target, parse_target
from headwise.costs.prediction import check_engine
from headwise.errors import HeadwiseError
from headwise.measure.evaluation.beside_source import (
    EVALUATING,
    NOT_EVALUATED,
    EvaluationSet,
    choose_evaluation_set,
    evaluate_result,
    overlap_notes,
    window_notes,
)
from headwise.measure.texts import (
    CalibrationTexts,
    check_texts,
    named_texts,
    refuse_cross_layers,
    refuse_inputs_within,
)
from headwise.measure.texts.circumstances import circumstances
from headwise.measure.timing import peak_rss_bytes
from headwise.models.checkpoints import (
    Checkpoint,
    FolderWriter,
    check_output,
    dtype_name,
    open_checkpoint,
    run_identity,
    versions,
)
from headwise.models.checkpoints.gguf_reader import GgufCheckpoint
from headwise.models.checkpoints.writer import MODEL
from headwise.models.specs import read_config
from headwise.runtime.hf import as_dtype, auto_class
from headwise.runtime.quantization.transform_code import FILE

UNKNOWN_SPREAD = "the text decides how the cache is spread over layers; parameters and disk depend on it"
"""The note of a dry run about sizes that it does not compute."""


@takes_options(ConvertOptions)
@checked_types
@torch.inference_mode(False)  # sensitivities are derivatives, whatever the caller is doing
def convert(
    source: str | Path, output: str | Path, options: ConvertOptions, *, progress: Progress = silent
) -> Conversion:
    """Convert a model's attention and write the result as a model folder.

    For example ``convert("smollm2-135m", "./half", to="mla", kv_budget=0.5, calibrate="text.txt")``.

    MHA results are stock folders of the source's family; so are GQA and MQA results if the family has a number of
    key–value heads. Other results, and MLA, are the family's model with headwise's attention: load them with
    ``headwise.load``, or with transformers after ``import headwise.hf``.

    ``calibrate`` and ``evaluate`` take the sources that `headwise.measure.texts.read_source` reads. The evaluation
    also measures what plain quantisation of the source loses at about these bytes. ``evaluate=False`` skips both; if
    one of them is not possible, a note of the report says why.

    Args:
        source: a model folder, ``.gguf``, ``smollm2-135m`` or ``hf://owner/name``.
        output: the folder to write; must not exist, or be empty, unless ``overwrite``.
        options: the keywords below as one object, in place of them.
        progress: the callback that is told of each layer.

    Raises:
        ArgumentError: an argument is outside its rule.
        SpecError: the source's attention is of a kind that is not converted.
        CheckpointError: the source cannot be read, or the output cannot be written.
    """
    start = time.perf_counter()
    prepared = _prepare(source, Path(output), options, progress)
    plan = prepared.plan
    reset_peak(plan.device)
    if options.dry_run:
        with refuse_unsolvable(plan.checkpoint), computing_on(plan.device):
            return _estimate(prepared)
    if isinstance(progress, TimedProgress):
        _expect(prepared, progress)
    with entered_first(prepared.writer()) as writer, refuse_unsolvable(plan.checkpoint):
        with computing_on(plan.device):
            written = write_folder(plan, replace(prepared.inputs, run=prepared.run), writer, prepared.format)
        notes = _notes(prepared, written)
        report = _describe(prepared, written, [*notes, *writer.notes], start)
        report = replace(report, seconds_writing=writer.write_seconds + written.write_seconds)
        # Before the folder is moved into place: a run that is killed here evaluates again, and converts nothing.
        report = on_main_process(partial(_prove, prepared, report, writer)) or report
        writer.write_text("README.md", model_card(_card_facts(prepared, written, notes, report)))
        measured = measured_json(plan, _target(options), options, report)
        if measured is not None:
            writer.write_text(MEASURED, measured)
    return report


@dataclass(frozen=True)
class _Prepared:
    """A conversion whose inputs have been checked.

    Attributes:
        source: the source, as the user named it.
        output: the folder to write.
        options: the user's options.
        plan: the plan of the conversion.
        format: the format of the folder.
        inputs: the texts or statistics that it is calibrated on, the windows to evaluate on, and the progress.
        no_evaluation_set: the reason why there are no windows, if the user named no text.
    """

    source: str
    output: Path
    options: ConvertOptions
    plan: ConversionPlan
    format: OutputFormat
    inputs: ConversionInputs
    no_evaluation_set: str | None

    @property
    def run(self) -> str:
        """A digest of all that decides the output: a killed run is continued by a run with the same identity."""
        options, statistics = self.options, self.inputs.statistics
        # What files hold in place of their paths, and one spelling of what has several.
        decides = options.identity() | {
            "to": asdict(_target(options)),
            "method": self.plan.method.spelling,
            "dtype": dtype_name(self.plan.dtype),
            "without": sorted(options.without),
            "statistics": None if statistics is None else statistics.identity,
            "conversion": CONVERSION,
        }
        return run_identity(self.plan.checkpoint, **decides | self.inputs.texts.identity())

    @property
    def engine(self) -> str | None:
        """The engine that is to run the result; None where it is not known."""
        return self.options.served_by or ("llama.cpp" if self.format.name.startswith("gguf") else None)

    def writer(self) -> FolderWriter:
        """The writer of the folder, with the tensors that it has if the cache is not spread over layers."""
        layout, is_exported = OutputLayout(self.plan), self.format.is_exported
        announced = self.format.announced(layout)
        work_bytes = sum(info.nbytes for info in layout.tensors.values())
        return FolderWriter(
            self.output,
            announced,
            run=self.run,
            overwrite=self.options.overwrite,
            provisional=not is_exported,
            # An exported folder is written from a complete one in headwise's own format.
            work_bytes=work_bytes * (1 if announced else 2) if is_exported else 0,
            mark=self.format.mark,
        )

    def notes(self, tokens: int | None) -> list[str]:
        """The notes for the user that do not depend on the result.

        Args:
            tokens: the number of calibration tokens; None before they are read.
        """
        plan, is_calibrated = self.plan, bool(self.inputs.texts) or self.inputs.statistics is not None
        notes, width = list(plan.checkpoint.notes), plan.before.hidden_size
        if not is_calibrated and not plan.is_exact and plan.method.uses_text:
            notes.append("no calibration text: converting by weights alone costs quality; name a text with calibrate")
        if is_calibrated and plan.is_exact:
            notes.append("this size is lossless: calibration was not needed")
        elif is_calibrated and tokens is not None and tokens <= width:
            notes.append(f"only {tokens} calibration tokens for layers of {width} inputs: too few for good quality")
        if plan.token_bytes is not None:
            notes.append(
                f"headwise.load stores the cache in codes, which {FILE} describes. "
                "Other programs store all values as they are"
            )
        notes += self.format.notes(plan)
        if isinstance(plan.checkpoint, GgufCheckpoint) and plan.checkpoint.quantization is not None:
            notes.append(f"the source is dequantised from {plan.checkpoint.quantization}")
        return notes


def _prepare(source: str | Path, output: Path, options: ConvertOptions, progress: Progress) -> _Prepared:
    """Check all inputs before any work."""
    target = _target(options)
    if options.served_by is not None:
        check_engine(options.served_by, field="served_by")
    texts = check_texts(options.calibrate, options.calibration_tokens, options.calibration_window)
    dtype = None if options.dtype is None else as_dtype(options.dtype)
    device = own_device(options.device)
    form = output_format(options.format, options.pad_to)
    check_output(output, overwrite=options.overwrite, mark=form.mark)
    checkpoint = open_checkpoint(source)
    refuse_cross_layers(checkpoint, texts)
    read = {"the source": checkpoint.path}
    if options.statistics is not None:
        read["the statistics"] = Path(options.statistics)
    refuse_inputs_within(output, read, calibrate=texts.sources, evaluate=named_texts(options.evaluate))
    # The plan decides sizes, so that it has to know what the format asks of them.
    target = replace(target, spreads=options.spread, has_constant=form.has_constant, block=form.block)
    plan = make_plan(
        checkpoint,
        target,
        method=options.method,
        dtype=dtype,
        # A stock folder has one width of latent for all layers, over which nothing can be spread.
        without=[*options.without, *(["spread"] if form.is_exported else [])],
        calibration="statistics" if options.statistics is not None else "text" if texts else None,
        device=device,
        bias_free=options.bias_free or (form.lacks_biases and target.mechanism == "mla"),
    )
    refuse_inputs(plan, options, texts.sources, is_exported=form.is_exported, may_lack_biases=form.may_lack_biases)
    form.check(OutputLayout(plan))
    # These read files to their ends, and so come after all that can be refused by the config.
    statistics = None if options.statistics is None else open_statistics(options.statistics, checkpoint, progress)
    evaluation_set, no_evaluation_set = _find_evaluation_set(checkpoint, options, texts, statistics)
    inputs = ConversionInputs(texts, statistics, evaluation_set, progress=progress)
    return _Prepared(str(source), output, options, plan, form, inputs, no_evaluation_set)


def _target(options: ConvertOptions) -> Target:
    return parse_target(
        options.to,
        kv_budget=options.kv_budget,
        kv_lora_rank=options.kv_lora_rank,
        qk_rope_head_dim=options.qk_rope_head_dim,
        kv_bytes=options.kv_bytes,
        bits=options.bits,
    )


def _find_evaluation_set(
    checkpoint: Checkpoint, options: ConvertOptions, texts: CalibrationTexts, statistics: SavedCalibrator | None
) -> tuple[EvaluationSet, str | None]:
    """The windows to evaluate on and to compare two formats on, and why there are none if none are named or serve."""
    if options.evaluate is False and not output_format(options.format).is_exported:
        return [], None
    named, windows = named_texts(options.evaluate), options.evaluation_windows
    known = () if statistics is None else statistics.text_identities
    try:
        evaluation_set = choose_evaluation_set(
            checkpoint, named, calibrate=texts, calibrated_on=known, windows=windows
        )
    except HeadwiseError as error:
        if named:
            raise
        return [], str(error)
    return evaluation_set, None


def _estimate(prepared: _Prepared) -> Conversion:
    """The report of a dry run."""
    plan, layout = prepared.plan, OutputLayout(prepared.plan)
    seconds = _seconds(prepared)
    evaluating = sum(seconds.pop(stage, 0.0) for stage in (EVALUATING, COMPARING))
    notes = prepared.notes(None) + ([UNKNOWN_SPREAD] if "spread" in plan.stages else []) + _unevaluated(prepared)
    config, tensors = prepared.format.config(layout), prepared.format.tensors(layout)
    written = WrittenFolder(config=config, tensors=tensors, code_bytes=plan.code_bytes)
    report = _report(prepared, written, sum(seconds.values()), notes)
    return replace(report, dry_run=True, seconds_evaluating=evaluating)


def _report(prepared: _Prepared, written: WrittenFolder, seconds: float, notes: Sequence[str]) -> Conversion:
    """The report of a folder, written or not; what only a written one has is left to the caller."""
    plan, before, after = prepared.plan, prepared.plan.before, read_config(written.config)
    dtype, codes = dtype_name(plan.dtype), written.code_bytes
    disk_bytes = prepared.format.weight_bytes(written.tensors, written.config, plan)
    token_bytes = cache_bytes_per_token(before), cache_bytes_per_token(after) if codes is None else codes
    weight_bytes = sum(file.stat().st_size for file in plan.checkpoint.files), disk_bytes
    return Conversion(
        source=prepared.source,
        output=str(prepared.output),
        model_type=written.config["model_type"],
        mechanism=after.mechanism,
        label=after.label,
        format=prepared.format.name,
        method=plan.method.spelling,
        dtype=dtype,
        kv_bytes_per_token_before=cache_bytes_per_token(before, dtype),
        kv_bytes_per_token_after=cache_bytes_per_token(after, dtype) if codes is None else codes,
        coded=codes is not None,
        parameters_before=sum(info.numel for info in plan.checkpoint.tensors.values()),
        parameters_after=sum(info.numel for info in written.tensors.values()),
        disk_bytes=disk_bytes,
        balance=balance(before, after, prepared.options.served_context, token_bytes, weight_bytes),
        seconds=seconds,
        made_with=circumstances(plan.checkpoint.path, dtype=dtype, texts=_texts(prepared), device=plan.device),
        notes=tuple(notes),
    )


def _texts(prepared: _Prepared) -> list[str | Path]:
    """All texts that a conversion reads, to calibrate and to evaluate on."""
    return [*prepared.inputs.texts.sources, *(name for name, _ in prepared.inputs.evaluation_set)]


def _unevaluated(prepared: _Prepared) -> list[str]:
    """A note why there is no evaluation, where the user wants one."""
    is_wanted = prepared.options.evaluate is not False and prepared.no_evaluation_set
    return [f"{NOT_EVALUATED}: {prepared.no_evaluation_set}"] if is_wanted else []


def _expect(prepared: _Prepared, progress: TimedProgress) -> None:
    """Tell progress how long each stage of a conversion on a text should take."""
    if not prepared.inputs.texts or prepared.plan.is_exact or process_count() > 1:
        return
    # What fails here fails in the conversion too, which then says so.
    with suppress(HeadwiseError, OSError, RuntimeError), computing_on(prepared.plan.device):
        progress.expect(_seconds(prepared))


def _seconds(prepared: _Prepared) -> dict[str, float]:
    """The seconds that each stage is expected to take, those of the evaluation included."""
    evaluation_set = prepared.inputs.evaluation_set if prepared.options.evaluate is not False else []
    inputs = replace(prepared.inputs, evaluation_set=evaluation_set)
    return estimate_stages(prepared.plan, inputs, shares_channels=prepared.format.is_exported)


def _notes(prepared: _Prepared, written: WrittenFolder) -> list[str]:
    """The notes for the user and for the model card."""
    plan, inputs, is_proved = prepared.plan, prepared.inputs, prepared.options.evaluate is not False
    overlap = []
    if is_proved and not plan.is_exact:
        overlap = overlap_notes(plan.checkpoint, inputs.evaluation_set, inputs.texts)
    windows = window_notes(plan.checkpoint, inputs.evaluation_set if is_proved else [])
    return [*prepared.notes(written.tokens), *written.notes(), *overlap, *windows]


def _describe(prepared: _Prepared, written: WrittenFolder, notes: Sequence[str], start: float) -> Conversion:
    """The report of a written folder, without its evaluation."""
    return replace(
        _report(prepared, written, time.perf_counter() - start, notes),
        calibration_tokens=written.tokens,
        calibration_window=written.window,
        seconds_reading=prepared.plan.checkpoint.read_seconds + written.read_seconds,
        peak_rss_bytes=peak_rss_bytes(),
        peak_device_bytes=peak_bytes(prepared.plan.device),
        stock=written.stock,
        spread=written.spread,
    )


def _prove(prepared: _Prepared, report: Conversion, writer: FolderWriter) -> Conversion:
    """The report with evaluations of the folder and of plain quantisation, or with notes why there are none.

    The folder is measured where it is written, before it is moved into place. What cannot be measured becomes a note,
    and after an interruption the same command measures again and converts nothing twice.
    """
    if prepared.options.evaluate is False:
        return report
    if prepared.no_evaluation_set:
        return replace(report, notes=(*report.notes, *_unevaluated(prepared)))
    start, inputs, source = time.perf_counter(), prepared.inputs, prepared.plan.checkpoint
    evaluation = evaluate_result(
        writer.folder, report.source, inputs.evaluation_set, inputs.progress, device=prepared.options.device
    )
    if isinstance(evaluation, str):
        return replace(report, notes=(*report.notes, evaluation))
    report = replace(report, evaluation=replace(evaluation, model=report.output))
    plain = compare_plain(
        source, writer.folder, inputs.evaluation_set, evaluation, engine=prepared.engine, progress=inputs.progress
    )
    report = replace(report, seconds_evaluating=time.perf_counter() - start)
    if isinstance(plain, str):
        return replace(report, notes=(*report.notes, plain))
    return replace(report, plain=plain)


def _card_facts(prepared: _Prepared, written: WrittenFolder, notes: Sequence[str], report: Conversion) -> CardFacts:
    """The content of the model card; seconds only beside an evaluation, so that other cards do not vary."""
    plan, statistics = prepared.plan, prepared.inputs.statistics
    after, base_model = read_config(written.config), base_model_of(prepared.source)
    return CardFacts(
        name=f"{(base_model or last_name(prepared.source)).rpartition('/')[2]}, {after.label}",
        source=prepared.source,
        before=plan.before,
        after=after,
        dtype=report.dtype,
        layout="gguf" if prepared.format.mark != MODEL else layout_of(written.config),
        method=report.method,
        stages=plan.stages if written.tokens else [],
        calibration=prepared.inputs.texts.sources if statistics is None else statistics.texts,
        calibration_tokens=written.tokens,
        calibration_window=written.window,
        evaluation=None if report.evaluation is None else report.evaluation.to_dict(),
        plain=None if report.plain is None else report.plain.to_dict(),
        base_model=base_model,
        license=source_license(plan.checkpoint.path),
        versions=versions(),
        auto_class=auto_class(written.config),
        parameters=(report.parameters_before, report.parameters_after),
        code_bytes=written.code_bytes,
        seconds=None if report.evaluation is None else report.seconds,
        notes=notes,
    )
