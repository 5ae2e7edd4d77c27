"""The selection guide that headwise began with, as rules that can be followed and adjusted.

The guide chooses a mechanism from words (short, long, small, large). Lengths are those at which it says elsewhere
that another mechanism begins; the numbers of parameters are open in it, and are headwise's. Its rules do not always
agree with each other, and nothing in them was measured: `Guidance.disagreements` says where they differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

from headwise.base.documents import as_document
from headwise.errors import ArgumentError

Goal = Literal["accuracy", "balanced", "speed"]
Application = Literal["research", "serving", "mobile", "documents", "very-long-documents"]

APPLICATIONS: Mapping[Application, tuple[str, ...]] = MappingProxyType(
    {
        "research": ("MHA",),
        "serving": ("GQA-3",),
        "mobile": ("MQA",),
        "documents": ("GQA-2", "MQA"),
        "very-long-documents": ("latent-384", "MQA"),
    }
)
"""The mechanisms that the guide takes for each application; ``GQA-k`` has k key–value heads."""

SIZES: Mapping[Application, tuple[int, int]] = MappingProxyType(
    {
        "research": (768, 12),
        "serving": (768, 12),
        "mobile": (256, 4),
        "documents": (768, 12),
        "very-long-documents": (768, 12),
    }
)
"""The hidden size and the query heads that the guide has for each application."""

_MATRIX: Mapping[str, tuple[tuple[str, ...], ...]] = MappingProxyType(
    {
        "short": (("MHA",), ("MHA", "GQA-4"), ("GQA-4",)),
        "medium": (("MHA",), ("GQA-4",), ("GQA-4", "MQA")),
        "long": (("GQA-4",), ("MQA", "GQA-2"), ("MQA",)),
        "very long": (("latent-256",),) * 3,
    }
)
"""The mechanisms by length, for small, medium and large models."""


_MOST_HEADS = 2**20
"""The most query heads: more than any model's, and few enough to find their divisors at once."""


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The numbers that the guide's words stand for.

    Attributes:
        short: the number of tokens below which a context is short; the guide takes MHA there.
        fast: the number of tokens above which the guide's flow asks for speed.
        long: the number of tokens above which a context is long; the guide takes MQA there.
        very_long: the number of tokens above which the guide takes MLA.
        medium: the number of parameters from which a model is medium; the guide has no number.
        large: the number of parameters from which a model is large; the guide has no number.
    """

    short: int = 512
    fast: int = 1024
    long: int = 2048
    very_long: int = 100_000
    medium: int = 10**9
    large: int = 10**10

    def __post_init__(self) -> None:
        for lower, upper in (("short", "long"), ("long", "very_long"), ("medium", "large")):
            if not 1 <= getattr(self, lower) <= getattr(self, upper):
                rule = f"must be at least 1, and at most {upper} = {getattr(self, upper)}"
                raise ArgumentError(lower, getattr(self, lower), rule)
        if self.fast < 1:
            raise ArgumentError("fast", self.fast, "must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The answers to the guide's questions.

    Attributes:
        context: the number of tokens in the context.
        heads: the number of query heads, which key–value heads must divide.
        parameters: the number of the model's parameters; None leaves out the rule that asks for it.
        accuracy_critical: whether no accuracy may be lost.
        extreme_speed: whether speed matters more than anything.
        memory_limited: whether memory is scarce.
        ample_parameters: whether parameters may be many all the same.
        goal: the goal in the rule for key–value heads.
        application: the application; None leaves out the rule that asks for it.
        thresholds: the numbers that the guide's words (short, long, large) stand for.
    """

    context: int
    heads: int
    parameters: int | None = None
    accuracy_critical: bool = False
    extreme_speed: bool = False
    memory_limited: bool = False
    ample_parameters: bool = False
    goal: Goal = "balanced"
    application: Application | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)

    def __post_init__(self) -> None:
        for name in ("context", "heads", "parameters"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(name, value, "must be at least 1")
        if self.heads > _MOST_HEADS:
            raise ArgumentError("heads", self.heads, f"must be at most {_MOST_HEADS}")
        for name, choices in (("goal", get_args(Goal)), ("application", (None, *APPLICATIONS))):
            if getattr(self, name) not in choices:
                allowed = ", ".join(str(choice) for choice in choices if choice is not None)
                raise ArgumentError(name, getattr(self, name), f"must be one of {allowed}")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule's answer.

    Attributes:
        name: the name of the rule.
        path: the questions that were asked and their answers, in order.
        mechanisms: the mechanisms that the rule chooses, the best first.
        kv_heads: the number of key–value heads of each mechanism; None for a latent.
    """

    name: str
    path: tuple[str, ...]
    mechanisms: tuple[str, ...]
    kv_heads: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """The answers of all rules.

    Attributes:
        needs: the needs that the rules were asked about.
        rules: the rules' answers, that of the flow first.
    """

    needs: Needs
    rules: tuple[Rule, ...]

    @property
    def disagreements(self) -> tuple[str, ...]:
        """The rules that share no mechanism with the flow, by name."""
        flow = set(self.rules[0].kv_heads)
        return tuple(rule.name for rule in self.rules[1:] if not flow & set(rule.kv_heads))

    def to_dict(self) -> dict[str, Any]:
        """The answers as JSON-able values."""
        document: dict[str, Any] = as_document(self)
        return document | {"disagreements": list(self.disagreements)}


def guide(needs: Needs) -> Guidance:
    """Follow every rule of the guide.

    For example ``guide(Needs(context=4096, heads=32)).rules[0].mechanisms`` is ``("GQA-4", "GQA-2")``.
    """
    rules = [_flow_rule(needs), _length_rule(needs), _kv_heads_rule(needs)]
    if needs.parameters is not None:
        rules.append(_matrix_rule(needs, needs.parameters))
    if needs.application is not None:
        width, heads = SIZES[needs.application]
        path = (f"{needs.application}: the guide's size is {width}, {heads} heads",)
        rules.append(_rule("application", path, APPLICATIONS[needs.application], needs))
    return Guidance(needs=needs, rules=tuple(rules))


def _flow_rule(needs: Needs) -> Rule:
    path, limits = [_question_and_answer("is accuracy critical", needs.accuracy_critical)], needs.thresholds
    if needs.accuracy_critical:
        return _rule("flow", path, ("MHA",), needs)
    is_long = needs.context > limits.fast
    path.append(_question_and_answer(f"are there more than {limits.fast:,} tokens", is_long))
    if is_long:
        path.append(_question_and_answer("is extreme speed wanted", needs.extreme_speed))
        return _rule("flow", path, ("MQA",) if needs.extreme_speed else ("GQA-4", "GQA-2"), needs)
    path.append(_question_and_answer("is memory limited", needs.memory_limited))
    if not needs.memory_limited:
        return _rule("flow", path, ("GQA-4",), needs)
    path.append(_question_and_answer("is the parameter budget ample", needs.ample_parameters))
    return _rule("flow", path, ("GQA-4",) if needs.ample_parameters else ("MQA",), needs)


def _length_rule(needs: Needs) -> Rule:
    limits, context = needs.thresholds, needs.context
    if context < limits.short:
        return _rule("lengths", [f"fewer than {limits.short:,} tokens"], ("MHA",), needs)
    if context > limits.very_long:
        return _rule("lengths", [f"more than {limits.very_long:,} tokens"], ("MLA",), needs)
    if context > limits.long:
        return _rule("lengths", [f"more than {limits.long:,} tokens"], ("MQA",), needs)
    return _rule("lengths", ["no rule for this length: the number of heads decides"], _BY_GOAL[needs.goal], needs)


_BY_GOAL: Mapping[Goal, tuple[str, ...]] = MappingProxyType(
    {"accuracy": ("GQA-h/2", "GQA-h/4"), "balanced": ("GQA-h/2",), "speed": ("MQA", "GQA-2")}
)


def _kv_heads_rule(needs: Needs) -> Rule:
    return _rule("key–value heads", [f"the goal is {needs.goal}"], _BY_GOAL[needs.goal], needs)


def _matrix_rule(needs: Needs, parameters: int) -> Rule:
    limits, context = needs.thresholds, needs.context
    bounds = (("very long", limits.very_long), ("long", limits.long), ("medium", limits.short - 1))
    length = next((name for name, least in bounds if context > least), "short")
    size = 2 if parameters >= limits.large else 1 if parameters >= limits.medium else 0
    path = [f"a {length} context", f"a {('small', 'medium', 'large')[size]} model"]
    return _rule("matrix", path, _MATRIX[length][size], needs)


def _question_and_answer(question: str, answer: bool) -> str:
    return f"{question}? {'yes' if answer else 'no'}"


def _rule(name: str, path: list[str] | tuple[str, ...], mechanisms: tuple[str, ...], needs: Needs) -> Rule:
    heads = tuple(kv_heads(mechanism, needs.heads) for mechanism in mechanisms)
    return Rule(name=name, path=tuple(path), mechanisms=mechanisms, kv_heads=heads)


def kv_heads(mechanism: str, heads: int) -> int | None:
    """The key–value heads of one of the guide's mechanisms; None for a latent.

    For example ``kv_heads("GQA-4", 9)`` is 3: of the divisors of the query heads, the largest that is no more.

    Args:
        mechanism: ``MHA``, ``MQA``, ``GQA-k``, ``GQA-h/k``, ``MLA`` or ``latent-r``.
        heads: query heads.
    """
    kind, _, number = mechanism.partition("-")
    if kind in ("MHA", "MQA"):
        return heads if kind == "MHA" else 1
    if kind != "GQA":
        return None
    wanted = heads // int(number[2:]) if number.startswith("h/") else int(number)
    return next(divisor for divisor in range(max(1, min(wanted, heads)), 0, -1) if heads % divisor == 0)
