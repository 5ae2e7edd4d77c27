"""Evaluate a model and its reference on text in one run: quality, cache bytes and time a token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ArgumentError, CheckpointError
from headwise.evaluation.model_pair import Pair, check_vocabulary, open_pair
from headwise.evaluation.paired_results import Paired
from headwise.evaluation.scoring import score_window
from headwise.evaluation.speed import Speed, allocated_bytes, decode_times
from headwise.hf import check_logits, has_codes
from headwise.options import EvaluateOptions, takes_options
from headwise.processes import all_sum, barrier, my_windows, process_index
from headwise.progress import Progress, silent
from headwise.texts.files import read_text
from headwise.texts.identity import refuse_twice
from headwise.texts.sources import named_texts
from headwise.texts.windows import first_ids, token_windows, usual_window
from headwise.type_checks import typed

WINDOW = 2048
CONTEXT = 512
_FIRST_BUCKET = 256

_Scores = list[tuple[str, dict[str, Tensor]]]
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
        perplexity_ratio: the model's over the reference's; this and the next two are None without a reference.
        kl: mean KL(reference ‖ model) a token, in nats.
        top1_agreement: fraction of positions where both rank the same token first.
        by_position: the cost by position in the window, in ranges of doubling length: 1–255, 256–511, 512–1023, ….
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
        perplexity_ratio: the model's over the reference's; this and the next two are None without a reference.
        kl: mean KL(reference ‖ model) a token, in nats.
        top1_agreement: fraction of positions where both rank the same token first.
        texts: the quality on each text.
        cache: the format that the model's cache was stored in; None for the model's own numbers.
        cache_bytes_per_token: bytes of the cache's tensors over the number of cached tokens; for a ``cache``, of all
            memory that it allocates for a window.
        context: tokens in the cache while decoding was timed.
        decode_ms: median milliseconds for one more token at that context.
        dtype: that both were run in.
        device: that both were run on.
        threads: the number of torch's threads.
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
    top1_agreement: float | None = None
    texts: tuple[TextScore, ...]
    cache: str | None = None
    cache_bytes_per_token: float
    context: int
    decode_ms: float
    dtype: str
    device: str
    threads: int


@takes_options(EvaluateOptions)
@typed
@torch.inference_mode()
def evaluate(
    model: str | Path | Pair, options: EvaluateOptions, *, progress: Progress = silent, shared: bool = False
) -> Evaluation:
    """Evaluate a model on text, beside its reference when there is one.

    For example ``evaluate("./mla", against="smollm2-135m", text="text.txt").perplexity_ratio``.

    Perplexity is over windows from the beginning of each text that do not overlap and do not see each other; each
    begins as the tokenizer begins a text. ``windows=None`` takes all windows of a text. Decoding is timed in turn for
    both models, one token at a time with a cache of ``context`` tokens.

    Args:
        model: a model folder, ``.gguf`` or other source with weights; or an open pair.
        options: the keywords below as one object, in place of them.
        progress: told of each window.
        shared: each of several processes scores its share of the windows, and all get the result; all of them have
            to call this, with whole models.

    Raises:
        ArgumentError: a text is missing or shorter than a window, or a number is out of range.
        CheckpointError: a model cannot be read.
    """
    files = list(map(str, named_texts(options.text)))
    contents = [read_text(file) for file in files]
    refuse_twice(files, name="text")
    # Opened before the tokenizer, whose errors say less about what is wrong with a folder.
    pair = open_pair(model, against=options.against, dtype=options.dtype, device=options.device, progress=progress)
    longest = pair.positions
    window = _within("window", options.window, usual_window(longest, WINDOW), 2, longest)
    # One position less, because the timed token needs one.
    context = _within("context", options.context, CONTEXT, 1, None if longest is None else longest - 1)
    batches = [
        (file, token_windows(pair.tokenizer, content, window=window, windows=options.windows, name=f"text {file}"))
        for file, content in zip(files, contents, strict=True)
    ]
    return evaluate_windows(pair, batches, context=context, cache=options.cache, progress=progress, shared=shared)


@torch.inference_mode()
def evaluate_windows(
    pair: Pair,
    texts: Sequence[tuple[str, Tensor]],
    *,
    context: int | None = None,
    cache: str | None = None,
    progress: Progress = silent,
    shared: bool = False,
) -> Evaluation:
    """Evaluate a model on windows of tokens, beside its reference; see `evaluate`.

    For example ``evaluate_windows(open_pair("./mla", against="./model"), [("text.txt", windows)]).kl``.

    Args:
        pair: the model and its reference.
        texts: the name of each text, and its windows ``[n, W]``; W is the same for all.
        context: tokens in the cache while decoding is timed; 512, or one less than the positions, when None.
        cache: the format that the model's cache is stored in; the model's own numbers when None.
        progress: told of each window.
        shared: each of several processes scores its share of the windows; all of them have to call this.
    """
    if context is None:
        context = CONTEXT if pair.positions is None else min(CONTEXT, pair.positions - 1)
    prompt = texts[0][1].flatten()[None, :context]
    prompt = prompt.repeat(1, -(-context // prompt.shape[1]))[:, :context]
    with pair.caching(cache):
        check_vocabulary(pair.models, max(int(batch.max()) for _, batch in texts))
        scores = _scores(pair, texts, progress, shared=shared)
        speed = _speed(pair, prompt, progress, shared=shared)
    if cache is not None or has_codes(pair.models["model"]):
        allocated = allocated_bytes(pair.models["model"], texts[0][1][0], cache)
        speed["model"] = replace(speed["model"], bytes_per_token=allocated)
    about = {"window": texts[0][1].shape[1], "begin": _begin(pair, texts), "context": context}
    reference = None
    if "against" in speed:
        alone = [(name, {"nll": score["reference_nll"]}) for name, score in scores]
        reference = _evaluation(alone, speed["against"], about | pair.about("against"))
    return _evaluation(scores, speed["model"], about | pair.about() | {"cache": cache}, reference)


def _begin(pair: Pair, texts: Sequence[tuple[str, Tensor]]) -> tuple[str, ...]:
    """The tokens that the tokenizer puts before every text, if all windows begin with them."""
    with suppress(CheckpointError):  # windows of tokens need no tokenizer
        ids = first_ids(pair.tokenizer)
        if ids and all(bool((batch[:, : len(ids)] == torch.tensor(ids)).all()) for _, batch in texts):
            return tuple(pair.tokenizer.convert_ids_to_tokens(ids))
    return ()


def _scores(pair: Pair, texts: Sequence[tuple[str, Tensor]], progress: Progress, *, shared: bool) -> _Scores:
    """The scores of every window, of which each process computes its share where they are shared."""
    windows = [(name, ids) for name, batch in texts for ids in batch]
    mine = my_windows(len(windows)) if shared else range(len(windows))
    rows: dict[int, dict[str, Tensor]] = {}
    for done, number in enumerate(mine):
        progress("perplexity", done, len(mine))
        rows[number] = score_window(pair.models, windows[number][1])
        for key, name in (("nll", "model"), ("reference_nll", "against")):
            if key in rows[number]:
                check_logits(rows[number][key], pair.models[name])
    progress("perplexity", len(mine), len(mine))
    keys = ("nll",) if "against" not in pair.sources else ("nll", "reference_nll", "kl", "agree")
    together = {}
    for key in keys:
        part = torch.zeros(len(windows), texts[0][1].shape[1] - 1, dtype=torch.float64)
        for number, row in rows.items():
            part[number] = row[key]
        together[key] = all_sum(part) if shared else part
    counts = [len(batch) for _, batch in texts]
    parts = {key: value.split(counts) for key, value in together.items()}  # type: ignore[no-untyped-call]
    return [(name, {key: value[number] for key, value in parts.items()}) for number, (name, _) in enumerate(texts)]


def _speed(pair: Pair, prompt: Tensor, progress: Progress, *, shared: bool) -> dict[str, Speed]:
    """Each model's cache and decoding time; of several processes the first measures, while the others wait."""
    if not shared:
        return decode_times(pair.models, prompt.to(pair.device), progress=progress)
    barrier()
    measured = torch.zeros(len(pair.models), 2, dtype=torch.float64)
    if process_index() == 0:
        speed = decode_times(pair.models, prompt.to(pair.device), progress=progress)
        measured = torch.tensor([(one.bytes_per_token, one.decode_ms) for one in speed.values()], dtype=torch.float64)
    return {name: Speed(*row) for name, row in zip(pair.models, all_sum(measured).tolist(), strict=True)}


def _evaluation(
    scores: _Scores, speed: Speed, about: dict[str, Any], reference: Evaluation | None = None
) -> Evaluation:
    """The evaluation of one model, from its scores and speed, and from the evaluation of its reference."""
    together = {key: torch.cat([score[key] for _, score in scores]) for key in scores[0][1]}
    others = [None] * len(scores) if reference is None else reference.texts
    return Evaluation(
        text=", ".join(name for name, _ in scores),
        windows=len(together["nll"]),
        **_quality(together, reference),
        texts=tuple(_text_score(name, score, other) for (name, score), other in zip(scores, others, strict=True)),
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


def _within(name: str, value: int | None, default: int, least: int, most: int | None) -> int:
    """Check a number of tokens against the models' positions; when None, the default or as many as they have.

    Raises:
        ArgumentError: the number is out of range.
    """
    if value is None:
        return default if most is None else min(default, most)
    if value < least or (most is not None and value > most):
        positions = "" if most is None else f" and at most {most}, by the models' positions"
        raise ArgumentError(name, value, f"must be at least {least}{positions}")
    return value


def _quality(score: dict[str, Tensor], reference: Evaluation | TextScore | None) -> dict[str, Any]:
    """Means over all tokens of ``[windows, W - 1]`` scores, as fields of `Evaluation` and `TextScore`."""
    perplexity = _exp(float(score["nll"].mean()))
    quality: dict[str, Any] = {"tokens": score["nll"].numel(), "perplexity": perplexity}
    if reference is not None:
        quality |= {
            "perplexity_ratio": perplexity / reference.perplexity,
            "kl": max(float(score["kl"].mean()), 0.0),  # a negative mean comes from rounding
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
