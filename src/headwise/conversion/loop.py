"""Convert layer after layer: read it, find what it becomes, write that, and keep it for a run that goes on."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headwise.checkpoints import Checkpoint, FolderWriter
from headwise.conversion.calibration.saved import SavedStatistics
from headwise.conversion.calibration.streams import Sequential
from headwise.conversion.planning.plan import Job
from headwise.conversion.solvers.grouped import METHODS, convert_to_grouped
from headwise.conversion.solvers.heads import NORM_EPS, Layer
from headwise.conversion.solvers.latent import convert_to_latent
from headwise.conversion.solvers.metrics import KEY_WEIGHT
from headwise.conversion.solvers.published import convert_as_published
from headwise.conversion.solvers.statistics import Statistics
from headwise.conversion.storage.layers import LOST, LayerResults
from headwise.errors import CheckpointError
from headwise.processes import rank
from headwise.progress import Progress
from headwise.specs import HOSTED_PREFIX, GroupedSpec, LatentSpec

Study = Sequential | SavedStatistics
"""What layers are solved from: a text that they go through in turn, or what an earlier study found."""


def fill(job: Job, writer: FolderWriter, study: Study | None, progress: Progress) -> None:
    """The whole folder, but for its card: written by the first process, while the others follow.

    Args:
        job: the conversion.
        writer: of the output.
        study: the conversion on a text, which all layers go through in turn, or what an earlier study of the
            source found; None for weights alone.
        progress: told of each layer.
    """
    if rank() == 0:
        writer.add_companions(job.checkpoint)
        _write(job, writer, study, progress)
        writer.write_json("config.json", job.config())
    elif isinstance(study, Sequential):
        _follow(job, writer, study)


def _write(job: Job, writer: FolderWriter, study: Study | None, progress: Progress) -> None:
    """Add every tensor of the output that is missing, one layer in memory at a time."""
    # What is only copied or averaged is made again as fast as it is read.
    is_solved = bool(job.channels) or job.method == METHODS[0]
    results = LayerResults(writer.work / "layers") if is_solved or study is not None else None
    # A text goes through every layer, and of an MLA layer the channels are to be known.
    visits = isinstance(study, Sequential) or bool(job.channels)
    owner = {
        name: (index, cross)
        for cross, specs in ((False, job.after.layers), (True, job.after.cross_layers))
        for index in range(len(specs))
        for name in job.names(index, cross=cross)
    }
    done: tuple[int, bool] | None = None
    layer: dict[str, Tensor] = {}
    for name in job.tensors:
        if writer.has(name) and not (visits and name in owner):
            continue
        if name not in owner:
            tensor = job.cast(name, job.checkpoint.read(name))
            with job.clock("writing"):
                writer.add(name, tensor)
            del tensor
            continue
        if owner[name] != done:
            done = index, cross = owner[name]
            progress("converting", index, job.before.num_layers)
            layer.clear()  # before the next one needs the room
            layer = convert_layer(job, index, study, results, cross=cross)
        tensor = layer.pop(name)
        if not writer.has(name):
            with job.clock("writing"):
                writer.add(name, tensor)
        del tensor
    progress("converting", job.before.num_layers, job.before.num_layers)


def _follow(job: Job, writer: FolderWriter, study: Sequential) -> None:
    """What the processes do that do not write: their windows' part in each layer."""
    for index in range(study.position, job.before.num_layers):
        convert_layer(job, index, study, LayerResults(writer.work / "layers"))


def convert_layer(
    job: Job,
    index: int,
    study: Study | None = None,
    results: LayerResults | None = None,
    *,
    cross: bool = False,
) -> dict[str, Tensor]:
    """One layer's new attention, by the output's names and in its dtype; with ``cross``, that to an encoder's.

    Args:
        job: the conversion.
        index: the layer's.
        study: see `fill`.
        results: where layers are kept, and found again by a later run; None to keep none.
        cross: the attention to an encoder's output.

    Raises:
        CheckpointError: what an earlier run kept is damaged, and cannot be made again.
    """
    if cross and results is not None:
        results = LayerResults(results.folder / "cross")
    is_past = isinstance(study, Sequential) and study.position > index
    if results is not None and (is_past or not isinstance(study, Sequential)):
        with job.clock("reading"):
            kept = results.load(index)
        if kept is not None:
            if not cross:
                job.note_channels(index, kept[1]["channels"])
            return kept[0]
        if is_past:
            raise CheckpointError("layer", index, LOST)
    before = read_layer(job.checkpoint, index, cross=cross)
    source, state = before.spec, before.state
    target = (job.after.cross_layers if cross else job.after.layers)[index]
    assert isinstance(source, GroupedSpec)
    assert isinstance(target, LatentSpec | GroupedSpec)
    made: dict[str, Tensor] = {}

    def solve(statistics: Statistics | None, sensitivity: Tensor | None) -> Layer:
        if isinstance(target, LatentSpec) and job.published:
            solved, channels = convert_as_published(job.published, state, source, target, statistics=statistics)
            return Layer(target, solved, channels)
        if isinstance(target, LatentSpec):
            solved, channels = convert_to_latent(
                state,
                source,
                target,
                statistics=statistics,
                sensitivity=sensitivity,
                longest=job.longest,
                key_weight=KEY_WEIGHT if job.key_weights is None else job.key_weights[index],
                kept=job.kept,
                mix=job.mixes,
            )
            return Layer(target, solved, channels)
        solved = convert_to_grouped(
            state, source, target, method=job.merging, statistics=statistics, sensitivity=sensitivity
        )
        return Layer(target, solved, norm_eps=before.norm_eps)

    def keep(layer: Layer, **about: Any) -> None:
        made.update(job.stored(index, layer, cross=cross))
        if results is not None and rank() == 0:
            with job.clock("writing"):
                results.save(index, made, {"channels": layer.channels, **about})
        if not cross:
            job.note_channels(index, layer.channels)

    if study is None or cross:
        keep(solve(None, None))
    elif isinstance(study, SavedStatistics):
        with job.clock("reading"):
            known = study.layer(index)
        keep(solve(*known))
    else:
        study.layer(
            index, before.float(), solve, lambda step: keep(step.layer, errors=step.errors, chosen=step.chosen)
        )
    return made


def read_layer(checkpoint: Checkpoint, index: int, *, cross: bool = False) -> Layer:
    """A layer's attention in a model, by the layer's own names.

    Args:
        checkpoint: the source.
        index: the layer's.
        cross: the attention to an encoder's output.
    """
    spec = (checkpoint.spec.cross_layers if cross else checkpoint.spec.layers)[index]
    assert isinstance(spec, GroupedSpec)
    was_hosted = str(checkpoint.config["model_type"]).startswith(HOSTED_PREFIX)
    state = checkpoint.family.read_attention(checkpoint.read, index, spec, cross=cross, hosted=was_hosted)
    norm_eps = checkpoint.config.get("rms_norm_eps")
    return Layer(spec, state, norm_eps=NORM_EPS if norm_eps is None else float(norm_eps))
