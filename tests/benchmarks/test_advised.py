"""The benchmark of advice that is followed, on a tiny model."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

import headwise
from benchmarks import advised, tables
from headwise.advice import AS_IT_IS
from tests.real_models import save_tiny


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    cache = tmp_path / "cache"
    cache.mkdir()
    for name in ("wikitext-2.train", "wikitext-2.test", "brown", "austen"):
        (cache / f"{name}.txt").write_text("".join(f"Sentence {place} of {name} ends here. " for place in range(60)))
    monkeypatch.setattr(advised, "SOURCE", str(save_tiny(tmp_path / "source")))
    return Namespace(work=tmp_path / "work", cache=cache, tokens=256, context=60, windows=2, dtype="float32")


def test_what_is_advised_is_converted_once_timed_and_evaluated(
    options: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = advised.followed("mla@0.5", options)
    monkeypatch.setattr(headwise, "convert", None)
    assert advised.followed("mla@0.5", options) == (folder, cache) == (options.work / "mla-0.5", None)
    assert advised.followed("int8", options) == (advised.SOURCE, "int8")
    assert advised.followed(AS_IT_IS, options) == (advised.SOURCE, None)
    times = advised.step_times(
        {AS_IT_IS: (advised.SOURCE, None), "a": (advised.SOURCE, "int8"), "b": (folder, None)}, options
    )
    assert set(times) == {AS_IT_IS, "a", "b"}
    assert all(0.01 < each < 10_000 for each in times.values())
    found = advised.evaluated(folder, None, options)
    assert len(found["texts"]) == 3
    assert found["cache_bytes_per_token"] < found["reference_cache_bytes_per_token"]


def test_the_table_has_predicted_beside_measured() -> None:
    texts = [{"perplexity_ratio": ratio} for ratio in (1.01, 1.02, 1.03)]
    row: dict[str, Any] = {
        "target": "mla@0.19",
        "kept_loss": 0.018,
        "predicted_ms": 47.0,
        "predicted_ms_as_it_is": 33.0,
        "measured_ms": 45.0,
        "measured_ms_as_it_is": 31.0,
        "predicted_bytes": 4377.6,
        "evaluate": {"texts": texts, "cache_bytes_per_token": 4356.0},
    }
    rows = {"latency": {**row, "target": AS_IT_IS, "evaluate": None}, "memory": row}
    assert tables.advised({"rows": rows}).splitlines()[2:] == [
        "| latency | as it is | 47.0, 33.0 | 45.0, 31.0 | 4,378 |  |  |  |",
        "| memory | `mla@0.19` | 47.0, 33.0 | 45.0, 31.0 | 4,378, 4,356 | ×1.0180 | ×1.0100 | ×1.0200, ×1.0300 |",
    ]
