"""A fact planted in a long context: whether a model, asked at the end, still has it; beside its reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.checkpoints import decode
from headwise.errors import ArgumentError
from headwise.evaluation.pair import Pair, check_vocabulary, open_pair
from headwise.evaluation.rate import Rate, rate
from headwise.progress import Progress, silent
from headwise.texts.files import read_text
from headwise.texts.windows import ending_ids, first_ids, token_ids, token_windows

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
FACT = "\nThe secret code is {code}. Remember it.\n"
QUESTION = "\nQuestion: What is the secret code?\nAnswer: The secret code is"


@dataclass(frozen=True, kw_only=True)
class DepthScore:
    """How a fact at one depth was found again; means over the trials.

    Attributes:
        depth: 0 at the beginning of the context, 1 right before the question.
        found: fraction of greedy continuations that hold the code.
        first: fraction of trials in which the code was the likeliest of the candidates.
        rank: of the code among the candidates, 1 the likeliest.
        probability: of the code, the candidates' probabilities adding up to 1.
        nll: the code's own negative log-likelihood, in nats.
    """

    depth: float
    found: float
    first: float
    rank: float
    probability: float
    nll: float
    reference_found: float | None = None
    reference_first: float | None = None
    reference_rank: float | None = None
    reference_probability: float | None = None
    reference_nll: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlantedEvaluation:
    """Retrieval of a planted fact by a model, and by its reference from the same contexts.

    Attributes:
        text: what the context is made of.
        context: tokens of the context, the fact, the question and a code.
        codes: candidates, the right one among them.
        trials: contexts at each depth.
        found: over all contexts, how often the greedy continuation holds the code.
        first: over all contexts, how often the code was the likeliest of the candidates.
        depths: the same by depth.
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
        return asdict(self)


@dataclass(frozen=True)
class _Context:
    """One question: the tokens up to the code, and the candidates, the right one first."""

    ids: Tensor
    candidates: list[list[int]]
    code: str


@dataclass(frozen=True)
class _Answer:
    found: bool
    rank: int
    probability: float
    nll: float


@torch.inference_mode()
def evaluate_planted(
    model: str | Path | Pair,
    *,
    text: str | Path,
    against: str | Path | None = None,
    context: int = 2048,
    depths: Sequence[float] = DEPTHS,
    trials: int = 4,
    codes: int = 10,
    seed: int = 0,
    dtype: str | None = None,
    device: str | None = None,
    progress: Progress = silent,
) -> PlantedEvaluation:
    """Plant a random code of five digits in a text, and ask for it at the end.

    Trial i's text is its i-th stretch of ``context`` tokens (from the beginning again when it is too short for all);
    the code is another one each time. A weak model that cannot say the code may still find it likelier than others.

    Args:
        model: a source with weights, or an open pair.
        text: a UTF-8 file of at least ``context`` tokens.
        against: the reference; its tokenizer is used.
        context: tokens in all.
        depths: where the fact stands, from 0 (at the beginning) to 1 (right before the question).
        trials: contexts at each depth.
        codes: how many codes the right one is ranked among, itself included.
        seed: of the codes.
        dtype: as in `open_pair`.
        device: as in `open_pair`.
        progress: told of each context.

    Raises:
        ArgumentError: the text is missing or too short, or a number is out of range.
        CheckpointError: a model could not be read.
    """
    for name, value, least in (("trials", trials, 1), ("codes", codes, 2)):
        if value < least:
            raise ArgumentError(name, value, f"must be at least {least}")
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise ArgumentError("depths", tuple(depths), "must be numbers from 0 to 1")
    content = read_text(text)
    pair = open_pair(model, against=against, dtype=dtype, device=device, progress=progress)
    if pair.positions is not None and context > pair.positions:
        raise ArgumentError("context", context, f"must be at most {pair.positions}, by the models' positions")
    stretches = token_windows(pair.tokenizer, content, window=context, windows=trials, name=f"text {text}")
    check_vocabulary(pair.models, int(stretches.max()))
    random = np.random.default_rng(seed)
    answers: dict[str, list[list[_Answer]]] = {name: [] for name in pair.models}
    done, total = 0, len(depths) * trials
    for depth in depths:
        for own in answers.values():
            own.append([])
        for trial in range(trials):
            progress("planted facts", done, total)
            drawn = [str(code) for code in random.choice(90_000, size=codes, replace=False) + 10_000]
            asked = _context(pair.tokenizer, stretches[trial % len(stretches)].tolist(), depth, drawn)
            for name, loaded in pair.models.items():
                answers[name][-1].append(_ask(loaded, pair.tokenizer, asked))
            done += 1
    progress("planted facts", total, total)
    every = {name: [answer for row in own for answer in row] for name, own in answers.items()}
    found = {name: [answer.found for answer in own] for name, own in every.items()}
    first = {name: [answer.rank == 1 for answer in own] for name, own in every.items()}
    return PlantedEvaluation(
        text=str(text),
        context=context,
        codes=codes,
        trials=trials,
        seed=seed,
        found=rate(found["model"], found.get("against"), seed=seed),
        first=rate(first["model"], first.get("against"), seed=seed),
        depths=tuple(
            DepthScore(
                depth=depth,
                **_means(answers["model"][index], ""),
                **(_means(answers["against"][index], "reference_") if "against" in answers else {}),
            )
            for index, depth in enumerate(depths)
        ),
        **pair.about(),
    )


def _context(tokenizer: Any, stretch: list[int], depth: float, codes: list[str]) -> _Context:
    """As many tokens as the stretch has, the last of them for the code."""
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
    cache.activate_past_recording()  # a layer with a sliding window has to be told that tokens will be taken back
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
    said = [int(last.argmax())]
    for _ in range(max(map(len, asked.candidates))):  # one more than its own: a space may be a token
        step = model(torch.tensor([said[-1:]], device=model.device), past_key_values=cache, use_cache=True)
        said.append(int(step.logits[0, -1].argmax()))
    return _Answer(
        found=asked.code in decode(tokenizer, said),
        rank=int((likelihoods >= likelihoods[0]).sum()),  # a tie counts against the code
        probability=float(likelihoods.softmax(0)[0]),
        nll=-float(likelihoods[0]),
    )


def _means(answers: list[_Answer], prefix: str) -> dict[str, float]:
    values = {
        "found": [float(answer.found) for answer in answers],
        "first": [float(answer.rank == 1) for answer in answers],
        "rank": [float(answer.rank) for answer in answers],
        "probability": [answer.probability for answer in answers],
        "nll": [answer.nll for answer in answers],
    }
    return {f"{prefix}{name}": sum(row) / len(row) for name, row in values.items()}
