"""Ranks that share a layer's heads compute what one computes: forward, backward and decoding with a cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headwise.runtime.attention.base import Cut
from headwise.runtime.parallel import cut_tensor
from tests.warm import run


def run_on(ranks: int, program: str, *arguments: object) -> str:
    """What a program of this folder prints on several ranks."""
    done = run(Path(__file__).with_name(program), *arguments, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_compute_what_one_computes(ranks: int) -> None:
    assert "every mechanism agrees" in run_on(ranks, "shared_heads.py")


def test_parts_of_a_tensor_are_heads_of_each_section() -> None:
    rows = torch.arange(12)
    parts = [cut_tensor(rows, Cut(0, 2, sections=2), 2, rank).tolist() for rank in range(2)]
    assert parts == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    held = [cut_tensor(rows, Cut(0, 2), 4, rank).tolist() for rank in range(4)]  # two ranks hold each head
    assert held == [list(range(6))] * 2 + [list(range(6, 12))] * 2
