"""A benchmark's results file: a row is kept as soon as it is measured, so that a run that was killed goes on."""

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
from headwise.checkpoints.disk import write_whole
from headwise.measurement.machine import machine


class OtherSettingsError(ValueError):
    """A results file is of other settings than this run's."""


class Kept:
    """Rows by name, in a JSON file.

    Args:
        path: the file; made by the first row.
        settings: what all of its rows are measured with. Rows of other settings are never mixed in.

    Raises:
        OtherSettingsError: the file is of other ones.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, json.loads(json.dumps(dict(settings)))
        self.rows: dict[str, dict[str, Any]] = {}
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            for name, value in self.settings.items():
                if found["settings"].get(name) != value:
                    was = found["settings"].get(name)
                    raise OtherSettingsError(
                        f"{path} was measured with {name} = {was!r}, not {value!r}: give another"
                    )
            self.rows = found["rows"]

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        """Keep a row, with what it was run on and by which command."""
        self.rows[name] = {**row, "run": run()}
        document = {"settings": self.settings, "rows": self.rows}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())


def run() -> dict[str, Any]:
    """What a number was measured on: commit, command, machine, versions."""
    return {
        "commit": _commit(),
        "command": " ".join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "machine": machine(),
        "versions": {
            "headwise": headwise.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def _commit() -> str | None:
    """Of the code that is run, with a + where it was changed since; None outside a repository."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def say(*words: object) -> None:
    """To the terminal at once, whatever it is piped into."""
    print(*words, flush=True)
