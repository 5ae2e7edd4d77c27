"""Planted facts: their position, the question, and how answers are counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise
from headwise.measure.evaluation import evaluate_planted, open_pair, planted
from headwise.measure.evaluation.planted import (
    FACT,
    QUESTION,
    _Answer,
    _answer_all,
    _Context,
    _plant_facts,
    _Question,
    _sentence_questions,
    _spread_depths,
    _string_questions,
)
from headwise.models.checkpoints import load_tokenizer
from tests.measure.evaluation.by_hand import scores_by_hand
from tests.real_models import save_tiny

TEXT = "Whatever is worth measuring is worth measuring twice, side by side; and saying how. " * 20
CODES = ["48213", "10007", "99999", "31415"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("planted")
    save_tiny(root / "source")
    (root / "text.txt").write_text(TEXT)
    headwise.convert(root / "source", root / "half", to="mla", kv_budget=0.5, evaluate=False)
    return root


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_context_is_as_long_as_asked_and_holds_the_fact_at_its_depth(root: Path, depth: float) -> None:
    tokenizer = load_tokenizer(root / "source")
    stretch = tokenizer(TEXT, add_special_tokens=False)["input_ids"][:220]
    context = _plant_facts(tokenizer, stretch, [depth], _sentence_questions(tokenizer, CODES))
    (asked,) = context.questions
    ids = context.ids + asked.ids
    fact = tokenizer(FACT.format(of="", code=CODES[0]), add_special_tokens=False)["input_ids"]
    question = tokenizer(QUESTION.format(of=""), add_special_tokens=False)["input_ids"]
    assert len(ids) + len(" 48213") == 220  # a token a character
    assert ids[-len(question) :] == question
    room = 220 - len(fact) - len(question) - len(" 48213")
    at = round(room * depth)
    assert ids[:at] == stretch[:at]
    assert ids[at : at + len(fact)] == fact
    assert ids[at + len(fact) : -len(question)] == stretch[at:room]
    assert [tokenizer.decode(candidate).replace(" ", "") for candidate in asked.candidates] == CODES


@pytest.mark.parametrize("depth", [0.0, 0.6, 1.0])
def test_several_facts_are_told_apart_by_name(root: Path, depth: float) -> None:
    """Each stands once, the one asked for at its depth; without the facts the text is as it was."""
    tokenizer, names = load_tokenizer(root / "source"), ["Oslo", "Lima", "Cairo"]
    stretch = tokenizer(TEXT, add_special_tokens=False)["input_ids"][:400]
    context = _plant_facts(tokenizer, stretch, _spread_depths(depth, 3), _sentence_questions(tokenizer, CODES, names))

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    (asked,) = context.questions
    ids, question = context.ids + asked.ids, tokens(QUESTION.format(of=" of Oslo"))
    assert len(ids) + len(" 48213") == 400
    assert ids[-len(question) :] == question
    del ids[-len(question) :]
    facts = [tokens(FACT.format(of=f" of {name}", code=code)) for name, code in zip(names, CODES, strict=False)]
    places = []
    for fact in facts:
        (at,) = (at for at in range(len(ids)) if ids[at : at + len(fact)] == fact)
        del ids[at : at + len(fact)]
        places.append(at)
    assert ids == stretch[: len(ids)]
    assert places[0] - sum(map(len, facts)) <= depth * len(ids) <= places[0]
    assert max(places) - min(places) > len(ids) // 2


@pytest.mark.parametrize("facts", [1, 3])
def test_random_strings_of_the_texts_tokens_are_begun_again_at_the_end(root: Path, facts: int) -> None:
    tokenizer = load_tokenizer(root / "source")
    stretches = torch.tensor(tokenizer(TEXT, add_special_tokens=False)["input_ids"][:400]).view(2, 200)
    options = headwise.PlantedOptions(text=root / "text.txt", strings=11, codes=4)
    questions = _string_questions(stretches, options, np.random.default_rng(0), facts)
    assert len(questions) == facts
    for question in questions:
        assert len(question.fact) == 11
        assert set(question.fact) <= set(stretches.unique().tolist())
        assert question.fact == question.ids + question.candidates[0]
        assert [len(question.ids), *map(len, question.candidates)] == [5, 6, 6, 6, 6]
    assert len({tuple(question.candidates[0]) for question in questions}) == facts
    assert all(sorted(question.candidates) == sorted(questions[0].candidates) for question in questions)
    stretch = stretches[0].tolist()
    rest = list(_plant_facts(tokenizer, stretch, _spread_depths(0.5, facts), questions).ids)
    assert len(rest) + 5 + 6 == 200
    for question in questions:
        (at,) = (at for at in range(len(rest)) if rest[at : at + 11] == question.fact)
        del rest[at : at + 11]
    assert rest == stretch[: len(rest)]


def test_only_the_same_tokens_repeat_a_string(root: Path) -> None:
    tokenizer = load_tokenizer(root / "source")
    stretch = tokenizer(TEXT, add_special_tokens=False)["input_ids"][:200]
    asked = _Question([5, 6, 7, 8], [5, 6], [[7, 8], [9, 8]], None)
    context = _plant_facts(tokenizer, stretch, [0.5], [asked])
    for said, found in (([7, 8], True), ([7, 9], False), ([9, 7, 8], False)):
        (answer,) = _answer_all(_Parrot(said, len(context.ids) + 2, 97), tokenizer, context)
        assert answer.found == found


@pytest.mark.parametrize("cache", [None, "int8", "kivi2:32"])
@pytest.mark.parametrize("strings", [None, 8])
def test_facts_together_are_asked_for_each_as_if_alone(
    root: Path, cache: str | None, strings: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one question adds to the cache is gone when the next is asked."""
    options: dict[str, Any] = {"text": root / "text.txt", "context": 250, "trials": 2, "codes": 4}
    options["depths"] = (0.0, 0.5, 1.0)
    asked, contexts = planted._answer_all, []

    def one_by_one(model: Any, tokenizer: Any, context: _Context) -> list[_Answer]:
        contexts.append(context)
        return [asked(model, tokenizer, replace(context, questions=[each]))[0] for each in context.questions]

    pair = open_pair(root / "source", dtype="float32")
    together = evaluate_planted(pair, **options, cache=cache, strings=strings, together=True)
    monkeypatch.setattr(planted, "_answer_all", one_by_one)
    alone = evaluate_planted(pair, **options, cache=cache, strings=strings, together=True)
    assert len(contexts) == 2
    assert [len(context.questions) for context in contexts] == [3, 3]
    assert together.together
    assert together.first.items == 6
    for row, other in zip(together.depths, alone.depths, strict=True):
        assert row.depth == other.depth
        assert row.rank == other.rank
        assert row.nll == pytest.approx(other.nll, rel=1e-4 if cache != "kivi2:32" else 0.05)


@pytest.mark.parametrize("name", ["source", "half"])
def test_an_answer_by_hand(root: Path, name: str) -> None:
    tokenizer, model = load_tokenizer(root / "source"), headwise.load(root / name)
    stretch = tokenizer(TEXT, add_special_tokens=False)["input_ids"][:200]
    for codes in (CODES, CODES[::-1]):
        context = _plant_facts(tokenizer, stretch, [0.5], _sentence_questions(tokenizer, codes))
        with torch.inference_mode():
            (answer,) = _answer_all(model, tokenizer, context)
        (asked,) = context.questions
        prompt = context.ids + asked.ids
        scores = torch.tensor([scores_by_hand(model, prompt, candidate) for candidate in asked.candidates])
        assert answer.rank == 1 + int((scores[1:] >= scores[0]).sum())
        assert answer.probability == pytest.approx(float(scores.softmax(0)[0]), rel=1e-4)
        assert answer.nll == pytest.approx(-float(scores[0]), rel=1e-4)


class _Parrot:
    """A model that generates one text after any prompt."""

    device = torch.device("cpu")

    class _Cache:
        def activate_past_recording(self) -> None: ...

        def crop(self, by: int) -> None:
            self.length += by

    def __init__(self, answer: list[int], prompt: int, vocab: int) -> None:
        self.answer, self.prompt, self.vocab = answer, prompt, vocab

    def __call__(self, ids: torch.Tensor, past_key_values: Any = None, **_: Any) -> Any:
        cache = past_key_values or self._Cache()
        start = getattr(cache, "length", 0)
        cache.length = start + ids.shape[1]
        logits = torch.zeros(1, ids.shape[1], self.vocab)
        for place in range(ids.shape[1]):
            position = start + place + 1 - self.prompt
            if 0 <= position < len(self.answer):
                logits[0, place, self.answer[position]] = 20.0
        return type("Out", (), {"past_key_values": cache, "logits": logits})()


def test_a_model_that_knows_the_code_is_right_and_one_that_says_another_is_not(root: Path) -> None:
    tokenizer = load_tokenizer(root / "source")
    stretch = tokenizer(TEXT, add_special_tokens=False)["input_ids"][:200]
    context = _plant_facts(tokenizer, stretch, [0.5], _sentence_questions(tokenizer, CODES))
    (asked,) = context.questions
    prompt = len(context.ids) + len(asked.ids)
    (knows,) = _answer_all(_Parrot(asked.candidates[0], prompt, 97), tokenizer, context)
    assert (knows.rank, knows.probability) == (1, pytest.approx(1.0))
    (wrong,) = _answer_all(_Parrot(asked.candidates[2], prompt, 97), tokenizer, context)
    assert wrong.rank == 4
    assert not wrong.found
    (silent,) = _answer_all(_Parrot([], prompt, 97), tokenizer, context)
    assert (silent.rank, silent.probability) == (4, pytest.approx(0.25))  # a tie counts against it


def test_the_same_seed_asks_the_same_and_a_model_equals_itself(root: Path) -> None:
    options: dict[str, Any] = {
        "text": root / "text.txt",
        "context": 200,
        "trials": 2,
        "depths": (0.0, 1.0),
        "codes": 4,
    }
    evaluation = evaluate_planted(root / "source", against=root / "source", **options)
    assert evaluation.first.items == 4
    assert evaluation.first.difference == 0
    assert [row.depth for row in evaluation.depths] == [0.0, 1.0]
    for row in evaluation.depths:
        assert row.reference is not None
        assert row.probability == row.reference.probability
        assert row.rank == row.reference.rank
    again = evaluate_planted(root / "source", **options)
    assert [row.probability for row in again.depths] == [row.probability for row in evaluation.depths]
    assert again.first.difference is again.depths[0].reference is None
    other = evaluate_planted(root / "source", **options, seed=1)
    assert [row.probability for row in other.depths] != [row.probability for row in evaluation.depths]


def test_all_positions_that_a_model_has(root: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "gpt2", "gpt2")
    evaluation = evaluate_planted(
        tmp_path / "gpt2", text=root / "text.txt", context=256, trials=1, depths=(0.5,), codes=4
    )
    assert evaluation.first.items == 1


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"trials": 0}, "trials = 0: must be at least 1"),
        ({"keys": 0}, "keys = 0: must be at least 1"),
        ({"keys": 11}, "keys = 11: must be at most 10"),
        ({"keys": 17, "codes": 20}, "keys = 17: must be at most 16"),
        ({"strings": 1}, "strings = 1: must be at least 2"),
        ({"strings": 8, "keys": 11}, "keys = 11: must be at most 10"),
        ({"strings": 150, "context": 200}, "context = 200: must be at least .* tokens"),
        ({"together": True, "keys": 2}, "keys = 2: must be 1"),
        ({"together": True, "codes": 4}, "depths = .* must be at most 4 together, with 4 codes"),
        ({"codes": 1}, "codes = 1: must be at least 2"),
        ({"depths": ()}, "depths = .*must be numbers from 0 to 1"),
        ({"depths": (0.5, 1.5)}, "depths = .*must be numbers from 0 to 1"),
        ({"context": 257}, "context = 257: must be at most 256"),
        ({"context": 60}, "context = 60: must be at least 1.. "),
        ({"context": 1}, "must be at least 2 tokens"),
    ],
)
def test_numbers_out_of_range(root: Path, options: dict[str, Any], rule: str) -> None:
    with pytest.raises(headwise.ArgumentError, match=rule):
        evaluate_planted(root / "source", text=root / "text.txt", **options)
