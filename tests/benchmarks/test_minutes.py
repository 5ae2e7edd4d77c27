"""The benchmark of the time that conversions take, with a tiny model in the place of a large one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import minutes


def test_each_stage_is_timed_beside_what_is_expected_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    monkeypatch.setattr(minutes, "QWEN2", {**minutes.QWEN2, **small, **heads})
    cache, file = tmp_path / "cache", tmp_path / "minutes.json"
    cache.mkdir()
    (cache / "wikitext-2.train.txt").write_text("".join(f"Sentence {place} ends here. " for place in range(60)))
    command = ["0.5B", "--cache", str(cache), "--work", str(tmp_path / "w"), "--json", str(file), "--tokens", "512"]
    minutes.main(command)
    row = json.loads(file.read_text())["rows"]["0.5B"]
    assert list(row["stages"]) == ["estimating", *row["expected"]]
    assert 0 < sum(row["stages"].values()) <= row["seconds"]
    assert row["cpu_seconds"] > 0
    capsys.readouterr()
    minutes.main(command)
    assert "0.5B: " in capsys.readouterr().out
    same = tmp_path / "same.json"
    minutes.main([*command[:-3], str(same), "--tokens", "512", "--to", "same", "--kv-bytes", "0.5"])
    assert list(json.loads(same.read_text())["rows"]["0.5B"]["stages"]) == [
        "estimating",
        "measuring sensitivities",
        "converting",
    ]
