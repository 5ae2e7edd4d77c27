"""A disk that fills up while a model is converted: one line, status 2, and the same command goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Result
from tests.models.checkpoints.test_resume import full_disk
from tests.real_models import save_tiny

KEPT = "what is done is kept in .out.headwise-partial, and the same command continues from there"


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# Of 512 tokens, 48 wide: a stream is 98 kB, a Gram matrix 9 kB, a layer's result 80 kB, the output 360 kB.
@pytest.mark.parametrize("size", [3_000, 50_000, 200_000])
@pytest.mark.parametrize("command", ["convert", "calibrate"])
def test_a_full_disk(cli: Callable[..., Result], here: Path, command: str, size: int) -> None:
    save_tiny(here / "source")
    (here / "text.txt").write_text("the quick brown fox jumps over the lazy dog, and then it does so again. " * 40)
    options = ["--calibrate", "text.txt", "--calibration-tokens", 512]
    options += ["--to", "mla", "--kv-budget", "0.5", "--no-evaluate"] if command == "convert" else []
    assert cli(command, "source", "whole", *options).status == 0
    with full_disk(size):
        result = cli(command, "source", "out", *options)
    if command == "calibrate" and size == 200_000:  # it was enough
        assert result.status == 0
        return
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("headwise: ")
    assert result.err.count("\n") == 1
    assert "File too large" in result.err
    assert (KEPT in result.err) == (here / ".out.headwise-partial").exists()
    assert not (here / "out").exists()
    assert cli(command, "source", "out", *options).status == 0
    assert content(here / "out") == content(here / "whole")


@pytest.mark.parametrize(
    ("redirected", "status", "said"), [(">/dev/full", 1, "headwise: no space left to write to\n"), (">&-", 0, "")]
)
@pytest.mark.parametrize("options", ["", "--json"])
def test_output_that_cannot_be_written(redirected: str, status: int, said: str, options: str) -> None:
    command = f"{sys.executable} -m headwise inspect llama-3-8b {options} {redirected}"
    done = subprocess.run(command, check=False, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, said)
