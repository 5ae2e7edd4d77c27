"""An engine in a separate process, which a benchmark asks for one token after another.

Engines share OpenMP with torch. In one process it would count more threads than cores and put threads to sleep
between any two products, which slows headwise, whose products are many and short.
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

from headwise.measure.timing.timing import time_call
from headwise.study.bench.report import UnableError


class Engine(Protocol):
    """A model that reads a prompt once and then makes one token at a time."""

    note: str

    def read(self, ids: list[int]) -> None:
        """Read a prompt, once."""

    def step(self, token: int) -> None:
        """Make one more token."""


class EngineProcess:
    """An engine in a separate process, which ends with the ``with`` block, or soon after this process has ended.

    Args:
        make: a module-level function that makes an `Engine` from a source and a number of tokens.
        source: a model folder, ``.gguf`` or other source with weights.
        max_tokens: the number of tokens that the cache has to hold.

    Raises:
        UnableError: the engine cannot run the model.
    """

    def __init__(self, make: Callable[[str, int], Engine], source: str | Path, max_tokens: int) -> None:
        arguments = (make.__module__, make.__name__, str(source), str(max_tokens), str(torch.get_num_threads()))
        # Removed by this process, so that an engine's files are gone however it ends.
        self._folder = tempfile.TemporaryDirectory(prefix="headwise-bench-")
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                f"import sys; from {__name__} import serve_engine; serve_engine(*sys.argv[1:])",
                *arguments,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "TMPDIR": self._folder.name},
        )
        try:
            self.note: str | None = self._answer()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def read(self, ids: list[int]) -> None:
        """Read a prompt, once."""
        self._ask("read", ids)

    def step(self, token: int) -> float:
        """Make one more token, and return the seconds it took, measured in the engine's process."""
        return float(self._ask("step", token))

    def _ask(self, what: str, argument: object) -> Any:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the missing answer says that the process has ended
            print(json.dumps([what, argument]), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UnableError(f"its process ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise UnableError(answer["error"])
        return answer["told"]


def serve_engine(module: str, make: str, source: str, max_tokens: str, threads: str) -> None:
    """Serve an `EngineProcess`: read lines of JSON from stdin, and answer each by one, until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to stdout, where only answers may be
    torch.set_num_threads(int(threads))
    engine: Engine

    def start() -> str:
        nonlocal engine
        engine = getattr(importlib.import_module(module), make)(source, int(max_tokens))
        return engine.note

    def answer(call: Callable[[], object]) -> bool:
        try:
            reply = {"told": call()}
        except UnableError as error:
            reply = {"error": str(error)}
        except Exception as error:  # engines fail in many ways
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers)
        return "told" in reply

    if answer(start):
        calls: dict[str, Callable[[Any], object]] = {
            "read": engine.read,
            "step": lambda token: time_call(partial(engine.step, token)),
        }
        for line in sys.stdin:
            name, argument = json.loads(line)
            answer(partial(calls[name], argument))
    os._exit(0)  # an engine's threads may wait for ever
