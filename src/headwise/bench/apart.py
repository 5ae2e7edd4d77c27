"""An engine in a process of its own.

In one process OpenMP, which engines share with torch, counts more threads than cores, and puts threads to sleep
between any two products; headwise, which makes many short ones, is then measured at something else than its speed.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from headwise.bench.report import UnableError
from headwise.measurement.timing import seconds


class Engine(Protocol):
    """A model that has read a prompt, and can be asked for one more token again and again."""

    note: str

    def read(self, ids: list[int]) -> None:
        """Read a prompt, once."""

    def step(self, token: int) -> None:
        """Make one more token."""


class Apart:
    """An engine in a process of its own, which ends with ``with``, or after its answer when this process has ended.

    Args:
        make: a function of a module: an `Engine` of a source and room.
        source: a model.
        room: tokens that the cache is to hold.

    Raises:
        UnableError: the engine cannot run the model.
    """

    def __init__(self, make: Callable[[str, int], Engine], source: str | Path, room: int) -> None:
        given = (make.__module__, make.__name__, str(source), str(room), str(torch.get_num_threads()))
        # Of ours, so that what an engine has written goes whatever ends it.
        self._folder = tempfile.TemporaryDirectory(prefix="headwise-bench-")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"import sys; from {__name__} import serve; serve(*sys.argv[1:])", *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "TMPDIR": self._folder.name},
        )
        try:
            self.note: str | None = self._told()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def read(self, ids: list[int]) -> None:
        """Read a prompt, once."""
        self._ask("read", ids)

    def step(self, token: int) -> float:
        """Seconds that one more token took, measured over there."""
        return float(self._ask("step", token))

    def _ask(self, what: str, argument: object) -> Any:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # how it ended is told below
            print(json.dumps([what, argument]), file=self._process.stdin, flush=True)
        return self._told()

    def _told(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UnableError(f"its process ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise UnableError(answer["error"])
        return answer["told"]


def serve(module: str, make: str, source: str, room: str, threads: str) -> None:
    """The other side of `Apart`: a line for each line, until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(int(threads))
    engine: Engine

    def start() -> str:
        nonlocal engine
        engine = getattr(importlib.import_module(module), make)(source, int(room))
        return engine.note

    def answer(call: Callable[[], object]) -> bool:
        try:
            told = {"told": call()}
        except UnableError as error:
            told = {"error": str(error)}
        except Exception as error:  # engines fail in many ways
            told = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(told), file=answers)
        return "told" in told

    if answer(start):
        asked: dict[str, Callable[[Any], object]] = {
            "read": engine.read,
            "step": lambda token: seconds(partial(engine.step, token)),
        }
        for line in sys.stdin:
            what, given = json.loads(line)
            answer(partial(asked[what], given))
    os._exit(0)  # an engine's threads may be waiting for what never comes
