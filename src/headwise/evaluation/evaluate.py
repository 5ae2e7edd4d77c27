"""Measure a model on text, beside its reference: quality, bytes of cache and time a token, both in one run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ArgumentError, CheckpointError
from headwise.evaluation.model_pair import Pair, check_vocabulary, open_pair
from headwise.evaluation.paired_results import Paired
from headwise.evaluation.scoring import score_window
from headwise.evaluation.speed import Speed, decode_times
from headwise.options import EvaluateOptions, takes_options
from headwise.progress import Progress, silent
from headwise.texts.files import read_text
from headwise.texts.identity import refuse_twice
from headwise.texts.windows import token_windows, usual_window
from headwise.type_checks import typed

WINDOW = 2048
CONTEXT = 512
_FIRST_BUCKET = 256

_Scores = list[tuple[str, dict[str, Tensor]]]
"""Each text's name, and what `score_window` says of its windows, as ``[n, W - 1]``."""


@dataclass(frozen=True, kw_only=True)
class PositionScore(Paired, compared=("nll",)):
    """The mean cost of the tokens at some positions of their windows.

    Attributes:
        start: the first position, a window's first token being 0.
        stop: the first position after them.
        nll: mean negative log-likelihood, in nats.
    """

    start: int
    stop: int
    nll: float


@dataclass(frozen=True, kw_only=True)
class TextScore(Paired, compared=("perplexity",)):
    """Quality on one text.

    Attributes:
        text: the file.
        windows: how many of its windows were scored.
        tokens: predictions scored (each window's first token is not predicted).
        perplexity: exp of the mean negative log-likelihood.
        perplexity_ratio: the model's over the reference's; this and the next two are None without a reference.
        kl: mean KL(reference ‖ model) a token, in nats.
        top1_agreement: fraction of positions where both rank the same token first.
        by_position: the cost by position in the window, in buckets that double: 1–255, 256–511, 512–1023, ….
    """

    text: str
    windows: int
    tokens: int
    perplexity: float
    perplexity_ratio: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    by_position: tuple[PositionScore, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluation(Paired, compared=("perplexity", "cache_bytes_per_token", "decode_ms")):
    """Measurements of a model on texts; ``reference`` has those of its reference on the same texts in the same run.

    Quality is over all tokens of all texts; ``texts`` has each text's own.

    Attributes:
        model: as it was named.
        against: the reference, as it was named.
        text: the file, or the files with commas between.
        window: tokens in each window.
        windows: how many windows were scored.
        tokens: predictions scored (each window's first token is not predicted).
        perplexity: exp of the mean negative log-likelihood.
        perplexity_ratio: the model's over the reference's; this and the next two are None without a reference.
        kl: mean KL(reference ‖ model) a token, in nats.
        top1_agreement: fraction of positions where both rank the same token first.
        texts: the quality on each text.
        cache_bytes_per_token: bytes the cache's tensors hold, over the tokens in it.
        context: tokens in the cache while decoding was timed.
        decode_ms: median milliseconds for one more token at that context.
        dtype: both were run in.
        device: both were run on.
        threads: torch's.
    """

    model: str
    against: str | None
    text: str
    window: int
    windows: int
    tokens: int
    perplexity: float
    perplexity_ratio: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    texts: tuple[TextScore, ...]
    cache_bytes_per_token: float
    context: int
    decode_ms: float
    dtype: str
    device: str
    threads: int


@takes_options(EvaluateOptions)
@typed
@torch.inference_mode()
def evaluate(model: str | Path | Pair, options: EvaluateOptions, *, progress: Progress = silent) -> Evaluation:
    """Measure a model on text, beside its reference when there is one.

    Perplexity is over windows without overlap, each from its own first token; the last distribution of a window is
    not scored. ``windows=None`` takes all of a text's. Decoding is timed in turn for both models, one token at a time
    on a cache of ``context`` tokens. For example
    ``evaluate("./mla", against="smollm2-135m", text="text.txt").perplexity_ratio``.

    Args:
        model: a model folder, ``.gguf`` or other source with weights; or a pair of them that is open already.
        options: the keywords below as one object, in their place.
        progress: told of each window.

    Raises:
        ArgumentError: a text is missing or shorter than a window, or a number is out of range.
        CheckpointError: a model could not be read.
    """
    files = [str(file) for file in ([options.text] if isinstance(options.text, str | Path) else options.text)]
    contents = [read_text(file) for file in files]
    refuse_twice(files, name="text")
    # Before the tokenizer, which says less of what is wrong with a folder.
    pair = open_pair(model, against=options.against, dtype=options.dtype, device=options.device, progress=progress)
    longest = pair.positions
    window = _within("window", options.window, usual_window(longest, WINDOW), 2, longest)
    # The token that is timed has a position too.
    context = _within("context", options.context, CONTEXT, 1, None if longest is None else longest - 1)
    batches = [
        (file, token_windows(pair.tokenizer, content, window=window, windows=options.windows, name=f"text {file}"))
        for file, content in zip(files, contents, strict=True)
    ]
    return evaluate_windows(pair, batches, context=context, progress=progress)


@torch.inference_mode()
def evaluate_windows(
    pair: Pair, texts: Sequence[tuple[str, Tensor]], *, context: int | None = None, progress: Progress = silent
) -> Evaluation:
    """Measure a model on windows of tokens, beside its reference; see `evaluate`.

    Args:
        pair: the model and its reference.
        texts: the name of each text, and its windows ``[n, W]``, W the same for all.
        context: tokens in the cache while decoding is timed; 512, or one less than the positions, when None.
        progress: told of each window.
    """
    if context is None:
        context = CONTEXT if pair.positions is None else min(CONTEXT, pair.positions - 1)
    check_vocabulary(pair.models, max(int(batch.max()) for _, batch in texts))
    scores = _scores(pair, texts, progress)
    prompt = texts[0][1].flatten()[None, :context]
    prompt = prompt.repeat(1, -(-context // prompt.shape[1]))[:, :context]
    speed = decode_times(pair.models, prompt.to(pair.device), progress=progress)
    about = {"window": texts[0][1].shape[1], "context": context}
    reference = None
    if "against" in speed:
        alone = [(name, {"nll": score["reference_nll"]}) for name, score in scores]
        reference = _evaluation(alone, speed["against"], about | pair.about("against"))
    return _evaluation(scores, speed["model"], about | pair.about(), reference)


def _scores(pair: Pair, texts: Sequence[tuple[str, Tensor]], progress: Progress) -> _Scores:
    scores = []
    done, total = 0, sum(len(batch) for _, batch in texts)
    for name, batch in texts:
        rows = []
        for ids in batch:
            progress("perplexity", done, total)
            rows.append(score_window(pair.models, ids))
            _check_finite(rows[-1], pair)
            done += 1
        scores.append((name, {key: torch.stack([row[key] for row in rows]) for key in rows[0]}))
    progress("perplexity", total, total)
    return scores


def _evaluation(
    scores: _Scores, speed: Speed, about: dict[str, Any], reference: Evaluation | None = None
) -> Evaluation:
    """One model's evaluation: its scores by text, its speed, and its reference's evaluation if there is one."""
    together = {key: torch.cat([score[key] for _, score in scores]) for key in scores[0][1]}
    others = [None] * len(scores) if reference is None else reference.texts
    return Evaluation(
        text=", ".join(name for name, _ in scores),
        windows=len(together["nll"]),
        **_quality(together, reference),
        texts=tuple(_text_score(*one, other) for one, other in zip(scores, others, strict=True)),
        cache_bytes_per_token=speed.bytes_per_token,
        decode_ms=speed.decode_ms,
        reference=reference,
        **about,
    )


def _text_score(name: str, score: dict[str, Tensor], reference: TextScore | None) -> TextScore:
    return TextScore(
        text=name,
        windows=len(score["nll"]),
        **_quality(score, reference),
        by_position=_by_position(score["nll"], reference),
        reference=reference,
    )


def _within(name: str, asked: int | None, usual: int, least: int, most: int | None) -> int:
    """A number of tokens that fits the models' positions: the usual one, or as many as there are."""
    if asked is None:
        return usual if most is None else min(usual, most)
    if asked < least or (most is not None and asked > most):
        positions = "" if most is None else f" and at most {most}, by the models' positions"
        raise ArgumentError(name, asked, f"must be at least {least}{positions}")
    return asked


def _check_finite(score: dict[str, Tensor], pair: Pair) -> None:
    for name, key in (("model", "nll"), ("against", "reference_nll")):
        if key in score and not bool(score[key].isfinite().all()):
            rule = f"computes NaN or infinite logits in {pair.dtype}, so there is nothing to measure"
            raise CheckpointError(name, pair.sources[name], rule)


def _quality(score: dict[str, Tensor], reference: Evaluation | TextScore | None) -> dict[str, Any]:
    """Means over all tokens of ``[windows, W - 1]`` scores, as fields of `Evaluation` and `TextScore`."""
    perplexity = _exp(float(score["nll"].mean()))
    quality: dict[str, Any] = {"tokens": score["nll"].numel(), "perplexity": perplexity}
    if reference is not None:
        quality |= {
            "perplexity_ratio": perplexity / reference.perplexity,
            "kl": max(float(score["kl"].mean()), 0.0),  # never negative but by rounding
            "top1_agreement": float(score["agree"].mean()),
        }
    return quality


def _by_position(nll: Tensor, reference: TextScore | None) -> tuple[PositionScore, ...]:
    """Means over all windows of costs ``[windows, W - 1]``, bucket by bucket."""
    window = nll.shape[1] + 1
    edges = [1]
    while edges[-1] < window:
        edges.append(min(max(_FIRST_BUCKET, 2 * edges[-1]), window))
    mean = nll.mean(0)
    return tuple(
        PositionScore(
            start=start,
            stop=stop,
            nll=float(mean[start - 1 : stop - 1].mean()),
            reference=None if reference is None else reference.by_position[index],
        )
        for index, (start, stop) in enumerate(pairwise(edges))
    )


def _exp(mean: float) -> float:
    """A broken model's perplexity can be beyond what a float holds; it is infinite then, and no error."""
    try:
        return math.exp(mean)
    except OverflowError:
        return math.inf
