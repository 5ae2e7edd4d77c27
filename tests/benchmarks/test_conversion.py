"""The conversion benchmark on a toy: published methods as folders, the choice of their settings, continued runs."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.conversion import Row, plan, variants
from hypothesis import given
from hypothesis import strategies as st

import headwise
from benchmarks import conversion, long, tables
from headwise.conversion.calibration.saved import open_statistics, read_evidence
from headwise.conversion.storage import LayerFiles
from headwise.measure.texts import calibration_windows
from headwise.models.checkpoints import load_tokenizer
from headwise.models.specs import GroupedSpec, RopeSpec, split_budget
from tests.closeness import assert_close
from tests.real_models import save_tiny

LAYER = GroupedSpec(hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64, rope=RopeSpec(dim=64))
TEXT = "Whatever is worth measuring is worth measuring twice, side by side; and saying how. "


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy source, and short files in the places of the texts."""
    root = tmp_path_factory.mktemp("benchmark")
    save_tiny(root / "source")
    cache = root / "cache"
    cache.mkdir()
    for place, name in enumerate(("wikitext-2.train", "wikitext-2.valid", "wikitext-2.test", "brown", "austen")):
        (cache / f"{name}.txt").write_text((TEXT[place:] + TEXT[:place]) * 40)
    items = [{"question": "Why?", "choices": ["so.", "no."], "answer": 1}] * 3
    (cache / "piqa.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return root


def arguments(root: Path, name: str, *more: str) -> Sequence[str]:
    return [
        *("--source", str(root / "source"), "--cache", str(root / "cache"), "--work", str(root / "work")),
        *("--json", str(root / name), "--mla", "14+10", "--window", "64", "--windows", "2", "--tokens", "512"),
        *more,
    ]


# --- what is measured ---


def test_sizes_are_split_as_a_conversion_splits_them_unless_they_say_how() -> None:
    rows = {row.name: row for row in plan(LAYER, ["216", "152+64", "192"])}
    assert (rows["mla-192/headwise"].kv_lora_rank, rows["mla-192/headwise"].qk_rope_head_dim) == split_budget(
        LAYER, 192
    )
    assert rows["mla-216/transmla"].target == {"to": "mla", "kv_lora_rank": 152, "qk_rope_head_dim": 64}
    assert rows["mla-192/headwise-mixture"].texts == ("wikitext", "moby-dick", "xsum")
    assert [row.name for row in rows.values() if row.stock] == ["mla-192/headwise-stock"]
    assert rows["mqa/mean"].target == {"to": "mqa"}
    assert [row.name for row in plan(LAYER, ["96"], ["*/mha2mla", "mqa/f*"])] == ["mla-96/mha2mla", "mqa/first_head"]


@given(st.integers(8, 300), st.sampled_from([2, 16, 32, 48, 64]), st.sampled_from(["transmla", "mha2mla"]))
def test_every_variant_is_another_and_keeps_the_rows_own_split_among_its_choices(
    values: int, rotary: int, method: str
) -> None:
    row = Row("r", method, max(values - rotary, 1), rotary)
    settings = [tuple(setting.items()) for setting in variants(row)]
    assert len(set(settings)) == len(settings)
    widths = {dict(setting)["qk_rope_head_dim"] for setting in settings}
    assert rotary in widths
    assert all(width == rotary or 2 * width <= row.kv_lora_rank + rotary for width in widths)


# --- published methods ---


def test_statistics_are_of_windows_as_long_as_those_that_are_measured_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwise.conversion.solvers.device.QUICK", False)  # layers are then run in float32
    options = {"source": str(root / "source"), "cache": root / "cache", "work": root / "own", "json": root / "s.json"}
    options |= {"tokens": 512, "items": 0, "windows": 2, "window": 64, "split": "test"}
    bench = conversion.Bench(Namespace(**options))
    folder = bench._statistics(Row("r", "transmla", 14, 10, ("wikitext",)))
    monkeypatch.setattr(conversion, "collect_statistics", None)
    assert bench._statistics(Row("s", "mha2mla", 12, 12, ("wikitext",))) == folder
    open_statistics(folder, bench.checkpoint)  # refuses what is not whole
    windows = calibration_windows(
        load_tokenizer(root / "source"), [root / "cache/wikitext-2.train.txt"], tokens=512, window=64
    )
    model, calls = headwise.load(root / "source", dtype=torch.float32), list[torch.Tensor]()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: calls.append(kwargs["hidden_states"]), with_kwargs=True
        )
    with torch.inference_mode():
        model(windows)
    for index, inputs in enumerate(calls):
        flat = torch.cat((inputs.flatten(0, 1), torch.ones(512, 1)), dim=1).double()
        statistics = read_evidence(LayerFiles(folder), index).statistics
        assert statistics is not None
        assert_close(statistics.inputs, flat.mT @ flat / 512, 1e-5)


# --- the whole of it ---


def test_rows_are_measured_once_and_the_published_ones_at_their_best(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = ("--rows", "mla-24/headwise", "mla-24/transmla", "mqa/mean")
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "FOLDS", (1, 2))
        conversion.main(arguments(root, "a.json", *wanted))
    document = json.loads((root / "a.json").read_text())
    rows = document["rows"]
    assert document["settings"]["calibration_tokens"] == 512
    tried = {name: row["valid_perplexity"] for name, row in rows.items() if "?" in name}
    assert len(tried) == 2
    best = rows["mla-24/transmla"]
    assert best["valid_perplexity"] == min(tried.values())
    assert tried[f"mla-24/transmla?qk_rope_head_dim=10&freqfold={best['setting']['freqfold']}"] == min(tried.values())
    texts = [Path(score["text"]).stem for score in best["evaluate"]["texts"]]
    assert texts == ["wikitext-2.test", "brown", "austen"]
    assert [rows[f"mla-24/{name}"]["values"] for name in ("headwise", "transmla")] == [24, 24]
    assert rows["mqa/mean"]["values"] == 16
    assert rows["mla-24/headwise"]["choices"]["items"] == 3
    assert "choices" not in best
    assert rows["mla-24/headwise"]["conversion"]["calibration_tokens"] == 512
    for name, shared in (("mla-24/headwise", 1.0), ("mla-24/transmla", 1.0), ("mqa/mean", None)):
        texts = [score["text"] for score in rows[name]["evaluate"]["texts"]]  # each the calibration's, rotated
        assert rows[name]["shared"] == ({} if shared is None else dict.fromkeys(texts, shared))
    assert [path.name for path in (root / "work").iterdir()] == ["statistics-source-wikitext-512"]

    assert [line.split(" | ")[0] for line in tables.conversion(document).splitlines()[2:]] == [
        *("| 48", "| 24", "| 24", "| 16, MQA")
    ]

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError

    for module, name in ((headwise, "convert"), (conversion, "collect_statistics"), (conversion, "evaluate")):
        monkeypatch.setattr(module, name, never)
    before = (root / "a.json").read_bytes()
    conversion.main(arguments(root, "a.json", *wanted))
    assert (root / "a.json").read_bytes() == before
    capsys.readouterr()
    conversion.main(arguments(root, "a.json", *wanted, "mla-24/mha2mla", "--list"))
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["mla-24/headwise", "done"],
        ["mla-24/transmla", "done"],
        ["mla-24/mha2mla"],
        ["mqa/mean", "done"],
    ]


def test_a_conversion_that_was_made_is_not_made_again_when_its_evaluation_was_killed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ("--rows", "mqa/first_head", "--keep", "--split", "valid")
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "evaluate", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            conversion.main(arguments(root, "b.json", *wanted))
    with monkeypatch.context() as patch:
        patch.setattr(headwise, "convert", None)
        conversion.main(arguments(root, "b.json", *wanted))
    row = json.loads((root / "b.json").read_text())["rows"]["mqa/first_head"]
    assert [Path(score["text"]).stem for score in row["evaluate"]["texts"]] == ["wikitext-2.valid"]
    assert (root / "work" / "mqa-first_head" / "config.json").exists()
    monkeypatch.setattr(headwise, "convert", None)
    with pytest.raises(TypeError):  # of other tokens it is another conversion
        conversion.main(arguments(root, "c.json", *wanted, "--tokens", "256"))


def test_what_is_lost_at_length_is_kept_text_by_text(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [
        *("--source", str(root / "source"), "--work", str(root / "half"), "--cache", str(root / "cache")),
        *("--conversions", "mla:0.5", "mla:0.25", "--tokens", "256", "--dtype", "float32"),
        *("--context", "224", "--windows", "2", "--json", str(root / "long.json")),
    ]
    long.main(options)
    monkeypatch.setattr(headwise, "convert", None)
    monkeypatch.setattr(long, "evaluate", None)
    long.main(options)  # all is kept
    document = json.loads((root / "long.json").read_text())
    assert list(document["rows"]) == [
        f"{cache}/{text}" for cache in ("mla:0.5", "mla:0.25") for text in ("wikitext", "brown", "austen")
    ]
    scores = document["rows"]["mla:0.25/brown"]["texts"][0]["by_position"]
    assert scores[-1]["stop"] == 224
    lines = tables.positions(document).splitlines()
    assert lines[0] == "| text | positions | original (nats) | `mla:0.5` | `mla:0.25` |"
    assert len(lines) == 2 + 3 * len(scores)
    (last,) = (line for line in lines if line.startswith(f"| brown | {scores[-1]['start']:,}–223 "))
    assert last.endswith(f" | {scores[-1]['nll'] - scores[-1]['reference_nll']:+.3f} |")
    half, quarter = (
        headwise.measure.evaluation.evaluate(
            root / "half" / f"source-mla-values-{part}-256",
            text=root / "cache" / "wikitext-2.test.txt",
            against=root / "source",
            window=224,
            windows=2,
        )
        for part in ("0.5", "0.25")
    )
    for name, whole in (("mla:0.5", half), ("mla:0.25", quarter)):
        row = document["rows"][f"{name}/wikitext"]
        assert row["perplexity_ratio"] == pytest.approx(whole.perplexity_ratio, rel=1e-4)
