"""An engine's process: `worker.py`, started in the environment where the engine is installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from headwise.base.progress import Progress
from headwise.errors import ArgumentError, MissingExtraError

WORKER = Path(__file__).with_name("worker.py")

_SURROUNDINGS = {
    "PYTHONSAFEPATH": "1",  # the worker's folder has modules with names of others' packages
    "PYTHONUTF8": "1",
    "GGML_NO_BACKTRACE": "1",  # ggml's own last words are then the last
}
"""What an engine's process is told besides."""


def is_installed(module: str, python: str) -> bool:
    """Whether an interpreter finds an engine's module, which is not imported.

    For example ``is_installed("llama_cpp", sys.executable)``.

    Args:
        module: that the engine is imported by.
        python: the interpreter of its environment.

    Raises:
        ArgumentError: there is no such interpreter.
    """
    search = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        words = [python, "-c", search]
        ended = subprocess.run(words, env=os.environ | _SURROUNDINGS, capture_output=True, check=False)
    except OSError as error:
        raise ArgumentError("engine_python", python, f"cannot be started: {error.strerror}") from None
    return ended.returncode == 0


def ask(engine: str, python: str, install: str, request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """What an engine's process answers; the process ends with this call, however that ends.

    For example ``ask("llama.cpp", sys.executable, "llama-cpp-python==0.3.36", request, silent)["version"]``.

    Args:
        engine: a name that the worker knows.
        python: the interpreter of its environment.
        install: what pip installs it by.
        request: see ``worker.py``.
        progress: told of every step.

    Raises:
        MissingExtraError: the engine is not installed there.
        ArgumentError: there is no such interpreter, or the engine refuses the model or ends without an answer.
    """
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                [python, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=os.environ | _SURROUNDINGS,
                start_new_session=True,
            )
        except OSError as error:
            raise ArgumentError("engine_python", python, f"cannot be started: {error.strerror}") from None
        with process:
            assert process.stdin is not None
            try:
                answer, last = _answer(process, request | {"engine": engine}, progress)
                status = process.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(BrokenPipeError):  # of a request that was not read
                    process.stdin.close()
        if missing := answer.get("missing"):
            what = "is not installed" if missing in ("llama_cpp", "mlx", "mlx_lm", "vllm") else f"asks for {missing}"
            raise MissingExtraError("engine", engine, f"{what} in {python}: {python} -m pip install '{install}'")
        if refused := answer.get("refused"):
            raise ArgumentError("engine", engine, f"refuses this: {refused}")
        if "scores" not in answer:
            raise ArgumentError("engine", engine, f"{_end(status)}; its last words: {_last_words(log, last)}")
        return answer


def _answer(
    process: subprocess.Popen[str], request: dict[str, Any], progress: Progress
) -> tuple[dict[str, Any], str]:
    """Hand the request over, and wait for the answer; empty where there is none, and the last line besides."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):  # the missing answer says that the process has ended
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
    last = ""
    for line in process.stdout:
        last = line.strip() or last
        said = _object(line)
        if said.keys() == {"stage", "done", "total"}:
            progress(said["stage"], said["done"], said["total"])
        elif said:
            return said, last
    return {}, last


def _object(line: str) -> dict[str, Any]:
    """The JSON object of a line; empty where it is none."""
    with suppress(ValueError):
        if isinstance(said := json.loads(line), dict):
            return said
    return {}


def _end(status: int) -> str:
    """How a process ended."""
    if status >= 0:
        return f"ended with status {status} and no result"
    name = signal.Signals(-status).name
    hint = " (a build for another processor ends so)" if name == "SIGILL" else ""
    return f"was ended by {name}{hint}"


def _last_words(log: IO[bytes], said: str) -> str:
    """The last line of an engine's log, which is its error; what it said to us where the log is empty."""
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return (lines or [said or "none"])[-1]
