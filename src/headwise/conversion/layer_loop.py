"""The layer loop: evidence of a layer, its solution, the refined layer on disk, and on to the next layer.

`convert_layer` is the whole way of one layer's tensors. `write_tensors` asks for each layer when it comes to the
layer's first tensor in the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from headwise.base.processes import process_index
from headwise.base.progress import Progress, silent
from headwise.conversion.budget.shared_channels import compare_own_channels
from headwise.conversion.calibration.base import Calibrator
from headwise.conversion.methods import Evidence
from headwise.conversion.output.layout import OutputLayout
from headwise.conversion.output.rotary_factors import with_even_pairs
from headwise.conversion.output.without_biases import constant_of_inputs, without_biases
from headwise.conversion.planning.plan import ConversionPlan, Place, read_layer
from headwise.conversion.solvers.device import CPU, moved
from headwise.conversion.solvers.layer import Layer
from headwise.conversion.storage.store import ConvertedLayer, LayerStore
from headwise.models.checkpoints import FolderWriter
from headwise.runtime.attention import RotaryEmbedding
from headwise.runtime.quantization import TransformCode
from headwise.serving.exports.deepseek import input_norm

CONVERTING = "converting"
"""The name of the stage, for progress."""


def convert_layers(
    layout: OutputLayout,
    calibrator: Calibrator,
    store: LayerStore,
    places: Iterable[Place],
    progress: Progress = silent,
) -> Iterator[ConvertedLayer]:
    """Convert some layers, in order, each when the caller asks for it.

    Args:
        layout: the layout of the output folder, with the plan.
        calibrator: gives the evidence of each layer.
        store: saves converted layers, for a run that continues this one if it is killed.
        places: the layers' places in the model.
        progress: told of each layer.

    Raises:
        CheckpointError: the result of an earlier run is lost, or a number does not fit the output's dtype.
        StorageError: the disk is full.
    """
    count = layout.plan.before.num_layers
    for place in places:
        layer = store.load(place) if calibrator.may_be_saved(place) else None
        if layer is None:
            progress(CONVERTING, place.index, count)  # a layer that is loaded says nothing about the pace
            layer = convert_layer(layout, calibrator, store, place)
        yield layer
        del layer  # freed before the next one is converted
    progress(CONVERTING, count, count)


def convert_layer(layout: OutputLayout, calibrator: Calibrator, store: LayerStore, place: Place) -> ConvertedLayer:
    """Convert one layer; see `convert_layers`."""
    plan = layout.plan
    source = read_layer(plan.checkpoint, place)
    target = plan.layer_target(place)
    evidence = calibrator.evidence(place, source)
    solution = plan.method.solve(source, target, evidence)
    channel_losses = compare_own_channels(plan.method, source, target, evidence, solution, calibrator)
    refined = calibrator.refine(place, solution, target.token_bytes, _last_step(plan, place, evidence))
    about = {**refined.about(), **channel_losses}
    layer = ConvertedLayer(
        place,
        layout.stored(place, refined.layer),
        refined.layer.channels,
        about,
        None if refined.layer.code is None else refined.layer.code.to(CPU),
    )
    if process_index() == 0:
        store.save(layer)
    calibrator.advance(place, refined)
    return layer


def _last_step(plan: ConversionPlan, place: Place, evidence: Evidence) -> Callable[[Layer], Layer] | None:
    """What is done with a layer before its refit: biases are removed, where the plan says so.

    Engines' small caches take such layers, so that their rotary pairs are made to bear rounding first.
    """
    if not plan.bias_free:
        return None
    assert evidence.statistics is not None
    moments = evidence.statistics.inputs
    rope = plan.before.layers[place.index].rope
    constant = constant_of_inputs(evidence.statistics, evidence.starts)
    gain = moved(plan.checkpoint.read(input_norm(place.index)))

    def last_step(layer: Layer) -> Layer:
        if rope is not None:
            layer = with_even_pairs(
                layer, moments, moved(torch.tensor(RotaryEmbedding(rope).frequencies))[layer.channels]
            )
        return without_biases(layer, constant, gain, plan.dtype)

    return last_step


def write_tensors(
    layout: OutputLayout, writer: FolderWriter, calibrator: Calibrator, store: LayerStore, progress: Progress = silent
) -> tuple[dict[int, list[int]], dict[int, TransformCode]]:
    """Add all tensors that a folder lacks, with one layer in memory at a time.

    Args:
        layout: the layout of the folder.
        writer: the open writer of the folder.
        calibrator: see `convert_layers`.
        store: see `convert_layers`.
        progress: told of each layer.

    Returns:
        The rotary channels of each layer, for the folder's config, and the code of each layer's cache.
    """
    plan, owner = layout.plan, layout.owner
    # A text goes through every layer, and the config needs the channels of every MLA layer.
    visits_all = calibrator.is_sequential or plan.after.mechanism == "mla"
    places = list(dict.fromkeys(owner[name] for name in owner if visits_all or not writer.has(name)))
    layers = convert_layers(layout, calibrator, store, places, progress)
    channels: dict[int, list[int]] = {}
    codes: dict[int, TransformCode] = {}
    layer: ConvertedLayer | None = None
    for name in layout.tensors:
        if name not in owner:
            if not writer.has(name):
                writer.add(name, layout.cast(name, plan.checkpoint.read(name)))
            continue
        place = owner[name]
        if layer is None or layer.place != place:
            if place not in places:
                continue
            layer = next(layers)
            if not place.cross:
                channels[place.index] = layer.channels
                if layer.code is not None:
                    codes[place.index] = layer.code
        tensor = layer.tensors.pop(name)
        if not writer.has(name):
            writer.add(name, tensor)
        del tensor  # freed before the next layer is converted
    for _ in layers:  # run the generator to its end
        pass
    return channels, codes


def follow(layout: OutputLayout, calibrator: Calibrator) -> None:
    """Convert without writing: the part of every process but the first in a conversion on a text."""
    if calibrator.is_sequential:
        places = [place for place in layout.plan.places if not calibrator.may_be_saved(place)]
        for _ in convert_layers(layout, calibrator, LayerStore(None), places):
            pass
