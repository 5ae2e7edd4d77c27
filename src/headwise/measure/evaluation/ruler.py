"""RULER's synthetic tasks (`ruler_tasks`): the share of answers in greedy continuations, beside a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from headwise.base.options import RulerOptions, takes_options
from headwise.base.progress import Progress, silent
from headwise.base.type_checks import checked_types
from headwise.errors import ArgumentError
from headwise.measure.evaluation.model_pair import Pair, check_vocabulary, open_pair
from headwise.measure.evaluation.results import Paired, Rate, compare_rates
from headwise.measure.evaluation.ruler_tasks import TASKS, Material, Sample, longest_sample, share_found
from headwise.measure.evaluation.scoring import greedy
from headwise.measure.texts.sources import read_text
from headwise.measure.texts.windows import first_ids, token_ids
from headwise.models.checkpoints import chat_text, decode
from headwise.runtime.hf.generate import stop_tokens


@dataclass(frozen=True, kw_only=True)
class RulerScore(Paired, compared=("score",)):
    """A model's score in one of RULER's tasks.

    Attributes:
        task: the task's published name.
        answers: the number of answers of each sample.
        score: the mean share of a sample's answers that its continuation holds, from 0 to 1.
        complete: the fraction of samples whose continuation holds every answer, with its interval; the score itself
            where a sample has one answer.
    """

    task: str
    answers: int
    score: float
    complete: Rate


@dataclass(frozen=True, kw_only=True)
class RulerEvaluation(Paired, compared=("score",)):
    """A model's scores in RULER's tasks, and its reference's in the same samples.

    Attributes:
        model: the model, as the user named it.
        against: the reference, as the user named it.
        text: the file that essays and words are cut from.
        length: the most tokens of a sample, its answer included.
        samples: the number of samples of each task.
        seed: the seed that samples were drawn with.
        chat: whether prompts are in the tokenizer's chat template.
        score: the mean of the tasks' scores.
        tasks: the scores in each task.
        dtype: the dtype that both models were run in.
        device: the device that both models were run on.
        threads: the number of torch's threads.
        cache: the format that the model's cache was stored in; None for the model's own numbers.
    """

    model: str
    against: str | None
    text: str
    length: int
    samples: int
    seed: int
    chat: bool
    score: float
    tasks: tuple[RulerScore, ...]
    dtype: str
    device: str
    threads: int
    cache: str | None = None


@takes_options(RulerOptions)
@checked_types
@torch.inference_mode()
def evaluate_ruler(
    model: str | Path | Pair, options: RulerOptions, *, progress: Progress = silent
) -> RulerEvaluation:
    """Score a model in RULER's synthetic tasks: the share of answers that its greedy continuations hold.

    For example ``evaluate_ruler("./mla", against="smollm2-135m", text="text.txt", length=4096).score``.

    A sample has as many pieces of its haystack as fit into ``length`` tokens, its answer included. Samples follow
    from the seed, the text, the length and the tokenizer; both models get the same. A continuation ends where the
    model ends its text, after as many tokens as are published for the task, or when it holds every answer.

    Args:
        model: a model folder, ``.gguf`` or other source with weights; or an open pair.
        options: the keywords below as one object, in place of them.
        progress: the callback that reports each sample.

    Raises:
        ArgumentError: the text is missing or has too few words, there is no such task or no chat template, or a
            number is out of range.
        CheckpointError: a model cannot be read, or computes NaN or infinite logits.
    """
    for name in options.tasks:
        if name not in TASKS:
            raise ArgumentError("tasks", name, f"must be one of {', '.join(TASKS)}")
    material = Material(read_text(options.text), options.length)
    pair = open_pair(model, against=options.against, dtype=options.dtype, device=options.device, progress=progress)
    if pair.positions is not None and options.length > pair.positions:
        raise ArgumentError("length", options.length, f"must be at most {pair.positions}, by the models' positions")
    if options.chat and not getattr(pair.tokenizer, "chat_template", None):
        raise ArgumentError("chat", True, "needs a tokenizer with a chat template")
    names = list(dict.fromkeys(options.tasks or TASKS))
    drawn = {name: _draw(pair.tokenizer, name, material, options) for name in names}
    with pair.caching(options.cache):
        check_vocabulary(pair.models, max(max(ids) for samples in drawn.values() for _, ids in samples))
        shares = _answer_all(pair, drawn, progress)
    about: dict[str, Any] = {
        "text": str(options.text),
        "length": options.length,
        "samples": options.samples,
        "seed": options.seed,
        "chat": options.chat,
    }
    answers = {name: len(samples[0][0].answers) for name, samples in drawn.items()}
    reference = None
    if "against" in shares:
        tasks = _scores(answers, shares["against"], None, options.seed)
        reference = RulerEvaluation(score=_mean(tasks), tasks=tasks, **pair.describe("against"), **about)
    tasks = _scores(answers, shares["model"], shares.get("against"), options.seed)
    return RulerEvaluation(
        score=_mean(tasks), tasks=tasks, cache=options.cache, reference=reference, **pair.describe(), **about
    )


Samples = list[tuple[Sample, list[int]]]
"""The samples of a task, each with the tokens of its prompt."""


def _draw(tokenizer: Any, name: str, material: Material, options: RulerOptions) -> Samples:
    """The samples of a task; the same whichever other tasks there are."""
    samples = []
    for number in range(options.samples):
        seed = (options.seed, list(TASKS).index(name), number)
        sample = longest_sample(
            TASKS[name], material, seed, lambda sample: len(prompt_ids(tokenizer, sample, chat=options.chat))
        )
        samples.append((sample, prompt_ids(tokenizer, sample, chat=options.chat)))
    return samples


def prompt_ids(tokenizer: Any, sample: Sample, *, chat: bool = False) -> list[int]:
    """The tokens of a sample's prompt, which ends with the beginning of its answer.

    For example ``prompt_ids(tokenizer, Sample("Which?", " This is", ("it",)))``.

    Args:
        tokenizer: a tokenizer of transformers.
        sample: a sample of a task.
        chat: whether the question is put into the tokenizer's chat template, and the beginning behind it.
    """
    if not chat:
        return first_ids(tokenizer) + token_ids(tokenizer, sample.text + sample.prefix)
    asked = [{"role": "user", "content": sample.text}]
    return token_ids(tokenizer, chat_text(tokenizer, asked) + sample.prefix.lstrip())


def _answer_all(pair: Pair, drawn: dict[str, Samples], progress: Progress) -> dict[str, dict[str, list[float]]]:
    """The share of answers that each model finds in each sample, by model and task."""
    shares = {name: {task: list[float]() for task in drawn} for name in pair.models}
    steps = [(task, sample) for task, samples in drawn.items() for sample in samples]
    for done, ((task, (sample, ids)), (name, model)) in enumerate(product(steps, pair.models.items())):
        progress("RULER", done, len(steps) * len(pair.models))
        shares[name][task].append(answer(model, pair.tokenizer, sample, ids, TASKS[task].tokens))
    progress("RULER", len(steps) * len(pair.models), len(steps) * len(pair.models))
    return shares


def answer(model: Any, tokenizer: Any, sample: Sample, ids: Sequence[int], tokens: int) -> float:
    """The share of a sample's answers that a model's greedy continuation holds.

    For example ``answer(load("./model"), tokenizer, sample, prompt_ids(tokenizer, sample), 128)``.

    Args:
        model: a transformers model.
        tokenizer: its tokenizer.
        sample: a sample of a task.
        ids: the tokens of its prompt.
        tokens: the most tokens of the continuation.

    Raises:
        CheckpointError: the model computes NaN or infinite logits.
    """
    prompt, made, share = torch.tensor([[*ids]], device=model.device), list[int](), 0.0
    stops = stop_tokens(model)
    for token, _ in islice(greedy(model, prompt), tokens):
        made.append(int(token))
        share = share_found(decode(tokenizer, made, skip_special_tokens=True), sample.answers)
        if share == 1 or made[-1] in stops:
            break
    return share


def _scores(
    answers: dict[str, int], shares: dict[str, list[float]], reference: dict[str, list[float]] | None, seed: int
) -> tuple[RulerScore, ...]:
    """The scores in each task, paired with the reference's."""
    others = (None,) * len(answers) if reference is None else _scores(answers, reference, None, seed)
    return tuple(
        RulerScore(
            task=task,
            answers=count,
            score=fmean(shares[task]),
            complete=compare_rates(
                [share == 1 for share in shares[task]],
                None if reference is None else [share == 1 for share in reference[task]],
                seed=seed,
            ),
            reference=other,
        )
        for (task, count), other in zip(answers.items(), others, strict=True)
    )


def _mean(tasks: Sequence[RulerScore]) -> float:
    return fmean(task.score for task in tasks)
