"""RULER's tasks: as long as asked, the answers where they should be and nowhere else, and how answers are counted."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.errors import ArgumentError
from headwise.measure.evaluation.ruler_tasks import (
    COMMON,
    HOPS,
    NOISE,
    TASKS,
    Material,
    Sample,
    longest_sample,
    share_found,
)
from headwise.measure.texts import language_reference

TEXT = language_reference(slice(40))
TOKENS = dict.fromkeys(TASKS, 128) | {"vt": 30, "cwe": 120, "fwe": 50}
LENGTHS = st.integers(1500, 6000)
few = settings(max_examples=5)
"""A sample is drawn some ten times before its length is found."""


def words_and_marks(sample: Sample) -> int:
    """A token for each word and each mark."""
    return len(re.findall(r"\w+|[^\w\s]", sample.text + sample.prefix))


def drawn(name: str, length: int, seed: int, material: Material | None = None) -> Sample:
    return longest_sample(TASKS[name], material or Material(TEXT, length), (seed, 0), words_and_marks)


def context(name: str, sample: Sample) -> str:
    """The haystack that is asked about, without the solved example before it, and the question."""
    text = sample.text[sample.text.rindex(sample.text.split("\n")[0]) :]
    return text[: text.rindex("\n")].removeprefix("Count how often each word occurs in the coded text below. ")


@pytest.mark.parametrize("name", TASKS)
@few
@given(length=LENGTHS, seed=st.integers(0, 10**6))
def test_a_sample_is_as_long_as_asked_and_not_a_piece_shorter(name: str, length: int, seed: int) -> None:
    task, material, pieces = TASKS[name], Material(TEXT, length), list[int]()

    def make(random: np.random.Generator, material: Material, count: int) -> Sample:
        pieces.append(count)
        return task.make(random, material, count)

    sample = longest_sample(replace(task, make=make), material, (seed, 0), words_and_marks)
    one_more = task.make(np.random.default_rng((seed, 0)), material, pieces[-1] + 1)
    assert task.tokens == TOKENS[name]
    assert words_and_marks(sample) + task.tokens <= length < words_and_marks(one_more) + task.tokens
    assert sample == drawn(name, length, seed)
    assert sample != drawn(name, length, seed + 1)


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("niah")])
@few
@given(length=LENGTHS, seed=st.integers(0, 10**6))
def test_needles_are_stated_once_and_those_asked_for_are_the_answers(name: str, length: int, seed: int) -> None:
    sample = drawn(name, length, seed)
    haystack = context(name, sample)
    kind = "uuid" if name in ("niah_single_3", "niah_multikey_3") else "number"
    stated = re.findall(rf"The hidden {kind} of ([\w-]+) is ([\w-]+)\.", haystack)
    question = sample.text[len(sample.text) - len(sample.text.split("\n")[-1]) :]
    asked = [key for key in dict(stated) if re.search(rf"\b{re.escape(key)}(,| and| does)", question)]
    assert sorted(sample.answers) == sorted(value for key, value in stated if key in asked)
    assert (
        len(set(sample.answers))
        == len(sample.answers)
        == (4 if name in ("niah_multivalue", "niah_multiquery") else 1)
    )
    for answer in sample.answers:
        assert (sample.text + sample.prefix).count(answer) == 1
        assert (UUID(answer).version == 4) if kind == "uuid" else (len(answer) == 7 and answer.isdigit())
    needles = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}.get(name, 1)
    assert len(asked) == (4 if name == "niah_multiquery" else 1)
    if name in ("niah_multikey_2", "niah_multikey_3"):
        assert len(stated) > 15
        assert len({key for key, _ in stated}) == len({value for _, value in stated}) == len(stated)
        assert haystack.count("\n") == len(stated)  # nothing but needles
        return
    assert len(stated) == needles
    rest = re.sub(rf"The hidden {kind} of [\w-]+ is [\w-]+\.", "", haystack.split("\n", 1)[1]).split()
    if name == "niah_single_1":
        assert set(" ".join(rest).split(NOISE)) <= {"", " "}
    else:  # the text's words in their order, from some place on and from the beginning again
        assert " ".join(rest) in " ".join(TEXT.split() * (1 + len(rest) // len(TEXT.split()) + 1))


@few
@given(length=LENGTHS, seed=st.integers(0, 10**6))
def test_each_variable_gets_its_value_from_the_one_before_it(length: int, seed: int) -> None:
    sample = drawn("vt", length, seed)
    haystack = context("vt", sample)
    assigned = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", haystack)
    assert tuple(name for name, _ in assigned) == sample.answers
    assert len(sample.answers) == HOPS + 1
    assert [value for _, value in assigned[1:]] == list(sample.answers[:-1])
    assert f"the value {assigned[0][1]}, be it" in sample.text
    assert sample.prefix.endswith(f"5 variables have the value {assigned[0][1]}:")
    counts = [(sample.text + sample.prefix).count(name) for name in sample.answers]
    assert counts == [2, 2, 2, 2, 1]
    example = sample.text.removesuffix(haystack).split("\n\n")[-2]  # solved: its variables stand behind its question
    assert len(set(re.findall(r"\b[A-Z]{3}\b", example)) - {"VAR"}) in (0, HOPS + 1)


@few
@given(length=LENGTHS, seed=st.integers(0, 10**6))
def test_common_words_stand_in_the_list_more_often(length: int, seed: int) -> None:
    sample = drawn("cwe", length, seed)
    listed = re.findall(r"(\d+)\. ([a-z]+)", context("cwe", sample))
    often, seldom = (6, 1) if length < 4096 else (30, 3)
    assert [int(place) for place, _ in listed] == list(range(1, len(listed) + 1))
    counts = Counter(word for _, word in listed)
    assert {word for word, count in counts.items() if count == often} == set(sample.answers)
    assert {count for word, count in counts.items() if word not in sample.answers} == {seldom}
    assert len(sample.answers) == COMMON
    example = sample.text[: sample.text.index("\nBelow")]
    assert len(re.findall(r"\d+\. [a-z]+", example)) == COMMON + (40 if length < 4096 else 190)


@few
@given(length=LENGTHS, seed=st.integers(0, 10**6))
def test_the_three_answers_of_a_coded_text_are_its_most_frequent_words(length: int, seed: int) -> None:
    sample = drawn("fwe", length, seed)
    counts = Counter(context("fwe", sample).split()).most_common(5)
    assert tuple(word for word, _ in counts[:4]) == ("...", *sample.answers)
    assert all(count > following for (_, count), (_, following) in pairwise(counts))
    assert counts[0][1] / counts[1][1] == pytest.approx(4, rel=0.15)


def test_a_longer_haystack_hides_the_same_needles() -> None:
    for name in TASKS:
        if name != "fwe":  # its vocabulary grows with the length
            material = Material(TEXT, 5000)
            short, long = (TASKS[name].make(np.random.default_rng((3, 1)), material, pieces) for pieces in (20, 60))
            assert short.answers == long.answers
            assert len(short.text) < len(long.text)


def test_values_that_an_essay_has_already_are_not_hidden_in_it() -> None:
    free = drawn("niah_single_2", 3000, 5).answers[0]
    taken = drawn("niah_single_2", 3000, 5, Material(f"{TEXT} {free}", 3000))
    assert taken.answers[0] != free
    assert free not in taken.answers


@pytest.mark.parametrize(
    ("said", "answers", "share"),
    [
        ("It is 48213.", ["48213"], 1),
        ("It is 4821.", ["48213"], 0),
        ("  1. Apple\n2. pear\n", ["apple", "PEAR", "plum"], 2 / 3),
        ("48\n213", ["48213"], 1),  # control characters are no part of what is said
        ("one, one", ["one", "two"], 0.5),
        ("someone", ["one"], 1),
        ("", ["one"], 0),
    ],
)
def test_answers_are_counted_in_whatever_case_they_are_said(said: str, answers: list[str], share: float) -> None:
    assert share_found(said, answers) == pytest.approx(share)


@pytest.mark.parametrize("name", TASKS)
def test_what_cannot_hold_a_sample_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"^length = 150: must be at least \d+ tokens"):
        drawn(name, 150, 0)


def test_a_text_may_have_just_the_words_that_are_listed() -> None:
    whole = Material(TEXT, 3000)
    sample = drawn("cwe", 3000, 1, whole)
    listed = set(re.findall(r"\d+\. ([a-z]+)", context("cwe", sample)))
    words = Material(" ".join(whole.words[: len(listed)]), 3000)
    with pytest.raises(ArgumentError, match=f"^text = '{len(listed)} words': must have at least {len(listed) + 1} "):
        drawn("cwe", 3000, 1, words)  # whether another would fit is not known
    assert drawn("cwe", 3000, 1, Material(" ".join(whole.words[: len(listed) + 1]), 3000)).answers


def test_a_text_of_few_words_is_refused() -> None:
    for name, rule in (("cwe", "at least 20 different words"), ("niah_multikey_2", "must have more, for")):
        with pytest.raises(ArgumentError, match=f"^text = '2 words': must have .*{rule.removeprefix('must have ')}"):
            drawn(name, 3000, 0, Material("word after word.", 3000))
