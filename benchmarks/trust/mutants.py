"""Change one operator or number of headwise at a time, at random, and see whether a test fails.

    pip install --no-deps cosmic-ray parso stevedore pbr
    make coverage
    python -m benchmarks.trust.mutants --json benchmarks/results/trust/mutants.json

The mutants are those of cosmic-ray: other operators, comparisons and constants, negated conditions, loops that do not
run. A place in the code is drawn first, and then a mutant of it, so that a product, which has a dozen, counts no more
than a number. Annotations, which nothing evaluates, are left out. A mutant is tried by the tests that `make coverage`
saw on its line, those of the mirrored folder first and then the fastest, up to `MOST` seconds of them; where it saw
none, as on lines that run when a module is imported, by those it saw in the file. Tests that end a mutant are run
without it too, once, and the campaign stops where they fail then. Each run has a process of its own, forked from one
that has imported torch.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree

from benchmarks.kept import Kept

ROOT = Path(__file__).parents[2]
TARGETS = (
    *("models/specs", "costs", "runtime/kernels/reference.py", "conversion/solvers", "conversion/codes.py"),
    *("runtime/quantization", "models/checkpoints", "conversion/preparation"),
)
"""The parts of headwise whose results would be wrong without a word."""

MOST = 120.0
"""Seconds of tests, by what they took when all were run, that a mutant has to outlive."""

LEFT_OUT = ("RemoveDecorator", "ExceptionReplacer", "VariableReplacer", "VariableInserter")
"""Operators of cosmic-ray whose mutants cannot be imported, mostly, or need arguments."""


@dataclass(frozen=True)
class Place:
    """A place in a file, and the mutants of it: names of operators with the occurrence of each in the file."""

    file: str
    line: int
    column: int
    mutants: tuple[tuple[str, int], ...]


def operators() -> dict[str, Any]:
    """cosmic-ray's operators by name."""
    from cosmic_ray.operators.provider import OperatorProvider

    provider = OperatorProvider()
    return {name: provider[name]() for name in provider if name not in LEFT_OUT}


def places(file: Path) -> Iterator[Place]:
    """Every place of a file that can be mutated."""
    from cosmic_ray.ast import ast_nodes, get_ast

    source = file.read_text(encoding="utf-8")
    unread = annotations(source)
    nodes = list(ast_nodes(get_ast(source)))
    found: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    for name, operator in operators().items():
        occurrence = 0
        for node in nodes:
            for (line, column), _ in operator.mutation_positions(node):
                if (line, column) not in unread:
                    found[line, column].append((name, occurrence))
                occurrence += 1
    for (line, column), mutants in sorted(found.items()):
        yield Place(str(file.relative_to(ROOT)), line, column, tuple(mutants))


class Annotations(set[tuple[int, int]]):
    """Places, as lines and columns, in annotations of a module."""


def annotations(source: str) -> Annotations:
    """The places of a module's annotations."""
    found = Annotations()
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        for name in ("annotation", "returns"):
            if (part := getattr(node, name, None)) is not None:
                for line in range(part.lineno, part.end_lineno + 1):
                    start = part.col_offset if line == part.lineno else 0
                    end = part.end_col_offset if line == part.end_lineno else len(lines[line - 1])
                    found |= {(line, column) for column in range(start, end)}
    return found


def tests_by_line(coverage_file: Path) -> dict[str, dict[int, set[str]]]:
    """The tests, as ``tests/x/test_y.py::test_z``, that reached each line of each file of headwise."""
    from coverage import CoverageData

    data = CoverageData(str(coverage_file))
    data.read()
    found: dict[str, dict[int, set[str]]] = {}
    for file in data.measured_files():
        name = f"src/headwise/{file.rpartition('/headwise/')[2]}"
        lines = found.setdefault(name, defaultdict(set))
        for line, contexts in data.contexts_by_lineno(file).items():
            lines[line] |= {node for context in contexts if (node := node_of(context)) is not None}
    return found


@cache
def node_of(context: str) -> str | None:
    """pytest's name of the test that coverage.py calls ``tests.x.test_y.test_z``; None for what is no test."""
    module, _, name = context.rpartition(".")
    file = f"{module.replace('.', '/')}.py"
    return f"{file}::{name}" if name.startswith("test") and (ROOT / file).is_file() else None


def seconds_of(junit: Path) -> dict[str, float]:
    """The seconds of each test function, all its parameters together."""
    found: Counter[str] = Counter()
    for case in ElementTree.parse(junit).iter("testcase"):
        file = Path(*str(case.get("classname")).split(".")).with_suffix(".py")
        found[f"{file}::{str(case.get('name')).partition('[')[0]}"] += float(case.get("time") or 0)
    return dict(found)


def chosen_tests(place: Place, lines: dict[int, set[str]], seconds: dict[str, float]) -> list[str]:
    """The tests to try a mutant with, in order, out of those of each line of its file."""
    tests = lines.get(place.line) or set().union(*lines.values())
    mirrored = f"tests/{Path(place.file).relative_to('src/headwise').parent}"
    found, total = [], 0.0
    for test in sorted(tests, key=lambda test: (not test.startswith(mirrored), seconds.get(test, 1.0))):
        total += seconds.get(test, 1.0)
        if found and total > MOST:
            continue
        found.append(test)
    return found


class Copy:
    """A copy of the package with one file mutated at a time.

    Args:
        folder: the folder to copy it to.
    """

    def __init__(self, folder: Path) -> None:
        self.source = folder / "src"
        shutil.copytree(ROOT / "src", self.source, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(str(self.source), quiet=2)

    def mutate(self, place: Place, name: str, occurrence: int) -> str | None:
        """Mutate a file, and return the changed lines; None where the mutant is the code itself."""
        from cosmic_ray.mutating import mutate_code

        source = (ROOT / place.file).read_text(encoding="utf-8")
        mutated = mutate_code(source, operators()[name], occurrence)
        try:
            if mutated is None or ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(source)):
                return None
        except SyntaxError:
            return None
        file = self.source / Path(place.file).relative_to("src")
        file.write_text(mutated, encoding="utf-8")
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()
        pairs = zip(source.split("\n"), mutated.split("\n"), strict=False)
        return "; ".join(f"{old.strip()}  ->  {new.strip()}" for old, new in pairs if old != new)[:300]

    def restore(self, place: Place) -> None:
        """Put a file back."""
        file = self.source / Path(place.file).relative_to("src")
        shutil.copyfile(ROOT / place.file, file)
        compileall.compile_file(str(file), quiet=2)


class BrokenTestsError(Exception):
    """Tests fail on headwise as it is."""


class Runs:
    """Runs tests on a copy of the package, each time in a process of its own."""

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self.passed: set[str] = set()

    def outcome(self, tests: Sequence[str], limit: float) -> str | None:
        """How tests end: None where they pass, ``a test`` where one fails, ``time``, or the name of a signal.

        A module that cannot be imported is a test that fails.
        """
        child = os.fork()
        if child == 0:
            self._run(tests)
        deadline = time.monotonic() + limit
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "time"
            time.sleep(0.02)
        if os.WIFSIGNALED(status):
            return signal.Signals(os.WTERMSIG(status)).name
        return None if os.WEXITSTATUS(status) == 0 else "a test"

    def _run(self, tests: Sequence[str]) -> NoReturn:
        status = 3
        try:
            os.setsid()
            devnull = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(devnull, descriptor)
            for name in [name for name in sys.modules if name.partition(".")[0] in ("headwise", "benchmarks")]:
                del sys.modules[name]
            sys.path[:0] = [str(self.copy.source), str(ROOT)]
            sys.dont_write_bytecode = True
            # Plugins of pytest that transformers has imported already would be warned of, which is an error here.
            os.environ |= {
                "PYTHONPATH": f"{self.copy.source}:{ROOT}",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            }
            os.chdir(ROOT)
            import pytest

            status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
        finally:
            os._exit(status)

    def check(self, tests: Sequence[str], limit: float) -> None:
        """Run those of some tests that were not yet seen to pass without a mutant.

        Raises:
            BrokenTestsError: they do not.
        """
        unseen = [test for test in tests if test not in self.passed]
        if unseen and (end := self.outcome(unseen, limit)) is not None:
            raise BrokenTestsError(f"{end} ends {' '.join(unseen)} without a mutant")
        self.passed.update(unseen)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), metavar="PART", help="below src/headwise")
    parser.add_argument("--coverage", type=Path, default=Path("build/coverage/data"))
    parser.add_argument("--junit", type=Path, default=Path("build/coverage/junit.xml"))
    parser.add_argument("--count", type=int, default=550)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    every = [
        place
        for target in options.targets
        for path in [ROOT / "src/headwise" / target]
        for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
        for place in places(file)
    ]
    draw = random.Random(options.seed)
    sample = [(place, *draw.choice(place.mutants)) for place in draw.sample(every, min(options.count, len(every)))]
    tests, seconds = tests_by_line(options.coverage), seconds_of(options.junit)
    settings = {"targets": options.targets, "seed": options.seed, "places": len(every), "most_seconds": MOST}
    kept = Kept(options.json, settings) if options.json else None
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    lives = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        runs = Runs(copy)
        for number, (place, name, occurrence) in enumerate(sample):
            key = f"{place.file}:{place.line}:{place.column} {name} {occurrence}"
            if kept is not None and key in kept.rows:
                continue
            change = copy.mutate(place, name, occurrence)
            if change is None:
                continue
            tried = chosen_tests(place, tests.get(place.file, {}), seconds)
            start = time.perf_counter()
            limit = 30 + 5 * sum(seconds.get(test, 1.0) for test in tried)
            end = runs.outcome(tried, limit) if tried else None
            copy.restore(place)
            if end is not None:
                runs.check(tried, limit)
            lives += end is None
            row = {"change": change, "tests": len(tried), "killed_by": end, "seconds": time.perf_counter() - start}
            print(f"{number + 1:4} {end or 'LIVES':8} {row['seconds']:6.1f} s {key}: {change}", flush=True)
            if kept is not None:
                kept.add(key, row)
    print(f"{lives} live")


if __name__ == "__main__":
    main()
