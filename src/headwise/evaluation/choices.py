"""Multiple choice, zero-shot: the ending a model finds likeliest, beside its reference's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.documents import as_document
from headwise.errors import ArgumentError
from headwise.evaluation.pair import Pair, check_vocabulary, open_pair
from headwise.evaluation.rate import Rate, rate
from headwise.progress import Progress, silent
from headwise.texts.files import read_jsonl
from headwise.texts.windows import ending_ids, first_ids

PROMPT = "Question: {question}\nAnswer:"
_BATCH = 2048
"""Tokens in a batch, padding included."""


@dataclass(frozen=True)
class Choice:
    """One item: a question, its possible endings, and which is right, counted from 0."""

    question: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, kw_only=True)
class ChoiceEvaluation:
    """Zero-shot accuracy of a model, and of its reference on the same items.

    Attributes:
        file: where the items are from.
        items: how many.
        accuracy: of the ending of greatest log-likelihood.
        accuracy_norm: of the ending of greatest log-likelihood a character.
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

    def to_dict(self) -> dict[str, Any]:
        """The measurements as JSON-able values."""
        return as_document(self)


@torch.inference_mode()
def evaluate_choices(
    model: str | Path | Pair,
    *,
    file: str | Path,
    against: str | Path | None = None,
    limit: int | None = None,
    dtype: str | None = None,
    device: str | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> ChoiceEvaluation:
    """How often a model prefers the right ending of ``Question: …\\nAnswer:``, paired with its reference.

    Args:
        model: a source with weights, or an open pair.
        file: a ``.jsonl``; see `read_choices`.
        against: the reference; its tokenizer is used.
        limit: items from the beginning; all when None.
        dtype: as in `open_pair`.
        device: as in `open_pair`.
        seed: of the interval's resampling.
        progress: told of each batch.

    Raises:
        ArgumentError: the file is not such a one, or an ending does not fit the models' positions.
        CheckpointError: a model could not be read.
    """
    items = read_choices(file, limit=limit)
    pair = open_pair(model, against=against, dtype=dtype, device=device, progress=progress)
    sequences = _sequences(pair.tokenizer, items, pair.positions)
    check_vocabulary(pair.models, max(max(prompt + ending) for prompt, ending in sequences))
    plain: dict[str, list[bool]] = {}
    normalised: dict[str, list[bool]] = {}
    for name, loaded in pair.models.items():
        scores = iter(log_likelihoods(loaded, sequences, progress=progress))
        plain[name], normalised[name] = [], []
        for item in items:
            own = [next(scores) for _ in item.choices]
            a_letter = [score / len(choice) for score, choice in zip(own, item.choices, strict=True)]
            plain[name].append(own.index(max(own)) == item.answer)
            normalised[name].append(a_letter.index(max(a_letter)) == item.answer)
    return ChoiceEvaluation(
        file=str(file),
        items=len(items),
        accuracy=rate(plain["model"], plain.get("against"), seed=seed),
        accuracy_norm=rate(normalised["model"], normalised.get("against"), seed=seed),
        **pair.about(),
    )


def read_choices(file: str | Path, *, limit: int | None = None) -> list[Choice]:
    """Items of a ``.jsonl``, an object a line.

    Each has ``question``, ``choices`` (two or more texts) and ``answer`` (which of them, counted from 0); or, as PIQA
    has it, ``goal``, ``sol1``, ``sol2`` and ``label``.

    Raises:
        ArgumentError: the file cannot be read, holds no items, or a line is not one.
    """
    rule = "must have question, choices (two or more texts) and answer (from 0); or PIQA's goal, sol1, sol2 and label"
    found = []
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
        found.append(Choice(question, tuple(texts), answer))
    return found


@torch.inference_mode()
def log_likelihoods(
    model: Any, sequences: Sequence[tuple[list[int], list[int]]], *, progress: Progress = silent
) -> list[float]:
    """The log-likelihood of each ending after its prompt, in nats.

    Args:
        model: transformers'.
        sequences: pairs of token ids, prompt and ending, neither of them empty.
        progress: told of each batch.
    """
    order = sorted(range(len(sequences)), key=lambda index: -sum(map(len, sequences[index])))
    scores = [0.0] * len(sequences)
    done = 0
    while done < len(order):
        longest = sum(map(len, sequences[order[done]]))
        batch = order[done : done + max(1, _BATCH // longest)]
        progress("choices", done, len(order))
        for index, score in zip(batch, _batch([sequences[index] for index in batch], model), strict=True):
            scores[index] = score
        done += len(batch)
    progress("choices", done, len(order))
    return scores


def _batch(sequences: list[tuple[list[int], list[int]]], model: Any) -> list[float]:
    longest = max(len(prompt) + len(ending) for prompt, ending in sequences)
    # Padding stands to the right, where no causal model sees it: there is nothing to mask.
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    for row, (prompt, ending) in enumerate(sequences):
        ids[row, : len(prompt) + len(ending)] = torch.tensor(prompt + ending)
    first = min(len(prompt) for prompt, _ in sequences) - 1  # the earliest distribution that is asked for
    ids = ids.to(model.device)
    logits = model(ids, use_cache=False, logits_to_keep=longest - first).logits
    scores = []
    for row, (prompt, ending) in enumerate(sequences):
        start = len(prompt) - 1 - first
        own = logits[row, start : start + len(ending)].float().log_softmax(-1)
        scores.append(float(_picked(own, ids[row, len(prompt) : len(prompt) + len(ending)]).double().sum()))
    return scores


def _picked(log_probabilities: Tensor, ids: Tensor) -> Tensor:
    return log_probabilities.gather(-1, ids[:, None])[:, 0]


def _sequences(tokenizer: Any, items: list[Choice], positions: int | None) -> list[tuple[list[int], list[int]]]:
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
            # Of a question that is too long its end is kept.
            sequences.append((first + (prompt if room is None else prompt[-room:]), ending))
    return sequences
