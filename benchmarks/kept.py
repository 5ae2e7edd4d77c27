"""A benchmark's results file, written after each row, so that a killed run can be continued."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

import headwise
from headwise.base.disk import write_whole
from headwise.measure.timing.machine import describe_machine


class OtherSettingsError(ValueError):
    """A results file has rows that were measured with other settings than this run's."""


class Kept:
    """Rows by name, in a JSON file.

    Args:
        path: the file; it is written with the first row.
        settings: by name; all rows of the file have the same.

    Raises:
        OtherSettingsError: the file has other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, json.loads(json.dumps(dict(settings)))
        self.rows = self._read()

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        """Write a row to the file, with the machine, the versions and the command that measured it."""
        self.rows |= self._read() | {name: {**row, "run": run()}}  # another run may have added rows meanwhile
        document = {"settings": self.settings, "rows": self.rows}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())

    def _read(self) -> dict[str, dict[str, Any]]:
        """The rows of the file, if there is one."""
        if not self.path.exists():
            return {}
        document = json.loads(self.path.read_text(encoding="utf-8"))
        for name, value in self.settings.items():
            if (was := document["settings"].get(name)) != value:
                raise OtherSettingsError(
                    f"{self.path} was measured with {name} = {was!r}, not {value!r}: give another file"
                )
        rows: dict[str, dict[str, Any]] = document["rows"]
        return rows


def run() -> dict[str, Any]:
    """The commit, command, machine and versions of a measurement."""
    return {
        "commit": _commit(),
        "command": " ".join(["python", "-m", f"benchmarks.{_module()}", *sys.argv[1:]]),
        "machine": describe_machine(),
        "versions": {
            "headwise": headwise.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def _module() -> str:
    """The module of `benchmarks` that is run, a file or a folder, in its folders' names."""
    program = Path(sys.argv[0])
    parts = list(program.with_suffix("").parts)
    parts = parts[max((place for place, name in enumerate(parts) if name == "benchmarks"), default=-2) + 1 :]
    return ".".join(name for name in parts if name != "__main__")


def _commit() -> str | None:
    """The commit of this code, with a + if files have changed since; None outside a repository."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def say(*words: object) -> None:
    """Print without buffering, even into a pipe."""
    print(*words, flush=True)
