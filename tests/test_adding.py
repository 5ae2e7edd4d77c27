"""A mechanism is five new files, a method and a family one and its test, and no edit.

The toys (``adding_a_mechanism/`` and so on) are laid over a copy of the package and tested there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import headwise


def test_new_files_are_enough(tmp_path: Path) -> None:
    package = Path(headwise.__file__).parent
    shutil.copytree(package, tmp_path / "src/headwise", ignore=shutil.ignore_patterns("__pycache__"))
    for kind, count in (("mechanism", 5), ("method", 2), ("family", 2)):
        toy = Path(__file__).parent / f"adding_a_{kind}"
        files = sorted(path for path in toy.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        assert len(files) == count
        for file in files:
            target = tmp_path / file.relative_to(toy)
            assert not target.exists(), f"{target.name} would change a file of the package, or of another toy"
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
    assert "9 passed" in done.stdout
