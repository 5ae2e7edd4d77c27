"""The campaign of malformed files: inputs follow from a seed, files are put back, and failures are findings."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.trust.fuzz import lines, mutations, trial
from benchmarks.trust.fuzz.readers import READERS
from benchmarks.trust.fuzz.trial import Trial

from headwise.errors import CheckpointError

FAST = ("checksums", "hardware", "texts", "questions")


@pytest.mark.parametrize("name", FAST)
def test_nothing_is_found_and_every_file_is_put_back(name: str, tmp_path: Path) -> None:
    tried = Trial(name, tmp_path)
    ended = set()
    for number in range(60):
        tried.refused = ""
        assert tried.read(tried.draw(number, 3)) is None, number
        ended.add(bool(tried.refused))
    assert ended == {False, True}
    assert tried.changed() == []


def fails(error: BaseException) -> Any:
    def read(*_: object) -> None:
        raise error

    return read


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("x"), "KeyError"),
        (MemoryError(), "MemoryError"),
        (CheckpointError("f", 1, "r"), None),
        (CheckpointError("f" * 199, ["x" * 300], "r" * 1500), None),
        (RecursionError(), "RecursionError"),
    ],
)
def test_what_is_a_finding(error: BaseException, kind: str | None, tmp_path: Path) -> None:
    tried = Trial("hardware", tmp_path)
    tried.reader = replace(tried.reader, read=fails(error))
    found = tried.read(tried.draw(0, 0))
    assert found is None if kind is None else found is not None and found["kind"] == kind


def test_what_takes_too_long_or_changes_another_file_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "SECONDS", 0.05)
    tried = Trial("hardware", tmp_path)
    tried.reader = replace(tried.reader, read=lambda *_: time.sleep(5))
    found = tried.read(tried.draw(0, 0))
    assert found is not None
    assert found["kind"] == "HangError"
    assert tried.changed() == []
    (tmp_path / "seeds" / "more").write_text("")
    assert tried.changed() == ["more"]


def test_mutations_follow_from_the_seed_and_differ() -> None:
    header = b'{"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}'
    tensors = len(header).to_bytes(8, "little") + header + bytes(16)
    for name, content in {
        "spoil_bytes": b"abc" * 20,
        "spoil_json": b'{"a": [1, {"b": "c"}], "d": 2.5}',
        "spoil_jsonl": b'{"a": 1}\n{"a": 2}\n',
        "spoil_safetensors": tensors,
        "spoil_lines": b'[a]\nb = 1\nc = "d"\n',
        "spoil_gguf": b"GGUF" + bytes(20),
    }.items():
        spoil = getattr(mutations, name)
        made = [spoil(content, mutations.Draw(seed)) for seed in range(60)]
        assert made == [spoil(content, mutations.Draw(seed)) for seed in range(60)]
        assert len({*made} - {content}) > 30


def test_every_reader_names_modules_and_parts_that_are_there() -> None:
    pytest.importorskip("coverage")
    for reader in READERS.values():
        found = lines.missing(lines.trace(), reader.modules)
        assert found
        assert lines.share(found) < 0.9  # nothing was traced
        assert len(lines.words(reader.modules)) > 3
