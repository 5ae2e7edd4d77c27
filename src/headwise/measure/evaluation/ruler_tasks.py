"""The synthetic tasks of RULER (Hsieh et al. 2024, arXiv 2404.06654): long prompts whose answers are known.

Needles in a haystack, variables that get their values from others, and words that occur most often. Tasks and their
sizes are the published ones, in words of our own. Questions about outside data sets are left out.

All that is drawn follows from a seed, and needles are drawn before the haystack: a longer one hides the same needles.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import pi
from uuid import UUID

import numpy as np

from headwise.errors import ArgumentError

NOISE = "The river is wide. The hills are low. The wind is cold. We walk on. We come home again."
"""A haystack that says nothing, over and over."""

NEEDLE = "The hidden {kind} of {key} is {value}."

_HIDDEN = "In the text below hidden {kind} are stated. Keep them in mind, you will be asked for them.\n{context}\n"
_ASKED = "Which hidden {kind} of {keys} does the text state?"
_STATED = " The hidden {kind} of {keys} that the text states {be}"
_CHAINS = "In the text below variables get values, some of them by way of others. Keep track of all.\n\n{context}\n"
_CHAINED = "Question: Which variables have the value {value}, be it by way of others?"
_FOLLOWED = " Answer: By the text above, {count} variables have the value {value}:"
_LISTED = "Below is a numbered list of words, and some words stand in it more often than others.\n{context}\n"
_COMMON = "Question: Which {count} words stand in the list most often?"
_COUNTED = " Answer: The {count} words that stand in the list most often are:"
_CODED = "Count how often each word occurs in the coded text below. {context}\n"
_FREQUENT = "Question: Which three words occur in the coded text most often, without '...'? Answer with these alone."
_FOUND = " Answer: The three words that occur in the coded text most often are:"

COMMON, HOPS = 10, 4
SHORT = 4096
"""Tokens below which lists of words repeat them less often, so that they fit."""


@dataclass(frozen=True)
class Sample:
    """A prompt of a task, and what its continuation should hold.

    Attributes:
        text: the context and the question.
        prefix: the beginning of the answer, which the model continues.
        answers: the texts to be found.
    """

    text: str
    prefix: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Material:
    """What haystacks are made of.

    Attributes:
        text: that essays and words are cut from.
        length: tokens of a sample, answer included; it decides how large a vocabulary is, not how long a haystack.
    """

    text: str
    length: int

    @cached_property
    def essay(self) -> list[str]:
        """The words of the text in their order, with their punctuation."""
        return self.text.split()

    @cached_property
    def words(self) -> list[str]:
        """The different words of four to ten small letters, in the order of the alphabet."""
        return sorted(set(re.findall(r"\b[a-z]{4,10}\b", self.text)))

    def some_words(self, random: np.random.Generator, count: int) -> list[str]:
        """So many different words.

        Raises:
            ArgumentError: the text has fewer.
        """
        if count > len(self.words):
            rule = f"must have at least {count} different words of four to ten small letters"
            raise ArgumentError("text", f"{len(self.words)} words", rule)
        return [self.words[index] for index in random.permutation(len(self.words))[:count]]


@dataclass(frozen=True)
class Task:
    """A task of RULER.

    Attributes:
        tokens: the most tokens of an answer, as published.
        make: makes the sample of a random generator and a number of haystack pieces.
        least: the fewest pieces.
    """

    tokens: int
    make: Callable[[np.random.Generator, Material, int], Sample]
    least: int


@dataclass(frozen=True, kw_only=True)
class Needles:
    """A needle in a haystack, or several.

    Attributes:
        haystack: what a piece is: ``noise`` (`NOISE`), ``essay`` (a word of the text) or ``needle`` (another needle).
        keys: what needles are found by: ``words`` or ``uuids``.
        kind: what they hold: ``numbers`` or ``uuids``.
        count: the number of keys.
        values: the number of values of each key.
        queries: the number of keys that are asked for.
    """

    haystack: str
    keys: str = "words"
    kind: str = "numbers"
    count: int = 1
    values: int = 1
    queries: int = 1

    def make(self, random: np.random.Generator, material: Material, pieces: int) -> Sample:
        """The sample of a random generator and a number of pieces."""
        start = int(random.integers(max(len(material.essay), 1)))
        names = _different(random, material, self.keys, self.count)
        # An answer is nowhere but where it is stated: in an essay's text neither.
        taken = material.text if self.haystack == "essay" else ()
        held = _different(random, material, self.kind, self.count * self.values, apart_from=taken)
        depths = random.random(len(held))
        asked = random.permutation(self.count)[: self.queries].tolist()
        stated = [self._state(names[index // self.values], value) for index, value in enumerate(held)]
        if self.haystack == "essay":
            words = material.essay
            text = " ".join(words[(start + index) % len(words)] for index in range(pieces))
            parts, separator = re.split(r"(?<=[.!?]) ", text), " "
        else:
            parts, separator = [NOISE] * pieces, "\n"
        if self.haystack == "needle":
            others = _different(random, material, self.keys, pieces, apart_from=names)
            values = _different(random, material, self.kind, pieces, apart_from=held)
            parts = list(map(self._state, others, values))
        context = separator.join(_inserted(parts, stated, depths))
        answers = tuple(held[index * self.values + place] for index in asked for place in range(self.values))
        one = len(answers) == 1
        asking = {"kind": self.kind[:-1] if one else self.kind, "keys": _listed([names[index] for index in asked])}
        text = _HIDDEN.format(kind=self.kind, context=context) + _ASKED.format(**asking)
        return Sample(text, _STATED.format(be="is" if one else "are", **asking), answers)

    def _state(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.kind[:-1], key=key, value=value)


def variables(random: np.random.Generator, material: Material, pieces: int) -> Sample:
    """A chain of variables of which each has the value of the one before, behind a solved example."""
    example, sample = _chain(random, 3, 5), _chain(random, 5, pieces)
    solved = f"{example.text}{example.prefix} {' '.join(example.answers)}\n\n"
    return Sample(solved + sample.text, sample.prefix, sample.answers)


def _chain(random: np.random.Generator, letters: int, pieces: int) -> Sample:
    names = list[str]()
    while len(names) <= HOPS:
        name = _letters(random, string.ascii_uppercase, letters)
        names += [] if name in {*names, "VAR"} else [name]
    value = int(random.integers(10_000, 100_000))
    stated = [f"VAR {names[0]} = {value}"]
    stated += [f"VAR {name} = VAR {before}" for before, name in pairwise(names)]
    depths = np.sort(random.random(len(stated)))  # a variable follows the one that it gets its value from
    context = "\n".join(_inserted([NOISE] * pieces, stated, depths))
    text = _CHAINS.format(context=context) + _CHAINED.format(value=value)
    return Sample(text, _FOLLOWED.format(count=len(names), value=value), tuple(names))


def common_words(random: np.random.Generator, material: Material, pieces: int) -> Sample:
    """A list of words of which ten stand in it more often, behind a solved example; a piece is another word."""
    is_short = material.length < SHORT
    examples, shown = (20, (3, 1)) if is_short else (40, (10, 3))
    example, sample = (
        _list(random, material.some_words(random, count), *repeats)
        for count, repeats in ((examples, shown), (COMMON + pieces, (6, 1) if is_short else (30, 3)))
    )
    solved = " ".join(f"{place}. {word}" for place, word in enumerate(example.answers, 1))
    return Sample(f"{example.text}{example.prefix} {solved}\n{sample.text}", sample.prefix, sample.answers)


def _list(random: np.random.Generator, words: list[str], often: int, seldom: int) -> Sample:
    listed = [*words[:COMMON] * often, *words[COMMON:] * seldom]
    order = random.permutation(len(listed))
    context = " ".join(f"{place}. {listed[index]}" for place, index in enumerate(order, 1))
    return Sample(
        _LISTED.format(context=context) + _COMMON.format(count=COMMON),
        _COUNTED.format(count=COMMON),
        tuple(words[:COMMON]),
    )


def frequent_words(random: np.random.Generator, material: Material, pieces: int) -> Sample:
    """A text of made-up words, the k-th of which occurs as often as 1/k² says; the first is noise."""
    words = dict[str, None]()
    while len(words) + 1 < max(material.length // 50, 5):
        words[_letters(random, string.ascii_lowercase, 6)] = None
    ranked = ["...", *words]
    counts = (pieces * 6 / pi**2 / np.arange(1, len(ranked) + 1) ** 2).astype(int)
    text = [word for word, count in zip(ranked, counts, strict=True) for _ in range(count)]
    context = " ".join(text[index] for index in random.permutation(len(text)))
    return Sample(_CODED.format(context=context) + _FREQUENT, _FOUND, tuple(ranked[1:4]))


_NEEDLES = {
    "niah_single_1": Needles(haystack="noise"),
    "niah_single_2": Needles(haystack="essay"),
    "niah_single_3": Needles(haystack="essay", kind="uuids"),
    "niah_multikey_1": Needles(haystack="essay", count=4),
    "niah_multikey_2": Needles(haystack="needle"),
    "niah_multikey_3": Needles(haystack="needle", keys="uuids", kind="uuids"),
    "niah_multivalue": Needles(haystack="essay", values=4),
    "niah_multiquery": Needles(haystack="essay", count=4, queries=4),
}
TASKS: dict[str, Task] = {
    **{name: Task(128, needles.make, 1) for name, needles in _NEEDLES.items()},
    "vt": Task(30, variables, 1),
    "cwe": Task(120, common_words, 1),
    "fwe": Task(50, frequent_words, 60),
}
"""The eleven tasks by their published names; with fewer than 60 words some of ``fwe`` would occur equally often."""


def longest_sample(
    task: Task, material: Material, seed: Sequence[int], count_tokens: Callable[[Sample], int]
) -> Sample:
    """The sample of a seed with as many haystack pieces as fit, its answer included.

    For example ``longest_sample(TASKS["vt"], Material(text, 4096), (0, 0), lambda sample: len(sample.text))``.

    Args:
        task: one of `TASKS`.
        material: what haystacks are made of, and the tokens that a sample may have.
        seed: what everything that is drawn follows from.
        count_tokens: counts the tokens of a sample's prompt.

    Raises:
        ArgumentError: not even the fewest pieces fit, or the text has too few words.
    """

    refused: dict[int, ArgumentError] = {}

    def made(pieces: int) -> Sample:
        return task.make(np.random.default_rng(seed), material, pieces)

    def fits(pieces: int) -> bool:
        try:
            return count_tokens(made(pieces)) + task.tokens <= material.length
        except ArgumentError as error:  # too few words, which is no matter if fewer suffice
            refused[pieces] = error
            return False

    low, high = 0, task.least
    while fits(high):
        low, high = high, 2 * high
    while low and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if high in refused:
        raise refused[high]
    if not low:
        rule = f"must be at least {count_tokens(made(high)) + task.tokens} tokens"
        raise ArgumentError("length", material.length, rule)
    return made(low)


def share_found(text: str, answers: Sequence[str]) -> float:
    """The share of answers that a continuation holds, in whatever case.

    For example ``share_found("It is 48213.", ["48213", "10007"])`` is 0.5.
    """
    said = re.sub(r"[\x00-\x1f]", "", text.strip()).lower()
    return sum(answer.lower() in said for answer in answers) / len(answers)


def _inserted(
    parts: Sequence[str], stated: Sequence[str], depths: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> list[str]:
    """The parts with statements at their depths, from 0 (before all) to 1; at one place in their order."""
    at = (depths * (len(parts) + 1)).astype(int)
    together = list[str]()
    before = 0
    for index in np.argsort(at, kind="stable"):
        together += [*parts[before : at[index]], stated[index]]
        before = at[index]
    return [*together, *parts[before:]]


def _different(
    random: np.random.Generator, material: Material, kind: str, count: int, apart_from: Container[str] = ()
) -> list[str]:
    """So many different numbers, uuids or pairs of words, none of which is in a list or a text."""
    drawn = dict[str, None]()
    if kind == "words" and 2 * (count + 1) > len(material.words) ** 2:
        raise ArgumentError("text", f"{len(material.words)} words", f"must have more, for {count} different pairs")
    while len(drawn) < count:
        if kind == "numbers":
            one = str(random.integers(1_000_000, 10_000_000))
        elif kind == "uuids":
            one = str(UUID(bytes=random.bytes(16), version=4))
        else:
            one = "-".join(material.words[index] for index in random.integers(len(material.words), size=2))
        if one not in apart_from:
            drawn[one] = None
    return list(drawn)


def _letters(random: np.random.Generator, alphabet: str, count: int) -> str:
    return "".join(alphabet[index] for index in random.integers(len(alphabet), size=count))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
