"""What a conversion did to a model: quality on text, bytes of cache, time a token; two models in one run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.arguments import typed
from headwise.errors import ArgumentError, CheckpointError
from headwise.evaluation.pair import Pair, check_vocabulary, open_pair
from headwise.evaluation.scoring import score_window
from headwise.evaluation.speed import decode_times
from headwise.progress import Progress, silent
from headwise.texts.files import read_text
from headwise.texts.sources import refuse_twice
from headwise.texts.windows import token_windows, usual_window

WINDOW = 2048
CONTEXT = 512
_FIRST_BUCKET = 256


@dataclass(frozen=True, kw_only=True)
class PositionScore:
    """The mean cost of the tokens at some positions of their windows.

    Attributes:
        start: the first position, a window's first token being 0.
        stop: the first position after them.
        nll: mean negative log-likelihood, in nats.
        reference_nll: the reference's.
    """

    start: int
    stop: int
    nll: float
    reference_nll: float | None = None


@dataclass(frozen=True, kw_only=True)
class TextScore:
    """Quality on one text.

    Attributes:
        text: the file.
        windows: how many of its windows were scored.
        tokens: predictions scored (each window's first token is not predicted).
        perplexity: exp of the mean negative log-likelihood.
        perplexity_ratio: the model's over the reference's.
        kl: mean KL(reference ‖ model) a token, in nats.
        top1_agreement: fraction of positions where both rank the same token first.
        by_position: the cost by position in the window, in buckets that double: 1–255, 256–511, 512–1023, ….
    """

    text: str
    windows: int
    tokens: int
    perplexity: float
    reference_perplexity: float | None = None
    perplexity_ratio: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    by_position: tuple[PositionScore, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Measurements of a model, and of its reference on the same texts in the same run.

    Quality is over all tokens of all texts; ``texts`` has each text's own.

    Attributes:
        text: the file, or the files with commas between.
        windows: how many windows were scored.
        tokens: predictions scored (each window's first token is not predicted).
        perplexity: exp of the mean negative log-likelihood.
        perplexity_ratio: the model's over the reference's.
        kl: mean KL(reference ‖ model) a token, in nats.
        top1_agreement: fraction of positions where both rank the same token first.
        texts: the same of each text.
        cache_bytes_per_token: bytes the cache's tensors hold, over the tokens in it.
        context: tokens in the cache while decoding was timed.
        decode_ms: median milliseconds for one more token at that context.
    """

    model: str
    against: str | None
    text: str
    window: int
    windows: int
    tokens: int
    perplexity: float
    reference_perplexity: float | None = None
    perplexity_ratio: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    texts: tuple[TextScore, ...]
    cache_bytes_per_token: float
    reference_cache_bytes_per_token: float | None = None
    context: int
    decode_ms: float
    reference_decode_ms: float | None = None
    dtype: str
    device: str
    threads: int

    def to_dict(self) -> dict[str, Any]:
        """The measurements as JSON-able values."""
        return asdict(self)


@typed
@torch.inference_mode()
def evaluate(
    model: str | Path | Pair,
    *,
    text: str | Path | Sequence[str | Path],
    against: str | Path | None = None,
    window: int | None = None,
    windows: int | None = 6,
    context: int | None = None,
    dtype: str | None = None,
    device: str | None = None,
    progress: Progress = silent,
) -> Evaluation:
    """Measure a model on text, beside its reference when there is one.

    Perplexity is over windows without overlap, each from its own first token; the last distribution of a window is
    not scored. Decoding is timed in turn for both models, one token at a time on a cache of ``context`` tokens.

    Args:
        model: a model folder, ``.gguf`` or other source with weights; or a pair of them that is open already.
        text: a UTF-8 file, or several.
        against: the reference, usually what the model was converted from; its tokenizer is used.
        window: tokens a window; 2048, or all the models' positions where they have fewer, when None.
        windows: how many of each text, from its beginning; None for all.
        context: tokens in the cache while decoding is timed; 512, or one less than the positions, when None.
        dtype: to run both in; the wider of those they are stored in when None.
        device: to run both on; the CPU when None.
        progress: told of each window.

    Raises:
        ArgumentError: a text is missing or shorter than a window, or a number is out of range.
        CheckpointError: a model could not be read.
    """
    files = [str(file) for file in ([text] if isinstance(text, str | Path) else text)]
    if not files:
        raise ArgumentError("text", files, "must be at least one file")
    contents = [read_text(file) for file in files]
    refuse_twice(files, name="text")
    # Before the tokenizer, which says less of what is wrong with a folder.
    pair = open_pair(model, against=against, dtype=dtype, device=device, progress=progress)
    longest = pair.positions
    window = _within("window", window, usual_window(longest, WINDOW), 2, longest)
    # The token that is timed has a position too.
    context = _within("context", context, CONTEXT, 1, None if longest is None else longest - 1)
    batches = [
        (file, token_windows(pair.tokenizer, content, window=window, windows=windows, name=f"text {file}"))
        for file, content in zip(files, contents, strict=True)
    ]
    return evaluate_windows(pair, batches, context=context, progress=progress)


@torch.inference_mode()
def evaluate_windows(
    pair: Pair, texts: Sequence[tuple[str, Tensor]], *, context: int | None = None, progress: Progress = silent
) -> Evaluation:
    """Measure a model on windows of tokens, beside its reference; see `evaluate`.

    Args:
        pair: what is measured.
        texts: what each text is called, and its windows ``[n, W]``, W the same for all.
        context: tokens in the cache while decoding is timed; 512, or one less than the positions, when None.
        progress: told of each window.
    """
    batches = [batch for _, batch in texts]
    window = batches[0].shape[1]
    if context is None:
        context = CONTEXT if pair.positions is None else min(CONTEXT, pair.positions - 1)
    check_vocabulary(pair.models, max(int(batch.max()) for batch in batches))

    scores: list[dict[str, Tensor]] = []
    done, total = 0, sum(map(len, batches))
    for batch in batches:
        rows = []
        for ids in batch:
            progress("perplexity", done, total)
            rows.append(score_window(pair.models, ids))
            _check_finite(rows[-1], pair)
            done += 1
        scores.append({key: torch.stack([row[key] for row in rows]) for key in rows[0]})
    progress("perplexity", total, total)
    prompt = batches[0].flatten()[None, :context]
    prompt = prompt.repeat(1, -(-context // prompt.shape[1]))[:, :context]
    speed = decode_times(pair.models, prompt.to(pair.device), progress=progress)
    reference = speed.get("against")
    return Evaluation(
        text=", ".join(name for name, _ in texts),
        window=window,
        windows=total,
        **_summary({key: torch.cat([score[key] for score in scores]) for key in scores[0]}),
        texts=tuple(
            TextScore(text=name, windows=len(score["nll"]), **_summary(score), by_position=_by_position(score))
            for (name, _), score in zip(texts, scores, strict=True)
        ),
        context=context,
        cache_bytes_per_token=speed["model"].bytes_per_token,
        reference_cache_bytes_per_token=None if reference is None else reference.bytes_per_token,
        decode_ms=speed["model"].decode_ms,
        reference_decode_ms=None if reference is None else reference.decode_ms,
        **pair.about(),
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


def _summary(score: dict[str, Tensor]) -> dict[str, Any]:
    """Means over all tokens of ``[windows, window - 1]`` scores."""
    nll = float(score["nll"].mean())
    found: dict[str, Any] = {"tokens": score["nll"].numel(), "perplexity": _exp(nll)}
    if "reference_nll" in score:
        reference = _exp(float(score["reference_nll"].mean()))
        found |= {
            "reference_perplexity": reference,
            "perplexity_ratio": found["perplexity"] / reference,
            "kl": max(float(score["kl"].mean()), 0.0),  # never negative but by rounding
            "top1_agreement": float(score["agree"].mean()),
        }
    return found


def _by_position(score: dict[str, Tensor]) -> tuple[PositionScore, ...]:
    window = score["nll"].shape[1] + 1
    edges = [1]
    while edges[-1] < window:
        edges.append(min(max(_FIRST_BUCKET, 2 * edges[-1]), window))
    means = {key: score[key].mean(0) for key in ("nll", "reference_nll") if key in score}
    return tuple(
        PositionScore(
            start=start,
            stop=stop,
            **{key: float(mean[start - 1 : stop - 1].mean()) for key, mean in means.items()},
        )
        for start, stop in pairwise(edges)
    )


def _exp(mean: float) -> float:
    """A broken model's perplexity can be beyond what a float holds; it is infinite then, and no error."""
    try:
        return math.exp(mean)
    except OverflowError:
        return math.inf
