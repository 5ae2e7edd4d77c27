"""Python processes that have imported torch, transformers and headwise already, which takes longer than most tests.

    done = warm.run("-m", "headwise", "convert", source, out, "--to", "mqa")       # as subprocess.run
    done = warm.run("-m", "headwise", "calibrate", source, out, ranks=2)           # as torchrun
    with warm.start("-c", PROGRAM, "an argument") as process:                      # as subprocess.Popen
        process.wait_for("ready")
        process.send_signal(signal.SIGINT)
        done = process.finish()

A command is what follows ``python`` on a command line. Each process is forked from one that only imports, so its
memory, working directory, environment and signals are its own; but what modules read from the environment while they
are imported (``OMP_NUM_THREADS``, ``COLUMNS``) is that of the first call. What a test says of imports needs a real
process.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

PRELOADED = ["pytest", "headwise.cli.commands.frontier", "headwise.conversion", "headwise.measure.evaluation"]


def run(*command: object, ranks: int = 1, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; see `start`."""
    with start(*command, ranks=ranks, env=env) as process:
        return process.finish()


def start(*command: object, ranks: int = 1, env: Mapping[str, str] | None = None) -> Warm:
    """Start a command in the working directory of this process.

    Args:
        command: ``-m`` and a module, ``-c`` and a program, or a file; then the arguments.
        ranks: the number of processes; of several each has its rank and the others' address, as torchrun's have.
        env: the whole environment; that of this process when None.
    """
    return Warm([str(word) for word in command], ranks, dict(os.environ if env is None else env))


class Warm:
    """A command that runs in one or several processes with one stdout and stderr, until the end of its block."""

    def __init__(self, command: list[str], ranks: int, environment: dict[str, str]) -> None:
        self.args, self._folder = command, tempfile.TemporaryDirectory()
        self._streams = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        for stream in self._streams:
            stream.touch()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._processes: list[Any] = []
        if ranks > 1:
            import torch.distributed as dist

            self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            environment |= {
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": f"{self._store.port}",
                "WORLD_SIZE": f"{ranks}",
            }
            environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        for rank in range(ranks):
            own = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} if ranks > 1 else {}
            words = (command, environment | own, os.getcwd(), self._streams)
            self._processes.append(context.Process(target=_run, args=words, daemon=True))
            self._processes[-1].start()

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        self.send_signal(signal.SIGKILL)
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def wait_for(self, text: str) -> None:
        """Wait until a text has been printed on stdout."""
        while text not in self._streams[0].read_text():
            assert all(process.is_alive() for process in self._processes), self._streams[1].read_text()
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        """Send a signal to every process that still runs."""
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def finish(self) -> subprocess.CompletedProcess[str]:
        """Wait for the end; as torchrun does, stop all ranks when one has failed.

        Returns:
            What was printed, and the status of the first process that failed, which is negative after a signal.
        """
        status, running = 0, {process.sentinel: process for process in self._processes}
        while running:
            ended = wait(list(running), timeout=30 if status else None)
            if not ended:
                self.send_signal(signal.SIGKILL)
            for sentinel in ended:
                process = running.pop(sentinel)
                process.join()
                if process.exitcode and not status:
                    status = process.exitcode
                    for other in running.values():
                        other.terminate()
        out, err = (stream.read_text(errors="replace") for stream in self._streams)
        return subprocess.CompletedProcess(self.args, status, out, err)


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
