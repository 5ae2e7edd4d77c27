"""The lines of a reader's modules: which of them its inputs run, and the words that they know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import headwise

_PACKAGE = Path(headwise.__file__).parent
_WORD = re.compile(r"[\w.*-]{1,60}", re.ASCII)


def trace() -> Any:
    """coverage.py for headwise, or None where it is not installed."""
    try:
        import coverage
    except ImportError:
        return None
    return coverage.Coverage(data_file=None, source_pkgs=["headwise"], messages=False)


def files_of(modules: Sequence[str]) -> Iterator[tuple[Path, frozenset[str]]]:
    """The files of modules of headwise, and of all modules in packages of it, each with the names of its parts.

    ``headwise.a.b`` is a module or a package, all of which is meant; ``headwise.a.b: c d`` are the functions and
    classes c and d of a module.
    """
    for module in modules:
        name, _, parts = module.partition(": ")
        path = _PACKAGE.joinpath(*name.split(".")[1:])
        for file in sorted(path.rglob("*.py")) if path.is_dir() else (path.with_suffix(".py"),):
            yield file, frozenset(parts.split())


def words(modules: Sequence[str]) -> list[str]:
    """The words that stand in quotes in modules: names of fields, of kinds and of formats, for inputs to hold."""
    found = set()
    for file, _ in files_of(modules):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _WORD.fullmatch(node.value):
                found.add(node.value)
    return sorted(found)


def missing(tracer: Any, modules: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By the file of each module: the number of its statements, and the lines of those that were not run.

    Args:
        tracer: of `trace`, stopped.
        modules: names as for `files_of`.

    Raises:
        ValueError: a module has no function or class of a name.
    """
    found = {}
    for file, parts in files_of(modules):
        _, statements, _, unrun, _ = tracer.analysis2(str(file))
        if parts:
            lines = _lines_of(file, parts)
            statements, unrun = sorted(lines & set(statements)), sorted(lines & set(unrun))
        if statements:
            found[file.relative_to(_PACKAGE).as_posix()] = {"statements": len(statements), "missing": unrun}
    return found


def _lines_of(file: Path, names: frozenset[str]) -> set[int]:
    """The lines of functions and classes with these names."""
    lines: set[int] = set()
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            found.add(node.name)
    if found != names:
        raise ValueError(f"{file.name} has no {' '.join(names - found)}")
    return lines


def share(lines: Mapping[str, Mapping[str, Any]]) -> float:
    """The share of statements that were run."""
    statements = sum(entry["statements"] for entry in lines.values())
    return 1 - sum(len(entry["missing"]) for entry in lines.values()) / statements
