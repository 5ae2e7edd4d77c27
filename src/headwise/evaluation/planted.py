"""Recall of planted facts: a text hides a code or several, and a model and its reference are asked for one.

In place of codes in sentences there may be random strings, of which one is begun again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.checkpoints import decode
from headwise.documents import as_document
from headwise.errors import ArgumentError
from headwise.evaluation.accuracy_intervals import Rate, rate
from headwise.evaluation.model_pair import Pair, check_vocabulary, open_pair
from headwise.evaluation.paired_results import Paired
from headwise.options import PlantedOptions, takes_options
from headwise.progress import Progress, silent
from headwise.texts.files import read_text
from headwise.texts.windows import ending_ids, first_ids, token_ids, token_windows
from headwise.type_checks import typed

FACT = "\nThe secret code{of} is {code}. Remember it.\n"
QUESTION = "\nQuestion: What is the secret code{of}?\nAnswer: The secret code{of} is"

CITIES = (
    *("Lisbon", "Cairo", "Oslo", "Lima", "Kyoto", "Delhi", "Boston", "Prague"),
    *("Athens", "Dublin", "Havana", "Warsaw", "Madrid", "Sydney", "Berlin", "Toronto"),
)
"""What codes are told apart by, where a context has several."""


@dataclass(frozen=True, kw_only=True)
class DepthScore(Paired, compared=("found", "first", "rank", "probability", "nll")):
    """Recall of the codes at one depth, as means over the trials.

    Attributes:
        depth: 0 at the beginning of the context, 1 right before the question.
        found: fraction of greedy continuations that contain the code.
        first: fraction of trials in which the code was the most likely candidate.
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
        context: tokens of the text, the fact, the question and the code together.
        codes: the number of candidates, including the right one.
        keys: the number of facts in each context.
        strings: the tokens of each random string; None for codes in sentences.
        trials: the number of contexts at each depth.
        seed: of the codes.
        found: over all contexts, how often the greedy continuation contains the code.
        first: over all contexts, how often the code was the most likely candidate.
        depths: the scores at each depth.
        dtype: that both were run in.
        device: that both were run on.
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

    def to_dict(self) -> dict[str, Any]:
        """The measurements as JSON-able values."""
        return as_document(self)


@dataclass(frozen=True)
class _Planted:
    """What a context hides, and how it is asked for.

    Attributes:
        facts: the tokens of each fact, the one that is asked for first.
        question: the tokens at the end of the context.
        candidates: the tokens of each answer, the right one first.
        code: the right answer as text; None where only the same tokens are right.
    """

    facts: list[list[int]]
    question: list[int]
    candidates: list[list[int]]
    code: str | None

    def room(self) -> int:
        """The tokens that facts, the question and the longest answer take."""
        return sum(map(len, self.facts)) + len(self.question) + max(map(len, self.candidates))


@dataclass(frozen=True)
class _Context:
    """A context with planted facts that ends with the question.

    Attributes:
        ids: ``[1, T]``, the tokens before the answer.
        planted: what it hides.
    """

    ids: Tensor
    planted: _Planted


@dataclass(frozen=True)
class _Answer:
    """The scores of one model in one context; see `DepthScore`."""

    found: bool
    rank: int
    probability: float
    nll: float


@takes_options(PlantedOptions)
@typed
@torch.inference_mode()
def evaluate_planted(
    model: str | Path | Pair, options: PlantedOptions, *, progress: Progress = silent
) -> PlantedEvaluation:
    """Plant a random code of five digits in a text, or several, and ask for one at the end.

    For example ``evaluate_planted("./mla", against="smollm2-135m", text="text.txt", context=2048).first.rate``.

    Trial i uses the i-th ``context`` tokens of the text, from the beginning again when the text is too short for all,
    and every trial has another code. Codes are also ranked by likelihood, because a weak model that cannot generate
    the code may still prefer it to others. With several ``keys`` the codes of the other facts are among the others.
    With ``strings`` each fact is a string of random tokens of the text. The context ends with the first half of one,
    and its second half is the answer, word for word.

    Args:
        model: a source with weights, or an open pair.
        options: the keywords below as one object, in place of them.
        progress: told of each context.

    Raises:
        ArgumentError: the text is missing or too short, or a number is out of range.
        CheckpointError: a model cannot be read.
    """
    most = options.codes if options.strings else min(options.codes, len(CITIES))
    if options.keys > most:
        raise ArgumentError("keys", options.keys, f"must be at most {most}, with {options.codes} codes")
    content = read_text(options.text)
    pair = open_pair(model, against=options.against, dtype=options.dtype, device=options.device, progress=progress)
    context, trials = options.context, options.trials
    if pair.positions is not None and context > pair.positions:
        raise ArgumentError("context", context, f"must be at most {pair.positions}, by the models' positions")
    stretches = token_windows(pair.tokenizer, content, window=context, windows=trials, name=f"text {options.text}")
    with pair.caching(options.cache):
        check_vocabulary(pair.models, int(stretches.max()))
        answers = _answers(pair, stretches, options, progress)
    at_all_depths = {name: [answer for row in rows for answer in row] for name, rows in answers.items()}
    generated = {name: [answer.found for answer in row] for name, row in at_all_depths.items()}
    first = {name: [answer.rank == 1 for answer in row] for name, row in at_all_depths.items()}
    return PlantedEvaluation(
        text=str(options.text),
        context=context,
        codes=options.codes,
        trials=trials,
        seed=options.seed,
        found=rate(generated["model"], generated.get("against"), seed=options.seed),
        first=rate(first["model"], first.get("against"), seed=options.seed),
        depths=tuple(
            _depth_score(depth, *(rows[index] for rows in (answers["model"], answers.get("against")) if rows))
            for index, depth in enumerate(options.depths)
        ),
        cache=options.cache,
        keys=options.keys,
        strings=options.strings,
        **pair.about(),
    )


def _answers(
    pair: Pair, stretches: Tensor, options: PlantedOptions, progress: Progress
) -> dict[str, list[list[_Answer]]]:
    """The answers of each model in the same contexts, a list for each depth."""
    random = np.random.default_rng(options.seed)
    answers: dict[str, list[list[_Answer]]] = {name: [[] for _ in options.depths] for name in pair.models}
    total = len(options.depths) * options.trials
    for step, (index, trial) in enumerate(product(range(len(options.depths)), range(options.trials))):
        progress("planted facts", step, total)
        planted = _strings(stretches, options, random) if options.strings else _codes(pair, options, random)
        stretch = stretches[trial % len(stretches)].tolist()
        context = _context(pair.tokenizer, stretch, options.depths[index], planted)
        for name, model in pair.models.items():
            answers[name][index].append(_ask(model, pair.tokenizer, context))
    progress("planted facts", total, total)
    return answers


def _codes(pair: Pair, options: PlantedOptions, random: np.random.Generator) -> _Planted:
    """Codes of five digits in sentences, each that of another city where there are several."""
    codes = [str(code) for code in random.choice(90_000, size=options.codes, replace=False) + 10_000]
    names = random.permutation(CITIES)[: options.keys].tolist() if options.keys > 1 else [""]
    return _sentences(pair.tokenizer, codes, names)


def _sentences(tokenizer: Any, codes: Sequence[str], names: Sequence[str] = ("",)) -> _Planted:
    """A sentence with a code for each name, and the question for the first."""
    of = [f" of {name}" if name else "" for name in names]
    split = [ending_ids(tokenizer, QUESTION.format(of=of[0]), f" {code}") for code in codes]
    return _Planted(
        facts=[
            token_ids(tokenizer, FACT.format(of=of_name, code=code)) for of_name, code in zip(of, codes, strict=False)
        ],
        question=split[0][0],
        candidates=[ending for _, ending in split],
        code=codes[0],
    )


def _strings(stretches: Tensor, options: PlantedOptions, random: np.random.Generator) -> _Planted:
    """Strings of random tokens of the text; the question is the first half of one, and the answer its second half."""
    length = options.strings or 0
    drawn = random.choice(np.unique(stretches.numpy()), size=(options.codes, length)).tolist()
    half = length // 2
    return _Planted(
        facts=drawn[: options.keys],
        question=drawn[0][:half],
        candidates=[string[half:] for string in drawn],
        code=None,
    )


def _context(tokenizer: Any, stretch: list[int], depth: float, planted: _Planted) -> _Context:
    """Plant facts in a stretch of text, which is shortened to make room for them, the question and the answer.

    The first is asked for, and stands at ``depth``; the others are spread evenly over the rest of the text.
    """
    first, facts = first_ids(tokenizer), planted.facts
    room = len(stretch) - len(first) - planted.room()
    if room < 0:
        raise ArgumentError("context", len(stretch), f"must be at least {len(stretch) - room} tokens")
    places = [round(room * depth), *(round(room * ((depth + n / len(facts)) % 1)) for n in range(1, len(facts)))]
    ids, before = [*first], 0
    for place, fact in sorted(zip(places, facts, strict=True)):
        ids += [*stretch[before:place], *fact]
        before = place
    ids += [*stretch[before:room], *planted.question]
    return _Context(torch.tensor([ids]), planted)


def _ask(model: Any, tokenizer: Any, context: _Context) -> _Answer:
    candidates = context.planted.candidates
    out = model(context.ids.to(model.device), use_cache=True, logits_to_keep=1)
    cache, last = out.past_key_values, out.logits[0, -1].float()
    cache.activate_past_recording()  # lets layers with a sliding window undo the cropped tokens
    scores = []
    for candidate in candidates:
        ids = torch.tensor(candidate, device=model.device)
        rows = last[None]
        if len(candidate) > 1:
            logits = model(ids[None, :-1], past_key_values=cache, use_cache=True).logits[0].float()
            cache.crop(1 - len(candidate))
            rows = torch.cat([rows, logits])
        scores.append(rows.log_softmax(-1).gather(-1, ids[:, None]).double().sum())
    likelihoods = torch.stack(scores)
    continuation = [int(last.argmax())]
    for _ in range(max(map(len, candidates))):  # one token more than a code has, as a space may be a token
        step = model(torch.tensor([continuation[-1:]], device=model.device), past_key_values=cache, use_cache=True)
        continuation.append(int(step.logits[0, -1].argmax()))
    return _Answer(
        found=_found(context.planted, tokenizer, continuation),
        rank=int((likelihoods >= likelihoods[0]).sum()),  # a tie counts against the code
        probability=float(likelihoods.softmax(0)[0]),
        nll=-float(likelihoods[0]),
    )


def _found(planted: _Planted, tokenizer: Any, continuation: list[int]) -> bool:
    """Whether a continuation holds the code, or begins with the tokens that are asked for."""
    if planted.code is None:
        (right, *_) = planted.candidates
        return continuation[: len(right)] == right
    return planted.code in decode(tokenizer, continuation)


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
