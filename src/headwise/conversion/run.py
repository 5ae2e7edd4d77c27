"""Carry out a plan: calibrate, size the layers, convert them, and write the folder in its format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from headwise.checkpoints import Checkpoint, FolderWriter, TensorInfo, dtype_name, open_checkpoint
from headwise.conversion.budget.shared_channels import choose_shared_channels
from headwise.conversion.budget.spread import Spread, find_spread
from headwise.conversion.calibration.base import NOTHING_KNOWN, Calibrator
from headwise.conversion.calibration.saved import SavedCalibrator
from headwise.conversion.calibration.text import TextCalibrator, start_on_text
from headwise.conversion.loop import follow, write_tensors
from headwise.conversion.output.difference import logits_difference
from headwise.conversion.output.formats import OutputFormat, StockReport
from headwise.conversion.output.layout import OutputLayout
from headwise.conversion.output.store import LayerStore
from headwise.conversion.planning.plan import ConversionPlan
from headwise.conversion.proof import Exam
from headwise.conversion.storage.layers import LayerFiles
from headwise.processes import barrier, first_enters, process_index
from headwise.progress import Progress, silent
from headwise.texts import NO_TEXTS, CalibrationTexts

TOKENS = 512
"""How many tokens the two formats of an exported folder are compared on."""


@dataclass(frozen=True, kw_only=True)
class ConversionInputs:
    """What a conversion is given beside its source.

    Attributes:
        texts: to calibrate on; none for weights or statistics alone.
        statistics: an earlier calibration, in the place of a text.
        exam: windows that two formats are compared on; may be empty.
        run: tells this conversion from another; one that was killed goes on.
        progress: told of windows and layers.
    """

    texts: CalibrationTexts = NO_TEXTS
    statistics: SavedCalibrator | None = None
    exam: Exam = field(default_factory=list)
    run: str = ""
    progress: Progress = silent

    @property
    def is_calibrated(self) -> bool:
        """Whether anything is known beside the weights."""
        return bool(self.texts) or self.statistics is not None

    def calibrator(self, plan: ConversionPlan, writer: FolderWriter) -> Calibrator:
        """What is known of the source, before layer 0 or where an earlier run stopped.

        Args:
            plan: the conversion.
            writer: of the folder, in whose working folder activations are kept.
        """
        if plan.is_exact:
            return NOTHING_KNOWN
        if self.texts:
            return start_on_text(plan, self.texts, writer.work, run=self.run, progress=self.progress)
        return self.statistics or NOTHING_KNOWN


@dataclass(frozen=True, kw_only=True)
class WrittenFolder:
    """A folder that is complete but for its card.

    Attributes:
        config: of the folder.
        tensors: of the folder.
        tokens: that were calibrated on.
        window: tokens in each window of them.
        read_seconds: spent on reading what had been kept, beside the source.
        write_seconds: spent on writing what is kept, beside the folder.
        stock: with an exported format, what it cost.
        spread: how the cache was spread over layers, where that was tried.
    """

    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    tokens: int = 0
    window: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    stock: StockReport | None = None
    spread: Spread | None = None

    def notes(self, *, in_nats: bool) -> list[str]:
        """What a user should know of the format and of the spread."""
        return [
            *([] if self.stock is None else self.stock.notes(in_nats=in_nats)),
            *([] if self.spread is None else [self.spread.note]),
        ]


def write_folder(
    plan: ConversionPlan, inputs: ConversionInputs, writer: FolderWriter, output_format: OutputFormat
) -> WrittenFolder:
    """Write the folder of a plan in a format, but for its card.

    Args:
        plan: the conversion.
        inputs: what it is given.
        writer: of the folder, open.
        output_format: of the folder.
    """
    if output_format.is_exported:
        return _write_exported(plan, inputs, writer, output_format)
    calibrator = inputs.calibrator(plan, writer)
    spread = None
    if isinstance(calibrator, TextCalibrator) and "spread" in plan.stages:
        spread = find_spread(plan, calibrator, writer.work, inputs.progress)
        plan = plan.resized(spread.layer_sizes)
    layout = OutputLayout(plan)
    if process_index() == 0:
        writer.announce(layout.tensors)
    config, store = _fill(layout, writer, calibrator, inputs.progress)
    return WrittenFolder(
        config=config,
        tensors=layout.tensors,
        tokens=calibrator.tokens,
        window=calibrator.window,
        read_seconds=store.read_seconds + calibrator.read_seconds,
        write_seconds=store.write_seconds,
        spread=spread,
    )


def _fill(
    layout: OutputLayout, writer: FolderWriter, calibrator: Calibrator, progress: Progress
) -> tuple[dict[str, Any], LayerStore]:
    """Everything in the folder but its card: written by the first process, while the others follow."""
    is_kept = calibrator is not NOTHING_KNOWN or not layout.plan.method.is_cheap
    store = LayerStore(writer.work / "layers" if is_kept else None)
    if process_index() > 0:
        follow(layout, calibrator)
        return layout.config(), store
    writer.add_companions(layout.plan.checkpoint)
    channels = write_tensors(layout, writer, calibrator, store, progress)
    config = layout.config(channels)
    writer.write_json("config.json", config)
    return config, store


def _write_exported(
    plan: ConversionPlan, inputs: ConversionInputs, writer: FolderWriter, output_format: OutputFormat
) -> WrittenFolder:
    """Convert in headwise's own format within the writer's working folder, and export the folder from there.

    A run that is killed goes on: within the first conversion, or after it.
    """
    own, summary = writer.work / "own", LayerFiles(writer.work / "plan")
    read_seconds = write_seconds = 0.0
    if not (own / "config.json").is_file():
        with first_enters(FolderWriter(own, OutputLayout(plan).tensors, run=inputs.run)) as inner:
            calibrator = inputs.calibrator(plan, inner)
            channels = _shared_channels(plan, calibrator, summary, inputs.progress)
            _, store = _fill(OutputLayout(plan.sharing(channels)), inner, calibrator, inputs.progress)
            read_seconds = store.read_seconds + calibrator.read_seconds
            write_seconds = store.write_seconds + inner.write_seconds
            if process_index() == 0:
                losses = _channel_losses(plan, store) if calibrator.is_sequential else {}
                summary.save(1, {}, {"tokens": calibrator.tokens, "window": calibrator.window, **losses})
    kept = summary.load(1)
    about: dict[str, Any] = {"tokens": 0, "window": 0} if kept is None else kept[1]
    checkpoint = open_checkpoint(own)
    config = output_format.exported_config({**checkpoint.config, "dtype": dtype_name(checkpoint.dtype)})
    barrier()  # all have read it before it is gone
    report = StockReport(shared_plan_error=about.get("shared"), own_plan_error=about.get("own"))
    if process_index() == 0:
        output_format.export(writer, checkpoint, config, inputs.progress)
        writer.note_left_out(plan.checkpoint)  # the folder between has no links
        report = _compared(report, checkpoint, writer, inputs.exam)
    return WrittenFolder(
        config=config,
        tensors=output_format.tensors(OutputLayout(plan)),
        tokens=about["tokens"],
        window=about["window"],
        read_seconds=read_seconds + checkpoint.read_seconds,
        write_seconds=write_seconds,
        stock=report,
    )


def _shared_channels(
    plan: ConversionPlan, calibrator: Calibrator, summary: LayerFiles, progress: Progress
) -> Tensor | None:
    """The channels that all layers keep, chosen once; None where they keep all they have."""
    if plan.is_exact:
        return None
    if (kept := summary.load(0)) is not None:
        return kept[0]["kept"]
    if process_index() > 0 and not calibrator.is_sequential:
        return None  # the first process needs no help
    channels = choose_shared_channels(plan, calibrator, progress)
    if process_index() == 0:
        summary.save(0, {"kept": channels}, {})
    return channels


def _channel_losses(plan: ConversionPlan, store: LayerStore) -> dict[str, float]:
    """What all layers lose with the channels they share, and with those that each needs most."""
    layers = [store.about(place) for place in plan.places]
    return {name: sum(about.get(name, 0.0) for about in layers) for name in ("shared", "own")}


def _compared(report: StockReport, own: Checkpoint, writer: FolderWriter, exam: Exam) -> StockReport:
    """The report with the difference between the two formats on the exam, where there is one."""
    if not exam:
        return report
    (text, windows), *_ = exam
    ids = windows[:1, :TOKENS]
    difference = logits_difference(own, open_checkpoint(writer.folder), ids)
    return replace(report, text=text, tokens=ids.numel(), logits_difference=difference)
