"""Retrieval: embeddings by hand, ranks, pooling files, and a tiny BERT beside itself and another."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, BertConfig, BertModel

import headwise
from headwise.measure.evaluation import Encoder, Pooling, embed_texts, evaluate_retrieval, load_encoder, read_pooling
from headwise.measure.evaluation.retrieval import Questions, answer_ranks, pool_states, rank_scores
from tests.real_models import exchange_tokens, save_character_tokenizer, save_tiny

TEXTS = ["a jar", "where is it dark", "x", "the quick brown fox jumps over the lazy dog", "a jar, open"]


def save_bert(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=98, max_position_embeddings=40, **sizes)).save_pretrained(folder)
    save_character_tokenizer(folder, 98)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("retrieval")
    save_bert(root / "source")
    save_bert(root / "other", seed=1)
    rows = [{"question": text[:9], "passage": text} for text in TEXTS] + [{"question": "jar", "passage": TEXTS[0]}]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.mark.parametrize("mode", ["mean", "cls", "max"])
def test_embeddings_in_batches_are_those_of_each_text_by_itself(
    root: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwise.measure.evaluation.retrieval._BATCH", 60)  # the longest alone, the others together
    loaded = load_encoder(root / "source", dtype="float64")
    encoder = Encoder(name="x", model=loaded.model, tokenizer=loaded.tokenizer, pooling=Pooling(mode=mode))
    embeddings = embed_texts(encoder, TEXTS)
    for text, row in zip(TEXTS, embeddings, strict=True):
        ids = torch.tensor([loaded.tokenizer(text)["input_ids"][:40]])
        with torch.inference_mode():
            states = loaded.model(ids).last_hidden_state[0]
        expected = {"mean": states.mean(0), "cls": states[0], "max": states.amax(0)}[mode]
        torch.testing.assert_close(row, (expected / expected.norm()).float(), atol=1e-6, rtol=1e-5)


def test_a_text_is_embedded_with_the_frequencies_of_its_own_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    encoder = load_encoder(save_tiny(tmp_path / "model", rope_parameters=rope, max_position_embeddings=12))
    encoder = replace(encoder, pooling=Pooling(max_length=64))
    for text, row in zip(TEXTS, embed_texts(encoder, TEXTS), strict=True):
        alone = replace(encoder, model=AutoModel.from_pretrained(tmp_path / "model"))
        torch.testing.assert_close(row, embed_texts(alone, [text])[0], atol=1e-5, rtol=1e-5)


def test_a_reference_that_numbers_tokens_otherwise_is_refused(root: Path, tmp_path: Path) -> None:
    other = exchange_tokens(shutil.copytree(root / "source", tmp_path / "other"))
    with pytest.raises(headwise.ArgumentError, match=r"against = .*other': has 69 as the token 'a', which is 68 in"):
        evaluate_retrieval(root / "source", against=other, file=root / "rows.jsonl")


def test_padding_is_not_pooled() -> None:
    states = torch.tensor([[[1.0, -2.0], [3.0, -4.0], [torch.nan, 99.0]]])
    mask = torch.tensor([[1, 1, 0]])
    for mode, expected in (("mean", [2.0, -3.0]), ("max", [3.0, -2.0]), ("cls", [1.0, -2.0])):
        assert pool_states(states, mask, Pooling(mode=mode, normalize=False))[0].tolist() == expected


def test_ranks_and_ties() -> None:
    passages = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    questions = torch.tensor([[1.0, 0.1], [0.0, 1.0], [1.0, 0.0]])
    assert answer_ranks(questions, passages, torch.tensor([1, 1, 0])).tolist() == [3, 1, 2]


def test_every_number_by_hand(root: Path) -> None:
    evaluation = evaluate_retrieval(root / "other", against=root / "source", file=root / "rows.jsonl")
    assert (evaluation.questions, evaluation.passages) == (6, 5)
    answers = torch.tensor([0, 1, 2, 3, 4, 0])
    ranks = {}
    for name in ("source", "other"):
        encoder = load_encoder(root / name)
        questions = embed_texts(encoder, [text[:9] for text in TEXTS] + ["jar"])
        scores = questions @ embed_texts(encoder, TEXTS).T
        ranks[name] = [int((row >= row[place]).sum()) for row, place in zip(scores, answers, strict=True)]
    assert evaluation.mrr == pytest.approx(sum(1 / rank for rank in ranks["other"]) / 6)
    assert evaluation.reference is not None
    assert evaluation.reference.mrr == pytest.approx(sum(1 / rank for rank in ranks["source"]) / 6)
    assert evaluation.recall_at_1.rate == sum(rank == 1 for rank in ranks["other"]) / 6
    assert evaluation.recall_at_1.reference is not None
    assert evaluation.recall_at_1.reference.rate == sum(rank == 1 for rank in ranks["source"]) / 6
    assert evaluation.recall_at_10.rate == 1


def test_loaded_encoders_and_a_limit(root: Path) -> None:
    encoder = load_encoder(root / "source")
    evaluation = evaluate_retrieval(encoder, against=encoder, file=root / "rows.jsonl", limit=2)
    assert (evaluation.questions, evaluation.passages) == (2, 2)
    assert evaluation.recall_at_1.difference == 0
    assert evaluate_retrieval(encoder, file=root / "rows.jsonl").reference is None


def test_nan_is_refused(root: Path) -> None:
    encoder = load_encoder(root / "source")
    with torch.no_grad():
        encoder.model.embeddings.LayerNorm.bias[0] = torch.nan
    with pytest.raises(headwise.CheckpointError, match="NaN"):
        evaluate_retrieval(encoder, file=root / "rows.jsonl")


def files(folder: Path, **contents: Any) -> Path:
    for name, content in contents.items():
        path = folder / (name.replace("__", "/") + ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


MODULES = [
    {"type": f"sentence_transformers.models.{kind}", "path": path}
    for kind, path in (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
]


def test_pooling_files(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == Pooling(mode="mean", normalize=True, max_length=None)
    config = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "word_embedding_dimension": 384}
    files(tmp_path, modules=MODULES[:2], **{"1_Pooling__config": config})
    assert read_pooling(tmp_path) == Pooling(mode="cls", normalize=False)
    files(tmp_path, modules=MODULES, sentence_bert_config={"max_seq_length": 12})
    assert read_pooling(tmp_path) == Pooling(mode="cls", normalize=True, max_length=12)


@pytest.mark.parametrize(
    ("contents", "rule"),
    [
        ({"modules": {}}, "modules.json = .*: is missing or damaged"),
        ({"modules": MODULES}, "config.json = .*: is missing or damaged"),
        ({"modules": [*MODULES, {"type": "x.Dense", "path": "3"}]}, "modules.json = 'Dense'"),
        ({"modules": MODULES, "1_Pooling__config": {}}, "pooling_mode = ''"),
        ({"modules": MODULES, "1_Pooling__config": {"pooling_mode_lasttoken": True}}, "pooling_mode_lasttoken"),
    ],
)
def test_pooling_that_is_not_known(tmp_path: Path, contents: dict[str, Any], rule: str) -> None:
    with pytest.raises(headwise.CheckpointError, match=rule):
        read_pooling(files(tmp_path, **contents))


@pytest.mark.parametrize(
    "row", [{"question": "q"}, {"question": "", "passage": "p"}, {"question": 1, "passage": "p"}]
)
def test_rows_of_another_form_are_refused(root: Path, tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(headwise.ArgumentError, match=r"retrieval = .*item 1': must have"):
        evaluate_retrieval(root / "source", file=path)


def test_what_cannot_be_loaded(root: Path, tmp_path: Path) -> None:
    for options, field in (({"dtype": "int8"}, "dtype"), ({"device": "nowhere"}, "device")):
        with pytest.raises(headwise.ArgumentError, match=f"{field} = "):
            load_encoder(root / "source", **options)
    with pytest.raises(headwise.HeadwiseError):
        load_encoder(tmp_path)


def test_equal_passages_count_once_and_each_question_has_one(tmp_path: Path) -> None:
    rows = [("a", "x"), ("b", "y"), ("c", "x"), ("d", "z")]
    file = tmp_path / "evaluation.jsonl"
    file.write_text("".join(json.dumps({"question": q, "passage": p}) + "\n" for q, p in rows))
    evaluation = Questions.read(file)
    assert evaluation.questions == ["a", "b", "c", "d"]
    assert evaluation.passages == ["x", "y", "z"]
    assert evaluation.answers.tolist() == [0, 1, 0, 2]
    assert Questions.read(file, 2).passages == ["x", "y"]


def test_ranks_side_by_side() -> None:
    scores = rank_scores(torch.tensor([1, 2, 1, 11]), torch.tensor([1, 1, 2, 1]))
    near, wider = scores["recall_at_1"], scores["recall_at_10"]
    assert (near.rate, near.reference.rate) == (0.5, 0.75)
    assert (near.only_model, near.only_reference) == (1, 2)
    assert near.difference_low <= near.difference == -0.25 <= near.difference_high
    assert (wider.rate, wider.reference.rate) == (0.75, 1.0)
    assert scores["mrr"] == pytest.approx((1 + 1 / 2 + 1 + 1 / 11) / 4)
