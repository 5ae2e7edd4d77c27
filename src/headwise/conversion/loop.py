"""Convert layer after layer: what is known of it, the solution, its refinement, and on to the next.

This is the whole way of one layer's tensors. `write_tensors` asks for each layer when it comes to its place in the
folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headwise.checkpoints import FolderWriter
from headwise.conversion.budget.shared_channels import compare_own_channels
from headwise.conversion.calibration.base import Calibrator
from headwise.conversion.output.layout import OutputLayout
from headwise.conversion.output.store import ConvertedLayer, LayerStore
from headwise.conversion.planning.plan import Place
from headwise.processes import process_index
from headwise.progress import Progress, silent


def convert_layers(
    layout: OutputLayout,
    calibrator: Calibrator,
    store: LayerStore,
    places: Iterable[Place],
    progress: Progress = silent,
) -> Iterator[ConvertedLayer]:
    """Convert some layers, in order, each as it is asked for.

    Args:
        layout: of the plan, and of the folder that the layers are for.
        calibrator: gives what is known of each layer.
        store: keeps what is converted for a run that goes on where this one was killed.
        places: of the layers.
        progress: told of each layer.

    Raises:
        CheckpointError: a layer of an earlier run is lost, a number does not fit the output's dtype, or the disk is
            full.
    """
    count = layout.plan.before.num_layers
    for place in places:
        progress("converting", place.index, count)
        kept = store.load(place) if calibrator.is_past(place) else None
        yield convert_layer(layout, calibrator, store, place) if kept is None else kept
        del kept  # before the next one needs the room
    progress("converting", count, count)


def convert_layer(layout: OutputLayout, calibrator: Calibrator, store: LayerStore, place: Place) -> ConvertedLayer:
    """Convert one layer; see `convert_layers`."""
    plan = layout.plan
    source = plan.source_layer(place)
    target = plan.layer_target(place)
    evidence = calibrator.evidence(place, source)
    solution = plan.method.solve(source, target, evidence)
    channel_losses = compare_own_channels(plan.method, source, target, evidence, solution, calibrator)
    refined = calibrator.refine(place, solution)
    about = {**refined.about(), **channel_losses}
    layer = ConvertedLayer(place, layout.stored(place, refined.layer), refined.layer.channels, about)
    if process_index() == 0:
        store.save(layer)
    calibrator.advance(place, refined)
    return layer


def write_tensors(
    layout: OutputLayout, writer: FolderWriter, calibrator: Calibrator, store: LayerStore, progress: Progress = silent
) -> dict[int, list[int]]:
    """Add every tensor that a folder lacks, one layer in memory at a time.

    Args:
        layout: of the folder.
        writer: of the folder, open.
        calibrator: see `convert_layers`.
        store: see `convert_layers`.
        progress: told of each layer.

    Returns:
        The rotary channels of each layer, for the folder's config.
    """
    plan, owner = layout.plan, layout.owner
    # A text goes through every layer, and the config says of every MLA layer which channels it has.
    visits_all = calibrator.is_sequential or plan.after.mechanism == "mla"
    places = list(dict.fromkeys(owner[name] for name in owner if visits_all or not writer.has(name)))
    layers = convert_layers(layout, calibrator, store, places, progress)
    channels: dict[int, list[int]] = {}
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
        tensor = layer.tensors.pop(name)
        if not writer.has(name):
            writer.add(name, tensor)
        del tensor  # before the next layer needs the room
    for _ in layers:  # to its end
        pass
    return channels


def follow(layout: OutputLayout, calibrator: Calibrator) -> None:
    """Convert without writing: the part that every process but the first has in a conversion on a text."""
    if calibrator.is_sequential:
        places = [place for place in layout.plan.places if not calibrator.is_past(place)]
        for _ in convert_layers(layout, calibrator, LayerStore(None), places):
            pass
