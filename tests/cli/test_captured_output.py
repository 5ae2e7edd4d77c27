"""The output of libraries is kept away from error lines and from JSON documents."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

PROGRAM = """
import logging, os, sys, warnings
from headwise.cli.app import err, out, progress_bar
from headwise.errors import CheckpointError

try:
    with progress_bar():
        warnings.warn("a warning")
        logging.getLogger("library").warning("a log")
        sys.stderr.write("a line of Python\\n")
        os.write(2, b"native \\x1b[31m\\n")
        os.write(1, b"native, on stdout\\n")
        err.print("a note of ours")
        out.print("a line of ours")
        if len(sys.argv) > 1:
            raise {"HeadwiseError": CheckpointError("a", 1, "is refused"), "KeyError": KeyError("a bug")}[sys.argv[1]]
except CheckpointError as error:
    sys.stderr.write(f"headwise: {error}\\n")
print("after")
"""


def test_a_refusal_is_all_there_is() -> None:
    done = warm.run("-c", PROGRAM, "HeadwiseError")
    assert done.stderr == "a note of ours\nheadwise: a = 1: is refused\n"
    assert done.stdout == "a line of ours\nafter\n"


@pytest.mark.parametrize("arguments", [(), ("KeyError",)])
def test_otherwise_it_follows(arguments: tuple[str, ...]) -> None:
    done = warm.run("-c", PROGRAM, *arguments)
    ours, _, rest = done.stderr.partition("\n")
    assert ours == "a note of ours"
    for line in ("UserWarning: a warning", "a log", "a line of Python", r"native \x1b[31m", "native, on stdout"):
        assert line in rest
    assert "\x1b" not in rest
    assert done.stdout == "a line of ours\n" + ("" if arguments else "after\n")
    assert ("KeyError: 'a bug'" in rest) == bool(arguments)


def test_a_crash_of_native_code_is_told(tmp_path: Path) -> None:
    program = """if True:
        import os
        from headwise.cli.app import progress_bar
        with progress_bar():
            os.write(2, b"native \\x1b[31m: no such device\\n")
            os.abort()
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == -signal.SIGABRT
    assert done.stderr == "native ^[[31m: no such device\n"
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_panics(here: Path, tiny_llama: Path) -> None:
    """The tokenizer's Rust code prints the panic itself, and raises a BaseException that is no Exception."""
    path = tiny_llama / "tokenizer.json"
    damaged = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | damaged))
    for command in (
        ("generate", "tiny", "--prompt", "a"),
        ("convert", "tiny", "out", "--to", "mla", "--kv-budget", "0.5", "--calibrate", "text.txt"),
    ):
        done = warm.run("-m", "headwise", *command)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("headwise: tokenizer = 'tiny': could not be loaded: ")
        assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in here.iterdir()) == ["text.txt", "tiny"]


def test_a_tokenizer_that_prints_leaves_a_document_whole(here: Path, tiny_llama: Path) -> None:
    path = tiny_llama / "tokenizer_config.json"
    tokens = {"0": {"content": "<eos>", "special": True, "\x1b[31munknown": True}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": tokens}))
    done = warm.run("-m", "headwise", "generate", "tiny", "--prompt", "a", "--max-new-tokens", "1", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["prompt"] == "a"
    assert "\x1b" not in done.stderr
