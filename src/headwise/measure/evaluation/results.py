"""What an evaluation says: costs of a text's tokens, of a model and its reference, as means and ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.measure.evaluation.paired_results import Paired
from headwise.measure.evaluation.speed import Speed

_FIRST_BUCKET = 256

Scores = Sequence[tuple[str, dict[str, Tensor]]]
"""The name of each text, and the scores of `score_window` for its windows, each ``[windows, W - 1]``."""


@dataclass(frozen=True, kw_only=True)
class PositionScore(Paired, compared=("nll",)):
    """The mean cost of the tokens in a range of positions within their windows.

    Attributes:
        start: the first position; a window's first token has position 0.
        stop: the first position after the range.
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
        windows: the number of windows.
        tokens: the number of scored predictions (a window's first token is not predicted).
        perplexity: exp of the mean negative log-likelihood.
        perplexity_ratio: the model's over the reference's; this and the next three are None without a reference.
        kl: mean KL(reference ‖ model) a token, in nats.
        kl_999: the 99.9 % quantile of the tokens' KL, which the few that lose most decide.
        top1_agreement: fraction of positions where both rank the same token first.
        by_position: the cost by position in the window, in ranges of doubling length: 1–255, 256–511, 512–1023, ….
    """

    text: str
    windows: int
    tokens: int
    perplexity: float
    perplexity_ratio: float | None = None
    kl: float | None = None
    kl_999: float | None = None
    top1_agreement: float | None = None
    by_position: tuple[PositionScore, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluation(Paired, compared=("perplexity", "cache_bytes_per_token", "cache_bytes", "decode_ms")):
    """Measurements of a model on texts, and in ``reference`` those of its reference in the same run.

    Quality is over all tokens of all texts; ``texts`` has the quality on each.

    Attributes:
        model: the model, as the user named it.
        against: the reference, as the user named it.
        text: the file, or several files joined by commas.
        window: tokens in each window.
        begin: the tokens that each window begins with because the tokenizer begins every text so, such as ``<bos>``.
        windows: the number of windows.
        tokens: the number of scored predictions (a window's first token is not predicted).
        perplexity: exp of the mean negative log-likelihood.
        perplexity_ratio: the model's over the reference's; this and the next three are None without a reference.
        kl: mean KL(reference ‖ model) a token, in nats.
        kl_999: the 99.9 % quantile of the tokens' KL, which the few that lose most decide.
        top1_agreement: fraction of positions where both rank the same token first.
        texts: the quality on each text.
        cache: the format that the model's cache was stored in; None for the model's own numbers.
        cache_bytes_per_token: bytes of the cache's tensors over the number of cached tokens; for a ``cache``, of all
            memory that it allocates for a window.
        cache_bytes: bytes that an engine allocated for its cache; None without an engine.
        context: tokens in the cache while decoding was timed.
        decode_ms: median milliseconds for one more token at that context.
        dtype: that both were run in; with an engine the stored one.
        device: that both were run on.
        threads: the number of torch's threads, or of the engine's.
        engine: that ran both, with its version, such as ``llama-cpp-python 0.3.36``; None for transformers.
    """

    model: str
    against: str | None
    text: str
    window: int
    begin: tuple[str, ...] = ()
    windows: int
    tokens: int
    perplexity: float
    perplexity_ratio: float | None = None
    kl: float | None = None
    kl_999: float | None = None
    top1_agreement: float | None = None
    texts: tuple[TextScore, ...]
    cache: str | None = None
    cache_bytes_per_token: float
    cache_bytes: int | None = None
    context: int
    decode_ms: float
    dtype: str
    device: str
    threads: int
    engine: str | None = None

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens a second that are decoded at ``context``."""
        return 1e3 / self.decode_ms


def evaluation_of(
    scores: Scores, speed: Speed, about: dict[str, Any], reference: Evaluation | None = None
) -> Evaluation:
    """The evaluation of one model.

    For example ``evaluation_of([("text.txt", {"nll": costs})], speed, about).perplexity``.

    Args:
        scores: of each text; those that compare models only where there is a reference.
        speed: its cache and decoding time.
        about: the fields of `Evaluation` that say what was measured.
        reference: the evaluation of its reference.
    """
    together = {key: torch.cat([score[key] for _, score in scores]) for key in scores[0][1]}
    others = [None] * len(scores) if reference is None else reference.texts
    return Evaluation(
        text=", ".join(name for name, _ in scores),
        windows=len(together["nll"]),
        **_quality(together, reference),
        texts=tuple(_text_score(name, score, other) for (name, score), other in zip(scores, others, strict=True)),
        cache_bytes_per_token=speed.bytes_per_token,
        cache_bytes=speed.allocated,
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


def _quality(score: dict[str, Tensor], reference: Evaluation | TextScore | None) -> dict[str, Any]:
    """Means over all tokens of ``[windows, W - 1]`` scores, as fields of `Evaluation` and `TextScore`."""
    perplexity = _exp(float(score["nll"].mean()))
    quality: dict[str, Any] = {"tokens": score["nll"].numel(), "perplexity": perplexity}
    if reference is not None:
        quality |= {
            "perplexity_ratio": perplexity / reference.perplexity,
            "kl": max(float(score["kl"].mean()), 0.0),  # a negative mean comes from rounding
            "kl_999": float(np.quantile(score["kl"].numpy(), 0.999)),
            "top1_agreement": float(score["agree"].mean()),
        }
    return quality


def _by_position(nll: Tensor, reference: TextScore | None) -> tuple[PositionScore, ...]:
    """Means of costs ``[windows, W - 1]`` over all windows and each range of positions."""
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
    """exp, infinite where it exceeds the largest float, as a broken model's perplexity may."""
    try:
        return math.exp(mean)
    except OverflowError:
        return math.inf
