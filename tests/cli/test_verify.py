"""``headwise verify``: every command that writes leaves checksums, by which one bit that is another is found."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.byte_level import save_byte_level
from tests.cli.conftest import Result
from tests.real_models import save_tiny

TEXT = "the quick brown fox jumps over the lazy dog, and then it does so again. "
STUDY = ("--calibrate", "text.txt", "--calibration-tokens", "512")
MEASURE = ("--evaluate", "exam.txt", "--window", "16", "--windows", "2")
MLA = ("--to", "mla", "--kv-budget", "0.5")


@pytest.fixture
def models(here: Path) -> Path:
    save_tiny(here / "tiny", vocab_size=324)
    save_tiny(here / "wide", vocab_size=324, head_dim=64)
    for folder in (here / "tiny", here / "wide"):
        save_byte_level(folder, 320)
    (here / "text.txt").write_text(TEXT * 40)
    (here / "exam.txt").write_text(
        "a slow green turtle crawls under an eager cat; nobody has seen it do so before. " * 9
    )
    return here


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


WRITERS = {
    "convert": (("convert", "tiny", "out", *MLA, "--no-evaluate"),),
    "convert to GGUF": (("convert", "tiny", "out", *MLA, "--format", "gguf", *STUDY, "--no-evaluate"),),
    "export a folder": (("export", "tiny", "out.gguf"),),
    "calibrate": (("calibrate", "tiny", "out", *STUDY),),
    "prepare a folder": (("prepare", "wide", "out", "--for", "mlx:4"),),
    "prepare a file": (("export", "wide", "a.gguf"), ("prepare", "a.gguf", "out.gguf", "--for", "llama.cpp:q8_0")),
    "heal": (
        ("convert", "tiny", "half", *MLA, "--no-evaluate"),
        ("heal", "half", "out", "--teacher", "tiny", "--text", "text.txt", "--tokens", "64", "--no-evaluate"),
    ),
    "migrate": (("migrate", "tiny", "out", "--max-quality-loss", "9", "--target", "mla:0.5", *STUDY, *MEASURE[:2]),),
    "frontier": (
        (
            "frontier",
            "tiny",
            "--output",
            "out",
            "--target",
            "int8",
            "--target",
            "mla:0.5",
            "--keep",
            *STUDY,
            *MEASURE,
        ),
    ),
    "frontier, predicted": (("frontier", "tiny", "--output", "out", "--quick", "--target", "int8", *STUDY),),
    "sample": (("sample", "tiny", "out.txt", "--tokens", "64"),),
    "a page": (("report", "tiny", "--html", "out.html"),),
}


@pytest.mark.parametrize("commands", WRITERS.values(), ids=WRITERS)
def test_what_a_command_writes_is_whole_until_a_bit_is_another(
    cli: Callable[..., Result], models: Path, commands: tuple[tuple[str, ...], ...]
) -> None:
    for command in commands:
        result = cli(*command)
        assert result.status == 0, result
    out = next(path for path in models.iterdir() if path.stem == "out" and path.suffix != ".sha256")
    found = cli("verify", out)
    assert (found.status, found.out.count("\n")) == (0, 1), found
    files = [path for path in out.rglob("*") if path.is_file()] if out.is_dir() else [out, Path(f"{out}.sha256")]
    draw = random.Random(0)
    for file in files:
        if nbytes := file.stat().st_size:
            bit = draw.randrange(8 * nbytes)
            flip(file, bit)
            found = cli("verify", out)
            assert (found.status, found.err) == (1, ""), (file, bit)
            assert json.loads(cli("verify", out, "--json").out)["is_whole"] is False
            flip(file, bit)
    assert cli("verify", out).status == 0


def test_what_is_said_of_damage(cli: Callable[..., Result], models: Path, refused: Callable[..., str]) -> None:
    assert cli("export", "tiny", "a.gguf").status == 0
    nbytes = (models / "a.gguf").stat().st_size
    assert cli("verify", "a.gguf").out == f"1 file, {nbytes / 1024:.1f} KiB: as written\n"
    flip(models / "a.gguf", 99)
    assert cli("verify", "a.gguf").out.startswith("a.gguf differs\n0 files, 0 B: as written; ")
    assert "has no SHA256SUMS" in refused("verify", "tiny")
    shutil.rmtree(models / "tiny")
    assert "does not exist" in refused("verify", "tiny")
