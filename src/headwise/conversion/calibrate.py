"""`calibrate`: collect statistics of a model on a text, for any number of conversions."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headwise.base.disk import storage_errors
from headwise.base.options import CalibrateOptions, takes_options
from headwise.base.processes import entered_first, my_windows, on_main_process
from headwise.base.progress import Progress, silent
from headwise.base.type_checks import checked_types
from headwise.conversion.calibration.saved import ABOUT, save_layer, write_statistics
from headwise.conversion.calibration.source import (
    begin_streams,
    kept_sensitivity,
    output_sensitivities,
    sensitivity_windows,
    traced,
)
from headwise.conversion.calibration.windows import CalibrationWindows, recall_windows
from headwise.conversion.plan import Place, read_layer
from headwise.conversion.solvers.device import computing_on, own_device, refuse_unsolvable
from headwise.conversion.solvers.statistics import statistics_of
from headwise.conversion.storage import LayerFiles, Spill
from headwise.costs.formulas.target import refuse_latent
from headwise.measure.texts.calibration import check_texts, open_windows, refuse_cross_layers
from headwise.measure.texts.sources import refuse_inputs_within
from headwise.measure.timing import peak_rss_bytes
from headwise.models.checkpoints import Checkpoint, FolderWriter, check_output, open_checkpoint, run_identity
from headwise.runtime.hf import LayerwiseModel


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The report of a calibration.

    Attributes:
        source: the model, as the user named it.
        output: the folder of its statistics.
        layers: the number of layers.
        tokens: the number of calibration tokens.
        disk_bytes: the size of the folder, in bytes.
        seconds: the seconds that it took.
        peak_rss_bytes: the peak resident memory of the process, in bytes.
    """

    source: str
    output: str
    layers: int
    tokens: int
    disk_bytes: int
    seconds: float
    peak_rss_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return asdict(self)


@takes_options(CalibrateOptions)
@checked_types
@torch.inference_mode(False)
def calibrate(
    source: str | Path, output: str | Path, options: CalibrateOptions, *, progress: Progress = silent
) -> Calibration:
    """Collect the statistics of a model on a text that `convert` can use for any target.

    For example ``calibrate("smollm2-135m", "./statistics", calibrate="text.txt")``, and then
    ``convert("smollm2-135m", "./half", to="mla", kv_budget=0.5, statistics="./statistics")``.

    A conversion by statistics runs no model and holds one layer in memory at a time. A conversion on the text itself
    is better: there each layer corrects the errors of the layers before it.

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
    start, overwrite = time.perf_counter(), options.overwrite
    texts = check_texts(options.calibrate, options.calibration_tokens, options.calibration_window)
    device, destination = own_device(options.device), Path(output)
    check_output(destination, overwrite=overwrite, mark=ABOUT)
    checkpoint = open_checkpoint(source)
    refuse_inputs_within(destination, {"the source": checkpoint.path}, calibrate=texts.sources)
    refuse_latent(checkpoint.spec)
    refuse_cross_layers(checkpoint, texts)
    run = run_identity(checkpoint, **options.identity() | texts.identity())
    ids, _, begin = open_windows(checkpoint, texts)
    windows = recall_windows(ids, 0, checkpoint.spec, begin=begin)
    # What enters a layer, what leaves it and what enters its attention, each float32 [N, W, E].
    spilled = 3 * 4 * windows.rows * windows.width * checkpoint.spec.hidden_size
    folder = FolderWriter(destination, {}, run=run, overwrite=overwrite, mark=ABOUT, work_bytes=spilled)
    with entered_first(folder) as writer, refuse_unsolvable(checkpoint):
        with computing_on(device):
            results = collect_statistics(checkpoint, windows.to(device), writer.work, run, progress)
        with storage_errors("output", output):
            on_main_process(partial(write_statistics, writer.folder, results, checkpoint, texts.sources, windows))
    return Calibration(
        source=str(source),
        output=str(output),
        layers=checkpoint.spec.num_layers,
        tokens=windows.tokens,
        disk_bytes=sum(file.stat().st_size for file in destination.iterdir()),
        seconds=time.perf_counter() - start,
        peak_rss_bytes=peak_rss_bytes(),
    )


@torch.no_grad()
def collect_statistics(
    checkpoint: Checkpoint, windows: CalibrationWindows, folder: Path, run: str = "", progress: Progress = silent
) -> LayerFiles:
    """Collect and save each layer's statistics of the inputs that the source gives it.

    Args:
        checkpoint: the source model.
        windows: the calibration windows, on the device of the block.
        folder: the folder of activations and results.
        run: the identity of the run, by which a killed run is continued.
        progress: the callback that is told of each layer.

    Returns:
        The files of the layers' statistics.
    """
    # The dtype of conversions on a text.
    model = LayerwiseModel(checkpoint, torch.float32, device=torch.get_default_device())
    sensitivities, results = LayerFiles(folder / "sensitivities"), LayerFiles(folder / "layers")
    output_sensitivities(model, sensitivity_windows(checkpoint.spec, windows), sensitivities, progress=progress)
    stream = begin_streams(model, windows, folder, ("source",), run)
    assert stream.layer is not None
    inputs, mine = Spill(folder / "inputs.spill", stream.shape), my_windows(len(windows))
    for index in range(stream.layer, model.num_layers):
        progress("calibrating", index, model.num_layers)
        module, sensitivity = model.module(index), kept_sensitivity(sensitivities, index)
        source = read_layer(checkpoint, Place(index)).float()
        states = ((window, stream.read("source", window, window + 1)) for window in mine)
        for window, _, call, output in traced(model, windows, index, module, states):
            stream.write("source", window, output)
            inputs.write(window, call.inputs[0])
        pairs = ((window, inputs.read(window)) for window in mine)
        statistics = statistics_of(source, sensitivity.double(), pairs, windows.seen_by(source.spec))
        on_main_process(partial(save_layer, results, index, statistics, sensitivity))
        stream.commit()
    progress("calibrating", model.num_layers, model.num_layers)
    return results
