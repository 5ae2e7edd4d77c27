"""Carry out a plan: calibrate, size the layers, convert one after the other, and write the folder.

`convert_layer` does all steps of one layer: what is known of it, its solution, the best of further steps on disk,
and on to the next layer. `convert_layers` takes the folder's tensors in their order, and each layer at its first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise.base.processes import barrier, entered_first, process_index
from headwise.base.progress import Progress, silent
from headwise.conversion.budget.allocation import DESCENDED
from headwise.conversion.budget.spread import Spread, choose_shared_channels, compare_own_channels, find_spread
from headwise.conversion.calibration.candidates import (
    NOTHING_KNOWN,
    Calibrator,
    Candidate,
    Step,
    coded,
    descended,
    refitted,
    select,
)
from headwise.conversion.calibration.saved import SavedCalibrator
from headwise.conversion.calibration.text import TextCalibrator, start_on_text
from headwise.conversion.output.formats import OutputFormat, StockReport, logits_difference
from headwise.conversion.output.layout import OutputLayout
from headwise.conversion.output.without_biases import constant_of_inputs, with_even_pairs, without_biases
from headwise.conversion.plan import ConversionPlan, Place, read_layer
from headwise.conversion.solvers.device import CPU, computing_on, refuse_unsolvable, to_device
from headwise.conversion.solvers.statistics import Statistics
from headwise.conversion.storage import ConvertedLayer, LayerFiles, LayerStore
from headwise.costs.formulas.layer import cache_values
from headwise.measure.evaluation.beside_source import EvaluationSet
from headwise.measure.texts import NO_TEXTS, CalibrationTexts
from headwise.models.checkpoints import Checkpoint, FolderWriter, TensorInfo, dtype_name, open_checkpoint
from headwise.runtime.attention import RotaryEmbedding
from headwise.runtime.quantization import TransformCode
from headwise.runtime.quantization.transform_code import FILE, codes_content
from headwise.serving.exports.deepseek import input_norm

CONVERTING = "converting"
"""The name of the stage, for progress."""


def convert_layer(layout: OutputLayout, calibrator: Calibrator, store: LayerStore, place: Place) -> ConvertedLayer:
    """Convert one layer: what is known of it, its solution, the best of further steps, on disk, and on to the next.

    Args:
        layout: the layout of the output folder, with the plan.
        calibrator: the calibrator, which knows the evidence of each layer.
        store: the store of converted layers, for a run that continues this one if it is killed.
        place: the layer's place in the model.

    Raises:
        CheckpointError: the result of an earlier run is lost, or a number does not fit the output's dtype.
        StorageError: the disk is full.
    """
    plan = layout.plan
    source, target = read_layer(plan.checkpoint, place), plan.layer_target(place)
    with refuse_unsolvable(plan.checkpoint, place.index):
        evidence, data = calibrator.collect(place, source)
        solved = plan.method.solve(source, target, evidence)
        channel_losses = compare_own_channels(plan.method, source, target, evidence, solved, data)
        steps = later_steps(plan, place, evidence.statistics, on_text=data is not None)
        best, about = select(solved, steps, data)
    layer = best.layer
    code = None if layer.code is None else layer.code.to(CPU)
    converted = ConvertedLayer(place, layout.stored(place, layer), layer.channels, about | channel_losses, code)
    # On disk before the streams pass it: a run that goes on behind a layer reads it from there.
    if process_index() == 0:
        store.save(converted)
    calibrator.advance(data, best)
    return converted


def later_steps(
    plan: ConversionPlan, place: Place, statistics: Statistics | None, *, on_text: bool
) -> dict[str, Step]:
    """The steps that follow a layer's solution, by name and in order; see `select`.

    Args:
        plan: the plan of the conversion.
        place: the layer's place in the model.
        statistics: the statistics that the layer was solved from.
        on_text: whether there are windows of a text; all steps but the removal of biases need them.
    """
    steps: dict[str, Step] = {}
    if on_text and "refine" in plan.stages and _kept(plan, place) <= DESCENDED:
        steps["refine"] = descended
    if on_text and plan.token_bytes is not None:
        # After the descent: the basis of a code has channels of very different sizes, which one learning rate for a
        # tensor does not suit; and a descent hardly lowers what rounding loses.
        steps["code"] = partial(coded, token_bytes=plan.token_bytes[place.index])
    if plan.bias_free:
        # Before the refit, which also makes up for a constant that is a function of the inputs.
        steps["norm"] = partial(_without_biases, plan=plan, place=place, statistics=statistics)
    if on_text and "refit" in plan.stages:
        steps["refit"] = refitted
    return steps


def _kept(plan: ConversionPlan, place: Place) -> float:
    """The number of values of a token that a layer caches, as a part of what the source's does."""
    before, after = (
        (model.cross_layers if place.cross else model.layers)[place.index] for model in (plan.before, plan.after)
    )
    return cache_values(after) / cache_values(before)


def _without_biases(
    candidate: Candidate, *, plan: ConversionPlan, place: Place, statistics: Statistics | None
) -> Iterator[Candidate]:
    """The layer without biases, for engines; its rotary pairs are made to bear the rounding of small caches."""
    assert statistics is not None
    layer, rope = candidate.layer, plan.before.layers[place.index].rope
    first_tokens = None if candidate.data is None else candidate.data.first_tokens
    constant = constant_of_inputs(statistics, None if first_tokens is None else first_tokens.inputs)
    if rope is not None:
        frequencies = to_device(torch.tensor(RotaryEmbedding(rope).frequencies))[layer.channels]
        layer = with_even_pairs(layer, statistics.inputs, frequencies)
    gain = to_device(plan.checkpoint.read(input_norm(place.index)))
    yield Candidate.of("norm", without_biases(layer, constant, gain, plan.dtype), candidate.data)


def convert_layers(
    layout: OutputLayout, calibrator: Calibrator, store: LayerStore, writer: FolderWriter, progress: Progress = silent
) -> tuple[dict[int, list[int]], dict[int, TransformCode]]:
    """Add all tensors that a folder lacks, in its order, with one layer in memory at a time.

    Args:
        layout: the layout of the folder.
        calibrator: the calibrator, which knows the evidence of each layer.
        store: the store of converted layers.
        writer: the open writer of the folder.
        progress: the callback that is told of each layer.

    Returns:
        The rotary channels of each layer, for the folder's config, and the code of each layer's cache.
    """
    plan, owner, count = layout.plan, layout.owner, layout.plan.before.num_layers
    # A text goes through every layer, and the config needs the channels of every MLA layer.
    visits_all = calibrator.is_sequential or plan.after.mechanism == "mla"
    waiting = {owner[name] for name in owner if visits_all or not writer.has(name)}
    channels: dict[int, list[int]] = {}
    codes: dict[int, TransformCode] = {}
    for name in layout.tensors:
        place = owner.get(name)
        if place is None and not writer.has(name):
            writer.add(name, layout.cast(name, plan.checkpoint.read(layout.read_name(name))))
        if place not in waiting:
            continue
        waiting.remove(place)  # with its first tensor all of a layer's are due
        layer = store.load(place) if calibrator.may_be_saved(place) else None
        if layer is None:
            progress(CONVERTING, place.index, count)  # a layer that is loaded says nothing about the pace
            layer = convert_layer(layout, calibrator, store, place)
        if not place.cross:
            channels[place.index] = layer.channels
            if layer.code is not None:
                codes[place.index] = layer.code
        for own in list(layer.tensors):
            tensor = layer.tensors.pop(own)
            if not writer.has(own):
                writer.add(own, tensor)
            del tensor
        del layer  # freed before the next one is converted
    progress(CONVERTING, count, count)
    return channels, codes


def convert_along(layout: OutputLayout, calibrator: Calibrator) -> None:
    """Convert without writing: the part of every process but the first in a conversion on a text."""
    for place in layout.plan.places:
        if calibrator.is_sequential and not calibrator.may_be_saved(place):
            convert_layer(layout, calibrator, LayerStore(None), place)


COMPARED_TOKENS = 512
"""The number of tokens that the two formats of an exported folder are compared on."""

SHARED_CHANNELS, CALIBRATED = "shared-channels", "calibrated"
"""The names of what an exported folder's run keeps beside its layers: the rotary channels that all layers share; and
the number of calibration tokens with the losses of sharing channels, once the folder in headwise's own format is
complete."""


@dataclass(frozen=True)
class ConversionInputs:
    """The inputs of a conversion other than its source.

    Attributes:
        texts: the calibration texts; none for a conversion by weights or statistics alone.
        statistics: the statistics of an earlier calibration, in place of a text.
        evaluation_set: the windows that two formats are compared on; may be empty.
        run: the identity of the conversion, by which a killed run is continued.
        progress: the callback that is told of windows and layers.
    """

    texts: CalibrationTexts = NO_TEXTS
    statistics: SavedCalibrator | None = None
    evaluation_set: EvaluationSet = field(default_factory=list)
    run: str = ""
    progress: Progress = silent

    def start_calibrator(self, plan: ConversionPlan, writer: FolderWriter) -> Calibrator:
        """Start the calibrator of the conversion, before layer 0 or where an earlier run stopped.

        Args:
            plan: the plan of the conversion.
            writer: the writer of the folder, whose working folder holds activations.
        """
        if plan.is_exact:
            return NOTHING_KNOWN
        if self.texts:
            return start_on_text(plan, self.texts, writer.work, run=self.run, progress=self.progress)
        return self.statistics or NOTHING_KNOWN


@dataclass(frozen=True, kw_only=True)
class WrittenFolder:
    """A folder that is complete except for its card.

    Attributes:
        config: the folder's config.
        tensors: the folder's tensors.
        tokens: the number of calibration tokens.
        window: the number of tokens in each calibration window.
        read_seconds: the seconds spent on reading saved layers and statistics.
        write_seconds: the seconds spent on writing saved layers.
        stock: the loss that an exported format causes; None for headwise's own.
        spread: the rank allocation to layers; None if none was searched.
        code_bytes: cache bytes a token, all layers, of a cache that is stored in codes; None without codes.
    """

    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    tokens: int = 0
    window: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    stock: StockReport | None = None
    spread: Spread | None = None
    code_bytes: int | None = None

    def notes(self) -> list[str]:
        """The notes for the user about the format and the allocation of the cache."""
        stock = [] if self.stock is None else self.stock.notes()
        return stock if self.spread is None else [*stock, self.spread.note]


def write_folder(
    plan: ConversionPlan, inputs: ConversionInputs, writer: FolderWriter, output_format: OutputFormat
) -> WrittenFolder:
    """Write the output folder of a plan, except for its card.

    Args:
        plan: the plan of the conversion.
        inputs: the inputs of the conversion.
        writer: the open writer of the folder.
        output_format: the format of the folder.
    """
    if output_format.is_exported:
        return _write_exported(plan, inputs, writer, output_format)
    calibrator = inputs.start_calibrator(plan, writer)
    spread = None
    if "spread" in plan.stages:
        assert isinstance(calibrator, TextCalibrator)  # a plan has this stage only with a text
        spread = find_spread(plan, calibrator, writer.work, inputs.progress)
        plan = plan.resized(spread.layer_sizes)
    layout = OutputLayout(plan)
    if process_index() == 0:
        writer.announce(layout.tensors)
    config, store, codes = _fill(layout, writer, calibrator, inputs.progress)
    # Blocks of few channels cannot spend every byte.
    code_bytes = sum(own.token_bytes for own in codes.values()) if codes else plan.code_bytes
    return WrittenFolder(
        config=config,
        tensors=layout.tensors,
        tokens=calibrator.tokens,
        window=calibrator.window,
        read_seconds=store.seconds["reading"] + calibrator.read_seconds,
        write_seconds=store.seconds["writing"],
        spread=spread,
        code_bytes=code_bytes,
    )


def _fill(
    layout: OutputLayout, writer: FolderWriter, calibrator: Calibrator, progress: Progress
) -> tuple[dict[str, Any], LayerStore, dict[int, TransformCode]]:
    """Write everything in the folder but its card: the first process writes, and the others convert along.

    Returns:
        The config, the layers, and the first process's codes by layer.
    """
    saves_layers = calibrator.has_evidence or not layout.plan.method.is_cheap
    store = LayerStore(writer.work / "layers" if saves_layers else None)
    if process_index() > 0:
        convert_along(layout, calibrator)
        return layout.config(), store, {}
    writer.add_companions(layout.plan.checkpoint)
    channels, codes = convert_layers(layout, calibrator, store, writer, progress)
    if codes:
        writer.write_bytes(FILE, codes_content(codes))
    config = layout.config(channels)
    writer.write_json("config.json", config)
    return config, store, codes


def _write_exported(
    plan: ConversionPlan, inputs: ConversionInputs, writer: FolderWriter, output_format: OutputFormat
) -> WrittenFolder:
    """Convert in headwise's own format within the writer's working folder, and export the folder from there.

    A killed run is continued within the conversion, or after it.
    """
    folder, results = writer.work / "headwise", LayerFiles(writer.work / "results")
    read_seconds = write_seconds = 0.0
    calibrated = results.load(CALIBRATED)
    if calibrated is None or not (folder / "config.json").is_file():
        with entered_first(FolderWriter(folder, OutputLayout(plan).tensors, run=inputs.run, overwrite=True)) as inner:
            calibrator = inputs.start_calibrator(plan, inner)
            channels = _shared_channels(plan, calibrator, results, inputs.progress, output_format)
            _, store, _ = _fill(
                OutputLayout(replace(plan, rotary_channels=channels)), inner, calibrator, inputs.progress
            )
            read_seconds = store.seconds["reading"] + calibrator.read_seconds
            write_seconds = store.seconds["writing"] + inner.write_seconds
            if process_index() == 0:
                losses = _channel_losses(plan, store) if calibrator.is_sequential else {}
                results.save(CALIBRATED, {}, {"tokens": calibrator.tokens, "window": calibrator.window, **losses})
        calibrated = results.load(CALIBRATED)
        assert calibrated is not None  # saved before the folder was moved into place
    about = calibrated[1]
    checkpoint = open_checkpoint(folder)
    config = output_format.exported_config(checkpoint.config | {"dtype": dtype_name(checkpoint.dtype)})
    barrier()  # every process has read the folder before it is removed
    report = StockReport(shared_plan_error=about.get("shared"), own_plan_error=about.get("own"))
    if process_index() == 0:
        with computing_on(CPU):  # the folder is read once more
            config = output_format.export(writer, checkpoint, plan, inputs.progress)
        writer.note_left_out(plan.checkpoint)  # links of the source, which the working folder does not have
        report = _compared(report, checkpoint, writer, inputs.evaluation_set, plan.device)
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
    plan: ConversionPlan, calibrator: Calibrator, results: LayerFiles, progress: Progress, output_format: OutputFormat
) -> Tensor | None:
    """The channels that all layers share, chosen once; None where layers keep all channels."""
    if plan.is_exact or plan.after.mechanism != "mla":
        return None
    if (saved := results.load(SHARED_CHANNELS)) is not None:
        return to_device(saved[0]["rotary_channels"])
    if process_index() > 0 and not calibrator.is_sequential:
        return None  # the first process converts alone
    channels = choose_shared_channels(plan, calibrator, progress, keep=output_format.keep)
    if process_index() == 0:
        results.save(SHARED_CHANNELS, {"rotary_channels": channels}, {})
    return channels


def _channel_losses(plan: ConversionPlan, store: LayerStore) -> dict[str, float]:
    """The losses of all layers in sum, with shared channels and with channels chosen layer by layer."""
    layers = [store.about(place) for place in plan.places]
    return {name: sum(about.get(name, 0.0) for about in layers) for name in ("shared", "own")}


def _compared(
    report: StockReport,
    own_format: Checkpoint,
    writer: FolderWriter,
    evaluation_set: EvaluationSet,
    device: torch.device,
) -> StockReport:
    """The report with the difference between the two formats on the evaluation set, where there is one."""
    if not evaluation_set:
        return report
    (text, windows), *_ = evaluation_set
    ids = windows[:1, :COMPARED_TOKENS]
    difference = logits_difference(own_format, open_checkpoint(writer.folder), ids, device)
    return replace(report, text=text, tokens=ids.numel(), logits_difference=difference)
