"""Calibration text: which windows are cut from which texts."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch

from headwise.errors import ArgumentError, MissingExtraError
from headwise.measure.texts import (
    calibration_windows,
    hold_out,
    named_texts,
    read_source,
    text_identity,
    windows_beyond,
)
from headwise.measure.texts.sources import read_jsonl, read_text
from headwise.models.checkpoints import load_tokenizer
from tests.real_models import save_character_tokenizer

LETTERS = "abcd"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A token a character."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_character_tokenizer(folder, 97)
    return load_tokenizer(folder)


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    """Texts of one letter each, and of digits that number the positions."""
    files = []
    for letter in LETTERS:
        files.append(tmp_path / f"{letter}.txt")
        files[-1].write_text("".join(f"{letter}{index:03d}" for index in range(100)))
    return files


def written(tokenizer: Any, windows: torch.Tensor) -> list[str]:
    return ["".join(tokenizer.convert_ids_to_tokens(row.tolist())) for row in windows]


def test_sources_take_turns_have_equal_shares_and_are_gone_through(tokenizer: Any, texts: list[Path]) -> None:
    windows = calibration_windows(tokenizer, texts[:3], tokens=64, window=8)
    assert windows.shape == (8, 8)
    whole = {path.stem: path.read_text() for path in texts}
    # An eighth of 400 tokens is left at the end; three windows lie 116 apart on the rest, or two 175.
    places = [("a", 0), ("b", 0), ("c", 0), ("a", 116), ("b", 116), ("c", 175), ("a", 232), ("b", 232)]
    assert written(tokenizer, windows) == [whole[letter][at : at + 8] for letter, at in places]
    assert torch.equal(windows, calibration_windows(tokenizer, texts[:3], tokens=64, window=8))


def test_windows_are_shorter_where_that_uses_all_the_tokens(tokenizer: Any, texts: list[Path]) -> None:
    assert calibration_windows(tokenizer, texts[:1], tokens=300, window=200).shape == (2, 150)
    assert calibration_windows(tokenizer, texts[:1], tokens=30, window=2048).shape == (1, 30)
    assert calibration_windows(tokenizer, texts[:2], tokens=16, window=2048).shape == (2, 8)


def test_a_short_text_gives_what_it_has(tokenizer: Any, texts: list[Path]) -> None:
    texts[1].write_text("b" * 20)
    windows = calibration_windows(tokenizer, texts[:2], tokens=64, window=8)
    assert [row == "b" * 8 for row in written(tokenizer, windows)] == [False, True, False, True, False, False]
    assert windows.numel() == 48
    assert calibration_windows(tokenizer, texts[:1], tokens=10**6, window=2048).shape == (1, 400)
    assert calibration_windows(tokenizer, texts[:1], tokens=10**6, window=300).shape == (2, 200)


def test_what_is_left_is_cut_as_wide_as_it_is_asked_for(tokenizer: Any, texts: list[Path]) -> None:
    study = calibration_windows(tokenizer, texts[:1], tokens=64, window=8)
    whole = texts[0].read_text()
    for width, windows in ((8, 2), (25, 2), (50, 1)):
        ((name, evaluation),) = windows_beyond(
            tokenizer, texts[:1], tokens=64, window=8, width=width, windows=windows
        )
        assert name == f"{texts[0]} after 350 tokens"
        assert written(tokenizer, evaluation) == [whole[350 + at * width :][:width] for at in range(windows)]
        assert not {*written(tokenizer, evaluation)} & {*written(tokenizer, study)}
    assert windows_beyond(tokenizer, texts[:1], tokens=64, window=8, width=51, windows=1) == []


def test_a_text_of_less_than_a_window_is_refused_in_a_mixture(tokenizer: Any, texts: list[Path]) -> None:
    texts[1].write_text("b" * 7)
    with pytest.raises(ArgumentError, match=r"^calibrate .*b.txt = '7 tokens': must be at least one window of 8"):
        calibration_windows(tokenizer, texts, tokens=64, window=8)


@pytest.mark.parametrize("content", ["", "b"])
def test_a_text_of_no_tokens_is_refused(tokenizer: Any, tmp_path: Path, content: str) -> None:
    (tmp_path / "text").write_text(content)
    with pytest.raises(ArgumentError, match=r"^calibrate .*text = '[01] tokens': must be at least one window of 2"):
        calibration_windows(tokenizer, [tmp_path / "text"], tokens=64, window=8)


@pytest.mark.parametrize("bad", [{"tokens": 1}, {"window": 1}], ids=str)
def test_numbers_out_of_range(tokenizer: Any, texts: list[Path], bad: dict[str, int]) -> None:
    ((field, value),) = bad.items()
    with pytest.raises(ArgumentError, match=rf"^{field} = {value}: must be at least 2"):
        calibration_windows(tokenizer, texts, **{"tokens": 64, "window": 8, **bad})
    with pytest.raises(ArgumentError, match=r"^calibrate = \[\]: must name"):
        calibration_windows(tokenizer, [], tokens=64, window=8)


@pytest.mark.parametrize("sources", [1, 2, 3, 4])
@pytest.mark.parametrize("every", [2, 4, 6, 8])
@pytest.mark.parametrize("count", [2, 3, 8, 240])
def test_some_windows_of_each_source_are_set_aside(count: int, every: int, sources: int) -> None:
    windows = torch.arange(count)[:, None].expand(count, 3)
    rest, held_out = hold_out(windows, every, sources=sources)
    assert sorted([*rest[:, 0].tolist(), *held_out[:, 0].tolist()]) == list(range(count))
    assert len(rest) >= 1
    assert len(held_out) >= 1
    if count == 240:
        shares = Counter(index % sources for index in held_out[:, 0].tolist())
        assert len(shares) == sources
        assert max(shares.values()) - min(shares.values()) <= 1
        assert count / (every + 3) - 1 <= len(held_out) <= count / every + 1


def test_a_single_window_cannot_be_split() -> None:
    with pytest.raises(ArgumentError, match=r"^windows = 1: must be at least 2"):
        hold_out(torch.zeros(1, 4), 4)
    with pytest.raises(ArgumentError, match=r"^every = 1: must be at least 2"):
        hold_out(torch.zeros(9, 4), 1)


def test_a_file_is_its_text(texts: list[Path], tmp_path: Path) -> None:
    assert read_source(texts[0]) == texts[0].read_text()
    assert read_source(texts[0], characters=7) == texts[0].read_text()[:7]
    odd = tmp_path / "a#b.txt"
    odd.write_text("odd")
    assert read_source(odd) == "odd"
    with pytest.raises(ArgumentError, match=r"^calibrate = '.*gone.txt': could not be read"):
        read_source(tmp_path / "gone.txt")


def test_a_text_is_known_by_its_content_wherever_it_is(tmp_path: Path) -> None:
    for place in ("one", "other"):
        (tmp_path / place / "folder").mkdir(parents=True)
        for name in ("folder/a.txt", "folder/b.txt", "rows.jsonl"):
            (tmp_path / place / name).write_text(f"what is in {name}")
    one, other = tmp_path / "one", tmp_path / "other"
    for name in ("folder", "folder/a.txt", "rows.jsonl", "rows.jsonl#title", "folder#title"):
        assert text_identity(f"{one / name}") == text_identity(f"{other / name}"), name
    plain = [text_identity(f"{one / name}") for name in ("rows.jsonl", "rows.jsonl#text", "rows.jsonl#title")]
    assert plain[0] == plain[1] == hashlib.sha256((one / "rows.jsonl").read_bytes()).hexdigest() != plain[2]
    assert (
        text_identity(one / "folder") == text_identity(f"{one / 'folder'}#text") != text_identity(f"{one}/folder#a")
    )
    for name in ("folder/b.txt", "rows.jsonl"):
        before = [text_identity(f"{one}/{source}") for source in ("folder", "rows.jsonl#title")]
        (one / name).write_text("something else")
        after = [text_identity(f"{one}/{source}") for source in ("folder", "rows.jsonl#title")]
        assert [a == b for a, b in zip(before, after, strict=True)] == [name == "rows.jsonl", name != "rows.jsonl"]
    assert text_identity("hf-dataset://a/b::test") == "hf-dataset://a/b::test"
    (one / "folder/c.txt").symlink_to(one / "gone")
    with pytest.raises(ArgumentError, match=r"^evaluate = '.*folder': could not be read: No such file"):
        text_identity(one / "folder", name="evaluate")


def test_a_text_file_has_no_columns(tmp_path: Path) -> None:
    text = tmp_path / "plain.txt"
    text.write_text("words")
    with pytest.raises(ArgumentError, match=r"plain\.txt has no columns; name it without #text"):
        read_source(f"{text}#text")


@pytest.mark.parametrize("bad", ["hf-dataset://", "hf-dataset://a/b:c:d:e"])
def test_a_dataset_that_is_not_named(bad: str) -> None:
    with pytest.raises(ArgumentError, match=r"must be hf-dataset://owner/name:config:split#column"):
        read_source(bad)


def test_without_datasets_its_pip_line_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"needs the datasets package"):
        read_source("hf-dataset://owner/name")


class Fake:
    """A ``datasets`` library that remembers how it was called."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.calls, self.taken = rows, [], 0  # type: ignore[var-annotated]

    def load_dataset(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        for row in self.rows:
            self.taken += 1
            yield row


@pytest.mark.parametrize(
    ("source", "args", "split", "text"),
    [
        ("hf-dataset://owner/name", ("owner/name", None), "train", "one\ntwo\n"),
        ("hf-dataset://owner/name:small", ("owner/name", "small"), "train", "one\ntwo\n"),
        ("hf-dataset://owner/name:small:test#other", ("owner/name", "small"), "test", "1\n2\n"),
        ("hf-dataset://name::test", ("name", None), "test", "one\ntwo\n"),
    ],
)
def test_a_dataset_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, source: str, args: tuple[Any, ...], split: str, text: str
) -> None:
    fake = Fake([{"text": "one\n", "other": "1"}, {"text": "two", "other": "2"}])
    monkeypatch.setitem(sys.modules, "datasets", fake)  # type: ignore[arg-type]
    assert read_source(source) == text
    assert fake.calls == [(args, {"split": split, "streaming": True})]


def test_no_more_is_read_than_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake([{"text": "x" * 99}] * 1000)
    monkeypatch.setitem(sys.modules, "datasets", fake)  # type: ignore[arg-type]
    assert len(read_source("hf-dataset://a/b", characters=450)) == 500
    assert fake.taken == 5


def test_columns_without_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", Fake([{"label": 3, "title": "t"}]))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="has no column text"):
        read_source("hf-dataset://a/b")
    with pytest.raises(ArgumentError, match="has no text in column"):
        read_source("hf-dataset://a/b#label")


# What needs the library itself.


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, str]]:
    made = [{"text": f"line {index}", "title": f"t{index}"} for index in range(5)]
    (tmp_path / "jsonl").mkdir()
    (tmp_path / "jsonl" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made[:3]))
    (tmp_path / "jsonl" / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made[3:]))
    return made


@pytest.mark.filterwarnings("ignore")
def test_local_files_of_rows(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    datasets.disable_progress_bars()
    expected = "".join(f"{row['text']}\n" for row in rows)
    assert read_source(tmp_path / "jsonl") == expected
    assert read_source(tmp_path / "jsonl" / "a.jsonl") == "line 0\nline 1\nline 2\n"
    assert read_source(f"{tmp_path / 'jsonl'}#title") == "t0\nt1\nt2\nt3\nt4\n"
    (tmp_path / "parquet").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "parquet" / "rows.parquet")
    assert read_source(tmp_path / "parquet") == expected
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("one\n\ntwo\n")
    assert read_source(tmp_path / "text") == "one\n\ntwo\n"
    with pytest.raises(ArgumentError, match="has no column nothing"):
        read_source(f"{tmp_path / 'jsonl'}#nothing")
    (tmp_path / "jsonl" / "a.jsonl").write_text("no json")
    with pytest.raises(ArgumentError, match=r"^calibrate = .*: could not be read: "):
        read_source(tmp_path / "jsonl")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "folder", "rows"])
def test_a_byte_order_mark_is_no_part_of_a_text(name: str, tmp_path: Path) -> None:
    """As Windows' programs write it, at the beginning of every file."""
    datasets.disable_progress_bars()
    rows = "".join(json.dumps({"text": line}) + "\n" for line in ("one", "two"))
    for folder in ("folder", "rows"):
        (tmp_path / folder).mkdir()
    for file in ("a.txt", "folder/a.txt", "folder/b.txt"):
        (tmp_path / file).write_text("one\ntwo\n", encoding="utf-8-sig")
    for file in ("a.jsonl", "rows/a.jsonl", "rows/b.jsonl"):
        (tmp_path / file).write_text(rows, encoding="utf-8-sig")
    expected = "one\ntwo\n" * (1 if name.startswith("a.") else 2)
    assert read_source(tmp_path / name) == read_source(tmp_path / name, characters=100) == expected
    assert read_text(tmp_path / "a.txt", characters=3) == "one"
    assert read_jsonl(tmp_path / "a.jsonl", name="choices") == [{"text": "one"}, {"text": "two"}]


def test_a_text_in_utf_16_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one", encoding="utf-16")
    with pytest.raises(ArgumentError, match=r"^calibrate = '.*a.txt': must be UTF-8"):
        read_source(tmp_path / "a.txt")
    with pytest.raises(ArgumentError, match=r"^choices = '.*a.txt': must be UTF-8"):
        read_jsonl(tmp_path / "a.txt", name="choices")


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.pkl").write_bytes(b"")
    with pytest.raises(ArgumentError, match=r"has no .parquet, .jsonl, .json or .txt files"):
        read_source(tmp_path)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, ()),
        (True, ()),
        (False, ()),
        ((), ()),
        ("a.txt", ("a.txt",)),
        (Path("a.txt"), (Path("a.txt"),)),
        (["a.txt", Path("b.txt")], ("a.txt", Path("b.txt"))),
    ],
    ids=str,
)
def test_an_option_names_one_text_or_several_or_none(value: Any, names: tuple[str | Path, ...]) -> None:
    assert named_texts(value) == names


@pytest.mark.parametrize(
    ("source", "reason"), [("x" * 400, "File name too long"), ("a\0b", "embedded null byte")], ids=["long", "null"]
)
def test_a_name_that_no_file_can_have_is_refused(source: str, reason: str) -> None:
    for use in (read_source, text_identity):
        with pytest.raises(ArgumentError, match=f"calibrate = .*could not be read: {reason}"):
            use(source)
