"""A result beside its source, on text that it was not made on, and beside plain formats of the source's cache.

This is the evaluation that ends a conversion or a healing. Caches are compared as a server would store them:
quantised values take the bytes of their codes, and all other numbers are bfloat16, whatever dtype is evaluated in.

Shapes: K key–value heads, D width of a key, V width of a value, W tokens of a window.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from headwise.base.options import EVALUATION_WINDOWS
from headwise.base.progress import Progress, silent
from headwise.costs.formulas.target import plain_formats
from headwise.costs.prediction import cached_heads, engine_caches
from headwise.errors import ArgumentError, SpecError
from headwise.measure.evaluation.evaluate import WINDOW, evaluate_windows
from headwise.measure.evaluation.model_pair import Pair, open_pair
from headwise.measure.evaluation.results import Evaluation
from headwise.measure.texts import (
    cut_windows,
    default_window,
    first_ids,
    language_reference,
    overlap_note,
    put_begin_before,
    read_source,
    refuse_twice,
    text_identity,
    token_ids,
    windows_beyond,
)
from headwise.measure.texts.calibration import NO_TEXTS, CalibrationTexts, open_windows, refuse_unknown_tokens
from headwise.measure.timing import available_bytes
from headwise.models.checkpoints import Checkpoint, load_tokenizer
from headwise.models.specs import AttentionSpec, ModelSpec
from headwise.runtime.attention.rope import change_note
from headwise.runtime.hf import HeadwiseCache, stock_config
from headwise.runtime.quantization.transform_code import FILE as CODES

REFERENCE = "Python's language reference"
_PARTS = (slice(None), slice(0, None, 2), slice(1, None, 2))
"""The whole language reference, and the two halves that `headwise demo` writes as texts."""

EvaluationSet = list[tuple[str, Tensor]]
"""The texts that a result is evaluated on: each one's name, and its windows ``[n, W]``."""

NOT_EVALUATED = "not evaluated"
"""The beginning of the note of a report that says why there is no evaluation."""

FARTHEST = 8192
"""The longest text that is read for what changes behind it."""

BEYOND = 256
"""Tokens that are read behind the length at which a model's rotary frequencies change."""

EVALUATING = "perplexity"
"""The name of the stage in which an evaluation set is scored, for progress."""


def refuse_no_evaluation_set(spec: ModelSpec) -> None:
    """Refuse a model that the prediction of a text's next tokens does not measure.

    Raises:
        SpecError: the model is an encoder, or has cross-attention to one.
    """
    if not spec.is_causal:
        rule = "is an encoder, which predicts no next token; headwise evaluate --retrieval measures one"
        raise SpecError("model_type", spec.model_type, rule)
    if spec.cross_layers:
        raise SpecError(
            "model_type", spec.model_type, "attends to an encoder, so that text alone does not evaluate it"
        )


def choose_evaluation_set(
    checkpoint: Checkpoint,
    named: Sequence[str | Path] = (),
    *,
    calibrate: CalibrationTexts = NO_TEXTS,
    calibrated_on: Collection[str] = (),
    window: int | None = None,
    windows: int | None = EVALUATION_WINDOWS,
) -> EvaluationSet:
    """Choose the windows that a conversion is evaluated on.

    They come from the texts that the user names; without any, from the rest of the calibration texts if that is at
    least a window long; otherwise from Python's language reference.

    Args:
        checkpoint: the source.
        named: the texts that the user names; see `headwise.measure.texts.read_source`.
        calibrate: the calibration texts.
        calibrated_on: the `text_identity` of other texts that the result is calibrated on.
        window: tokens in each window; when None 2048, or the model's positions or the tokens of a single named text
            if those are fewer. Where rotary frequencies change with the length of a text, so many that they do, if
            the texts are as long.
        windows: the number of windows of each text; a shorter text has fewer. All when None.

    Raises:
        ArgumentError: a text cannot be read, is calibrated on, is shorter than a window, or has tokens outside the
            model's vocabulary; or the window is longer than the model's positions.
        SpecError: the prediction of next tokens does not measure the model.
        CheckpointError: there is no tokenizer.
    """
    refuse_no_evaluation_set(checkpoint.spec)
    positions = checkpoint.spec.max_position_embeddings
    if window is not None and not 2 <= window <= (positions or window):
        limit = "" if positions is None else f" and at most {positions}, by the model's positions"
        raise ArgumentError("window", window, f"must be at least 2{limit}")
    widths = _usual_widths(checkpoint.spec) if window is None else [window]
    tokenizer = load_tokenizer(checkpoint.path)
    begin = first_ids(tokenizer)
    if widths[-1] < 2 + len(begin):
        raise ArgumentError("window", widths[-1], f"must be at least {2 + len(begin)}")
    widths = [width - len(begin) for width in widths]  # of text alone
    calibration_texts = {*calibrated_on, *map(text_identity, calibrate.sources)}
    evaluation_set: EvaluationSet = []
    if named:
        most = None if windows is None else widths[0] * windows
        characters = None if most is None else most * 32  # more to a token than any tokenizer's average
        texts = [read_source(text, characters=characters, name="evaluate") for text in named]
        refuse_twice(named, name="evaluate")
        for text in named:
            if text_identity(text, name="evaluate") in calibration_texts:
                raise ArgumentError("evaluate", str(text), "is calibrated or trained on; name another text, or none")
        ids = [token_ids(tokenizer, text, at_most=most) for text in texts]
        shortest = min(map(len, ids))
        width = next((width for width in widths if width <= shortest), widths[-1])
        if window is None and len(ids) == 1:
            width = max(min(width, shortest), 2)
        evaluation_set = [
            (str(text), cut_windows(text_ids, window=width, windows=windows, name=f"evaluate {text}"))
            for text, text_ids in zip(named, ids, strict=True)
        ]
    elif calibrate:
        taken = default_window(positions, calibrate.widest, around=len(begin))
        tokens = calibrate.text_tokens(taken, len(begin))
        beyond = partial(windows_beyond, tokenizer, calibrate.sources, tokens=tokens, window=taken, windows=windows)
        # The widest windows for which no more texts are too short than for the usual ones.
        evaluation_set = max((beyond(width=width) for width in widths), key=len)
    if not evaluation_set:
        if calibration_texts & {hashlib.sha256(language_reference(part).encode()).hexdigest() for part in _PARTS}:
            rule = "must be named: all texts are calibrated on, and Python's language reference is one of them"
            raise ArgumentError("evaluate", None, rule)
        most = None if windows is None else widths[0] * windows
        reference = token_ids(tokenizer, language_reference(), at_most=most)
        evaluation_set = [(REFERENCE, cut_windows(reference, window=widths[0], windows=windows))]
    evaluation_set = [(name, put_begin_before(batch, begin)) for name, batch in evaluation_set]
    refuse_unknown_tokens(checkpoint, *(batch for _, batch in evaluation_set))
    return evaluation_set


def _usual_widths(spec: ModelSpec) -> list[int]:
    """The tokens of a window where the user says nothing, the best number first."""
    positions, change = spec.max_position_embeddings, spec.changes_at
    usual = default_window(positions, WINDOW)
    if change is None or not usual <= change <= FARTHEST:
        return [usual]
    # Positions limit no model whose frequencies are stretched from them on.
    beyond = change + BEYOND
    return [beyond if positions in (None, change) else min(beyond, positions or beyond), usual]


def window_notes(checkpoint: Checkpoint, evaluation_set: EvaluationSet) -> list[str]:
    """Notes for the user about how windows of text begin, and about lengths at which the model changes.

    Args:
        checkpoint: the source.
        evaluation_set: the windows that results are evaluated on; empty where there are none.
    """
    notes = []
    if evaluation_set and (begin := first_ids(tokenizer := load_tokenizer(checkpoint.path))):
        tokens = " ".join(tokenizer.convert_ids_to_tokens(begin))
        notes.append(f"windows begin with `{tokens}`, as the tokenizer begins every text")
    if (change := checkpoint.spec.changes_at) is not None:
        notes.append(change_note(change))
        if evaluation_set and (width := evaluation_set[0][1].shape[1]) <= change:
            notes.append(f"evaluated on {width:,} tokens at a time, and not beyond {change:,}")
    return notes


def overlap_notes(checkpoint: Checkpoint, evaluation_set: EvaluationSet, calibrate: CalibrationTexts) -> list[str]:
    """A note for the user if more than 1 % of the evaluation text repeats calibration text; see `overlap_note`."""
    if not (evaluation_set and calibrate):
        return []
    windows = open_windows(checkpoint, calibrate).ids
    note = overlap_note([batch for _, batch in evaluation_set], [windows])
    return [] if note is None else [note]


def _free_bytes(device: torch.device) -> int | None:
    """The free memory of a device; None where it is not known."""
    if device.type != "cuda":
        return available_bytes()
    torch.cuda.empty_cache()  # what torch keeps of memory that nothing uses any more would count as taken
    return torch.cuda.mem_get_info(device)[0]


def short_of_memory(pair: Pair) -> str | None:
    """Why a pair's models cannot be loaded, where too little memory is free for them; None where there is enough.

    Converting holds one layer: memory that suffices for it may not suffice for two whole models.

    Args:
        pair: whose weights are not loaded yet.
    """
    memory, free = pair.nbytes, _free_bytes(pair.device)
    if free is None or free >= memory:
        return None
    taken = f"{'the model takes' if pair.is_itself else 'both models take'} {memory / 1e9:.1f} GB of memory"
    return f"{taken} and {free / 1e9:.1f} GB are free"


def evaluate_result(
    output: str | Path,
    source: str | Path,
    evaluation_set: EvaluationSet,
    progress: Progress = silent,
    *,
    cache: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
) -> Evaluation | str:
    """Evaluate a written folder, or the source with its cache in a format, beside the source.

    Args:
        output: the folder, or the source.
        source: the source that it was converted from.
        evaluation_set: the windows, from `choose_evaluation_set`.
        progress: told of each window.
        cache: the format that the cache is stored in; as it is when None.
        dtype: to run both models in; the wider of their stored ones when None.
        device: to run both models on; the CPU when None.

    Returns:
        The evaluation, or a note why there is none.
    """
    undone = NOT_EVALUATED if cache is None else f"not compared with {cache}"
    try:
        pair = open_pair(output, against=source, dtype=dtype, device=device, progress=progress)
        if (short := short_of_memory(pair)) is not None:
            return f"{undone}: {short}"
        return evaluate_windows(pair, evaluation_set, cache=cache, progress=progress)
    except KeyboardInterrupt as stopped:
        stopped.add_note("interrupted during the evaluation, which --no-evaluate leaves out")
        raise
    except Exception as error:  # no error of the evaluation may cost the user the converted folder
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return f"{undone}: {kind}{' '.join(str(error).split())}"


SAME_BYTES = 1.01
"""A cache that takes at most this many times the bytes of another is no larger: sizes cannot be met exactly."""

SIMILAR_BYTES = 0.01
"""Two caches are said to have the same bytes where they differ by at most this part of the cache in bfloat16."""


@torch.inference_mode()
def bfloat16_bytes(checkpoint: Checkpoint, tokens: int, quantize: str | None = None) -> float:
    """Bytes a token that a model's cache allocates, where numbers that are not in codes are bfloat16.

    The bytes are those of a cache of the model's shapes that is filled with zeros; no weight is read. For example
    ``bfloat16_bytes(open_checkpoint("smollm2-135m"), 2048, "kivi4")`` is 6,480, of 23,040 without a format.

    Args:
        checkpoint: the model; a code that it was converted with is not counted, because an `Evaluation` has its
            bytes.
        tokens: W, tokens in the cache; with few of them, scales of blocks, sliding windows and unquantised recent
            tokens weigh more.
        quantize: the format of the cache, see `headwise.hf.HeadwiseCache`; None for the cache as it is.

    Raises:
        ArgumentError: the format does not suit the model's heads.
        SpecError: a layer is of a kind whose cache is not quantised.
    """
    cache = HeadwiseCache(stock_config(checkpoint.config), max_length=tokens, quantize=quantize)
    sizes: dict[tuple[object, ...], int] = {}  # of layers that are alike, one is filled
    total = 0
    for index, layer in enumerate(checkpoint.spec.layers):
        shapes = _shapes(layer)
        # An engine may leave some layers without its codec, such as the first and the last two.
        is_coded = getattr(cache.layers[index], "codec", None) is not None
        kind = (shapes, layer.sliding_window, type(cache.layers[index]), is_coded)
        if kind not in sizes:
            before = cache.nbytes
            keys, values = (torch.zeros(1, heads, tokens, width, dtype=torch.bfloat16) for heads, width in shapes)
            cache.update(keys, values, index)
            sizes[kind] = cache.nbytes - before
        total += sizes[kind]
    return total / tokens


def served_bytes(checkpoint: Checkpoint, evaluation: Evaluation) -> float:
    """Bytes a token of an evaluated model's cache as a server would store it.

    Evaluations compute in float32, so only a cache in codes of the model's own has the bytes that they measured.

    Args:
        checkpoint: the model.
        evaluation: an evaluation of the model.
    """
    if (checkpoint.path / CODES).is_file():
        return evaluation.cache_bytes_per_token
    return bfloat16_bytes(checkpoint, evaluation.window, evaluation.cache)


def compared_formats(model: ModelSpec, engine: str | None = None) -> list[str]:
    """The formats that a conversion of a model is compared with: an engine's own, or else those of the field.

    For example ``compared_formats(read_spec("llama-3-8b"), "llama.cpp")`` is
    ``["llama.cpp:q8_0", "llama.cpp:q4_0"]``.

    Args:
        model: the model.
        engine: the engine whose caches are wanted, without those that are known to go wrong; the field's formats are
            taken when None, or where headwise can simulate none of the engine's.
    """
    own = [] if engine is None else engine_caches(model, engine).items()
    return [name for name, cache in own if cache.is_simulated and not cache.limit] or list(plain_formats(model))


def nearest_formats(checkpoint: Checkpoint, tokens: int, size: float, engine: str | None = None) -> dict[str, float]:
    """The formats to compare a cache with, and their bytes a token: one below and one above.

    These are the largest that is no larger, and the smallest that is larger, or one of the two where there is no
    other.
    For example ``nearest_formats(open_checkpoint("smollm2-135m"), 2048, 7_000)`` is
    ``{"kivi4": 6480.0, "int8/int4": 9360.0}``.

    Args:
        checkpoint: the model that would be quantised.
        tokens: W, tokens in the cache, see `bfloat16_bytes`.
        size: bytes a token of the cache to compare with.
        engine: the engine whose caches are wanted, see `compared_formats`.

    Returns:
        At most two formats, the smaller first; an empty dictionary where none suits the model.
    """
    formats = compared_formats(checkpoint.spec, engine)
    sizes = {spelling: bfloat16_bytes(checkpoint, tokens, spelling) for spelling in formats}
    below = {spelling: taken for spelling, taken in sizes.items() if taken <= SAME_BYTES * size}
    above = {spelling: taken for spelling, taken in sizes.items() if spelling not in below}
    nearest = [max(below, key=below.__getitem__)] if below else []
    nearest += [min(above, key=above.__getitem__)] if above else []
    return {spelling: sizes[spelling] for spelling in nearest}


def log_perplexity_margin(kl: float, other_kl: float, tokens: int) -> float:
    """The difference of two models' log-perplexities that chance explains: two standard errors, in nats.

    A token's cost in a model that lies KL from the source differs from its cost in the source by a mean of about KL
    and a variance of about 2 KL (both by the second order of the divergence). The errors of two ways to store a cache
    are taken as independent. For example ``log_perplexity_margin(0.01, 0.02, 12_282)`` is 0.0044.

    Args:
        kl: mean KL(source ‖ model) a token, in nats.
        other_kl: mean KL(source ‖ other model) a token, in nats.
        tokens: the number of predictions that both were scored on.
    """
    return 2 * math.sqrt(2 * (max(kl, 0.0) + max(other_kl, 0.0)) / tokens)


def _shapes(layer: AttentionSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """The heads and widths of a layer's keys and values in a transformers cache: (K, D) and (K, V)."""
    heads, key, value = cached_heads(layer)
    if not heads:
        raise SpecError("attention", layer.label, "has no cache of keys and values that could be measured")
    return (heads, key), (heads, value)
