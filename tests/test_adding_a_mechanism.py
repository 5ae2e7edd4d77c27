"""A mechanism is five files and no edit: the toy in ``adding_a_mechanism/`` is laid over a copy and tested there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import headwise

TOY = Path(__file__).parent / "adding_a_mechanism"


def test_five_new_files_are_enough(tmp_path: Path) -> None:
    package = Path(headwise.__file__).parent
    shutil.copytree(package, tmp_path / "src/headwise", ignore=shutil.ignore_patterns("__pycache__"))
    files = sorted(path for path in TOY.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert len(files) == 5
    for file in files:
        target = tmp_path / file.relative_to(TOY)
        assert not target.exists(), f"{target.name} would change a file of the house"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path / "tests")],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
