"""Python processes that have imported torch, transformers and headwise already, which takes longer than most tests.

    done = warm.run("-m", "headwise", "convert", source, out, "--to", "mqa")       # as subprocess.run
    done = warm.run("-m", "headwise", "calibrate", source, out, ranks=2)           # as torchrun
    with warm.start("-c", PROGRAM, "an argument") as process:                      # as subprocess.Popen
        process.wait_for("ready")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()

A command is what follows ``python`` on a command line. Each process is forked from one that only imports, so its
memory, working directory, environment and signals are its own; but what modules read from the environment while they
are imported (``OMP_NUM_THREADS``, ``COLUMNS``) is that of the first call. What a test says of imports needs a real
process.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

PRELOADED = ["pytest", "headwise.cli.commands.frontier", "headwise.conversion", "headwise.measure.evaluation"]


def context() -> Any:
    """The context of ``multiprocessing`` whose processes are warm."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(PRELOADED)
    return forkserver


def run(*command: object, ranks: int = 1, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; see `start`."""
    with start(*command, ranks=ranks, env=env) as process:
        out, err = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode or 0, out, err)


def start(*command: object, ranks: int = 1, env: Mapping[str, str] | None = None) -> Warm:
    """Start a command in the working directory of this process.

    Args:
        command: ``-m`` and a module, ``-c`` and a program, or a file; then the arguments.
        ranks: the number of processes; of several each has its rank and the others' address, as torchrun's have.
        env: the whole environment; that of this process when None.
    """
    return Warm([str(word) for word in command], ranks, dict(os.environ if env is None else env))


def popen(command: Sequence[str], stdout: IO[str] | int = subprocess.PIPE, **_: object) -> Warm:
    """A warm process in the place of ``subprocess.Popen``, for a command that begins with the interpreter.

    Args:
        command: the interpreter, and what follows it.
        stdout: a file that has a name; a constant of ``subprocess`` changes nothing.
    """
    return Warm([*command[1:]], 1, dict(os.environ), None if isinstance(stdout, int) else stdout.name)


class Warm:
    """A command that runs in one or several processes with one stdout and stderr, until the end of its block."""

    def __init__(
        self, command: list[str], ranks: int, environment: dict[str, str], stdout: str | None = None
    ) -> None:
        self.args, self._folder = command, tempfile.TemporaryDirectory()
        self._streams = [Path(stdout or f"{self._folder.name}/out"), Path(self._folder.name, "err")]
        for stream in self._streams:
            stream.touch()
        self.returncode: int | None = None
        self._failed, self._deadline = 0, math.inf
        self._processes: list[Any] = []
        if ranks > 1:
            import torch.distributed as dist

            self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": f"{self._store.port}"}
            environment |= {"WORLD_SIZE": f"{ranks}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        for rank in range(ranks):
            own = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} if ranks > 1 else {}
            words = (command, environment | own, os.getcwd(), self._streams)
            self._processes.append(context().Process(target=_run, args=words, daemon=True))
            self._processes[-1].start()
        self.pid = self._processes[0].pid

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()
        self._folder.cleanup()

    def wait_for(self, text: str) -> None:
        """Wait until a text has been printed on stdout."""
        while text not in self._streams[0].read_text():
            assert self.poll() is None, self._streams[1].read_text()
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        """Send a signal to every process that still runs."""
        for process in self._processes:
            if process.exitcode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def wait(self) -> None:
        """Wait until every process has ended, looking at none."""
        for process in self._processes:
            process.join()

    def poll(self) -> int | None:
        """The status of the first process that failed, negative after a signal, or 0; None while one still runs.

        As torchrun does, this stops all ranks when one has failed. Of ranks that have ended since the last look, one
        that a signal ended comes first: the others fail because it is gone.
        """
        statuses = [process.exitcode for process in self._processes]
        if not self._failed and any(statuses):
            self._failed, self._deadline = min(filter(None, statuses)), time.monotonic() + 30
            self.send_signal(signal.SIGTERM)
        if time.monotonic() > self._deadline:
            self.send_signal(signal.SIGKILL)
        self.returncode = None if None in statuses else self._failed
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end, and return stdout and stderr.

        Raises:
            subprocess.TimeoutExpired: it still runs after this many seconds.
        """
        start = time.monotonic()
        while self.poll() is None:
            if timeout is not None and time.monotonic() > start + timeout:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        out, err = (stream.read_text(errors="replace") for stream in self._streams)
        return out, err


def _run(command: list[str], environment: dict[str, str], folder: str, streams: list[Path]) -> None:
    """Run a command in this process, which exists for nothing else, as Python runs it."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it is of the environment
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, stream in enumerate(streams, start=1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_APPEND), descriptor)
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        elif command[0] == "-c":
            sys.argv = ["-c", *command[2:]]
            exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
