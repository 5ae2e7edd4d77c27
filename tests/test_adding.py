"""A mechanism is five new files, a method and a family one and its test, and no edit.

Each toy (``adding_a_mechanism/`` and so on) is laid over a copy of the package and tested there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import headwise


@pytest.mark.parametrize(("kind", "count", "passed"), [("mechanism", 5, 3), ("method", 2, 3), ("family", 2, 3)])
def test_new_files_are_enough(kind: str, count: int, passed: int, tmp_path: Path) -> None:
    toy = Path(__file__).parent / f"adding_a_{kind}"
    package = Path(headwise.__file__).parent
    shutil.copytree(package, tmp_path / "src/headwise", ignore=shutil.ignore_patterns("__pycache__"))
    files = sorted(path for path in toy.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert len(files) == count
    for file in files:
        target = tmp_path / file.relative_to(toy)
        assert not target.exists(), f"{target.name} would change a file of the package"
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
    assert f"{passed} passed" in done.stdout
