"""Run headwise in a process of its own in which something goes wrong before a chosen operation on files.

An audit hook in the process sees each file that Python opens, renames or removes below a folder. Before the one with
a chosen number it sends a signal, fills the disk, changes an input, and so on. So the last moments of a run, which
last microseconds, are met by every run that asks for them; moments between two operations are met by a timer outside.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import warm

import headwise

PATIENCE = 600.0
"""The seconds after which a run counts as one that hangs."""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Of several threads each has its turn when the system gives it one; of one the results are the same bits."""

_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a run.

    Attributes:
        kind: one of ``signal``, ``error``, ``fill``, ``vanish``, ``truncate``, ``change``, ``remove`` and ``clock``.
        at: the number of the operation before which it happens, the first being 1; 0 before all of them.
        value: the number of the signal or of the error, or the seconds by which the clock jumps.
        path: the file that something happens to; of ``remove`` the folder whose folders go, but for ``inputs``.
    """

    kind: str
    at: int
    value: int = 0
    path: str = ""


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        status: the exit status, negative after a signal; None where it had to be stopped, because it hung.
        err: what it printed on stderr.
        operations: its operations on files.
        seconds: how long it took.
    """

    status: int | None
    err: str
    operations: tuple[str, ...]
    seconds: float

    @property
    def complaint(self) -> str | None:
        """What is wrong with the way in which it ended: a hang, a traceback, or other words than one line."""
        if self.status is None:
            return "it hangs"
        if self.status in (0, -signal.SIGKILL):
            return None
        lines = self.err.strip().splitlines()
        if len(lines) != 1 or not lines[0].startswith("headwise: "):
            return f"status {self.status}, and on stderr {self.err.strip()[-1500:]!r}"
        if self.status not in (1, 2, 130):
            return f"status {self.status}: {lines[0]}"
        return None


def environment() -> dict[str, str]:
    """The environment of a Python that is started for a run: it has this headwise, and one thread."""
    return os.environ | ONE_THREAD | {"PYTHONPATH": str(Path(headwise.__file__).parents[1])}


def happen(fault: Fault) -> None:
    """Let a fault happen to files or to the disk."""
    path = Path(fault.path)
    with suppress(FileNotFoundError):
        if fault.kind == "vanish":
            path.rename(path.with_name(f"{path.name}.away"))
        elif fault.kind == "truncate":
            os.truncate(path, path.stat().st_size // 2)
        elif fault.kind == "change":
            with path.open("r+b") as file:
                for start in range(path.stat().st_size // 2, path.stat().st_size, 4096):
                    file.seek(start)
                    file.write(b"7")
        elif fault.kind == "remove":
            for other in path.iterdir():
                if other.is_dir() and other.name != "inputs":
                    shutil.rmtree(other, ignore_errors=True)
        elif fault.kind == "fill":
            with suppress(OSError), path.open("wb", buffering=0) as file:
                while file.write(b"\0" * 65536):
                    pass


def _happen_within(fault: Fault) -> None:
    """Let a fault happen to the process that this is called in."""
    if fault.kind == "signal":
        os.kill(os.getpid(), fault.value)
    elif fault.kind == "clock":
        _shift_clock(fault.value)
    else:
        happen(fault)


def _shift_clock(seconds: int) -> None:
    """Let the wall clock of this process jump; the monotonic clocks go on, as the system's do."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + seconds * 10**9


def _watch(folder: str, faults: Sequence[Fault], log: int) -> None:
    """Count this process's operations on files below a folder, and let faults happen before them."""
    count, is_busy = 0, False
    waiting = sorted(faults, key=lambda fault: fault.at)
    lasting: list[int] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count, is_busy
        if event not in _EVENTS or is_busy:
            return
        path = _path(event, arguments)
        if not path.startswith(folder):
            return
        is_busy = True
        try:
            count += 1
            is_write = event != "open" or bool(arguments[2] & _WRITES)
            os.write(log, f"{event}{'' if is_write else ' to read'} {path}\n".encode())
            while waiting and waiting[0].at <= count:
                fault = waiting.pop(0)
                if fault.kind == "error":
                    lasting.append(fault.value)
                else:
                    _happen_within(fault)
            if lasting and is_write:
                raise OSError(lasting[0], os.strerror(lasting[0]), path)
        finally:
            is_busy = False

    sys.addaudithook(hook)


def _path(event: str, arguments: tuple[Any, ...]) -> str:
    """The path that an operation is on, of a rename the new one; empty where it has none."""
    path = arguments[1] if event in ("os.rename", "os.link", "os.symlink") else arguments[0]
    if not isinstance(path, str | bytes | os.PathLike):
        return ""
    name = os.fsdecode(path)
    if event in ("os.remove", "os.rmdir") and isinstance(arguments[1], int) and arguments[1] >= 0:
        with suppress(OSError):  # within a folder that is open
            return os.path.join(os.readlink(f"/proc/self/fd/{arguments[1]}"), name)
    return os.path.abspath(name)


def _child(words: Sequence[str], folder: str, faults: Sequence[Fault], logs: str, room: int | None) -> None:
    """Run headwise in this process, which exists for nothing else."""
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{logs}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(folder)
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(f"{logs}/operations", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if room is not None:
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + room
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    Path(logs, "started").touch()
    _watch(os.path.join(folder, ""), faults, log)
    from headwise.cli import main

    main(list(words))


class Run:
    """A run of headwise that has begun.

    Args:
        words: the words after ``headwise``.
        folder: the working directory, below which operations are counted.
        faults: what goes wrong in it.
        room: the bytes of address space that it may take beyond those that a process has which has imported
            headwise; any number when None.
        is_cold: whether Python is started for it, and no operations are counted. Otherwise its process is forked from
            one that has imported headwise, so that moments are those of its work and not of imports.
        limit: the whole address space in bytes, for a cold run.
    """

    def __init__(
        self,
        words: Sequence[object],
        folder: Path,
        faults: Sequence[Fault] = (),
        *,
        room: int | None = None,
        is_cold: bool = False,
        limit: int | None = None,
    ) -> None:
        self._logs = tempfile.TemporaryDirectory()
        self._start = time.perf_counter()
        self._process: Any
        spoken = [*map(str, words)]
        if is_cold:
            before = [] if limit is None else ["prlimit", f"--as={limit}"]
            with open(f"{self._logs.name}/err", "wb") as err:
                command = [*before, sys.executable, "-m", "headwise", *spoken]
                self._process = subprocess.Popen(
                    command, cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=err
                )
        else:
            given = (spoken, os.path.realpath(folder), tuple(faults), self._logs.name, room)
            os.environ |= ONE_THREAD  # of the first such process, by which all others are forked
            self._process = warm.context().Process(target=_child, args=given)
            self._process.start()
            while not Path(self._logs.name, "started").exists() and self._process.is_alive():
                time.sleep(0.001)
            self._start = time.perf_counter()
        self.pid: int = self._process.pid

    def wait(self, seconds: float) -> bool:
        """Wait for its end, or as long; return whether it has ended."""
        if isinstance(self._process, subprocess.Popen):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            return self._process.returncode is not None
        self._process.join(seconds)
        return self._process.exitcode is not None

    def send(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if not self.wait(0):
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self) -> Ended:
        """Wait for its end, and say how it was."""
        has_ended = self.wait(PATIENCE)
        seconds = time.perf_counter() - self._start
        if not has_ended:
            self.send(signal.SIGKILL)
            self.wait(PATIENCE)
        status = self._process.returncode if isinstance(self._process, subprocess.Popen) else self._process.exitcode
        logs = Path(self._logs.name)
        files = [logs / name for name in ("err", "operations")]
        err, operations = (file.read_text(errors="replace") if file.exists() else "" for file in files)
        self._logs.cleanup()
        return Ended(status if has_ended else None, err, tuple(operations.splitlines()), seconds)
