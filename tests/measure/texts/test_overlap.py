"""Shared passages, compared with a count by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise.measure.texts import windows
from headwise.measure.texts.windows import overlap_note, passages_apart, shared_fraction, shared_tokens
from headwise.models.checkpoints import load_tokenizer
from tests.real_models import save_character_tokenizer


def by_hand(evaluation: Sequence[Tensor], study: Sequence[Tensor], run: int) -> list[list[bool]]:
    """Mark the shared tokens of the evaluation windows by comparing every run of tokens with every other."""

    def rows(windows: Sequence[Tensor]) -> list[list[int]]:
        return [row.tolist() for batch in windows for row in (batch if batch.dim() == 2 else batch[None])]

    runs = {tuple(row[at : at + run]) for row in rows(study) for at in range(len(row) - run + 1)}
    marks = []
    for row in rows(evaluation):
        mark = [False] * len(row)
        for at in range(len(row) - run + 1):
            if tuple(row[at : at + run]) in runs:
                mark[at : at + run] = [True] * run
        marks.append(mark)
    return marks


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(2, 3))
def test_marks_are_those_of_a_count_by_hand(seed: int, run: int, letters: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def windows() -> list[Tensor]:
        shapes = [(2, 9), (5,), (1, 3), (12,), (0,)]
        return [torch.randint(0, letters, shape, generator=draw) for shape in shapes]

    evaluation, study = windows(), windows()
    marks = shared_tokens(evaluation, study, run=run)
    assert [mark.shape for mark in marks] == [batch.shape for batch in evaluation]
    flat = [row.tolist() for mark in marks for row in (mark if mark.dim() == 2 else mark[None])]
    assert flat == by_hand(evaluation, study, run)
    assert shared_fraction(evaluation, study, run=run) == pytest.approx(sum(map(sum, flat)) / sum(map(len, flat)))


def test_equal_hashes_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        windows, "_hashes", lambda rows, run: np.zeros((len(rows), max(rows.shape[1] - run + 1, 0)), np.uint64)
    )
    evaluation, study = [torch.arange(10), torch.arange(50, 60)], [torch.arange(4, 14)]
    assert [mark.tolist() for mark in shared_tokens(evaluation, study, run=4)] == [
        [False] * 4 + [True] * 6,
        [False] * 10,
    ]


def test_runs_do_not_go_on_in_the_next_window() -> None:
    whole = torch.arange(40)
    assert shared_fraction([whole], [whole.view(4, 10)], run=11) == 0
    assert shared_fraction([whole.view(4, 10)], [whole], run=10) == 1
    assert shared_fraction([], [whole]) == shared_fraction([whole], []) == shared_fraction([whole], [whole[:19]]) == 0


def test_a_hundred_thousand_tokens() -> None:
    evaluation, study = (
        torch.randint(0, 50_000, (50, 2048), generator=torch.Generator().manual_seed(at)) for at in (1, 2)
    )
    study[7, 100:600] = evaluation[3, 1000:1500]
    for other, share in ((study, 500 / evaluation.numel()), (evaluation, 1.0)):
        assert shared_fraction([evaluation], [other]) == pytest.approx(share)


def test_a_note_where_more_than_a_hundredth_is_shared() -> None:
    evaluation, study = torch.arange(4000).view(2, 2000), torch.arange(10_000, 14_000).view(2, 2000)
    assert overlap_note([evaluation], [study]) is None
    study[0, :40] = evaluation[1, 500:540]
    assert overlap_note([evaluation], [study]) is None  # exactly a hundredth
    study[0, :41] = evaluation[1, 500:541]
    assert overlap_note([evaluation], [study]) == (
        "1.0% of the 4,000 tokens evaluated on lie in passages of 20 or more tokens that the calibration text has"
        " too: expect a worse result on other text"
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A token a character."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_character_tokenizer(folder, 97)
    return load_tokenizer(folder)


def test_passages_without_shared_runs_stay(tokenizer: Any) -> None:
    study = "the quick brown fox jumps over the lazy dog"
    passages = ["a fox that jumps over the lazy cat", "over the lazy dog, twice", "short", "pack my box with jugs"]
    assert passages_apart(tokenizer, passages, study) == passages[1:]
    assert passages_apart(tokenizer, [*passages, study], study) == passages[1:]
