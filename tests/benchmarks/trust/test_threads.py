"""The benchmark of threads, on a few requests; and that it sees what threads would do wrong."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from benchmarks.trust.threads import Kind, Request, main

from benchmarks.trust import threads

FEW = (Kind("llama", "headwise", "int4"), Kind("mistral", "headwise"), Kind("heads", "optimize"))


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(threads, "KINDS", FEW)

    def of(count: int) -> dict[str, Any]:
        options = ["--requests", count, "--threads", 3, "--live", 6, "--each", 15, "--json", tmp_path / "kept.json"]
        main([*map(str, options)])
        result: dict[str, Any] = json.loads((tmp_path / "kept.json").read_text())
        return result

    return of


def test_every_request_is_the_replay(report: Any) -> None:
    result = report(30)
    assert result["different"] == {}
    assert result["errors"] == {"served": {}, "replayed": {}}
    assert sum(result["kinds"].values()) == result["acts"]["start"] == 30
    assert result["acts"].keys() == {"start", *threads.ACTS}
    assert len(result["served"]["mib"]) == 31


def test_what_threads_do_wrong_is_told(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Request.token

    def token(request: Request, *given: Any) -> None:
        own(request, *given)
        if threading.current_thread() is not threading.main_thread() and request.number in (1, 2):
            request.digest.update(b"another sequence's")
            assert request.number == 1, "a thread's own error"

    monkeypatch.setattr(Request, "token", token)
    result = report(3)
    assert result["different"] == {"1": "mistral headwise", "2": "heads optimize"}
    assert list(result["errors"]["served"]) == ["2"]
