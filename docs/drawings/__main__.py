"""``python -m docs.drawings``: draw every figure of the documentation, or check those that are there."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from docs.drawings import FOLDER, stale, write


def main(arguments: list[str] | None = None) -> int:
    """Draw or check.

    Returns:
        1 if a checked figure differs from what would be drawn, otherwise 0.
    """
    parser = argparse.ArgumentParser(prog="python -m docs.drawings", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and name the figures that differ")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the figures are (docs/images)")
    options = parser.parse_args(arguments)
    if not options.check:
        for path in write(options.folder):
            print(path)
        return 0
    different = stale(options.folder)
    for path in different:
        print(f"{path} differs from what would be drawn", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
