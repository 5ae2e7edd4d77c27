"""`quick_frontier`: what every format of a model's cache loses, predicted from one pass over a little text.

A text goes through the model with its cache rounded in many formats at once, one layer's weights in memory. A
*stream* is the hidden states of some tokens of each window in a model whose cache has a format. They attend to the
keys and values of all tokens as the format stores them. Those of the other tokens, which rounding has changed in the
layers below, are estimated from a few formats that whole windows are run in, the *references*: their change has the
direction that it has in the first reference whose changes are as large as those that the stream's own tokens show,
and that size. Whole windows in a format are thus the model with that cache, and a stream nearly is, at a part of the
time.

A quadratic form of each layer's error, weighed by its sensitivity, would be another way. But it needs a backward
pass, leaves out what errors of several layers do together, and is wrong where a format loses much; the hidden states
of a stream carry all of that to the logits. Only keys and values of other tokens have to be estimated: left exact,
they make a format of SmolLM2 lose 1.3 to 2.3 times too little.

Shapes: B windows, W tokens of a window, S tokens of a stream, K key–value heads, D width of a head, E hidden size.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from headwise.base.documents import PREDICTED, as_document, finite, read_document
from headwise.base.jobs import write_file
from headwise.base.options import QuickFrontierOptions, takes_options
from headwise.base.progress import Progress, silent
from headwise.base.type_checks import checked_types
from headwise.conversion.frontiers.candidate import Candidate, read_target
from headwise.conversion.frontiers.run import refuse_output
from headwise.costs.formulas.target import PLAIN_FORMATS, PlainFormat
from headwise.costs.prediction import SERVING_ENGINES
from headwise.errors import ArgumentError, HeadwiseError, SpecError
from headwise.measure.evaluation.beside_source import bfloat16_bytes
from headwise.measure.evaluation.scoring import kl_divergence
from headwise.measure.points import PREDICTED_ERROR
from headwise.measure.texts import refuse_inputs_within
from headwise.measure.texts.calibration import check_texts, open_windows
from headwise.measure.texts.circumstances import circumstances
from headwise.models.checkpoints import Checkpoint, open_checkpoint, run_identity
from headwise.models.specs import GroupedSpec, ModelSpec
from headwise.runtime.caches.cache import Update, rounded_queries
from headwise.runtime.hf import HeadwiseCache, LayerwiseModel, as_device
from headwise.runtime.quantization.formats import ENGINE_FORMATS, EngineFormat, parse_format
from headwise.runtime.quantization.groups import BITS, HADAMARD, Float8Code
from headwise.serving.programs import served_by

STAGE = "rounding caches"
"""The name of the work, for progress."""

_PIECE = 16
"""The number of positions, of all windows, whose logits are in memory at once."""


@torch.no_grad()
def stream_losses(
    model: LayerwiseModel,
    ids: Tensor,
    references: Sequence[str],
    formats: Sequence[str] = (),
    *,
    positions: Tensor | None = None,
    progress: Progress = silent,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compute what tokens lose: KL(full cache ‖ format), in nats.

    For example ``stream_losses(model, ids, ["int4"], ["int8", "kivi4"], positions=torch.arange(0, 512, 16))``.

    Args:
        model: a decoder all of whose layers have keys and values of heads.
        ids: the token ids of the windows, ``[B, W]``.
        references: the formats that whole windows are run in, from the one that loses least on.
        formats: the formats that streams are run in.
        positions: the positions of a stream's tokens in their window, ``[S]``, rising; all of them when None.
        progress: the callback that is told of each layer.

    Returns:
        The losses in nats of each reference, ``[B, W]``, and of each format, ``[B, S]``, by name.
    """
    every = torch.arange(ids.shape[1])
    positions = every if positions is None else positions
    exact, rounded = _Given(every), {name: _Given(every) for name in references}
    few = _Given(positions, exact, [*rounded.values()])
    hidden = model.begin(ids)
    full, part = model.among(every, exact.update), model.among(positions, few.update)
    wholes = {name: model.among(every, given.update) for name, given in rounded.items()}
    changed, states = dict.fromkeys(references, hidden), dict.fromkeys(formats, hidden[:, positions])
    for index in range(model.num_layers):
        progress(STAGE, index, model.num_layers)
        module = model.module(index)
        hidden = full.run(index, module, hidden)
        for name, whole in wholes.items():
            changed[name] = _run(whole, index, module, changed[name], rounded[name], name)
        for name in formats:
            states[name] = _run(part, index, module, states[name], few, name)
    progress(STAGE, model.num_layers, model.num_layers)
    return _divergences(model, hidden, changed), _divergences(model, hidden[:, positions], states)


def _run(view: LayerwiseModel, index: int, module: nn.Module, states: Tensor, given: _Given, quantize: str) -> Tensor:
    """A layer's output ``[B, S, E]`` of its inputs, where its keys and values have a format."""
    with rounded_queries(view.model, quantize):
        given.store = HeadwiseCache(view.model.config, quantize=quantize).layers[index].update
        return view.run(index, module, states)


def _divergences(model: LayerwiseModel, exact: Tensor, states: dict[str, Tensor]) -> dict[str, Tensor]:
    """KL of each token, ``[B, S]``, from the last layer's outputs ``[B, S, E]`` with a full cache and with others."""
    found: dict[str, list[Tensor]] = {name: [] for name in states}
    for start in range(0, exact.shape[1], _PIECE):
        piece = slice(start, start + _PIECE)
        target = log_softmax(model.finish(exact[:, piece]).float(), -1)
        for name, part in states.items():
            logits = log_softmax(model.finish(part[:, piece]).float(), -1)
            found[name].append(kl_divergence(target, logits))
    return {name: torch.cat(parts, 1) for name, parts in found.items()}


class _Given:
    """Gives attention the keys and values of whole windows as a format stores them, layer after layer.

    Attributes:
        latest: the keys and values of the latest call before they were stored, ``[B, K, W, D]`` each.
        store: the function that stores and reads back keys and values; None where they stay as they are.

    Args:
        positions: the positions of the tokens that call attention, ``[S]``.
        exact: the object that has the keys and values of all tokens with a full cache.
        rounded: the objects that have those of each reference; none where all tokens call attention.
    """

    def __init__(self, positions: Tensor, exact: _Given | None = None, rounded: Sequence[_Given] = ()) -> None:
        self._positions, self._exact, self._rounded = positions, exact, rounded
        self.latest: tuple[Tensor, ...] = ()
        self.store: Update | None = None

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values ``[B, K, W, D]`` as they are stored, of which the given ``[B, K, S, D]`` are new."""
        if self._exact is not None:
            key_states, value_states = (
                self._completed(new, exact, [given.latest[side] for given in self._rounded])
                for side, (new, exact) in enumerate(zip((key_states, value_states), self._exact.latest, strict=True))
            )
        self.latest = key_states, value_states
        return (key_states, value_states) if self.store is None else self.store(key_states, value_states)

    def _completed(self, new: Tensor, exact: Tensor, rounded: Sequence[Tensor]) -> Tensor:
        """New keys or values among those of the other tokens, which are as far off as the new ones are."""
        at = self._positions.to(new.device)
        size, filled = (new - exact[:, :, at]).norm(), exact
        for reference in rounded:
            off = reference - exact
            most = off[:, :, at].norm()
            # Never more than a reference's: many times an error is no error that a model makes.
            filled = exact + torch.where(most > 0, size / most, 0.0).clamp_max(1.0) * off
            if size <= most:
                break
        return filled.index_copy(2, at, new)


QUICK_TOKENS = 2048
"""The number of tokens of the text that are read where the user names none."""

LEAST = 256
"""The fewest tokens of a text that are enough to predict anything."""

EVERY = 16
"""One token in so many is run in every format, at positions drawn at random."""

_OWN = (*(f"int{bits}{turned}" for turned in ("", HADAMARD) for bits in BITS if bits < 8), str(Float8Code()))
"""headwise's formats beside those that conversions are compared with."""


@dataclass(frozen=True, kw_only=True)
class QuickPoint:
    """A format of a model's cache, and its predicted loss.

    Attributes:
        target: the format, as ``headwise evaluate --cache`` takes it.
        runs_in: the program that has such a cache.
        cache_bytes_per_token: the bytes a token that the cache takes, where numbers that are not in codes are
            bfloat16.
        cache_fraction: these bytes as a fraction of the model's cache in bfloat16.
        kl: the predicted mean KL(full cache ‖ format), in nats a token; infinite where logits are not finite.
    """

    target: str
    runs_in: str
    cache_bytes_per_token: float
    cache_fraction: float
    kl: float


@dataclass(frozen=True, kw_only=True)
class QuickFrontier:
    """The predicted losses of the formats of a model's cache.

    Attributes:
        source: the model, as the user named it.
        label: the mechanism and sizes of the model's layers.
        calibrate: the texts that were read.
        tokens: the number of the texts' tokens that were read.
        run: the digest of the model, the texts and their windows; predictions of one digest are kept in one file.
        points: the formats, from what loses least on.
        error: the error of such predictions where they were measured, in words.
        made_with: what the numbers depend on besides the model, see `circumstances`.
        notes: notes for the user; formats that are left out are named.
        seconds: the seconds that the prediction took.
    """

    source: str
    label: str
    calibrate: tuple[str, ...]
    tokens: int
    run: str
    points: tuple[QuickPoint, ...]
    error: str
    made_with: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-able values, and ``is_predicted``, by which `headwise.decide.advice.read_points` tells
        them."""
        document: dict[str, Any] = finite(as_document(self))
        return document | {"is_predicted": True}


@takes_options(QuickFrontierOptions)
@checked_types
def quick_frontier(
    source: str | Path,
    options: QuickFrontierOptions,
    *,
    output: str | Path | None = None,
    progress: Progress = silent,
) -> QuickFrontier:
    """Predict what every format of a model's cache loses, headwise's own and those of engines, in minutes.

    For example ``quick_frontier("smollm2-135m", calibrate="text.txt").points[0].target``.

    A text of 2,048 tokens is run through the model one layer at a time, in windows of 512. One token in 16 is run
    once more for each format, and attends to all keys and values of the window as the format stores them
    (`headwise.conversion.frontiers.quick`). In two formats whole windows are run, and how much all of their tokens
    lose beside those few corrects the others.

    Args:
        source: a model folder, ``.gguf``, ``smollm2-135m`` or ``hf://owner/name``; a decoder.
        options: the keywords below as one object, in place of them. Without ``calibration_tokens``, 2,048 are read;
            targets may be formats alone.
        output: the folder to write ``predicted.json`` into, if any: new, empty, or an earlier frontier's. What it
            keeps of other formats, from the same text, stays and is in the result.
        progress: the callback that is told of each layer.

    Raises:
        ArgumentError: an argument is outside its rule, a text is too short, or a target is no format.
        SpecError: the model is no decoder, or has a layer without keys and values of heads.
        CheckpointError: the source cannot be read, or the output cannot be written.
    """
    start = time.perf_counter()
    texts = check_texts(options.calibrate, options.calibration_tokens or QUICK_TOKENS, options.calibration_window)
    if output is not None:
        refuse_output(Path(output))
        refuse_inputs_within(Path(output), {}, calibrate=texts.sources)
    device = as_device(options.device)
    checkpoint = open_checkpoint(source)
    check_heads(checkpoint)
    formats, notes = list_formats(checkpoint, options.targets)
    ids = open_windows(checkpoint, texts).ids
    if ids.numel() < LEAST:
        raise ArgumentError("calibrate", f"{ids.numel()} tokens", f"must be at least {LEAST} tokens to predict from")
    # Read before the model runs: predictions of another model or text are refused at once, and not after minutes.
    run = run_identity(checkpoint, **texts.identity())
    kept = {} if output is None else _kept(Path(output) / PREDICTED, run)
    losses = predict(checkpoint, ids, list(formats), device=device, progress=progress)
    whole = bfloat16_bytes(checkpoint, QUICK_TOKENS)
    # A format that is predicted again replaces the one that was kept.
    points = kept | {
        name: QuickPoint(
            target=name,
            runs_in=served_by(name, checkpoint.spec),
            cache_bytes_per_token=taken,
            cache_fraction=taken / whole,
            kl=math.inf if math.isnan(losses[name]) else losses[name],
        )
        for name, taken in formats.items()
    }
    result = QuickFrontier(
        source=str(source),
        label=checkpoint.spec.layers[0].label,
        calibrate=tuple(map(str, texts.sources)),
        tokens=ids.numel(),
        run=run,
        points=tuple(sorted(points.values(), key=lambda point: (point.kl, point.cache_fraction))),
        error=PREDICTED_ERROR,
        made_with=circumstances(checkpoint.path, dtype=torch.float32, texts=texts.sources, device=device),
        notes=(*checkpoint.notes, *notes),
        seconds=time.perf_counter() - start,
    )
    if output is not None:
        document = json.dumps(result.to_dict(), indent=2, ensure_ascii=False)
        write_file(Path(output) / PREDICTED, f"{document}\n", listed_in=Path(output))
    return result


def _kept(file: Path, run: str) -> dict[str, QuickPoint]:
    """The kept predictions of the same model on the same text, by target; empty where there are none.

    Raises:
        ArgumentError: other predictions are kept, which this run would replace.
    """
    if not file.is_file():
        return {}
    document = read_document(file) or {}
    with suppress(KeyError, TypeError):  # of a file that something else wrote
        if document["run"] == run:
            points = document["points"]
            return {
                each["target"]: QuickPoint(**each | {"kl": math.inf if each["kl"] is None else each["kl"]})
                for each in points
            }
    rule = "keeps predictions of another model, text or windows; give a new folder, or remove the file"
    raise ArgumentError("output", str(file), rule)


def check_heads(checkpoint: Checkpoint) -> None:
    """Refuse a model that predicts no next token of a text, or has a layer without keys and values of heads.

    Raises:
        SpecError: the model is one of these.
    """
    if not checkpoint.spec.is_causal or checkpoint.spec.cross_layers:
        raise SpecError("model_type", checkpoint.spec.model_type, "must be of a decoder of text")
    for index, layer in enumerate(checkpoint.spec.layers):
        if not isinstance(layer, GroupedSpec) or layer.shares_kv:
            raise SpecError(f"layer {index}", layer.label, "must have keys and values of heads, which formats round")


def list_formats(checkpoint: Checkpoint, targets: Sequence[str] = ()) -> tuple[dict[str, float], list[str]]:
    """List the formats to predict, with their bytes a token, and notes of those that are left out and why.

    For example ``list_formats(open_checkpoint("smollm2-135m"), ["kivi4"])[0]`` is ``{"kivi4": 6480.0}``.

    Args:
        checkpoint: the model.
        targets: the formats that the user names; without any, all formats of headwise's and of the engines.

    Raises:
        ArgumentError: a target is no format, or does not suit the model's heads.
    """
    if targets:
        named = dict.fromkeys(map(read_target, targets))
        for target in named:
            if Candidate(target).cache is None:
                raise ArgumentError("target", target, "is no format of a cache, which alone is predicted")
        return {target: bfloat16_bytes(checkpoint, QUICK_TOKENS, target) for target in named}, []
    formats: dict[str, float] = {}
    reasons: dict[str, list[str]] = {}
    for name in _every_format(checkpoint.spec):
        try:
            formats[name] = bfloat16_bytes(checkpoint, QUICK_TOKENS, name)
        except HeadwiseError as error:
            reasons.setdefault(error.rule, []).append(name)
    reasons["as wide as a full cache"] = [name for name in _engine_formats() if not _rounds(name)]
    reasons["headwise does not round as it does"] = [name for name, is_known in _listed().items() if not is_known]
    return formats, [f"not predicted: {', '.join(names)} ({reason})" for reason, names in reasons.items() if names]


def _every_format(spec: ModelSpec) -> list[str]:
    """All formats that could be predicted; some may not suit the model."""
    plain = [str(form.fitted(spec)) for form in PLAIN_FORMATS]
    listed = [name for name, is_simulated in _listed().items() if is_simulated]  # some pairs of formats among them
    return [*dict.fromkeys((*plain, *_OWN, *filter(_rounds, _engine_formats()), *listed))]


def _listed() -> dict[str, bool]:
    """The caches that are known of all engines, and whether headwise rounds as they do."""
    return {
        f"{name}:{cache.name}": cache.is_simulated
        for name, engine in SERVING_ENGINES.items()
        for cache in engine.caches
    }


def _engine_formats() -> list[str]:
    return [f"{engine}:{name}" for engine, formats in ENGINE_FORMATS.items() for name in formats]


def _rounds(name: str) -> bool:
    """Whether a format of an engine's stores codes, and not numbers."""
    code = parse_format(name)
    return isinstance(code, EngineFormat) and code.keys.rounds


def predict(
    checkpoint: Checkpoint,
    ids: torch.Tensor,
    formats: Sequence[str],
    *,
    device: torch.device | None = None,
    progress: Progress = silent,
) -> dict[str, float]:
    """Predict what each format loses: KL(full cache ‖ format), in nats a token.

    For example ``predict(checkpoint, ids, ["int4"])["int4"]``.

    Args:
        checkpoint: the model.
        ids: the token ids of the windows, ``[B, W]``.
        formats: the formats to predict.
        device: the device to compute on; the CPU when None.
        progress: the callback that is told of each layer.
    """
    window = ids.shape[1]
    generator = torch.Generator().manual_seed(0)
    few = max(window // EVERY, 1)
    positions = ((torch.arange(few) + torch.rand(few, generator=generator)) * window / few).long()
    model = LayerwiseModel(checkpoint, torch.float32, device=device)
    references = _references(checkpoint.spec, window)
    wholes, parts = stream_losses(model, ids, references, formats, positions=positions, progress=progress)
    known = sorted((_typical(whole[:, positions]), float(whole.double().mean())) for whole in wholes.values())
    return {name: _corrected(_typical(part), known) for name, part in parts.items()}


def _references(spec: ModelSpec, window: int) -> list[str]:
    """Two formats that whole windows are run in: one of middling loss, and one that loses much.

    Keys by channel lose about as much in all models; by token, those of some models lose everything.
    """
    by_channel = [PlainFormat(bits, bits, has_blocks=True).fitted(spec) for bits in (3, 2)]
    if all(form.suits(spec) and window >= form.group for form in by_channel):
        return [str(form) for form in by_channel]
    return [str(PlainFormat(bits, bits).fitted(spec)) for bits in (4, 3)]


def _typical(losses: torch.Tensor) -> float:
    """The square of the mean root of tokens' losses: the mean of few tokens is that of the few that lose most."""
    return float(losses.double().clamp_min(0.0).sqrt().mean().square())


def _corrected(typical: float, known: Sequence[tuple[float, float]]) -> float:
    """The mean loss of all tokens from the typical loss of few, by the ratios that are known of other formats.

    Between two formats the logarithm of the ratio is interpolated.

    Args:
        typical: the typical loss of the format, as `_typical` computes it.
        known: the typical loss and the mean loss of each reference, from the least on.
    """
    (low, of_low), (high, of_high) = known[0], known[-1]
    if typical <= 0 or low <= 0:
        return typical
    place = math.log(typical / low) / math.log(high / low) if high > low else 0.0
    place = min(max(place, 0.0), 1.0)
    return typical * math.exp((1 - place) * math.log(of_low / low) + place * math.log(of_high / high))
