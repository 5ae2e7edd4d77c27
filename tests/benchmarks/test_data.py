"""The benchmarks' texts are made from small samples of their packages' formats."""

from __future__ import annotations

import hashlib
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
from benchmarks.data import Package, _piqa_item, fetch, r_character_vectors, running_text, unlike, unwrapped

from benchmarks import data


@pytest.mark.parametrize(
    ("tagged", "text"),
    [
        ("The/at dog/nn ,/, (/( he/pps said/vbd )/) ran/vbd ./.", "The dog, (he said) ran."),
        ("``/`` No/rb ''/'' ,/, said/vbd Mr./np X/np ./.", '"No", said Mr. X.'),
        ("in/in Ala./np ./.", "in Ala."),
        ("Why/wrb ?/. ?/. So/rb ;/. ;/.", "Why? So;"),
        ("a/at '/' pro/jj '/' and/cc '/' con/jj '/' ./.", "a 'pro' and 'con'."),
        ("1/2/cd of/in it/ppo --/-- and/or/cc all/abn", "1/2 of it -- and/or all"),
        ("\n\tOne/cd ./.\nTwo/cd ./.\n\n\n\tThree/cd ./.\n", "One. Two.\n\nThree."),
        ("\tMerger/nn-hl proposed/vbn-hl \nHowever/wrb ,/, no/at ./.", "Merger proposed\n\nHowever, no."),
    ],
)
def test_tagged_words_become_prose(tagged: str, text: str) -> None:
    assert running_text(tagged) == text


def r_database(*vectors: list[str], named: bool = False) -> bytes:
    database = b""
    for vector in vectors:
        flags = 16 | named << 9
        data = (
            b"X\n" + struct.pack(">iiii", 3, 0x40201, 0x30500, 5) + b"UTF-8" + struct.pack(">ii", flags, len(vector))
        )
        for text in vector:
            data += struct.pack(">ii", 0x40009, len(text.encode())) + text.encode()
        if named:
            data += struct.pack(">iiii", 0x402, 1, 0x40009, 5) + b"names"
        database += struct.pack(">I", len(data)) + zlib.compress(data)
    return database


def test_character_vectors_of_an_r_database() -> None:
    vectors = [["EMMA", "", "naïve — yes"], [], ["Persuasion"]]
    assert r_character_vectors(r_database(*vectors)) == vectors
    assert r_character_vectors(r_database(*vectors, named=True)) == vectors


def test_other_r_objects_are_refused() -> None:
    number = b"X\n" + struct.pack(">iiii", 3, 0x40201, 0x30500, 5) + b"UTF-8" + struct.pack(">iid", 14, 1, 2.0)
    with pytest.raises(ValueError, match="only character vectors"):
        r_character_vectors(struct.pack(">I", len(number)) + zlib.compress(number))


def test_hard_wrapped_lines_are_joined() -> None:
    assert (
        unwrapped(["EMMA", "", "", "Handsome,", "clever, ", "and rich", ""]) == "EMMA\n\nHandsome, clever, and rich"
    )


def test_piqa_items() -> None:
    row = {"question": "q", "options": "A. x \nB. two\nlines ", "answer": "B. two\nlines "}
    assert _piqa_item(row) == {"question": "q", "choices": ["x", "two\nlines"], "answer": 1}


def test_questions_of_the_same_article_or_passage_are_left_out() -> None:
    rows = [
        {"question": "a", "passage": "Home Run -- Hit -- far.", "idx": "1"},
        {"question": "b", "passage": "Ethanol fuel -- It burns.", "idx": "2"},
        {"question": "c", "passage": "Euro -- Money.", "idx": "3"},
    ]
    assert unlike(rows, {"ethanol Fuel"}, {"Money."}) == [{"question": "a", "passage": "Hit -- far."}]


def test_a_package_is_fetched_once_and_held_to_its_hash(tmp_path: Path) -> None:
    content = b"hello\n"
    command = ("sh", "-c", "test ! -e file && echo hello > file")
    good = Package(command, "file", hashlib.sha256(content).hexdigest()[:16])
    assert fetch(good, tmp_path).read_bytes() == content
    assert fetch(good, tmp_path).read_bytes() == content
    with pytest.raises(ValueError, match="must start with 0000"):
        fetch(Package(command, "file", "0000"), tmp_path)


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_debian_packages_are_unpacked_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = []
    for name, path in (("program", "usr/bin/program"), ("library", "usr/lib/library")):
        files = {
            path: name,
            "DEBIAN/control": f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: me\nDescription: it\n",
        }
        for file, text in files.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text)
        built = tmp_path / f"{name}.deb"
        subprocess.run(
            ("dpkg-deb", "--build", str(tmp_path / name), str(built)), check=True, stdout=subprocess.DEVNULL
        )
        packages.append(Package(("cp", str(built), "."), built.name, hashlib.sha256(built.read_bytes()).hexdigest()))
    monkeypatch.setattr(data, "FLITE", packages)
    for _ in range(2):
        folder = data.flite(tmp_path / "cache")
        assert (folder / "bin/program").read_text() == "program"
        assert (folder / "lib/library").read_text() == "library"
