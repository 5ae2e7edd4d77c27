"""The answers to the questions that a page's controls can ask: a grid of them, computed here, not by the page.

Time and memory depend on the device, the context and the batch; what is refused also on the loss that is allowed, and
the order on the goal. Everything is predicted once for each place of the grid, by the functions of `advise`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from headwise.costs.prediction import MOST, Device, Memory, Pass, largest_batch, operators, peak_memory, seconds
from headwise.costs.prediction.memory import cache_bytes
from headwise.decide.advice import MOST_SEQUENCES, Alternative, Option, Question, judged
from headwise.decide.advice.advise import Goal
from headwise.models.specs import ModelSpec

CONTEXTS = (1024, 4096, 16_384, 65_536, 131_072)
"""Tokens that a reader may choose, as far as the model takes them, besides those that the page begins with."""

BATCHES = (1, 8, 64)
"""Sequences, likewise."""

LOSSES = (None, 0.05, 0.01, 0.02, 0.1)
"""Rises of perplexity that a reader may allow, likewise; None for any. Where none is known the first two say all."""


@dataclass(frozen=True, kw_only=True)
class Axes:
    """What a reader may choose.

    Attributes:
        hardware: devices by their names.
        context: the numbers of a sequence's tokens to choose from.
        batch: the numbers of sequences to choose from.
        loss: the largest rise of perplexity, and whether it is the usual one because nothing was said of it.
        goal: the goals to choose from: what is made as small, or as large, as it can be.
    """

    hardware: Mapping[str, Device]
    context: tuple[int, ...]
    batch: tuple[int, ...]
    loss: tuple[tuple[float | None, bool], ...]
    goal: tuple[Goal, ...] = get_args(Goal)


def axes_of(question: Question, hardware: Mapping[str, Device], positions: int, *, is_known: bool) -> Axes:
    """The places of a grid, with those of the question that a page begins with among them.

    For example ``axes_of(question, devices(), 8192, is_known=False).context[-1]``.

    Args:
        question: the question that the page begins with.
        hardware: devices, its own among them.
        positions: the most tokens that the model takes; 0 for any.
        is_known: whether the loss of any option was measured or predicted.
    """
    step, own = question.step, (question.max_quality_loss, question.is_usual)
    others = ((loss, False) for loss in (LOSSES if is_known else LOSSES[:2]))
    return Axes(
        hardware=hardware,
        context=tuple(sorted({step.total, *(each for each in CONTEXTS if each <= (positions or MOST))})),
        batch=tuple(sorted({step.batch, *BATCHES})),
        loss=(own, *(each for each in others if each != own)),
    )


class _Predicted:
    """Time and memory of candidates, each predicted once; those of one model and as many bits are the same."""

    def __init__(self, tried: Sequence[Alternative], question: Question) -> None:
        self._question, self._tried = question, tried
        first: dict[tuple[ModelSpec, float | None], int] = {}
        self._same = [first.setdefault((each.model, each.cache_bits), at) for at, each in enumerate(tried)]
        self._kept: dict[tuple[Any, ...], Any] = {}

    def numbers(self, index: int, hardware: Device, context: int, batch: int) -> dict[str, Any]:
        """The fields of an `Option` that depend on the place."""
        memory = self.memory(index, context, batch)
        return {
            "cache_bytes_per_token": self.cached(index, context, batch),
            "decode_seconds": self.seconds(index, hardware, context, batch),
            "memory_bytes": memory.total,
            "weight_bytes": memory.weights,
            "largest_batch": self.fit(index, hardware, context),
            "tokens_per_second": self.rate(index, hardware, context),
        }

    def memory(self, index: int, context: int, batch: int) -> Memory:
        """The peak memory of a step."""
        memory: Memory = self._once(("memory", index, context, batch), peak_memory)
        return memory

    def cached(self, index: int, context: int, batch: int) -> float:
        """Bytes of cache a token."""
        held: int = self._once(("cache", index, context, batch), cache_bytes)
        return held / (context * batch)

    def seconds(self, index: int, hardware: Device, context: int, batch: int) -> float:
        """The seconds of a decode step."""

        def timed(_: ModelSpec, step: Pass) -> float:
            work = self._once(("work", index, context, batch), operators)
            return sum(each.seconds for each in seconds(work, hardware, step))

        found: float = self._once(("seconds", index, context, batch, hardware.name), timed)
        return found

    def fit(self, index: int, hardware: Device, context: int) -> int:
        """The sequences that fit."""
        available = int(hardware.memory_bytes * self._question.usable)
        key = ("fit", index, context, 1, available)
        found: int = self._once(key, lambda model, step: largest_batch(model, step, available))
        return found

    def rate(self, index: int, hardware: Device, context: int) -> float:
        """Tokens a second of as many sequences as fit; 0 where none does."""
        many = min(self.fit(index, hardware, context), MOST_SEQUENCES)
        return many / self.seconds(index, hardware, context, many) if many else 0.0

    def _step(self, index: int, context: int, batch: int) -> tuple[ModelSpec, Pass]:
        each = self._tried[index]
        return each.model, replace(self._question.step, total=context, batch=batch, cache_bits=each.cache_bits)

    def _once(self, key: tuple[Any, ...], found: Callable[[ModelSpec, Pass], Any]) -> Any:
        name, index, context, batch, *rest = key
        kept = (name, self._same[index], context, batch, *rest)
        if kept not in self._kept:
            self._kept[kept] = found(*self._step(index, context, batch))
        return self._kept[kept]


REASONS = ("", "unknown", "may not fit", "does not fit", "not measured", "may lose too much", "loses too much")
"""Why an option is refused, by the number that stands for it; the first is of those that are allowed."""


def answers(
    tried: Sequence[Alternative],
    options: Sequence[Option],
    question: Question,
    axes: Axes,
    verdict: Callable[[Sequence[Option], Sequence[Option]], str],
) -> dict[str, Any]:
    """The answer at every place of a grid, as JSON-able values.

    Args:
        tried: the candidates, the model as it is first.
        options: each candidate's option, as any question sees it (`ranked`); their numbers are not used.
        question: the question that the page begins with.
        axes: the axes of the grid.
        verdict: says in a sentence what is to be done, of the options in their order and as the goal ranks them.

    Returns:
        ``memory`` and ``cache``, bytes of each option, by context and batch; ``fit`` and ``rate``, the sequences that
        fit and their tokens a second, by device and context; and ``places``, by device, context and batch, with the
        ``seconds`` of a step of each option (None where it does not run on the device), their ``order`` by goal, and
        by loss their ``refused``, a digit each for one of `REASONS`, ``dominated`` and the ``verdict`` by goal, an
        index of ``verdicts``.
    """
    known = _Predicted(tried, question)
    verdicts: dict[str, int] = {}
    every = range(len(tried))

    def place(hardware: Device, context: int, batch: int) -> dict[str, Any]:
        running = [index for index in every if tried[index].runs_on(hardware)]
        found = [replace(options[index], **known.numbers(index, hardware, context, batch)) for index in running]
        orders = [sorted(range(len(found)), key=lambda at: found[at].score(goal, found[0])) for goal in axes.goal]
        by_loss = []
        for loss, is_usual in axes.loss:
            asked = replace(question, hardware=hardware, max_quality_loss=loss, is_usual=is_usual)
            judgement = judged(found, asked, [tried[index].is_bound for index in running])
            # The best first, then what is refused, as `ranked` has them.
            ranks = [
                sorted((judgement[at] for at in order), key=lambda option: option.refused is not None)
                for order in orders
            ]
            said = [verdict(judgement, one) for one in ranks]
            by_loss.append(
                {
                    "refused": "".join(str(REASONS.index(option.refused or "")) for option in judgement),
                    "dominated": "".join(str(int(option.is_dominated)) for option in judgement),
                    "verdict": [verdicts.setdefault(text, len(verdicts)) for text in said],
                }
            )
        return {
            "running": running,
            "seconds": [_short(option.decode_seconds) for option in found],
            "order": orders,
            "loss": by_loss,
        }

    devices = axes.hardware.values()
    return {
        "places": [[[place(each, c, b) for b in axes.batch] for c in axes.context] for each in devices],
        "memory": [[[known.memory(i, c, b).total for i in every] for b in axes.batch] for c in axes.context],
        "cache": [[[_short(known.cached(i, c, b)) for i in every] for b in axes.batch] for c in axes.context],
        "fit": [[[known.fit(i, each, c) for i in every] for c in axes.context] for each in devices],
        "rate": [[[_short(known.rate(i, each, c)) for i in every] for c in axes.context] for each in devices],
        "verdicts": list(verdicts),
    }


def _short(number: float) -> float:
    """A number to seven digits, which no reader sees the end of."""
    return float(f"{number:.7g}")
