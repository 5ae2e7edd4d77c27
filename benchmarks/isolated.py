"""Run a generated program in a process of its own: no network, and little time, memory, disk and processes.

Linux only. ``unshare`` gives the program namespaces without any network device, with its own processes and mounts:
all file systems are read-only but a small one in memory, which is its ``/tmp`` and current folder. Root's programs
run as ``nobody``, and a user's as that user without capabilities. Where these namespaces cannot be had, nothing is
run, and there is no option for running it all the same. All this is against mistakes: a program that means harm can
read what everyone may read, and so find the word by which it is said to have ended.
"""

from __future__ import annotations

import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

NOBODY = "65534"

_SETUP = """
set -e
while read -r _ _ _ _ place _; do
    case "$place" in /proc*|/sys*|/dev*) ;; *) mount -o remount,bind,ro "$place" ;; esac
done < /proc/self/mountinfo
mount --rbind "$1" /mnt
shift
for place in /dev/shm /tmp; do mount -t tmpfs -o size=16m,mode=1777 tmpfs "$place"; done
mount -t proc proc /proc
cd /tmp
"$@" || exit $?
"""
"""Run by a shell within the namespaces, with the program's command as its arguments, after Python's folder.

That folder may lie where only its owner may look, so that it is put in the place of ``/mnt``."""

_LIMITED = """
import os, resource, sys
for limit, value in zip(sys.argv[2::2], sys.argv[3::2]):
    resource.setrlimit(int(limit), (int(value), int(value)))
os.execv(sys.argv[1], [sys.argv[1], "-I", "-"])
"""
"""Sets limits and becomes the interpreter that reads the program: a limit of processes must not meet ``unshare``."""


class NoIsolationError(RuntimeError):
    """This machine cannot isolate a program."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may take.

    Attributes:
        seconds: of processor time.
        wall_seconds: until it is killed, whatever it does.
        memory: bytes of addresses.
        file_bytes: of each file that it writes, and of what it prints.
        processes: it and those that it starts, threads included.
    """

    seconds: int = 10
    wall_seconds: float = 30.0
    memory: int = 1 << 30
    file_bytes: int = 1 << 20
    processes: int = 1

    def arguments(self) -> list[str]:
        """The numbers of the limits, each followed by its value."""
        limits = {
            resource.RLIMIT_CPU: self.seconds,
            resource.RLIMIT_AS: self.memory,
            resource.RLIMIT_FSIZE: self.file_bytes,
            resource.RLIMIT_NPROC: self.processes,
            resource.RLIMIT_CORE: 0,
        }
        return [str(number) for item in limits.items() for number in item]


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        passed: whether its last statement was reached, and it then ended without an error.
        why: ``passed``, ``timed out``, ``ended early``, ``killed by`` a signal, or the last line of its error.
    """

    passed: bool
    why: str


def refuse_no_isolation() -> None:
    """Refuse to run programs where a harmless one cannot be isolated, or where an isolated one has a network.

    Raises:
        NoIsolationError: there is no isolation.
    """
    network = "import socket\nassert [name for _, name in socket.if_nameindex()] in ([], ['lo'])"
    try:
        outcome = run_isolated(network)
    except OSError as error:
        outcome = Outcome(False, str(error))
    if not outcome.passed:
        raise NoIsolationError(f"programs cannot be isolated here, so none is run: {outcome.why}")


def run_isolated(program: str, limits: Limits = Limits()) -> Outcome:
    """Run a Python program, and say whether its end was reached.

    An exit status of 0 is not believed, as a program may leave before its tests. After its last statement a random
    word is printed, which is drawn here and is not known when the program is written.
    """
    word = secrets.token_hex(16)
    is_root = os.geteuid() == 0
    python = str(Path("/mnt") / Path(sys.executable).resolve().relative_to(sys.base_prefix))
    command = [
        *("unshare", *(() if is_root else ("--user", "--map-root-user"))),
        *("--net", "--pid", "--ipc", "--uts", "--mount", "--fork", "--kill-child", "sh", "-c", _SETUP),
        *("sh", sys.base_prefix),
        *("setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"),
        *(("--reuid", NOBODY, "--regid", NOBODY, "--clear-groups") if is_root else ()),
        *(python, "-I", "-c", _LIMITED, python, *limits.arguments()),
    ]
    source = f"{program}\n__import__('sys').stdout.write('\\n{word}')\n"
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        environment = {"PATH": os.defpath + ":/usr/sbin:/sbin", "LANG": "C.UTF-8"}
        started = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=err, env=environment, cwd="/", start_new_session=True
        )
        try:
            started.communicate(source.encode("utf-8", "replace"), timeout=limits.wall_seconds)
        except subprocess.TimeoutExpired:
            started.kill()  # and with it, by --kill-child, every process of its namespace
            started.wait()
            return Outcome(False, "timed out")
        lines = [_last_line(file, limits.file_bytes) for file in (out, err)]
    if started.returncode == 0:
        return Outcome(True, "passed") if lines[0] == word else Outcome(False, "ended early")
    if started.returncode > 128:  # as a shell says it
        return Outcome(False, f"killed by {signal.Signals(started.returncode - 128).name}")
    return Outcome(False, lines[1] or "failed")


def _last_line(file: tempfile._TemporaryFileWrapper[bytes], most: int) -> str:
    file.seek(0)
    lines = file.read(most).decode("utf-8", "replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "")[:200]
