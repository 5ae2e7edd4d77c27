"""Planted facts: a code is hidden in a long text, and the model is asked for it at the end; beside its reference."""

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
from headwise.evaluation.model_pair import Pair, check_vocabulary, open_pair
from headwise.evaluation.paired_results import Paired
from headwise.evaluation.rate import Rate, rate
from headwise.options import PlantedOptions, takes_options
from headwise.progress import Progress, silent
from headwise.texts.files import read_text
from headwise.texts.windows import ending_ids, first_ids, token_ids, token_windows
from headwise.type_checks import typed

FACT = "\nThe secret code is {code}. Remember it.\n"
QUESTION = "\nQuestion: What is the secret code?\nAnswer: The secret code is"


@dataclass(frozen=True, kw_only=True)
class DepthScore(Paired, compared=("found", "first", "rank", "probability", "nll")):
    """How well codes at one depth are recalled: means over the trials.

    Attributes:
        depth: 0 at the beginning of the context, 1 right before the question.
        found: fraction of greedy continuations that hold the code.
        first: fraction of trials in which the code was the likeliest of the candidates.
        rank: the code's among the candidates, 1 the likeliest.
        probability: the code's, the candidates' probabilities adding up to 1.
        nll: the code's own negative log-likelihood, in nats.
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
        model: as it was named.
        against: the reference, as it was named.
        text: the file that contexts are cut from.
        context: tokens of the text, the fact, the question and the code together.
        codes: candidates, the right one among them.
        trials: contexts at each depth.
        seed: of the codes.
        found: over all contexts, how often the greedy continuation holds the code.
        first: over all contexts, how often the code was the likeliest of the candidates.
        depths: the scores at each depth.
        dtype: both were run in.
        device: both were run on.
        threads: torch's.
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

    def to_dict(self) -> dict[str, Any]:
        """The measurements as JSON-able values."""
        return as_document(self)


@dataclass(frozen=True)
class _Context:
    """One question.

    Attributes:
        ids: ``[1, T]``, the tokens up to the code.
        candidates: each code's tokens, the right one's first.
        code: the right one, as text.
    """

    ids: Tensor
    candidates: list[list[int]]
    code: str


@dataclass(frozen=True)
class _Answer:
    """One model's answer to one question; see `DepthScore`."""

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
    """Plant a random code of five digits in a text, and ask for it at the end.

    Trial i uses the i-th ``context`` tokens of the text (from the beginning again when it is too short for all), and
    each trial another code. A weak model that cannot say the code may still find it likelier than others. For example
    ``evaluate_planted("./mla", against="smollm2-135m", text="text.txt", context=2048).first.rate``.

    Args:
        model: a source with weights, or an open pair.
        options: the keywords below as one object, in their place.
        progress: told of each context.

    Raises:
        ArgumentError: the text is missing or too short, or a number is out of range.
        CheckpointError: a model could not be read.
    """
    content = read_text(options.text)
    pair = open_pair(model, against=options.against, dtype=options.dtype, device=options.device, progress=progress)
    context, trials = options.context, options.trials
    if pair.positions is not None and context > pair.positions:
        raise ArgumentError("context", context, f"must be at most {pair.positions}, by the models' positions")
    stretches = token_windows(pair.tokenizer, content, window=context, windows=trials, name=f"text {options.text}")
    check_vocabulary(pair.models, int(stretches.max()))
    answers = _answers(pair, stretches, options, progress)
    together = {name: [answer for row in rows for answer in row] for name, rows in answers.items()}
    found = {name: [answer.found for answer in row] for name, row in together.items()}
    first = {name: [answer.rank == 1 for answer in row] for name, row in together.items()}
    return PlantedEvaluation(
        text=str(options.text),
        context=context,
        codes=options.codes,
        trials=trials,
        seed=options.seed,
        found=rate(found["model"], found.get("against"), seed=options.seed),
        first=rate(first["model"], first.get("against"), seed=options.seed),
        depths=tuple(
            _depth_score(depth, *(rows[index] for rows in (answers["model"], answers.get("against")) if rows))
            for index, depth in enumerate(options.depths)
        ),
        **pair.about(),
    )


def _answers(
    pair: Pair, stretches: Tensor, options: PlantedOptions, progress: Progress
) -> dict[str, list[list[_Answer]]]:
    """Each model's answers, a list a depth, of the same questions."""
    random = np.random.default_rng(options.seed)
    answers: dict[str, list[list[_Answer]]] = {name: [[] for _ in options.depths] for name in pair.models}
    total = len(options.depths) * options.trials
    for step, (index, trial) in enumerate(product(range(len(options.depths)), range(options.trials))):
        progress("planted facts", step, total)
        codes = [str(code) for code in random.choice(90_000, size=options.codes, replace=False) + 10_000]
        stretch = stretches[trial % len(stretches)].tolist()
        asked = _context(pair.tokenizer, stretch, options.depths[index], codes)
        for name, model in pair.models.items():
            answers[name][index].append(_ask(model, pair.tokenizer, asked))
    progress("planted facts", total, total)
    return answers


def _context(tokenizer: Any, stretch: list[int], depth: float, codes: list[str]) -> _Context:
    """A question as long as the stretch of text it is made from, a code's own tokens included."""
    fact = token_ids(tokenizer, FACT.format(code=codes[0]))
    split = [ending_ids(tokenizer, QUESTION, f" {code}") for code in codes]
    question = split[0][0]
    candidates = [ending for _, ending in split]
    first = first_ids(tokenizer)
    room = len(stretch) - len(first) - len(fact) - len(question) - max(map(len, candidates))
    if room < 0:
        raise ArgumentError("context", len(stretch), f"must be at least {len(stretch) - room} tokens")
    before = round(room * depth)
    ids = [*first, *stretch[:before], *fact, *stretch[before:room], *question]
    return _Context(torch.tensor([ids]), candidates, codes[0])


def _ask(model: Any, tokenizer: Any, asked: _Context) -> _Answer:
    out = model(asked.ids.to(model.device), use_cache=True, logits_to_keep=1)
    cache, last = out.past_key_values, out.logits[0, -1].float()
    cache.activate_past_recording()  # layers with a sliding window must keep what cropping takes back
    scores = []
    for candidate in asked.candidates:
        ids = torch.tensor(candidate, device=model.device)
        rows = last[None]
        if len(candidate) > 1:
            logits = model(ids[None, :-1], past_key_values=cache, use_cache=True).logits[0].float()
            cache.crop(1 - len(candidate))
            rows = torch.cat([rows, logits])
        scores.append(rows.log_softmax(-1).gather(-1, ids[:, None]).double().sum())
    likelihoods = torch.stack(scores)
    continuation = [int(last.argmax())]
    for _ in range(max(map(len, asked.candidates))):  # one more than a code has: a space may be a token
        step = model(torch.tensor([continuation[-1:]], device=model.device), past_key_values=cache, use_cache=True)
        continuation.append(int(step.logits[0, -1].argmax()))
    return _Answer(
        found=asked.code in decode(tokenizer, continuation),
        rank=int((likelihoods >= likelihoods[0]).sum()),  # a tie counts against the code
        probability=float(likelihoods.softmax(0)[0]),
        nll=-float(likelihoods[0]),
    )


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
