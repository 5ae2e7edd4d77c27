"""Files are written whole, and what cannot be written is refused before any work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headwise.base.disk import open_regular, refuse_no_file, storage_errors, write_whole
from headwise.base.documents import load_json
from headwise.errors import ArgumentError, CheckpointError, StorageError


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    for content in (b"first", b"second, longer", b""):
        write_whole(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_no_file_is_refused_before_any_work(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null"), Path()):
        with pytest.raises(ArgumentError, match="must be a file, or not exist"):
            refuse_no_file("html", path)
    for path in (tmp_path / "no" / "x", tmp_path / "file" / "x", tmp_path / "loop"):
        with pytest.raises(ArgumentError, match=r"html = .*: cannot be written: "):
            refuse_no_file("html", path)
    refuse_no_file("html", tmp_path / "file")
    assert {file.name for file in tmp_path.iterdir()} == {"pipe", "loop", "file"}


def test_only_a_regular_file_is_opened(tmp_path: Path) -> None:
    """A pipe would be waited for, and a device might never end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("1")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for path, error in ((tmp_path / "pipe", OSError), (Path("/dev/zero"), OSError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error):
            open_regular(path)
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"1"


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b'{"a": 1}' + b" " * 20, "must have at most 20 bytes"),
        (b"\xff\xfe", "is not valid JSON: "),
        (b"[" * 20, "is not valid JSON: "),
        (b"", "is not valid JSON: "),
    ],
)
def test_json_is_read_within_reason(tmp_path: Path, content: bytes, rule: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"^{rule}"):
        load_json(tmp_path / "a.json", 20)
    (tmp_path / "a.json").write_bytes(b"[" * 50_000)
    with pytest.raises(ValueError, match=r"^is not valid JSON: maximum recursion"):
        load_json(tmp_path / "a.json", 1 << 20)
    (tmp_path / "a.json").write_text('{"a": 1}')
    assert load_json(tmp_path / "a.json", 8) == {"a": 1}


def test_what_the_disk_refuses_is_an_error_of_its_own_kind(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    message = f"file = '{missing}': could not be read: No such file"
    with pytest.raises(StorageError, match=message), storage_errors("file", missing, "read"):
        missing.read_bytes()
    assert issubclass(StorageError, CheckpointError)  # as those who wrote `except CheckpointError` expect
