"""Multiple choice: likelihoods by hand, both forms of a file, and files of another form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import headwise
from headwise.measure.evaluation import evaluate_choices, log_likelihoods, read_choices
from headwise.measure.evaluation.choices import _BATCH, PROMPT, Choice
from headwise.measure.texts.windows import ending_ids
from headwise.models.checkpoints import load_tokenizer
from tests.measure.evaluation.by_hand import scores_by_hand
from tests.real_models import save_tiny, tiny_model

ITEMS = [
    Choice("How does one open a jar", ("by its lid", "with a ladder, slowly", "no"), 0),
    Choice("Where is it dark?", ("at noon", "at night, mostly"), 1),
    Choice("Dry?", ("water", "sand"), 1),
    Choice("Cold?", ("ice", "fire"), 0),
]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("choices")
    save_tiny(root / "source")
    save_tiny(root / "other", seed=3)
    rows = [{"question": i.question, "choices": list(i.choices), "answer": i.answer} for i in ITEMS]
    write(root / "items.jsonl", rows)
    return root


def test_likelihoods_in_batches_are_those_of_each_token_by_itself() -> None:
    model = tiny_model("llama", max_position_embeddings=2048)
    torch.manual_seed(2)
    lengths = [(9, 4), (30, 1), (1, 7), (700, 3), (700, 40), (12, 12), (9, 4)]
    sequences = [(torch.randint(3, 97, (p,)).tolist(), torch.randint(3, 97, (e,)).tolist()) for p, e in lengths]
    assert sum(map(sum, lengths)) > _BATCH / 2
    scores = log_likelihoods(model, sequences)
    for score, (prompt, ending) in zip(scores, sequences, strict=True):
        assert score == pytest.approx(scores_by_hand(model, prompt, ending), rel=1e-5)


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 48}
LENGTHS = {
    "longrope": ({**LONG, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}, 192),
    "dynamic": ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, 48),
}
"""RoPE that changes beyond 48 tokens, and the positions of its model."""


@pytest.mark.parametrize("kind", LENGTHS)
def test_an_item_is_scored_with_the_frequencies_of_its_own_length(kind: str, tmp_path: Path) -> None:
    rope, positions = LENGTHS[kind]
    folder = save_tiny(tmp_path / "model", rope_parameters=rope, max_position_embeddings=positions)
    torch.manual_seed(2)
    sequences = [(torch.randint(3, 97, (n,)).tolist(), [5, 6, 7]) for n in (80, 40, 61, 30, 61)]
    scores = log_likelihoods(headwise.load(folder), sequences)
    for score, sequence in zip(scores, sequences, strict=True):
        alone = log_likelihoods(AutoModelForCausalLM.from_pretrained(folder), [sequence])
        assert score == pytest.approx(alone[0], rel=1e-5)


def test_accuracy_by_hand(root: Path) -> None:
    tokenizer = load_tokenizer(root / "source")
    right: dict[str, list[list[bool]]] = {}
    for name in ("source", "other"):
        model = headwise.load(root / name)
        plain, by_length = [], []
        for item in ITEMS:
            scores = []
            for choice in item.choices:
                split = ending_ids(tokenizer, PROMPT.format(question=item.question), f" {choice}")
                assert tokenizer.decode(split[1]).replace(" ", "") == choice.replace(" ", "")
                scores.append(scores_by_hand(model, *split))
            lengths = [len(choice) for choice in item.choices]
            plain.append(max(range(len(scores)), key=lambda k: scores[k]) == item.answer)
            by_length.append(max(range(len(scores)), key=lambda k: scores[k] / lengths[k]) == item.answer)
        right[name] = [plain, by_length]
    evaluation = evaluate_choices(root / "other", against=root / "source", file=root / "items.jsonl")
    for measured, own, reference in zip(
        (evaluation.accuracy, evaluation.accuracy_norm), right["other"], right["source"], strict=True
    ):
        assert measured.rate == sum(own) / 4
        assert measured.reference is not None
        assert measured.reference.rate == sum(reference) / 4
        assert measured.only_model == sum(a and not b for a, b in zip(own, reference, strict=True))
    assert evaluation.items == 4
    assert evaluate_choices(root / "other", file=root / "items.jsonl", limit=2).items == 2


def test_a_model_against_itself(root: Path) -> None:
    evaluation = evaluate_choices(root / "source", against=root / "source", file=root / "items.jsonl")
    assert evaluation.accuracy.only_model == evaluation.accuracy.only_reference == evaluation.accuracy.difference == 0


def test_both_forms_are_read(tmp_path: Path) -> None:
    rows = [
        {"goal": "g", "sol1": "a", "sol2": "b", "label": 1},
        {"question": "q", "choices": ["x", "y", "z"], "answer": 2, "title": "not used"},
    ]
    path = write(tmp_path / "both.jsonl", rows)
    path.write_text(path.read_text().replace("\n", "\n\n"))
    assert read_choices(path) == [Choice("g", ("a", "b"), 1), Choice("q", ("x", "y", "z"), 2)]


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"question": "q", "choices": ["only"], "answer": 0},
        {"question": "q", "choices": "ab", "answer": 0},
        {"question": "q", "choices": ["a", ""], "answer": 0},
        {"question": "q", "choices": ["a", "b"], "answer": 2},
        {"question": "q", "choices": ["a", "b"], "answer": "a"},
        {"question": "q", "choices": ["a", "b"], "answer": True},
        {"question": None, "choices": ["a", "b"], "answer": 0},
        {"goal": "g", "sol1": "a", "label": 0},
        {"goal": "g", "sol1": "a", "sol2": "b", "label": -1},
    ],
)
def test_items_of_another_form_are_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    good = {"question": "q", "choices": ["x", "y"], "answer": 0}
    with pytest.raises(headwise.ArgumentError, match=r"choices = .*, item 2'"):
        read_choices(write(tmp_path / "bad.jsonl", [good, row]))


@pytest.mark.parametrize("content", ["", "\n\n", "[1]\n", "{not json}\n", "[" * 5000])
def test_files_of_another_form_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(headwise.ArgumentError, match=r"choices = .* JSON object"):
        read_choices(tmp_path / "bad.jsonl")


def test_an_ending_longer_than_the_positions(root: Path) -> None:
    long = write(root / "long.jsonl", [{"question": "q", "choices": ["a" * 300, "b"], "answer": 0}])
    with pytest.raises(headwise.ArgumentError, match="must fit"):
        evaluate_choices(root / "source", file=long)
    fits = write(root / "fits.jsonl", [{"question": "q" * 500, "choices": ["a" * 200, "b"], "answer": 0}])
    assert evaluate_choices(root / "source", file=fits).items == 1


def test_a_token_across_the_seam_is_the_endings() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "a": 1, ":": 2, " ": 3, "b": 4, ": ": 5}
    tokenizer = Tokenizer(models.BPE(vocab, [(":", " ")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    assert ending_ids(fast, "aa:", " b") == ([1, 1], [5, 4])
