"""The notebooks run from the first cell to the last, and are kept without what they print."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "docs/notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_cell_runs(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(FOLDER / name, as_version=4)
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()  # raises the first error of a cell
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert outputs
    assert "error" not in {output.output_type for output in outputs}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_is_valid_and_kept_without_outputs(name: str) -> None:
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
