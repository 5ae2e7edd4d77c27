"""The counts of other packages, in one unit, and the reason if a package has none."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn, zeros

from headwise.study.counting import PeerCount, peer_counts
from headwise.study.counting import layer_comparison as other_counters


class Scaled(nn.Module):
    """A linear layer whose second argument has to be given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5, bias=False)

    def forward(self, states: Tensor, *, scale: float) -> Tensor:
        out: Tensor = self.linear(states) * scale
        return out


def test_multiply_adds_are_two_flops() -> None:
    assert PeerCount(name="thop", version="1", printed=7).flops == 14
    assert PeerCount(name="torch", version="1", printed=7, unit="FLOPs").flops == 7
    assert PeerCount(name="thop", version=None, error="is not installed").flops is None


def test_every_counter_is_asked_about_the_whole_call() -> None:
    answers = {peer.name: peer for peer in peer_counts(Scaled(), zeros(1, 2, 3), scale=2.0)}
    assert list(answers) == ["thop", "fvcore", "torchinfo", "calflops", "torch"]
    assert {peer.error for peer in answers.values()} == {None}
    assert {answers[name].flops for name in ("thop", "fvcore", "torch")} == {2 * 2 * 3 * 5}
    assert {answers[name].parameters for name in ("thop", "fvcore", "torchinfo", "calflops")} == {15}
    assert answers["torch"].parameters is None


def test_a_counter_without_an_answer_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: nn.Module, states: Tensor) -> Any:
        raise RuntimeError("no such operator")

    counters = {"no-such-package": (fail, "FLOPs"), "torch": (fail, "FLOPs")}
    monkeypatch.setattr(other_counters, "PEERS", counters)
    missing, failing = peer_counts(Scaled(), zeros(1, 2, 3), scale=2.0)
    assert (missing.version, missing.printed) == (None, None)
    assert missing.error == "is not installed (pip install 'headwise[bench]')"
    assert failing.version is not None
    assert failing.error == "RuntimeError: no such operator"
