"""Zero-shot multiple choice: how often the right ending is the most likely one, for a model and its reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headwise.base.documents import as_document
from headwise.base.options import ChoiceOptions, takes_options
from headwise.base.progress import Progress, silent
from headwise.base.type_checks import checked_types
from headwise.errors import ArgumentError
from headwise.measure.evaluation.model_pair import Pair, check_vocabulary, open_pair
from headwise.measure.evaluation.results import Rate, compare_rates
from headwise.measure.evaluation.scoring import similar_length_batches
from headwise.measure.texts.sources import read_jsonl
from headwise.measure.texts.windows import ending_ids, first_ids
from headwise.runtime.hf import check_logits

PROMPT = "Question: {question}\nAnswer:"
_BATCH = 2048
"""Tokens in a batch, padding included."""


@dataclass(frozen=True)
class Choice:
    """A question with several possible endings.

    Attributes:
        question: the question, as text.
        choices: the endings, as texts.
        answer: the index of the right ending.
    """

    question: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, kw_only=True)
class ChoiceEvaluation:
    """Zero-shot accuracy of a model, and of its reference on the same items.

    Attributes:
        model: the model, as the user named it.
        against: the reference, as the user named it.
        file: the file of the items.
        items: the number of items.
        accuracy: the fraction of items whose right ending has the greatest log-likelihood.
        accuracy_norm: the fraction of items whose right ending has the greatest log-likelihood a character.
        dtype: the dtype that both models were run in.
        device: the device that both models were run on.
        threads: the number of torch's threads.
        cache: the format that the model's cache was stored in; None for the model's own numbers.
    """

    model: str
    against: str | None
    file: str
    items: int
    accuracy: Rate
    accuracy_norm: Rate
    dtype: str
    device: str
    threads: int
    cache: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The measurements as JSON-able values."""
        return as_document(self)


@takes_options(ChoiceOptions)
@checked_types
@torch.inference_mode()
def evaluate_choices(
    model: str | Path | Pair, options: ChoiceOptions, *, progress: Progress = silent
) -> ChoiceEvaluation:
    """Count how often a model prefers the right ending of ``Question: …\\nAnswer:``, paired with its reference.

    For example ``evaluate_choices("./mla", against="smollm2-135m", file="piqa.jsonl").accuracy.rate``.

    Args:
        model: a model folder, ``.gguf`` or other source with weights; or an open pair.
        options: the keywords below as one object, in place of them.
        progress: the callback that reports each batch.

    Raises:
        ArgumentError: the file has another form, or an ending does not fit the models' positions.
        CheckpointError: a model cannot be read, or computes NaN or infinite logits.
    """
    items = read_choices(options.file, limit=options.limit)
    pair = open_pair(model, against=options.against, dtype=options.dtype, device=options.device, progress=progress)
    sequences = _tokenise_items(pair.tokenizer, items, pair.positions)
    with pair.caching(options.cache):
        check_vocabulary(pair.models, max(max(prompt + ending) for prompt, ending in sequences))
        likelihoods = {
            name: log_likelihoods(loaded, sequences, progress=progress) for name, loaded in pair.models.items()
        }
    by_total: dict[str, list[bool]] = {}
    by_character: dict[str, list[bool]] = {}
    for name in pair.models:
        scores = iter(likelihoods[name])
        by_total[name], by_character[name] = [], []
        for item in items:
            totals = [next(scores) for _ in item.choices]
            means = [total / len(choice) for total, choice in zip(totals, item.choices, strict=True)]
            by_total[name].append(totals.index(max(totals)) == item.answer)
            by_character[name].append(means.index(max(means)) == item.answer)
    return ChoiceEvaluation(
        file=str(options.file),
        items=len(items),
        accuracy=compare_rates(by_total["model"], by_total.get("against"), seed=options.seed),
        accuracy_norm=compare_rates(by_character["model"], by_character.get("against"), seed=options.seed),
        cache=options.cache,
        **pair.describe(),
    )


def read_choices(file: str | Path, *, limit: int | None = None) -> list[Choice]:
    """Read the items of a ``.jsonl`` file, which has one JSON object a line.

    For example ``read_choices("piqa.jsonl", limit=500)``.

    Each object has ``question``, ``choices`` (two or more texts) and ``answer`` (the index of the right one, from 0),
    or PIQA's fields ``goal``, ``sol1``, ``sol2`` and ``label``.

    Args:
        file: a UTF-8 file.
        limit: the number of items to read, from the beginning; all when None.

    Raises:
        ArgumentError: the file cannot be read, holds no items, or has a line of another form.
    """
    rule = "must have question, choices (two or more texts) and answer (from 0); or PIQA's goal, sol1, sol2 and label"
    items = []
    for number, row in enumerate(read_jsonl(file, name="choices", limit=limit), 1):
        question, texts, answer = (row.get(key) for key in ("question", "choices", "answer"))
        if "goal" in row:
            question, texts, answer = row["goal"], [row.get("sol1"), row.get("sol2")], row.get("label")
        if (
            not isinstance(question, str)
            or not isinstance(texts, list)
            or len(texts) < 2
            or not all(isinstance(text, str) and text.strip() for text in texts)
            or type(answer) is not int
            or not 0 <= answer < len(texts)
        ):
            raise ArgumentError("choices", f"{file}, item {number}", rule)
        items.append(Choice(question, tuple(texts), answer))
    return items


@torch.inference_mode()
def log_likelihoods(
    model: Any, sequences: Sequence[tuple[list[int], list[int]]], *, progress: Progress = silent
) -> list[float]:
    """Score each ending after its prompt: the sum of its tokens' log-probabilities, in nats.

    For example ``log_likelihoods(load("./model"), [ending_ids(tokenizer, "The sky is", " blue.")])``.

    Args:
        model: a causal language model of transformers.
        sequences: pairs of prompt and ending, as token ids; neither is empty.
        progress: the callback that reports each batch.

    Returns:
        The log-likelihood of each ending, in the order of ``sequences``.

    Raises:
        CheckpointError: the model computes NaN or infinite logits.
    """
    lengths = [len(prompt) + len(ending) for prompt, ending in sequences]
    scores = [0.0] * len(sequences)
    done = 0
    for batch in similar_length_batches(model, lengths, tokens=_BATCH):
        progress("choices", done, len(sequences))
        for index, score in zip(batch, _score_batch([sequences[index] for index in batch], model), strict=True):
            scores[index] = score
        done += len(batch)
    progress("choices", done, len(sequences))
    return scores


def _score_batch(sequences: list[tuple[list[int], list[int]]], model: Any) -> list[float]:
    longest = max(len(prompt) + len(ending) for prompt, ending in sequences)
    # Padding is on the right, where no token of a causal model sees it, so no mask is needed.
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    for row, (prompt, ending) in enumerate(sequences):
        ids[row, : len(prompt) + len(ending)] = torch.tensor(prompt + ending)
    first = min(len(prompt) for prompt, _ in sequences) - 1  # the earliest position whose logits are needed
    ids = ids.to(model.device)
    logits = model(ids, use_cache=False, logits_to_keep=longest - first).logits
    scores = []
    for row, (prompt, ending) in enumerate(sequences):
        start = len(prompt) - 1 - first
        log_probabilities = logits[row, start : start + len(ending)].float().log_softmax(-1)  # [ending, vocabulary]
        targets = ids[row, len(prompt) : len(prompt) + len(ending)]
        costs = -log_probabilities.gather(-1, targets[:, None])[:, 0].double()  # [ending], in nats
        check_logits(costs, model)
        scores.append(-float(costs.sum()))
    return scores


def _tokenise_items(tokenizer: Any, items: list[Choice], positions: int | None) -> list[tuple[list[int], list[int]]]:
    first = first_ids(tokenizer)
    sequences = []
    for item in items:
        for choice in item.choices:
            prompt, ending = ending_ids(tokenizer, PROMPT.format(question=item.question), f" {choice}")
            room = None if positions is None else positions - len(first) - len(ending)
            if not (prompt and ending):
                raise ArgumentError("choices", choice, "must have tokens of its own, and so must its question")
            if room is not None and room < 1:
                raise ArgumentError("choices", choice, f"must fit the models' {positions} positions, with a question")
            # A prompt that is too long loses its beginning.
            sequences.append((first + (prompt if room is None else prompt[-room:]), ending))
    return sequences
