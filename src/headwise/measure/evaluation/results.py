"""Results of evaluations: perplexity by position, paired accuracies with intervals, bytes and times.

An evaluation says what the tokens of a text cost a model and its reference, as means and ratios; JSON holds the
measurements of both side by side. Accuracies are compared item by item: how many only one of the two models has right
decides a difference far more sharply than two separate rates would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from itertools import groupby, pairwise
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from headwise.base.documents import plain
from headwise.measure.evaluation.continuations import Continuations
from headwise.measure.evaluation.scoring import Speed

_Z = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""
_RESAMPLES = 10_000


_FIRST_BUCKET = 256

Scores = Sequence[tuple[str, dict[str, Tensor]]]
"""The name of each text, and the scores of `score_window` for its windows, each ``[windows, W - 1]``."""

_PREFIX = "reference_"


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Measurements of a model and, where there is a reference, those of the reference.

    A subclass names the numbers that JSON shows for both: ``class Score(Paired, compared=("nll",))``. In JSON each of
    them is followed by the reference's, as ``reference_nll``.

    Attributes:
        reference: the reference's measurements, an object of this class; None without a reference.
    """

    reference: Self | None = None

    compared: ClassVar[tuple[str, ...]] = ()
    """The numbers that are followed by the reference's in JSON."""

    def __init_subclass__(cls, *, compared: Sequence[str] = (), **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.compared = tuple(compared)

    def to_dict(self) -> dict[str, Any]:
        """The measurements as JSON-able values, each compared number followed by the reference's."""
        document: dict[str, Any] = {}
        names = (field.name for field in fields(self) if field.name != "reference")
        for is_compared, group in groupby(names, key=lambda name: name in self.compared):
            neighbours = tuple(group)
            document |= {name: plain(getattr(self, name)) for name in neighbours}
            if is_compared:
                document |= {_PREFIX + name: plain(getattr(self.reference, name, None)) for name in neighbours}
        return document


@dataclass(frozen=True, kw_only=True)
class Rate(Paired, compared=("rate", "low", "high")):
    """The fraction of items that a model has right with its 95 % interval, and its difference from the reference's.

    Without a reference ``only_model`` and the attributes after it are None.

    Attributes:
        items: the number of items.
        rate: the fraction that the model has right.
        low: the lower end of the 95 % Wilson interval of ``rate``.
        high: the upper end of the 95 % Wilson interval of ``rate``.
        only_model: the number of items that only the model has right.
        only_reference: the number of items that only the reference has right.
        difference: the model's rate minus the reference's.
        difference_low: the lower end of the 95 % bootstrap interval of ``difference`` over items.
        difference_high: the upper end of the 95 % bootstrap interval of ``difference``.
        p_value: the p-value of McNemar's exact test: the probability that the items which only one of the two has
            right are split so unevenly by chance.
    """

    items: int
    rate: float
    low: float
    high: float
    only_model: int | None = None
    only_reference: int | None = None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    p_value: float | None = None


def compare_rates(right: Sequence[bool], reference: Sequence[bool] | None = None, *, seed: int = 0) -> Rate:
    """Summarise whether a model was right on each item, beside its reference on the same items.

    For example ``compare_rates([True, False], [True, True]).difference`` is -0.5.

    Args:
        right: whether the model has each item right; not empty.
        reference: whether the reference has each item right; None without a reference.
        seed: the seed of the bootstrap interval.
    """
    items = len(right)
    low, high = wilson_interval(sum(right), items)
    alone = Rate(items=items, rate=sum(right) / items, low=low, high=high)
    if reference is None:
        return alone
    only_model = sum(model and not other for model, other in zip(right, reference, strict=True))
    only_reference = sum(other and not model for model, other in zip(right, reference, strict=True))
    # The difference depends only on the numbers of items of three kinds, and resampling items with replacement draws
    # these numbers from a multinomial distribution.
    shares = np.array([only_model, only_reference, items - only_model - only_reference]) / items
    counts = np.random.default_rng(seed).multinomial(items, shares, size=_RESAMPLES)  # [resamples, 3]
    difference_low, difference_high = np.percentile((counts[:, 0] - counts[:, 1]) / items, [2.5, 97.5])
    return replace(
        alone,
        reference=compare_rates(reference),
        only_model=only_model,
        only_reference=only_reference,
        difference=(only_model - only_reference) / items,
        difference_low=float(difference_low),
        difference_high=float(difference_high),
        p_value=mcnemar_p_value(only_model, only_reference),
    )


def wilson_interval(right: int, items: int) -> tuple[float, float]:
    """The 95 % interval of a fraction. Source: Wilson 1927.

    Args:
        right: the number of items that the model has right.
        items: the number of all items.

    Returns:
        The lower and the upper end.
    """
    fraction, spread = right / items, _Z**2 / items
    middle = fraction + spread / 2
    half = _Z * math.sqrt(fraction * (1 - fraction) / items + spread / (4 * items))
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    return max(low, 0.0), min(high, 1.0)


def mcnemar_p_value(first: int, second: int) -> float:
    """The two-sided p-value of McNemar's exact test: the probability of a split at least as uneven by chance.

    Args:
        first: the number of items that only the one model has right.
        second: the number of items that only the other has right.
    """
    total, least = first + second, min(first, second)
    tail = sum(math.comb(total, count) for count in range(least + 1))
    return min(1.0, float(Fraction(tail, 2**total) * 2))


@dataclass(frozen=True, kw_only=True)
class PositionScore(Paired, compared=("nll",)):
    """The mean cost of the tokens in a range of positions within their windows.

    Attributes:
        start: the first position; a window's first token has position 0.
        stop: the first position after the range.
        nll: the mean negative log-likelihood, in nats a token.
    """

    start: int
    stop: int
    nll: float


@dataclass(frozen=True, kw_only=True)
class TextScore(Paired, compared=("perplexity",)):
    """Quality on one text.

    Attributes:
        text: the file of the text.
        windows: the number of windows.
        tokens: the number of scored predictions (a window's first token is not predicted).
        perplexity: exp of the mean negative log-likelihood.
        perplexity_ratio: the model's perplexity over the reference's; this and the next four are None without a
            reference.
        kl: mean KL(reference ‖ model) a token, in nats.
        kl_999: the 99.9 % quantile of the tokens' KL, which the few that lose most decide: of all tokens, and linear
            between the two that it lies between.
        top1_agreement: fraction of positions where both rank the same token first.
        top1_changed: the number of positions where they do not.
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
    top1_changed: int | None = None
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
        perplexity_ratio: the model's perplexity over the reference's; this and the next four are None without a
            reference.
        kl: mean KL(reference ‖ model) a token, in nats.
        kl_999: the 99.9 % quantile of the tokens' KL, which the few that lose most decide: of all tokens, and linear
            between the two that it lies between.
        top1_agreement: fraction of positions where both rank the same token first.
        top1_changed: the number of positions where they do not.
        texts: the quality on each text.
        continuations: greedy continuations beside the reference's; None where none were asked for.
        cache: the format that the model's cache was stored in; None for the model's own numbers.
        cache_bytes_per_token: bytes of the cache's tensors over the number of cached tokens; with a ``cache``, bytes
            of all memory that it allocates for a window, over its tokens.
        cache_bytes: bytes that an engine allocated for its cache; None without an engine.
        context: the number of tokens in the cache while decoding was timed.
        decode_ms: the median milliseconds for one more token at ``context``.
        dtype: the dtype that both models were run in; with an engine the stored one.
        device: the device that both models were run on.
        threads: the number of torch's threads, or of the engine's.
        engine: the engine that ran both models, with its version, such as ``llama-cpp-python 0.3.36``; None for
            transformers.
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
    top1_changed: int | None = None
    texts: tuple[TextScore, ...]
    continuations: Continuations | None = None
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
        scores: the scores of each text's windows; those that compare models only where there is a reference.
        speed: the model's cache bytes and decoding time.
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
            "top1_changed": int((score["agree"] == 0).sum()),
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
