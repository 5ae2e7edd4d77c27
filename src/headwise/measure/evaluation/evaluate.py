"""Evaluate a model and its reference on text in one run: quality, cache bytes and time a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.base.options import EvaluateOptions, PassageOptions, takes_options
from headwise.base.processes import all_sum, barrier, my_windows, process_index
from headwise.base.progress import Progress, silent
from headwise.base.type_checks import checked_types
from headwise.errors import ArgumentError, CheckpointError
from headwise.measure.evaluation.continuations import compare_continuations, cut_prompts
from headwise.measure.evaluation.model_pair import Pair, check_vocabulary, open_pair
from headwise.measure.evaluation.results import Evaluation, Scores, evaluation_of
from headwise.measure.evaluation.scoring import Speed, decode_times, score_window
from headwise.measure.texts.sources import named_texts, read_text, refuse_twice
from headwise.measure.texts.windows import default_window, first_ids, token_windows
from headwise.runtime.hf import HeadwiseCache, check_logits, has_codes

WINDOW = 2048
CONTEXT = 512

Windows = Sequence[tuple[str, Tensor]]
"""The name of each text, and its windows ``[n, W]`` of tokens; W is the same for all."""


@takes_options(EvaluateOptions)
@checked_types
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
        progress: the callback that reports each window.
        shared: whether each of several processes scores its share of the windows; all of them have to call this, with
            whole models, and all get the result.

    Raises:
        ArgumentError: a text is missing or shorter than a window, or a number is out of range.
        CheckpointError: a model cannot be read.
    """
    contents = read_texts(options.text)
    # Models are opened before the tokenizer, whose errors say less about what is wrong with a folder.
    pair = open_pair(model, against=options.against, dtype=options.dtype, device=options.device, progress=progress)
    batches, context = cut_evaluation_windows(contents, pair, options)
    how: dict[str, Any] = {"context": context, "cache": options.cache, "continuations": options.continuations}
    return evaluate_windows(pair, batches, **how, progress=progress, shared=shared)


def read_texts(texts: str | Path | Sequence[str | Path]) -> dict[str, str]:
    """The content of each text to evaluate on, by its file.

    For example ``read_texts(["wiki.txt", "brown.txt"])["wiki.txt"]``.

    Raises:
        ArgumentError: a text cannot be read, or is named twice.
    """
    files = list(map(str, named_texts(texts)))
    contents = [read_text(file) for file in files]
    refuse_twice(files, name="text")
    return dict(zip(files, contents, strict=True))


def cut_evaluation_windows(contents: dict[str, str], pair: Pair, options: PassageOptions) -> tuple[Windows, int]:
    """The windows of each text that models are evaluated on, and the context at which decoding is timed.

    For example ``cut_evaluation_windows(read_texts("a.txt"), open_pair("./model"), EvaluateOptions(text="a.txt"))``.

    Args:
        contents: the content of each text, by its file.
        pair: the models, whose positions and tokenizer decide.
        options: the number and length of the windows, and the context.

    Raises:
        ArgumentError: a text is shorter than a window, or a number is out of range.
    """
    longest = pair.positions
    window = _checked_count("window", options.window, default_window(longest, WINDOW), 2, longest)
    # The timed token needs a position too.
    context = _checked_count("context", options.context, CONTEXT, 1, None if longest is None else longest - 1)
    batches = [
        (file, token_windows(pair.tokenizer, content, window=window, windows=options.windows, name=f"text {file}"))
        for file, content in contents.items()
    ]
    return batches, context


def default_context(pair: Pair) -> int:
    """The context at which decoding is timed where the user says nothing: 512, or one less than the positions.

    For example ``default_context(open_pair("smollm2-135m"))`` is 512.
    """
    return CONTEXT if pair.positions is None else min(CONTEXT, pair.positions - 1)


def timing_prompt(texts: Windows, context: int) -> Tensor:
    """The tokens ``[1, context]`` behind which decoding is timed: a text from its beginning, repeated if need be.

    For example ``timing_prompt([("text.txt", windows)], 512)``.
    """
    prompt = texts[0][1].flatten()[None, :context]
    return prompt.repeat(1, -(-context // prompt.shape[1]))[:, :context]


@torch.inference_mode()
def evaluate_windows(
    pair: Pair,
    texts: Windows,
    *,
    context: int | None = None,
    cache: str | None = None,
    continuations: int = 0,
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
        continuations: the number of prompts of each text that both models continue greedily.
        progress: the callback that reports each window.
        shared: whether each of several processes scores its share of the windows; all of them have to call this.

    Raises:
        ArgumentError: continuations are asked for without a reference, or are more than a text has prompts.
    """
    if continuations and "against" not in pair.sources:
        raise ArgumentError("continuations", continuations, "needs a reference to compare with: against")
    begin, continued = leading_tokens(pair, texts), None
    prompts = cut_prompts(texts, continuations, positions=pair.positions, begin=len(begin))
    context = default_context(pair) if context is None else context
    prompt = timing_prompt(texts, context)
    window = texts[0][1].shape[1]
    with pair.caching(cache):
        check_vocabulary(pair.models, max(int(batch.max()) for _, batch in texts))
        caches = _caches_to_count(pair, cache, window)
        scores = _score_texts(pair, texts, caches, progress, shared=shared)
        if prompts:
            continued = compare_continuations(pair, prompts, progress=progress, shared=shared)
        speed = _measure_speed(pair, prompt, progress, shared=shared)
    for name, per_token in _bytes_per_token(caches, window, shared=shared).items():
        speed[name] = replace(speed[name], bytes_per_token=per_token)
    about = {"window": window, "begin": begin, "context": context}
    evaluation = summarised(pair, scores, speed, about | {"cache": cache})
    return replace(evaluation, continuations=continued)


def summarised(pair: Pair, scores: Scores, speed: Mapping[str, Speed], about: dict[str, Any]) -> Evaluation:
    """The evaluation of a model, with that of its reference where it has one.

    For example ``summarised(pair, scores, {"model": Speed(576.0, 12.5)}, {"window": 512, "context": 256})``.

    Args:
        pair: the models.
        scores: the scores of each text; see `headwise.measure.evaluation.results.evaluation_of`.
        speed: the speed of each model.
        about: the other fields of the evaluation, in place of what the pair says of them.
    """
    reference = None
    if "against" in speed:
        alone = [(name, {"nll": score["reference_nll"]}) for name, score in scores]
        reference = evaluation_of(alone, speed["against"], pair.describe("against") | about | {"cache": None})
    return evaluation_of(scores, speed["model"], pair.describe() | about, reference)


def leading_tokens(pair: Pair, texts: Windows) -> tuple[str, ...]:
    """The tokens that the tokenizer puts before every text, if all windows begin with them.

    For example ``leading_tokens(open_pair("./gemma"), [("text.txt", windows)])`` is ``("<bos>",)``.
    """
    with suppress(CheckpointError):  # windows of tokens need no tokenizer
        ids = first_ids(pair.tokenizer)
        if ids and all(bool((batch[:, : len(ids)] == torch.tensor(ids)).all()) for _, batch in texts):
            return tuple(pair.tokenizer.convert_ids_to_tokens(ids))
    return ()


def _caches_to_count(pair: Pair, cache: str | None, window: int) -> dict[str, HeadwiseCache]:
    """The caches whose bytes are counted with a window of text in them, by model: those that store codes.

    They have room for exactly that window, scales and recent tokens included. Sliding windows hold a part of a text,
    so that the caches of both models are counted where the reference has some.
    """
    if cache is None and not has_codes(pair.models["model"]):
        return {}
    return {
        name: HeadwiseCache(model, max_length=window, quantize=cache if name == "model" else None)
        for name, model in pair.models.items()
        if name == "model" or any(HeadwiseCache(model).is_sliding)
    }


def _bytes_per_token(caches: Mapping[str, HeadwiseCache], window: int, *, shared: bool) -> dict[str, float]:
    """The bytes a token of caches that a window was read into; of several processes one has read it."""
    nbytes = torch.tensor([cache.nbytes for cache in caches.values()], dtype=torch.float64)
    counted = (all_sum(nbytes) if shared and caches else nbytes) / window
    return dict(zip(caches, counted.tolist(), strict=True))


def _score_texts(
    pair: Pair, texts: Windows, caches: Mapping[str, HeadwiseCache], progress: Progress, *, shared: bool
) -> Scores:
    """The scores of every window, of which each process computes its share where they are shared.

    The first window is read through the caches that are given.
    """
    windows = [(name, ids) for name, batch in texts for ids in batch]
    mine = my_windows(len(windows)) if shared else range(len(windows))
    rows: dict[int, dict[str, Tensor]] = {}
    for done, number in enumerate(mine):
        progress("perplexity", done, len(mine))
        rows[number] = score_window(pair.models, windows[number][1], None if number else caches)
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


def _measure_speed(pair: Pair, prompt: Tensor, progress: Progress, *, shared: bool) -> dict[str, Speed]:
    """Each model's cache and decoding time; of several processes the first measures, while the others wait."""
    if not shared:
        return decode_times(pair.models, prompt.to(pair.device), progress=progress)
    barrier()
    measured = torch.zeros(len(pair.models), 2, dtype=torch.float64)
    if process_index() == 0:
        speed = decode_times(pair.models, prompt.to(pair.device), progress=progress)
        measured = torch.tensor([(one.bytes_per_token, one.decode_ms) for one in speed.values()], dtype=torch.float64)
    return {name: Speed(*row) for name, row in zip(pair.models, all_sum(measured).tolist(), strict=True)}


def _checked_count(name: str, value: int | None, default: int, least: int, most: int | None) -> int:
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
