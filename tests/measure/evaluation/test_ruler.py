"""RULER's tasks asked of a model: prompts, greedy answers, and scores beside a reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

import headwise
from headwise.errors import ArgumentError
from headwise.measure.evaluation import evaluate_ruler, open_pair
from headwise.measure.evaluation.results import wilson_interval
from headwise.measure.evaluation.ruler import _draw, _scores, answer, prompt_ids
from headwise.measure.evaluation.ruler_tasks import TASKS, Material, Sample
from headwise.measure.texts import language_reference
from headwise.models.checkpoints import load_tokenizer
from tests.real_models import save_tiny

LENGTH = 1500
SOME = ("vt", "fwe")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ruler")
    save_tiny(root / "source", max_position_embeddings=2048)
    (root / "text.txt").write_text(language_reference(slice(10)))
    headwise.convert(root / "source", root / "half", to="mla", kv_budget=0.5, evaluate=False)
    return root


@pytest.mark.parametrize("prompt", [40, 1500])  # in one piece, and in two
def test_answers_are_looked_for_in_what_transformers_generates(root: Path, prompt: int) -> None:
    model, tokenizer = headwise.load(root / "source"), load_tokenizer(root / "source")
    sample = Sample(language_reference()[: prompt - 5], " It is", ())
    ids = prompt_ids(tokenizer, sample)
    greedy = GenerationConfig(max_new_tokens=30, do_sample=False, pad_token_id=0)
    made = model.generate(torch.tensor([ids]), generation_config=greedy)[0, len(ids) :].tolist()
    # A place whose token shows in the text, and is not made before.
    at = next(place for place in range(8, 20) if made[place] > 2 and made[place] not in made[:place])

    def said(tokens: int) -> str:
        return str(tokenizer.decode(made[:tokens], skip_special_tokens=True))

    for answers, tokens, share in (
        ([said(at + 1)], 30, 1),
        ([said(at + 1)], at + 1, 1),
        ([said(at + 1)], at, 0),
        ([said(at + 1), said(at)], at, 0.5),
        (["no such answer", said(at).upper()], 30, 0.5),
        ([said(30)], 30, 1),
    ):
        assert answer(model, tokenizer, Sample("", "", tuple(answers)), ids, tokens) == share
    model.generation_config.eos_token_id = made[at]
    assert answer(model, tokenizer, Sample("", "", (said(at),)), ids, 30) == 1
    assert answer(model, tokenizer, Sample("", "", (said(30),)), ids, 30) == 0


def test_scores_are_paired_with_the_references_sample_by_sample() -> None:
    shares, reference = {"vt": [1.0, 0.4, 0.0, 1.0]}, {"vt": [1.0, 1.0, 0.0, 1.0]}
    (score,) = _scores({"vt": 5}, shares, reference, 0)
    assert (score.task, score.answers, score.score) == ("vt", 5, 0.6)
    assert (score.complete.rate, score.complete.low, score.complete.high) == (0.5, *wilson_interval(2, 4))
    assert (score.complete.only_model, score.complete.only_reference) == (0, 1)
    assert score.to_dict()["reference_score"] == 0.75


def test_a_model_beside_itself_and_beside_another(root: Path) -> None:
    source = root / "source"
    asked = {"text": root / "text.txt", "length": LENGTH, "samples": 2, "tasks": SOME}
    same = evaluate_ruler(source, against=source, **asked)
    assert [score.task for score in same.tasks] == list(SOME)
    assert [score.answers for score in same.tasks] == [5, 3]
    assert same.reference is not None
    assert same.score == same.reference.score == sum(score.score for score in same.tasks) / 2
    assert all(score.complete.difference == 0 and score.complete.items == 2 for score in same.tasks)
    half = evaluate_ruler(root / "half", against=source, **asked)
    assert (half.against, half.samples, half.length, half.cache) == (str(source), 2, LENGTH, None)
    assert half.reference is not None
    assert half.reference.tasks == same.reference.tasks
    coded = evaluate_ruler(source, cache="int2", **asked)
    assert (coded.cache, coded.reference) == ("int2", None)
    assert evaluate_ruler(source, **asked).to_dict()["reference_score"] is None


def test_samples_depend_on_the_seed_and_not_on_the_model_or_other_tasks(root: Path) -> None:
    options = headwise.RulerOptions(text=root / "text.txt", length=LENGTH, samples=2)
    material = Material((root / "text.txt").read_text(), LENGTH)
    pairs = [open_pair(root / "source"), open_pair(root / "half", against=root / "source")]
    drawn = [_draw(pair.tokenizer, "vt", material, options) for pair in pairs]
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]
    for sample, ids in drawn[0]:
        assert len(ids) + TASKS["vt"].tokens <= LENGTH
        assert ids == prompt_ids(pairs[0].tokenizer, sample)
    other = headwise.RulerOptions(text=root / "text.txt", length=LENGTH, samples=2, seed=1)
    assert _draw(pairs[0].tokenizer, "vt", material, other)[0] not in drawn[0]


def test_the_answer_begins_behind_the_chat_template(root: Path) -> None:
    tokenizer = load_tokenizer(root / "source")
    sample = Sample("What?", " It is", ("it",))
    raw = prompt_ids(tokenizer, sample)
    assert tokenizer.decode(raw).replace(" ", "") == "What?Itis"
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}[me]{% endif %}"
    chat = prompt_ids(tokenizer, sample, chat=True)
    assert tokenizer.decode(chat).replace(" ", "") == "[user]What?[/][me]Itis"


def test_bad_input(root: Path) -> None:
    source, text = root / "source", root / "text.txt"
    for options, line in (
        ({"tasks": ["niah"]}, "tasks = 'niah': must be one of niah_single_1, "),
        ({"length": 4096}, "length = 4096: must be at most 2048, by the models' positions"),
        ({"length": 200}, "length = 200: must be at least"),
        ({"length": LENGTH, "chat": True}, "chat = True: needs a tokenizer with a chat template"),
        ({"samples": 0}, "samples = 0: must be at least 1"),
    ):
        with pytest.raises(ArgumentError, match=f"^{line}"):
            evaluate_ruler(source, text=text, **options)
    with pytest.raises(ArgumentError, match=r"text = 'nowhere\.txt': could not be read"):
        evaluate_ruler(source, text="nowhere.txt")
