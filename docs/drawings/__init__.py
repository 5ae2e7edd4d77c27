"""The figures of the documentation: every number in them is computed here, and every one is drawn again by a test.

``python -m docs.drawings`` writes them to ``docs/images``; with ``--check`` it names those that differ.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

TOPICS = ("scaling", "roofline", "sharing", "mla", "rope", "rank", "bits", "mechanisms")
"""The modules of this package that draw, each by a function ``draw`` that returns its files by name."""

FOLDER = Path(__file__).parents[1] / "images"
"""Where the pages look for the figures."""


def drawn() -> dict[str, str]:
    """Every figure as SVG, by the name of its file."""
    files: dict[str, str] = {}
    for topic in TOPICS:
        files |= import_module(f"docs.drawings.{topic}").draw()
    return files


def write(folder: Path = FOLDER) -> list[Path]:
    """Draw every figure into a folder.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, svg in drawn().items():
        path = folder / name
        path.write_text(svg, encoding="utf-8", newline="\n")
        written.append(path)
    return written


def stale(folder: Path = FOLDER) -> list[Path]:
    """The files of a folder that are missing, or are not what would be drawn."""
    return [path for name, svg in drawn().items() if not _holds(path := folder / name, svg)]


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode("utf-8")
