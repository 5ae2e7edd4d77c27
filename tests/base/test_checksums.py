"""Checksums are those of sha256sum, and find any bit that is another; a list cannot point out of its folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headwise
from headwise.base.checksums import SUMS, list_folder, relisted, remove_listed, replace_listed, write_among_others
from headwise.errors import ArgumentError, StorageError


def written(folder: Path, **files: bytes) -> Path:
    for name, content in files.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    list_folder(folder)
    return folder


def test_a_file_among_others_takes_no_name_and_follows_links(tmp_path: Path) -> None:
    (tmp_path / "page.new").write_text("theirs")
    (tmp_path / "page").symlink_to(tmp_path / "real")
    for content in (b"one", b"two"):
        write_among_others(tmp_path / "page", content)
        assert (tmp_path / "real").read_bytes() == content
    assert (tmp_path / "page").is_symlink()
    assert (tmp_path / "page.new").read_text() == "theirs"
    assert {file.name for file in tmp_path.iterdir()} == {"page", "page.new", "real", "real.sha256"}
    assert (tmp_path / "real").stat().st_mode & 0o777 == (tmp_path / "page.new").stat().st_mode & 0o777


def test_a_folder_is_whole_until_any_bit_of_it_is_another(tmp_path: Path) -> None:
    """Every bit of every file, the list among them; two files are equal, so that their lines may be exchanged."""
    folder = written(tmp_path / "out", a0=b"same", a1=b"same", sub__b=b"")
    found = headwise.verify(folder)
    assert (found.is_whole, found.files, found.nbytes, found.unlisted) == (True, 3, 8, ())
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = file.read_bytes()
        for bit in range(8 * len(content)):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            found = headwise.verify(folder)
            assert not found.is_whole, (file, bit)
            if file.name != SUMS:
                assert found.differing == (file.relative_to(folder).as_posix(),)
        file.write_bytes(content)
    assert headwise.verify(folder).is_whole


def test_a_file_is_whole_until_any_bit_of_it_or_of_its_checksum_is_another(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_among_others(page, b"<p>")
    for file in (page, tmp_path / "page.html.sha256"):
        content = file.read_bytes()
        for bit in range(8 * len(content)):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            assert not headwise.verify(page).is_whole
            assert not headwise.verify(tmp_path).is_whole
        file.write_bytes(content)
    assert headwise.verify(page).is_whole
    assert headwise.verify(tmp_path).files == 1


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..", "-") and len(name.encode()) < 100
)


@settings(max_examples=20)
@given(names=st.sets(NAMES, min_size=1, max_size=4))
def test_lists_are_those_of_sha256sum(tmp_path_factory: pytest.TempPathFactory, names: set[str]) -> None:
    folder = tmp_path_factory.mktemp("names")
    for name in names - {SUMS}:
        (folder / name).write_text(name)
    (folder / os.fsdecode(b"no utf-8 \xff")).write_bytes(b"")
    list_folder(folder)
    assert headwise.verify(folder).is_whole
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", SUMS], cwd=folder, check=True)


def test_what_is_missing_added_or_no_file_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", a=b"1", b=b"2", c=b"3", d=b"4")
    (folder / "a").unlink()
    (folder / "b").unlink()
    (folder / "b").mkdir()
    (folder / "c").unlink()
    os.mkfifo(folder / "c")  # reading it would never end
    (folder / "extra").write_text("")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "theirs").write_text("")
    found = headwise.verify(folder)
    assert (found.missing, found.differing, found.unlisted, found.files) == (("a",), ("b", "c"), ("extra",), 1)
    assert found.to_dict()["is_whole"] is False


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "sub/../../secret", "a\0b", ""])
def test_a_list_that_points_out_of_its_folder_is_damaged_and_nothing_there_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes(b"")
    folder = written(tmp_path / "out", a=b"1")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    with (folder / SUMS).open("a") as file:
        file.write(f"{empty}  {name}\n")
    found = headwise.verify(folder)
    assert (found.differing, found.files) == ((SUMS,), 1)


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe", b"0" * 64, b"A" * 64 + b"  a\n", b"0" * 63 + b"  a\n"])
def test_a_list_of_another_form_is_damaged(tmp_path: Path, content: bytes) -> None:
    folder = written(tmp_path / "out", a=b"1")
    (folder / SUMS).write_bytes(content)
    found = headwise.verify(folder)
    assert SUMS in found.differing
    assert not found.is_whole


def test_a_line_that_is_there_twice_is_damage(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", a=b"1")
    (folder / SUMS).write_bytes((folder / SUMS).read_bytes() * 2)
    assert headwise.verify(folder).differing == (SUMS,)


def test_what_has_no_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, rule in (
        (tmp_path, f"has no {SUMS}: it is not finished, or not headwise's"),
        (tmp_path / "file", r"has no file\.sha256"),
        (tmp_path / "none", "does not exist"),
        (Path("/dev/null"), "neither a folder nor a file"),
    ):
        with pytest.raises(ArgumentError, match=rule):
            headwise.verify(path)
    with pytest.raises(StorageError):
        headwise.verify("x" * 10_000)


def test_files_and_folders_in_a_folder_are_verified_by_their_own_lists(tmp_path: Path) -> None:
    inner = written(tmp_path / "models" / "half", config=b"{}")
    with relisted(tmp_path / "frontier.json", tmp_path):
        (tmp_path / "frontier.json").write_text("1")
    write_among_others(tmp_path / "page", b"2")
    found = headwise.verify(tmp_path)
    assert (found.is_whole, found.files, found.unlisted) == (True, 3, ())
    (inner / "config").write_bytes(b"[]")
    assert headwise.verify(tmp_path).differing == ("models/half/config",)
    assert headwise.verify(tmp_path / "page").is_whole
    assert not headwise.verify(inner / "config").is_whole


def test_a_file_that_is_written_again_has_no_checksum_meanwhile(tmp_path: Path) -> None:
    for content in ("old", "new"):
        with relisted(tmp_path / "a", tmp_path):
            assert content == "old" or headwise.verify(tmp_path).unlisted == ("a",)
            (tmp_path / "a").write_text(content)
        assert headwise.verify(tmp_path).is_whole
        with relisted(tmp_path / "b", tmp_path):
            (tmp_path / "b").write_text("another")
    source, moved = tmp_path / "source", tmp_path / "moved"
    for content in ("old", "new"):
        source.write_text(content)
        replace_listed(source, moved)
        assert headwise.verify(moved).is_whole
    remove_listed(moved)
    assert {file.name for file in tmp_path.iterdir()} == {"a", "b", SUMS}


def test_links_to_files_are_read_as_a_downloaded_snapshot_has_them(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", a=b"1")
    (tmp_path / "snapshot").mkdir()
    for file in folder.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert headwise.verify(tmp_path / "snapshot").is_whole
