"""Recall of planted facts: a text hides a code or several, and a model and its reference are asked for one.

In place of codes in sentences there may be random strings, of which one is begun again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.base.documents import as_document
from headwise.base.options import PlantedOptions, takes_options
from headwise.base.progress import Progress, silent
from headwise.base.type_checks import checked_types
from headwise.errors import ArgumentError
from headwise.measure.evaluation.model_pair import Pair, check_vocabulary, open_pair
from headwise.measure.evaluation.results import Paired, Rate, compare_rates
from headwise.measure.texts.sources import read_text
from headwise.measure.texts.windows import cut_windows, ending_ids, first_ids, token_ids
from headwise.models.checkpoints import decode
from headwise.runtime.hf import check_logits

FACT = "\nThe secret code{of} is {code}. Remember it.\n"
QUESTION = "\nQuestion: What is the secret code{of}?\nAnswer: The secret code{of} is"

CITIES = (
    *("Lisbon", "Cairo", "Oslo", "Lima", "Kyoto", "Delhi", "Boston", "Prague"),
    *("Athens", "Dublin", "Havana", "Warsaw", "Madrid", "Sydney", "Berlin", "Toronto"),
)
"""The names that distinguish codes, where a context has several."""


@dataclass(frozen=True, kw_only=True)
class DepthScore(Paired, compared=("found", "first", "rank", "probability", "nll")):
    """Recall of the codes at one depth, as means over the trials.

    Attributes:
        depth: the place of the code: 0 at the beginning of the context, 1 right before the question.
        found: the fraction of greedy continuations that contain the code.
        first: the fraction of trials in which the code was the most likely candidate.
        rank: the code's rank among the candidates; 1 is the most likely.
        probability: the code's probability, normalised over the candidates.
        nll: the code's negative log-likelihood among all continuations, in nats.
    """

    depth: float
    found: float
    first: float
    rank: float
    probability: float
    nll: float


@dataclass(frozen=True, kw_only=True)
class PlantedEvaluation:
    """Recall of planted codes by a model, and by its reference from the same contexts.

    Attributes:
        model: the model, as the user named it.
        against: the reference, as the user named it.
        text: the file that contexts are cut from.
        context: the number of tokens of text, facts, question and code together.
        codes: the number of candidates, including the right one.
        keys: the number of facts in each context.
        strings: the number of tokens in each random string; None for codes in sentences.
        together: whether each context has a fact at every depth, and is asked for each.
        trials: the number of contexts at each depth.
        seed: the seed that codes and strings were drawn with.
        found: the fraction of all contexts in which the greedy continuation contains the code.
        first: the fraction of all contexts in which the code was the most likely candidate.
        depths: the scores at each depth.
        dtype: the dtype that both models were run in.
        device: the device that both models were run on.
        threads: the number of torch's threads.
        cache: the format that the model's cache was stored in; None for the model's own numbers.
    """

    model: str
    against: str | None
    text: str
    context: int
    codes: int
    trials: int
    seed: int
    found: Rate
    first: Rate
    depths: tuple[DepthScore, ...]
    dtype: str
    device: str
    threads: int
    cache: str | None = None
    keys: int = 1
    strings: int | None = None
    together: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The measurements as JSON-able values."""
        return as_document(self)


@dataclass(frozen=True)
class _Question:
    """A fact, and how it is asked for.

    Attributes:
        fact: the tokens that are planted.
        ids: the tokens of the question.
        candidates: the tokens of each answer, the right one first.
        code: the right answer as text; None where only the same tokens are right.
    """

    fact: list[int]
    ids: list[int]
    candidates: list[list[int]]
    code: str | None


@dataclass(frozen=True)
class _Context:
    """A context with planted facts.

    Attributes:
        ids: the tokens of the context before a question.
        questions: the questions, each asked on its own after the same context.
    """

    ids: list[int]
    questions: list[_Question]


@dataclass(frozen=True)
class _Answer:
    """The scores of one model in one context; see `DepthScore`."""

    found: bool
    rank: int
    probability: float
    nll: float


@takes_options(PlantedOptions)
@checked_types
@torch.inference_mode()
def evaluate_planted(
    model: str | Path | Pair, options: PlantedOptions, *, progress: Progress = silent
) -> PlantedEvaluation:
    """Plant a random code of five digits in a text, or several, and ask for one at the end, or for each.

    For example ``evaluate_planted("./mla", against="smollm2-135m", text="text.txt", context=2048).first.rate``.

    Trial i uses the i-th ``context`` tokens of the text, from the beginning again when the text is too short for all,
    and every trial has another code. Codes are also ranked by likelihood, because a weak model that cannot generate
    the code may still prefer it to others. With several ``keys`` the codes of the other facts are among the others.
    With ``strings`` each fact is a string of random tokens of the text. The context ends with the first half of one,
    and its second half is the answer, word for word. With ``together`` each context has a fact at every depth, and
    each of them is asked for after the same text, which is read once.

    Args:
        model: a model folder, ``.gguf`` or other source with weights; or an open pair.
        options: the keywords below as one object, in place of them.
        progress: the callback that reports each context.

    Raises:
        ArgumentError: the text is missing or too short, or a number is out of range.
        CheckpointError: a model cannot be read, or computes NaN or infinite logits.
    """
    most = options.codes if options.strings else min(options.codes, len(CITIES))
    if options.keys > most:
        raise ArgumentError("keys", options.keys, f"must be at most {most}, with {options.codes} codes")
    if options.together and options.keys > 1:
        raise ArgumentError("keys", options.keys, "must be 1 with together, which plants a fact for each depth")
    if options.together and len(options.depths) > most:
        raise ArgumentError("depths", options.depths, f"must be at most {most} together, with {options.codes} codes")
    content = read_text(options.text)
    pair = open_pair(model, against=options.against, dtype=options.dtype, device=options.device, progress=progress)
    context, trials = options.context, options.trials
    if pair.positions is not None and context > pair.positions:
        raise ArgumentError("context", context, f"must be at most {pair.positions}, by the models' positions")
    if context < 2:
        raise ArgumentError("context", context, "must be at least 2 tokens")
    # Texts may be long: no more of one is tokenised than the contexts take.
    ids = token_ids(pair.tokenizer, content, at_most=context * trials)
    stretches = cut_windows(ids, window=context, windows=trials, name=f"text {options.text}")
    with pair.caching(options.cache):
        check_vocabulary(pair.models, int(stretches.max()))
        answers = _answer_contexts(pair, stretches, options, progress)
    # Both models' answers are joined in the same order, so that they are compared question by question.
    at_all_depths = {name: [answer for row in rows for answer in row] for name, rows in answers.items()}
    generated = {name: [answer.found for answer in row] for name, row in at_all_depths.items()}
    first = {name: [answer.rank == 1 for answer in row] for name, row in at_all_depths.items()}
    return PlantedEvaluation(
        text=str(options.text),
        context=context,
        codes=options.codes,
        trials=trials,
        seed=options.seed,
        found=compare_rates(generated["model"], generated.get("against"), seed=options.seed),
        first=compare_rates(first["model"], first.get("against"), seed=options.seed),
        depths=tuple(
            _depth_score(depth, *(rows[index] for rows in (answers["model"], answers.get("against")) if rows))
            for index, depth in enumerate(options.depths)
        ),
        cache=options.cache,
        keys=options.keys,
        strings=options.strings,
        together=options.together,
        **pair.describe(),
    )


def _answer_contexts(
    pair: Pair, stretches: Tensor, options: PlantedOptions, progress: Progress
) -> dict[str, list[list[_Answer]]]:
    """The answers of each model in the same contexts, a list for each depth."""
    random = np.random.default_rng(options.seed)
    answers: dict[str, list[list[_Answer]]] = {name: [[] for _ in options.depths] for name in pair.models}
    contexts = (
        [[*options.depths]] if options.together else [_spread_depths(depth, options.keys) for depth in options.depths]
    )
    total = len(contexts) * options.trials
    for step, (index, trial) in enumerate(product(range(len(contexts)), range(options.trials))):
        progress("planted facts", step, total)
        places = contexts[index]
        if options.strings:
            questions = _string_questions(stretches, options, random, len(places))
        else:
            questions = _code_questions(pair.tokenizer, options, random, len(places))
        asked = len(places) if options.together else 1
        context = _plant_facts(
            pair.tokenizer, stretches[trial % len(stretches)].tolist(), places, questions, asked=asked
        )
        for name, model in pair.models.items():
            for depth, answer in enumerate(_answer_all(model, pair.tokenizer, context), start=index):
                answers[name][depth].append(answer)
    progress("planted facts", total, total)
    return answers


def _spread_depths(depth: float, facts: int) -> list[float]:
    """The depth of a fact, and those of others, evenly over the rest of the text."""
    return [depth, *((depth + number / facts) % 1 for number in range(1, facts))]


def _code_questions(
    tokenizer: Any, options: PlantedOptions, random: np.random.Generator, facts: int
) -> list[_Question]:
    """Codes of five digits in sentences, each that of another city where there are several."""
    codes = [str(code) for code in random.choice(90_000, size=options.codes, replace=False) + 10_000]
    return _sentence_questions(tokenizer, codes, random.permutation(CITIES)[:facts].tolist() if facts > 1 else [""])


def _sentence_questions(tokenizer: Any, codes: Sequence[str], names: Sequence[str] = ("",)) -> list[_Question]:
    """A sentence with a code for each name, and the question for it."""
    questions = []
    for name, code, others in zip(names, codes, _each_with_others(codes), strict=False):
        of = f" of {name}" if name else ""
        split = [ending_ids(tokenizer, QUESTION.format(of=of), f" {answer}") for answer in (code, *others)]
        fact, candidates = token_ids(tokenizer, FACT.format(of=of, code=code)), [ending for _, ending in split]
        questions.append(_Question(fact, split[0][0], candidates, code))
    return questions


def _string_questions(
    stretches: Tensor, options: PlantedOptions, random: np.random.Generator, facts: int
) -> list[_Question]:
    """Strings of random tokens of the text; a question is the first half of one, and the answer its second half."""
    length = options.strings or 0
    drawn = random.choice(np.unique(stretches.numpy()), size=(options.codes, length)).tolist()
    half = length // 2
    return [
        _Question(string, string[:half], [answer[half:] for answer in (string, *others)], None)
        for string, others in zip(drawn[:facts], _each_with_others(drawn), strict=False)
    ]


def _each_with_others(items: Sequence[Any]) -> Iterator[list[Any]]:
    """For each item, all others."""
    return ([*items[:number], *items[number + 1 :]] for number in range(len(items)))


def _plant_facts(
    tokenizer: Any, stretch: list[int], places: Sequence[float], questions: list[_Question], *, asked: int = 1
) -> _Context:
    """Plant facts at their depths in a stretch of text, which is shortened to make room for them and the answer.

    Only the first facts are ``asked`` for.
    """
    first = first_ids(tokenizer)
    facts = sum(len(question.fact) for question in questions)
    answer = max(len(question.ids) + max(map(len, question.candidates)) for question in questions[:asked])
    room = len(stretch) - len(first) - facts - answer
    if room < 0:
        raise ArgumentError("context", len(stretch), f"must be at least {len(stretch) - room} tokens")
    at = [round(room * place) for place in places]
    ids, before = [*first], 0
    for place, fact in sorted(zip(at, (question.fact for question in questions), strict=True)):
        ids += [*stretch[before:place], *fact]
        before = place
    return _Context([*ids, *stretch[before:room]], questions[:asked])


def _answer_all(model: Any, tokenizer: Any, context: _Context) -> list[_Answer]:
    """The answers to each question of a context, whose text is read once."""
    (question, *more), answers = context.questions, []
    out = model(_as_batch(model, [*context.ids, *([] if more else question.ids)]), use_cache=True, logits_to_keep=1)
    cache = out.past_key_values
    cache.activate_past_recording()  # lets layers with a sliding window undo the cropped tokens
    for number, question in enumerate(context.questions):
        if more:
            out = model(_as_batch(model, question.ids), past_key_values=cache, use_cache=True, logits_to_keep=1)
        answer, tokens = _answer_one(model, tokenizer, question, cache, out.logits[0, -1].float())
        answers.append(answer)
        if number < len(more):
            cache.crop(-(len(question.ids) + tokens))
    return answers


def _answer_one(model: Any, tokenizer: Any, question: _Question, cache: Any, last: Tensor) -> tuple[_Answer, int]:
    """The answer after the question's last logits, and the tokens that the cache has then beside the question's."""
    scores = []
    for candidate in question.candidates:
        rows = last[None]
        if len(candidate) > 1:
            logits = model(_as_batch(model, candidate[:-1]), past_key_values=cache, use_cache=True).logits[0].float()
            cache.crop(1 - len(candidate))
            rows = torch.cat([rows, logits])
        scores.append(rows.log_softmax(-1).gather(-1, _as_batch(model, candidate).mT).double().sum())
    likelihoods = torch.stack(scores)
    check_logits(-likelihoods, model)
    continuation = [int(last.argmax())]
    tokens = max(map(len, question.candidates))  # one more than a code has, as a space may be a token
    for _ in range(tokens):
        step = model(_as_batch(model, continuation[-1:]), past_key_values=cache, use_cache=True)
        check_logits(step.logits[0, -1], model)
        continuation.append(int(step.logits[0, -1].argmax()))
    answer = _Answer(
        found=_holds_code(question, tokenizer, continuation),
        rank=int((likelihoods >= likelihoods[0]).sum()),  # a tie counts against the code
        probability=float(likelihoods.softmax(0)[0]),
        nll=-float(likelihoods[0]),
    )
    return answer, tokens


def _as_batch(model: Any, ids: list[int]) -> Tensor:
    return torch.tensor([ids], device=model.device)


def _holds_code(question: _Question, tokenizer: Any, continuation: list[int]) -> bool:
    """Whether a continuation holds the code, or begins with the tokens that are asked for."""
    if question.code is None:
        (right, *_) = question.candidates
        return continuation[: len(right)] == right
    return question.code in decode(tokenizer, continuation)


def _depth_score(depth: float, answers: list[_Answer], reference: list[_Answer] | None = None) -> DepthScore:
    """Means over the answers at one depth."""
    return DepthScore(
        depth=depth,
        found=_mean([answer.found for answer in answers]),
        first=_mean([answer.rank == 1 for answer in answers]),
        rank=_mean([answer.rank for answer in answers]),
        probability=_mean([answer.probability for answer in answers]),
        nll=_mean([answer.nll for answer in answers]),
        reference=None if reference is None else _depth_score(depth, reference),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
