"""`advise`: which mechanism, size and bits to serve a model with, on a device, at a context and batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from headwise.base.documents import as_document
from headwise.base.options import MOST_LOSS
from headwise.base.type_checks import checked_types
from headwise.costs.formulas.model import weights
from headwise.costs.prediction import (
    MOST,
    Device,
    Pass,
    check_engine,
    fastest_absorbed,
    largest_batch,
    operators,
    peak_memory,
    seconds,
)
from headwise.costs.prediction.memory import cache_bytes, check_usable
from headwise.costs.prediction.operators import USUAL_DTYPE
from headwise.costs.prediction.predict import check_context, counted_weights, timed_note
from headwise.decide.advice.candidates import (
    AS_IT_IS,
    Alternative,
    candidates,
    engine_notes,
    file_note,
    predicted_note,
    weight_notes,
)
from headwise.decide.advice.next_measurement import Expected, expected_losses
from headwise.errors import ArgumentError
from headwise.measure.points import Measured, read_measured
from headwise.models.specs import ModelSpec, read_spec
from headwise.serving.programs import commands

Goal = Literal["latency", "throughput", "memory", "balanced"]

USUAL_LOSS = 0.05
"""The rise of perplexity that commands allow where something is known and the user says nothing."""

MOST_SEQUENCES = 1024
"""The most sequences at once that throughput is predicted for: schedulers of engines stop there or before."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of a model.

    Attributes:
        hardware: one of the devices that serve it.
        step: the decode step: context, batch, dtype and devices.
        goal: the number that is made as small, or as large, as it can be.
        max_quality_loss: the largest rise of perplexity, as a fraction; only what was measured within it, what is
            predicted far enough below it (`Measured.loss_at_most`), or what loses nothing is then recommended. None
            allows any loss that is known, and, where the model as it is does not fit, an engine's cache that is known
            to be safe.
        is_usual: whether the limit is `USUAL_LOSS` because the user says nothing: it is then for what is known, and
            an engine's cache that is known to be safe is allowed as without a limit.
        usable: the share of a device's memory that may be used.
        engine: the engine that is to run the model, one of `headwise.costs.prediction.SERVING_ENGINES`; None where it
            may be any.
    """

    hardware: Device
    step: Pass
    goal: Goal = "balanced"
    max_quality_loss: float | None = None
    is_usual: bool = False
    usable: float = 0.9
    engine: str | None = None

    def __post_init__(self) -> None:
        if self.goal not in get_args(Goal):
            raise ArgumentError("goal", self.goal, f"must be one of {', '.join(get_args(Goal))}")
        if self.max_quality_loss is not None and not 0 <= self.max_quality_loss <= MOST_LOSS:
            rule = f"must be at least 0 and at most {MOST_LOSS}, a fraction such as 0.05"
            raise ArgumentError("max_quality_loss", self.max_quality_loss, rule)
        check_usable(self.usable)
        if self.engine is not None:
            check_engine(self.engine)

    @property
    def memory_bytes(self) -> int:
        """The bytes of one device's memory that may be used."""
        return int(self.hardware.memory_bytes * self.usable)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One candidate, as the question sees it.

    Attributes:
        target: the name of the candidate, as a measurement is found by it.
        label: the mechanism and sizes of the first layer.
        convert_to: the options of ``headwise convert`` that make it; None where nothing is converted.
        cache_bytes_per_token: the cache's bytes for a token of one sequence, on all devices that share a model, as
            one of them holds it.
        decode_seconds: seconds of a decode step, which gives every sequence one token.
        memory_bytes: the bytes that one device needs.
        weight_bytes: those of ``memory_bytes`` that weights take.
        largest_batch: the number of sequences of the context that fit.
        tokens_per_second: tokens a second of as many sequences as fit, at most `MOST_SEQUENCES`; 0 where none fits.
        parameters: the number of the model's parameters.
        loss: the rise of perplexity, as a fraction, measured or predicted; 0 where nothing is lost; None where it is
            not known.
        loss_at_most: what is held to the limit: the loss, or more where it is predicted (`Measured.loss_at_most`).
        kl: the KL in nats a token, where there is one.
        is_predicted: whether the loss is predicted, and was not measured.
        is_first_size: whether its sizes, and so its time, memory and parameters, are those that a search on a text
            begins with.
        is_safe: whether models like this one lose next to nothing, so that it may be used unmeasured.
        served_by: the programs that serve it, in words.
        words: the engine's own options, for its own caches; empty for all else.
        commands: the command lines that serve it, one after the other; none where headwise knows none.
        refused: why it is not recommended; None where it may be.
        is_dominated: whether another option that may be recommended is no worse in time, cache and loss, and better
            in one of them.
    """

    target: str
    label: str
    convert_to: str | None
    cache_bytes_per_token: float
    decode_seconds: float
    memory_bytes: int
    weight_bytes: int
    largest_batch: int
    tokens_per_second: float
    parameters: int
    loss: float | None
    loss_at_most: float | None
    kl: float | None
    is_predicted: bool
    is_first_size: bool
    is_safe: bool
    served_by: str
    words: str
    commands: tuple[str, ...] = ()
    refused: str | None = None
    is_dominated: bool = False

    def score(self, goal: Goal, source: Option) -> float:
        """What the goal makes small: seconds, seconds a token, bytes, or seconds times bytes over the source's."""
        if goal == "latency":
            return self.decode_seconds
        if goal == "throughput":
            return 1 / self.tokens_per_second if self.tokens_per_second else float("inf")
        if goal == "memory":
            return self.cache_bytes_per_token
        time, cache = self.decode_seconds / source.decode_seconds, self.cache_bytes_per_token
        return time * cache / source.cache_bytes_per_token


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Every option, the best first.

    Attributes:
        source: the model, as the user named it.
        question: the question that was asked.
        options: those that may be recommended by the goal, then those that are refused.
        binding: what decides: ``memory``, ``quality``, ``memory and quality``, or ``nothing``, where the best option
            would be the best without the limits.
        trained_context: tokens that the model was made for, where its config says so.
        changes: what is best at other contexts and batches, in words, where it is another option.
        measure_next: the option that was not measured, and would come first if it lost what is expected of it, or
            predicted; None where there is none. What is not even predicted is never recommended itself.
        to_measure: the option to measure next: ``measure_next``, or where nothing known suggests one, of those that
            fit one that needs no conversion, and of these the one that keeps most; None where nothing is left.
        absorbed_tokens: where MLA is recommended, the most new tokens of a sequence that take less time absorbed than
            expanded, as is predicted; None for other mechanisms.
        weights: the formats in which the model's weights are counted, in words.
        notes: what is not known of these, and how conversions are counted where weights are quantised.
    """

    source: str
    question: Question
    options: tuple[Option, ...]
    binding: str
    changes: tuple[str, ...]
    trained_context: int | None
    measure_next: Expected | None = None
    to_measure: str | None = None
    absorbed_tokens: int | None = None
    weights: str = USUAL_DTYPE
    notes: tuple[str, ...] = ()

    @cached_property
    def best(self) -> Option | None:
        """What is recommended; None where nothing may be."""
        return _recommended(self.options)

    def to_dict(self) -> dict[str, Any]:
        """The advice as JSON-able values."""
        document: dict[str, Any] = as_document(self)
        return document | {"best": _target(self.best)}


@checked_types
def advise(source: str | Path, question: Question, *, measured: Iterable[str | Path] = ()) -> Advice:
    """Recommend what to do with a model's cache. Reads only configs and measurements.

    For example ``advise("llama-3-8b", Question(hardware=device("h100"), step=Pass(total=32768, batch=16))).best``.

    Doing nothing and a format of fewer bits are options like every conversion. Times and memory are predictions
    (`headwise.costs.prediction`); quality is what a frontier of this model measured, or `headwise.quick_frontier`
    predicted by running it, and is never guessed.

    Args:
        source: a model folder, a ``.gguf``, a catalog name or ``hf://owner/name``.
        question: the hardware, the step, the goal and the limits.
        measured: folders that ``headwise frontier`` wrote of this model, with or without ``--quick``.

    Raises:
        HeadwiseError: the model or a measurement cannot be read, or a number is impossible.
    """
    model = read_spec(source)
    return advise_on(model, question, read_measured(measured, model), source=str(source))


def advise_on(
    model: ModelSpec, question: Question, measured: Mapping[str, Measured], *, source: str = "model"
) -> Advice:
    """`advise` on a spec, with measurements and predictions by target.

    For example ``advise_on(read_spec("llama-3-8b"), question, {}).best``.

    Args:
        model: the model's spec, with its body.
        question: the hardware, the step, the goal and the limits.
        measured: the measured losses by target.
        source: the name of the model in the answer.
    """
    positions = check_context(model, question.step.total)
    tried = candidates(model, measured, question.engine, question.hardware)
    options = ranked(tried, question, measured, with_capacity=True, source=source)
    free = replace(question, max_quality_loss=None, hardware=replace(question.hardware, memory_bytes=2**62))
    best = _recommended(options)
    now, changes = _target(best), []
    for name, step in _other_steps(question.step, positions or MOST):
        then = _target(_recommended(ranked(tried, replace(question, step=step), measured)))
        if then != now:
            changes.append(f"{name}: " + (f"{then} comes first" if then else "nothing can be recommended"))
    next_one = _measure_next(tried, question, measured)
    return Advice(
        source=source,
        question=question,
        options=options,
        binding=_binding(options, ranked(tried, free, measured)[0], question),
        changes=tuple(changes),
        trained_context=model.max_position_embeddings,
        measure_next=next_one,
        to_measure=_most_kept(tried, options, question) if next_one is None else next_one.target,
        absorbed_tokens=None if best is None else _absorbed_tokens(tried, best, question),
        weights=counted_weights(model, question.step.dtype),
        notes=(
            *weight_notes(model, tried),
            *engine_notes(model, question.engine, measured),
            *file_note(source, question.engine),
            *_growth_note(options),
            *predicted_note(option.is_predicted for option in options),
            *timed_note(model, question.hardware, question.step.dtype),
        ),
    )


def _growth_note(options: Sequence[Option]) -> list[str]:
    """A note where the weights of conversions grow by more than the cache shrinks."""
    (source,) = (option for option in options if option.target == AS_IT_IS)
    grown = [
        option.target
        for option in options
        if not option.is_first_size
        and option.weight_bytes > source.weight_bytes
        and option.memory_bytes >= source.memory_bytes
    ]
    if not grown:
        return []
    return [f"at this context and batch the weights grow by more than the cache shrinks: {', '.join(grown)}"]


def _absorbed_tokens(tried: Sequence[Alternative], best: Option, question: Question) -> int | None:
    (chosen,) = (each for each in tried if each.target == best.target)
    step = replace(question.step, cache_bits=chosen.cache_bits)
    return fastest_absorbed(chosen.model, step, question.hardware)


def _measure_next(
    tried: Sequence[Alternative], question: Question, measured: Mapping[str, Measured]
) -> Expected | None:
    """What would be recommended if everything lost what is expected of it, where that was not measured."""
    if question.max_quality_loss is None:  # the smallest cache would be named, whatever it loses
        return None
    bits = {each.target: each.cache_bits for each in tried if each.cache_bits is not None}
    known = {target: point for target, point in measured.items() if not point.is_predicted}
    expected = expected_losses(known, [each.target for each in tried if not each.is_exact], bits)
    expected |= {
        point.target: Expected(target=point.target, loss=point.loss, between=())
        for point in measured.values()
        if point.is_predicted
    }
    supposed = {
        each.target: Measured(target=each.target, cache_fraction=1.0, loss=each.loss, kl=None, file="")
        for each in expected.values()
    }
    best = _recommended(ranked(tried, question, {**measured, **supposed}))
    return None if best is None else expected.get(best.target)


def _most_kept(tried: Sequence[Alternative], options: Sequence[Option], question: Question) -> str | None:
    """The option that keeps most of the cache, of those that were not measured and fit.

    One that needs no conversion comes first; key–value heads, which lose more than latents of their size, last.
    """
    by_target = {option.target: option for option in options}
    left = [
        by_target[each.target]
        for each in tried
        if each.is_measurable and each.target in by_target and by_target[each.target].loss is None
    ]
    fitting = [option for option in left if option.memory_bytes <= question.memory_bytes]

    def place(option: Option) -> tuple[bool, bool, float]:
        merges_heads = option.target.startswith(("gqa", "mqa"))
        return option.convert_to is not None, merges_heads, -option.cache_bytes_per_token

    return _target(min(fitting, key=place, default=None))


def ranked(
    tried: Sequence[Alternative],
    question: Question,
    measured: Mapping[str, Measured],
    *,
    with_capacity: bool = False,
    source: str = "MODEL",
) -> tuple[Option, ...]:
    """All options in the order of the goal, those that are refused last.

    For example ``ranked(candidates(model), question, {})[0].target``.

    Args:
        tried: the source first.
        question: the hardware, the step, the goal and the limits.
        measured: the measured or predicted losses by target.
        with_capacity: whether the sequences that fit are counted whatever the goal; only throughput needs them.
        source: the name of the model in command lines.
    """
    needs_capacity = with_capacity or question.goal == "throughput"
    options: list[Option] = []
    are_bound: list[bool] = []
    for each in tried:
        try:
            option = _option(each, question, measured.get(each.target), with_capacity=needs_capacity)
        except ArgumentError:  # its heads cannot be shared out among the devices
            if not options:  # the model itself
                raise
            continue
        typed = commands(each.target, each.convert_to, tried[0].model, source, question.engine, question.step)
        options.append(replace(option, commands=typed))
        are_bound.append(each.is_bound)
    found = judged(options, question, are_bound)
    # Of equal options the one with less conversion comes first: candidates are listed from nothing on.
    return tuple(
        sorted(found, key=lambda option: (option.refused is not None, option.score(question.goal, found[0])))
    )


def judged(options: Sequence[Option], question: Question, are_bound: Sequence[bool]) -> list[Option]:
    """Options with the reasons why some are refused, and with whether they are dominated, in their order.

    For example ``judged(options, question, [False] * len(options))[0].refused``.

    Args:
        options: the model as it is first.
        question: the hardware, the step, the goal and the limits.
        are_bound: for each option, whether its memory is an upper bound, so that it may be refused needlessly.
    """
    fits = options[0].memory_bytes <= question.memory_bytes
    reasons = [
        _refusal(option, question, source_fits=fits, is_bound=is_bound)
        for option, is_bound in zip(options, are_bound, strict=True)
    ]
    allowed = [option for option, reason in zip(options, reasons, strict=True) if reason is None]
    return [
        replace(option, refused=reason, is_dominated=any(_dominates(other, option) for other in allowed))
        for option, reason in zip(options, reasons, strict=True)
    ]


def _option(candidate: Alternative, question: Question, measured: Measured | None, *, with_capacity: bool) -> Option:
    """The figures of a candidate; whether it is refused, and what serves it, is not yet known."""
    step = replace(question.step, cache_bits=candidate.cache_bits)
    model, available = candidate.model, question.memory_bytes
    memory = peak_memory(model, step)
    fitting = largest_batch(model, step, available) if with_capacity else 0
    many = min(fitting, MOST_SEQUENCES)
    rate = 0.0 if not many else many / _decode_seconds(model, replace(step, batch=many), question.hardware)
    loss, at_most = known_loss(candidate, measured)
    return Option(
        target=candidate.target,
        label=model.label,
        convert_to=candidate.convert_to,
        cache_bytes_per_token=cache_bytes(model, step) / (step.batch * step.total),
        decode_seconds=_decode_seconds(model, step, question.hardware),
        memory_bytes=memory.total,
        weight_bytes=memory.weights,
        largest_batch=fitting,
        tokens_per_second=rate,
        parameters=weights(model).total,
        loss=loss,
        loss_at_most=at_most,
        kl=None if measured is None else measured.kl,
        is_predicted=measured is not None and measured.is_predicted,
        is_first_size=candidate.is_first_size,
        is_safe=candidate.is_safe,
        served_by=candidate.served_by,
        words=candidate.words,
    )


def known_loss(candidate: Alternative, measured: Measured | None) -> tuple[float | None, float | None]:
    """The loss of a candidate, and the one that is held to a limit; None where they are not known.

    For example ``known_loss(candidates(model)[0], None)`` is ``(0.0, 0.0)``, of the model as it is.

    Args:
        candidate: the candidate.
        measured: the candidate's measured or predicted loss; None without one.
    """
    if candidate.is_exact:
        return 0.0, 0.0
    return (None, None) if measured is None else (measured.loss, measured.loss_at_most)


def _decode_seconds(model: ModelSpec, step: Pass, hardware: Device) -> float:
    return sum(timed.seconds for timed in seconds(operators(model, step), hardware, step))


def _refusal(option: Option, question: Question, *, source_fits: bool, is_bound: bool) -> str | None:
    """Why an option is not recommended; where its memory is an upper bound, it may be needlessly.

    Cost alone never recommends a loss that nobody knows: what was not measured has to be known as safe, and needed.
    """
    if option.memory_bytes > question.memory_bytes:
        if option.is_first_size:  # the sizes that a search begins with say little of those that it finds
            return "unknown"
        return "may not fit" if is_bound else "does not fit"
    if option.loss_at_most is None:
        is_asked = question.max_quality_loss is not None and not question.is_usual
        return None if option.is_safe and not source_fits and not is_asked else "not measured"
    if question.max_quality_loss is None or option.loss_at_most <= question.max_quality_loss:
        return None
    return "may lose too much" if option.is_predicted else "loses too much"


def _dominates(one: Option, other: Option) -> bool:
    """Whether an option is at least as good in time, cache and loss, and better in one."""
    if one.target == other.target or one.loss is None:
        return False
    # What was not measured loses something unknown: only what loses nothing is surely no worse.
    theirs = other.loss if other.loss is not None else 0.0
    pairs = (
        (one.decode_seconds, other.decode_seconds),
        (one.cache_bytes_per_token, other.cache_bytes_per_token),
        (one.loss, theirs),
    )
    return all(ours <= its for ours, its in pairs) and any(ours < its for ours, its in pairs)


def _recommended(options: Sequence[Option]) -> Option | None:
    """The option that comes first, if it may be recommended."""
    return options[0] if options[0].refused is None else None


def _target(option: Option | None) -> str | None:
    return None if option is None else option.target


def _binding(options: Sequence[Option], free: Option, question: Question) -> str:
    """The limit that decides: ``memory``, ``quality``, both, or ``nothing``."""
    if _target(_recommended(options)) == free.target:
        return "nothing"
    (limited,) = (option for option in options if option.target == free.target)
    reasons = []
    if limited.memory_bytes > question.memory_bytes:
        reasons.append("memory")
    most, loss = question.max_quality_loss, limited.loss_at_most
    if most is not None and (loss is None or loss > most):
        reasons.append("quality")
    # For throughput, memory also decides how many sequences there are.
    return " and ".join(reasons) or "memory"


def _other_steps(step: Pass, most: int) -> list[tuple[str, Pass]]:
    """The same question at a quarter and at four times the context, up to ``most`` tokens, and the batch."""
    contexts, batches = ([value // 4, 4 * value] for value in (step.total, step.batch))
    found = [(f"{total:,} tokens", replace(step, total=total)) for total in contexts if 1 <= total <= most]
    return found + [(f"{batch:,} sequences", replace(step, batch=batch)) for batch in batches if 1 <= batch <= MOST]
