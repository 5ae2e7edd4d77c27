"""``headwise.prepare``: a model that loses less in an engine's own small cache, and computes what it did."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.base.checksums import remove_listed
from headwise.base.disk import refuse_file, refuse_input_within
from headwise.base.documents import as_document
from headwise.base.jobs import Job, partial_folder
from headwise.base.options import PrepareOptions, takes_options
from headwise.base.progress import Progress, silent
from headwise.base.threads import map_in_threads
from headwise.base.type_checks import checked_types
from headwise.conversion.preparation.change import Change
from headwise.conversion.preparation.one_layer import best_change, why_no_shift
from headwise.conversion.preparation.proof import Proof, check_engines, check_written, prove
from headwise.conversion.preparation.samples import POSITIONS, Inputs, Projected, layer_inputs, projected
from headwise.conversion.preparation.stored import FolderLayers, GgufLayers, Room
from headwise.conversion.solvers.layer import grouped_layers, grouped_spec
from headwise.costs.prediction import SERVING_ENGINES
from headwise.errors import ArgumentError, CheckpointError, HeadwiseError, SpecError, StorageError
from headwise.measure.evaluation.beside_source import choose_evaluation_set, overlap_notes, window_notes
from headwise.measure.texts import named_texts, refuse_inputs_within
from headwise.measure.texts.calibration import CalibrationTexts, check_texts
from headwise.measure.texts.circumstances import circumstances
from headwise.models.checkpoints import Checkpoint, FolderCheckpoint, GgufCheckpoint, open_checkpoint
from headwise.models.checkpoints.gguf_in_place import check_file, copied_files
from headwise.models.specs import AttentionSpec, GroupedSpec, read_gguf_header
from headwise.models.specs.gguf_header import renamed_parts
from headwise.runtime.quantization.formats import EngineFormat, parse_engine_format
from headwise.serving.exports.gguf import export_gguf

_LARGEST = 1e15
"""The largest query, key or value whose products float32 holds."""


@dataclass(frozen=True, kw_only=True)
class PreparedLayer:
    """The report of one prepared layer.

    Attributes:
        layer: the layer's number.
        loss: the ratio of what scores lose by each format's rounding afterwards to what they lost before, by the
            format's spelling. It is the geometric mean over the key–value heads. Formats that keep this layer's cache
            as it is are left out.
        cut: the number of powers of two that the range of the layer's weights is short of, at most; 0 where all fit.
        off: the error of the attention's output with a full cache over the output's size (root mean squares), because
            the biases of its keys were shifted; 0 where they were not.
    """

    layer: int
    loss: dict[str, float]
    cut: int = 0
    off: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A prepared model.

    Attributes:
        source: the model, as the user named it.
        output: the file or folder that was written; of a split model the first of its files.
        cache: the formats that it was prepared for.
        calibrate: the texts that it was fitted on; none where the weights alone were.
        layers: the report of each layer.
        proof: the measurements of the prepared model after it was written.
        made_with: what the numbers depend on besides the model, see `circumstances`.
        notes: notes for the user.
        seconds: the seconds that it took, without the measurement on a text.
    """

    source: str
    output: str
    cache: tuple[str, ...]
    calibrate: tuple[str, ...]
    layers: tuple[PreparedLayer, ...]
    proof: Proof
    made_with: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-able values."""
        return as_document(self)


@takes_options(PrepareOptions)
@checked_types
def prepare(
    source: str | Path, output: str | Path, options: PrepareOptions, *, progress: Progress = silent
) -> Preparation:
    """Write a model whose keys lose less in an engine's own small cache, and which computes what it did.

    For example ``prepare("model.gguf", "prepared.gguf", cache="llama.cpp:q4_0")``.

    The two channels of each rotary pair of a key–value head are multiplied by a power of two, and those of its
    queries divided by it; some pairs are turned by quarters as well. All products of queries and keys stay as they
    are, and powers of two round no weight, so the model is the same. Rows of quantised blocks in a ``.gguf`` are
    multiplied by powers of 2^¼, by which the blocks' float16 scales are rounded. Of a ``.gguf`` only the scales of
    blocks of attn_q and attn_k are written anew, and all other bytes are copied.

    What was written is read again, and its products are compared with the source's. With ``evaluate`` a text tells
    the rest: how far log-probabilities are off, and what the cache loses of the source and of the prepared model.

    Args:
        source: a model folder, or a ``.gguf`` of any type for an engine that loads one.
        output: a ``.gguf`` for a ``.gguf``; for a folder either a folder or the ``.gguf`` that `export_gguf` makes.
        options: the keywords below as one object, in place of them.
        progress: the callback that is told of each layer.

    Returns:
        The report of the preparation.

    Raises:
        ArgumentError: the output cannot be written, or a cache is none that a model can be prepared for.
        SpecError: the model's keys cannot be changed so.
        CheckpointError: the source cannot be read.
        StorageError: the output cannot be written.
    """
    start = time.perf_counter()
    formats = read_formats(options.cache)
    checkpoint = open_checkpoint(source, quantised=True)
    path = Path(output)
    check_output(checkpoint, path, overwrite=options.overwrite)
    check_layers(checkpoint, formats, path)
    if options.refit:
        check_biases(checkpoint)
    elif options.context is not None:
        raise ArgumentError("context", options.context, "goes with refit: what is exact is so at any length")
    texts = check_texts(options.calibrate, options.calibration_tokens if options.calibrate else None, None)
    named = named_texts(options.evaluate)
    refuse_inputs_within(path, {}, calibrate=texts.sources, evaluate=named)
    check_engines(formats, options.engine_python, is_measured=bool(named))
    windows = options.evaluation_windows
    evaluation_set = choose_evaluation_set(checkpoint, named, calibrate=texts, windows=windows) if named else []
    _refuse_no_numbers(checkpoint, progress)
    # Files of these families have the two channels of a pair side by side, not half a head apart, so that other
    # channels share a block of the cache.
    if checkpoint.family.gguf_interleaved:
        formats = [code.interleaved() for code in formats]
    with _as_written(checkpoint, path, progress) as model:
        stored = _stored_layers(model)
        changes, layers = _fitted(checkpoint, stored, formats, texts, options, progress)
        products: list[float] = []

        # Called on what is on the disk, before it is moved into its place: what is wrong never gets there.
        def check(written: Path) -> None:
            again = open_checkpoint(written, quantised=True)
            products.append(check_written(checkpoint, again, changes, path, progress))

        if isinstance(stored, GgufLayers):
            with copied_files(model.files, path, moved=model is not checkpoint) as copies:
                stored.write(changes, copies)
                check(copies[model.files[0]])
            written = renamed_parts(path, len(model.files))[0]
        else:
            stored.write(path, changes, check, overwrite=options.overwrite, progress=progress)
            written = path
    # The measurement on a text takes far longer. It comes last, when no error of it can cost what is written.
    seconds = time.perf_counter() - start
    try:
        proof = prove(source, written, products[0], evaluation_set, formats, options, progress)
    except HeadwiseError:  # it does not hold
        _remove(written)
        raise
    notes = [*checkpoint.notes, *_notes(layers, options.context), *overlap_notes(checkpoint, evaluation_set, texts)]
    notes += window_notes(checkpoint, evaluation_set) if evaluation_set else []
    return Preparation(
        source=str(source),
        output=str(written),
        cache=tuple(map(str, formats)),
        calibrate=tuple(map(str, texts.sources)),
        layers=tuple(layers),
        proof=proof,
        made_with=circumstances(checkpoint.path, dtype=checkpoint.dtype, texts=[*texts.sources, *named]),
        notes=(*notes, *proof.notes),
        seconds=seconds,
    )


@contextmanager
def _as_written(checkpoint: Checkpoint, output: Path, progress: Progress) -> Iterator[Checkpoint]:
    """The model in the form that it is written in: a folder as a GGUF file, beside the output, where that is one."""
    if isinstance(checkpoint, GgufCheckpoint) or output.suffix != ".gguf":
        yield checkpoint
        return
    with Job(output, folder=partial_folder(Path(os.path.realpath(output))), run=None) as job:
        file = job.work / output.name
        try:
            export_gguf(checkpoint.path, file, progress=progress)
        except StorageError as error:
            if error.field != "output":
                raise
            raise StorageError("output", str(output), error.rule) from None
        yield open_checkpoint(file)


def _fitted(
    checkpoint: Checkpoint,
    stored: GgufLayers | FolderLayers,
    formats: Sequence[EngineFormat],
    texts: CalibrationTexts,
    options: PrepareOptions,
    progress: Progress,
) -> tuple[list[Change], list[PreparedLayer]]:
    """The change of each layer, and what it achieves.

    Args:
        checkpoint: the source.
        stored: the source's layers in the form that they are written in, whose types say how far weights can be
            scaled.
        formats: the formats that the model is prepared for.
        texts: the texts to fit on; none where inputs are modelled from the weights alone.
        options: the options of `prepare`.
        progress: the callback that is told of each layer.
    """
    spec = checkpoint.spec
    longest = options.context or spec.max_position_embeddings or POSITIONS

    # Files are read in this thread alone; the others compute.
    def read() -> Iterator[tuple[int, GroupedSpec, Mapping[str, Tensor], Inputs, Room]]:
        every = zip(grouped_layers(spec), layer_inputs(checkpoint, texts), strict=True)
        for index, (layer, inputs) in enumerate(every):
            state = checkpoint.family.read_attention(checkpoint.read, index, layer)
            yield index, layer, state, inputs, stored.room(index, layer)

    def fitted(item: tuple[int, GroupedSpec, Mapping[str, Tensor], Inputs, Room]) -> tuple[Change, PreparedLayer]:
        index, layer, state, inputs, room = item
        states = projected(state, layer, *inputs)
        _check_size(states, index)
        codes = [code for code in formats if not code.is_unquantised(index, spec.num_layers)]
        change, loss, off = best_change(
            states, state, codes, room, shifts=options.refit, longest=longest, on_text=bool(texts)
        )
        return change, PreparedLayer(layer=index, loss=loss, cut=change.cut, off=off)

    found = []
    progress("fitting", 0, spec.num_layers)
    for number, pair in enumerate(map_in_threads(fitted, read()), 1):
        found.append(pair)
        progress("fitting", number, spec.num_layers)
    return [change for change, _ in found], [layer for _, layer in found]


def _check_size(states: Projected, index: int) -> None:
    """Refuse a layer whose queries, keys or values are too large for float32 to hold their products.

    Raises:
        CheckpointError: they are.
    """
    for name in ("queries", "keys", "values"):
        if not (largest := float(getattr(states, name).abs().max())) <= _LARGEST:
            rule = f"must be at most {_LARGEST:g} in size, so that their products are finite: weights are damaged"
            raise CheckpointError(f"{name} of layer {index}", largest, rule)


def _refuse_no_numbers(checkpoint: Checkpoint, progress: Progress) -> None:
    """Refuse a model with NaN or infinite values in what is copied as it is; attention is read in any case.

    Raises:
        CheckpointError: a tensor has such values.
    """
    attention = tuple(f"{checkpoint.family.place(index)}." for index in range(checkpoint.spec.num_layers))
    copied = [name for name in checkpoint.tensors if not name.startswith(attention)]
    for number, name in enumerate(copied, 1):
        checkpoint.check_numbers(name)
        progress("reading", number, len(copied))


def _stored_layers(checkpoint: Checkpoint) -> GgufLayers | FolderLayers:
    if isinstance(checkpoint, GgufCheckpoint):
        return GgufLayers(checkpoint)
    assert isinstance(checkpoint, FolderCheckpoint)
    return FolderLayers(checkpoint)


def read_formats(caches: str | Sequence[str]) -> list[EngineFormat]:
    """Read the formats that a model is prepared for.

    For example ``read_formats("llama.cpp:q4_0")``.

    Raises:
        ArgumentError: a cache is no format of an engine, or keeps keys as they are.
    """
    formats = []
    for spelling in dict.fromkeys([caches] if isinstance(caches, str) else caches):
        code = parse_engine_format(spelling, name="for")
        if not code.keys.rounds:
            raise ArgumentError("for", spelling, "keeps keys as they are, so that there is nothing to prepare")
        formats.append(code)
    return formats


def check_layers(checkpoint: Checkpoint, formats: Sequence[EngineFormat], output: Path) -> None:
    """Refuse a model whose keys cannot be changed in this way.

    Args:
        checkpoint: the model.
        formats: the formats that the model is to be prepared for.
        output: the file or folder that is to be written.

    Raises:
        SpecError: a layer has no keys of heads, or shares them with another layer.
        ArgumentError: a format's blocks do not divide its heads, it keeps all layers as they are, or its engine loads
            no such file.
    """
    count = checkpoint.spec.num_layers
    for code in formats:
        if output.suffix == ".gguf" and not SERVING_ENGINES[code.engine].reads_gguf:
            is_file = isinstance(checkpoint, GgufCheckpoint)
            instead = "prepare the folder that it was made of" if is_file else "write a folder"
            rule = f"is a cache of {code.engine}, which loads no .gguf: {instead}"
            raise ArgumentError("for", str(code), rule)
        if all(code.is_unquantised(index, count) for index in range(count)):
            rule = f"keeps the caches of all {count} layers as they are, so that there is nothing to prepare"
            raise ArgumentError("for", str(code), rule)
    if not checkpoint.spec.is_causal or checkpoint.family.cross_attention is not None:
        raise SpecError("model_type", checkpoint.family.model_type, "is no decoder, and cannot be prepared")
    for index, layer in enumerate(checkpoint.spec.layers):
        if (reason := _why_not(layer)) is not None:
            raise SpecError(f"layer {index}", layer.label, f"{reason}, and cannot be prepared")
        for code in formats:
            try:
                code.keys.block(grouped_spec(layer).head_dim)
            except ArgumentError as error:  # in the user's words, who named the engine's format
                raise ArgumentError("for", str(code), error.rule) from None


def check_biases(checkpoint: Checkpoint) -> None:
    """Refuse to refit a model none of whose layers has keys with a bias that can be shifted.

    Raises:
        ArgumentError: the model has no such layer.
    """
    reasons = [why_no_shift(layer) for layer in checkpoint.spec.layers if isinstance(layer, GroupedSpec)]
    if None not in reasons:
        raise ArgumentError("refit", "True", f"shifts biases of keys, and this model has none to shift: {reasons[0]}")
    if checkpoint.zeros:
        raise ArgumentError("refit", "True", f"shifts biases of keys, and {min(checkpoint.zeros)} is not stored")


def _why_not(layer: AttentionSpec) -> str | None:
    if not isinstance(layer, GroupedSpec):
        return "has no keys of heads"
    if layer.shares_kv:
        return "reads another layer's keys"
    if layer.output_gate or layer.q_lora_rank is not None:
        return "projects its queries in another way"
    return None


def check_output(checkpoint: Checkpoint, output: Path, *, overwrite: bool) -> None:
    """Refuse an output that cannot be written, or that would replace the source.

    Raises:
        ArgumentError: the output is of the wrong kind, exists, or is the source.
    """
    is_file = isinstance(checkpoint, GgufCheckpoint)
    if is_file or output.suffix == ".gguf":
        check_file(checkpoint.files if is_file else [checkpoint.path], output, overwrite=overwrite)
        return
    refuse_file(output)
    refuse_input_within(output, checkpoint.path, "the source")


def _remove(output: Path) -> None:
    """Remove what was written."""
    if output.is_dir():
        shutil.rmtree(output)
        return
    for part in read_gguf_header(output).files:
        remove_listed(Path(os.path.realpath(part)))


def _notes(layers: Sequence[PreparedLayer], context: int | None) -> list[str]:
    notes = []
    if shifted := [layer for layer in layers if layer.off]:
        most = max(shifted, key=lambda layer: layer.off)
        notes.append(
            f"the biases of keys are shifted in {len(shifted)} layers, which is not exact: with a full cache the"
            f" output of attention is off by {most.off:.2%} of its size in layer {most.layer}, and by less in others"
        )
        if context is not None:
            notes.append(f"for texts of up to {context:,} tokens: longer ones lose more, with a full cache as well")
    if cut := [layer for layer in layers if layer.cut]:
        most = max(cut, key=lambda layer: layer.cut)
        names = ", ".join(str(layer.layer) for layer in cut)
        notes.append(
            f"the types of layers {names} have too little room for the powers of two that were wanted (layer"
            f" {most.layer}: {most.cut} too many); smaller ones were taken"
        )
    return notes
