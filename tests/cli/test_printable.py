"""Control characters out of files do not reach the terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.markup import escape

from headwise.base.printable import printable
from headwise.base.tables import Table
from headwise.cli.app import emit, out
from tests.cli.conftest import Result

Refused = Callable[..., str]
HOSTILE = "\x1b[31mred\x1b]0;title\x07 \x9b2J \u202eturned\u2066 \x7f\r\x00\x85\u2028"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
SMALL = ("--window", "16", "--windows", "2", "--context", "8")


def test_what_is_escaped() -> None:
    assert printable(HOSTILE) == (r"\x1b[31mred\x1b]0;title\x07 \x9b2J \u202eturned\u2066 \x7f\r\x00\x85\u2028")
    plain = "a\tb\nc – é ñ ﷺ नमस्ते 👩‍👩‍👧 שלום"
    assert printable(plain) == plain


def test_strings_tables_and_markup(capsys: pytest.CaptureFixture[str]) -> None:
    out.print_table(Table([HOSTILE, "n"], [(HOSTILE, HOSTILE)]))
    out.print(f"[bold]{escape(HOSTILE)}[/bold]")
    out.print(f"note: {HOSTILE}", markup=False)
    out.print(escape("\x1b[red]not a colour"))
    printed = capsys.readouterr().out
    assert not CONTROLS.search(printed)
    assert r"\x1b[red]not a colour" in printed


def test_documents_are_escaped_and_read_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    emit({"text": HOSTILE, HOSTILE: "a\tb\nc – é नमस्ते 👩‍👩‍👧 שלום"})
    document = capsys.readouterr().out
    assert not CONTROLS.search(document)
    assert r"\u009b2J \u202eturned" in document
    assert "é नमस्ते 👩‍👩‍👧 שלום" in document
    assert json.loads(document) == {"text": HOSTILE, HOSTILE: "a\tb\nc – é नमस्ते 👩‍👩‍👧 שלום"}


def test_generated_text(cli: Callable[..., Result], here: Path, tiny_llama: Path) -> None:
    """Newline and tab are not escaped; JSON escapes every control character."""
    path = tiny_llama / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = {token: number for token, number in tokenizer["model"]["vocab"].items() if number < 3}
    kept = set(vocabulary.values())
    vocabulary |= {f"\n\t\x1b[31m\u202e{number}": number for number in range(64) if number not in kept}
    path.write_text(json.dumps(tokenizer | {"model": {**tokenizer["model"], "vocab": vocabulary}}))
    command = ("generate", "tiny", "--prompt", "a", "--max-new-tokens", "4")
    result = cli(*command)
    assert result.status == 0
    assert not CONTROLS.search(result.out)
    assert "\n\t\\x1b[31m\\u202e" in result.out
    document = cli(*command, "--json").out
    assert not CONTROLS.search(document)
    assert "\x1b[31m" in json.loads(document)["text"]


def test_names_in_refusals(refused: Refused, tiny_llama: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "\x1b[31m\u202eshard.safetensors"}}
    (tiny_llama / "model.safetensors").unlink()
    (tiny_llama / "model.safetensors.index.json").write_text(json.dumps(index))
    line = refused("convert", "tiny", "out", "--to", "mqa")
    assert not CONTROLS.search(line.removesuffix("\n"))
    assert r"\x1b[31m\u202eshard" in line


def test_names_of_fields_in_refusals(refused: Refused, tiny_llama: Path, edit_config: Callable[..., None]) -> None:
    edit_config(**{"\x1b[31m": {"auto_map": {"AutoModel": "evil.Model"}}})
    line = refused("convert", "tiny", "out", "--to", "mqa")
    assert not CONTROLS.search(line.removesuffix("\n"))
    assert r"\x1b[31m.auto_map = " in line


def test_names_of_tensors_in_notes(cli: Callable[..., Result], here: Path, tiny_llama: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = tiny_llama / "model.safetensors"
    tensors = load_file(weights)
    save_file({**tensors, "\x1b[31m\u202eweight": tensors["model.norm.weight"].clone()}, weights)
    result = cli("convert", "tiny", "out", "--to", "mqa", "--no-evaluate")
    assert (result.status, result.err) == (0, "")
    assert not CONTROLS.search(result.out)
    assert r"\x1b[31m\u202eweight" in result.out


def test_names_in_tables_and_notes(cli: Callable[..., Result], here: Path, tiny_llama: Path) -> None:
    name = "\x1b[31m\u202e.txt"
    (here / name).write_text((here / "text.txt").read_text())
    (tiny_llama / "\x1b]0;\x07.json").symlink_to("/dev/null")
    for command in (
        ("evaluate", "tiny", "--text", name, *SMALL),
        ("convert", "tiny", "out", "--to", "mla", "--kv-budget", "0.5", "--no-evaluate"),
    ):
        result = cli(*command)
        assert (result.status, result.err) == (0, "")
        assert not CONTROLS.search(result.out)
        assert r"\x1b" in result.out
