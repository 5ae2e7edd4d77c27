from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from headwise.cli import main
from tests.threads import one_thread

__all__ = ["one_thread"]


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run the command line in this process, without a progress bar: a busy machine is slow, not wrong."""
    monkeypatch.setattr("headwise.cli.app._PATIENCE", 600.0)

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return Result(stopped.value.code, captured.out, captured.err)

    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a text in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return tmp_path


@pytest.fixture
def refused(cli: Callable[..., Result], here: Path) -> Callable[..., str]:
    """Run what must be refused, hold it to the rule, and return the one line."""

    def run(*arguments: object, status: int = 2) -> str:
        before = _everything(here)
        result = cli(*arguments)
        assert (result.status, result.out) == (status, ""), result
        assert result.err.startswith("headwise: ")
        assert result.err.count("\n") == 1
        assert result.err.endswith("\n")
        assert _everything(here) == before, "something was left behind, or taken away"
        return result.err

    return run


def _everything(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }
