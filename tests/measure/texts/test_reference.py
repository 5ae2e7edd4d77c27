"""The two texts of Python's language reference."""

from __future__ import annotations

from pathlib import Path

import torch

from headwise.measure.texts import language_reference, shared_fraction, token_ids, write_reference_texts
from headwise.models.checkpoints import load_tokenizer
from headwise.models.specs.sources import bundled_gguf


def test_the_two_texts_share_no_passage_and_are_always_the_same(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(bundled_gguf())
    study, evaluation = write_reference_texts(tmp_path, tokenizer)
    assert (study.name, evaluation.name) == ("study.txt", "exam.txt")
    study_ids, exam_ids = (
        torch.tensor(token_ids(tokenizer, path.read_text(encoding="utf-8"))) for path in (study, evaluation)
    )
    assert shared_fraction([exam_ids], [study_ids]) == 0
    assert len(exam_ids) > 4 * 2048  # windows for an evaluation are left
    halves = [torch.tensor(token_ids(tokenizer, language_reference(slice(first, None, 2)))) for first in (0, 1)]
    assert torch.equal(study_ids, halves[0])
    assert shared_fraction([halves[1]], [study_ids]) > 0.2  # of topics as they are a good part is shared
    before = study.read_bytes(), evaluation.read_bytes()
    write_reference_texts(tmp_path, tokenizer)
    assert (study.read_bytes(), evaluation.read_bytes()) == before
