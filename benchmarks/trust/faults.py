"""Let everything around a run fail: the disk, its sources, its memory, its clock, other runs and other processes.

    python -m benchmarks.trust.faults --folder FOLDER --json benchmarks/results/trust/faults.json
    python -m benchmarks.trust.faults --folder FOLDER --json faults.json --case convert --fault "full disk" --times 8

Each case of `benchmarks.trust.cases` that runs in seconds meets every fault, at operations on files that are drawn at
random. It must end with success, or with one line and status 2, 1 or 130; the output must not have its name or be
right; the inputs stay as they are; once the fault is over the same command makes the undisturbed output, and nothing
is left beside it. With the rights to mount, the work is done on a file system of its own in memory, so that full and
read-only disks are real. Rows that a file has are kept, so that a campaign goes on where it was ended.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.kept import Kept, say
from benchmarks.trust.cases import CASES, make_inputs
from benchmarks.trust.ground import Ground
from benchmarks.trust.runs import Ended, Fault, environment

from benchmarks import data

MEGABYTE = 1024**2
DISK = 600
"""The megabytes of the disk."""

SIZES = (1, 16, 66, 72)
"""The megabytes that are free on small disks; a run that writes a folder begins with 64 and its tensors."""

ROOMS = (8, 64, 256, 1024)
"""The megabytes of address space that a run may take, beyond those of a process that has imported headwise."""

LIMITS = (500, 1000, 2000, 4000, 8000)
"""The megabytes of address space of a run from its start, imports and all."""

ERRORS = (errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES, errno.EDQUOT)

_ENDS = "exists and is not empty", "exists; say --overwrite", "is being written by process"
"""What a command says where another one has written its output, or is writing it."""


def mount(folder: Path, *options: str) -> bool:
    """Mount a file system in memory, or change one; return whether that is allowed."""
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
    return sys.platform == "linux" and subprocess.run(command, check=False, capture_output=True).returncode == 0


class Trial:
    """One case, to which faults happen.

    Args:
        ground: the case's folder.
        draw: what draws moments.
        is_mounted: whether the folder is a file system of its own.
    """

    def __init__(self, ground: Ground, draw: random.Random, *, is_mounted: bool) -> None:
        self.ground, self.is_mounted = ground, is_mounted
        self._draw = draw
        self.statuses: Counter[str] = Counter()
        self.said: dict[str, str] = {}

    def moment(self) -> int:
        """The number of a random operation."""
        return self._draw.randint(1, len(self.ground.operations))

    def choice(self, things: Sequence[Any]) -> Any:
        """One of several things, drawn at random."""
        return self._draw.choice(things)

    def note(self, said: str, ended: Ended) -> None:
        """Look at how a run ended, at its inputs and at its output."""
        if complaint := ended.complaint:
            self.ground.findings.append(f"{said}: {complaint}")
        self.statuses[str(ended.status)] += 1
        if ended.status:
            self.said.setdefault(said, ended.err.strip()[-300:].replace(str(self.ground.folder), "FOLDER"))

    def check_and_go_on(self, said: str, ended: Ended) -> None:
        """What has to hold after each fault."""
        self.note(said, ended)
        self.ground.check(said)
        self.ground.go_on(said)


def small_disk(trial: Trial) -> None:
    folder, inputs = trial.ground.folder, trial.ground.folder / "inputs"
    used = sum(file.stat().st_size for file in inputs.rglob("*") if file.is_file()) // MEGABYTE + 1
    free = trial.choice(SIZES)
    mount(folder, "remount", f"size={used + free}m")
    try:
        ended = trial.ground.run()
    finally:
        mount(folder, "remount", f"size={DISK}m")
    trial.check_and_go_on(f"small disk, {free} MB free", ended)


def full_disk(trial: Trial) -> None:
    filler = trial.ground.folder / "filler"
    ended = trial.ground.run(Fault("fill", trial.moment(), path=str(filler)))
    filler.unlink(missing_ok=True)
    trial.check_and_go_on("full disk", ended)


def read_only(trial: Trial) -> None:
    mount(trial.ground.folder, "remount", "ro")
    try:
        ended = trial.ground.run()
    finally:
        mount(trial.ground.folder, "remount", "rw")
    trial.check_and_go_on("read-only disk", ended)


def error(trial: Trial) -> None:
    number = trial.choice(ERRORS)
    ended = trial.ground.run(Fault("error", trial.moment(), number))
    trial.check_and_go_on(f"{errno.errorcode[number]} from an operation on", ended)


def source(trial: Trial) -> None:
    ground, inputs = trial.ground, trial.ground.folder / "inputs"
    kind = trial.choice(("vanish", "truncate", "change"))
    read = {line.partition(" to read ")[2] for line in ground.operations}
    files = sorted(file for file in inputs.rglob("*") if str(file.resolve()) in read)
    file = trial.choice(files)
    kept = file.read_bytes(), file.stat().st_mtime_ns
    ended = ground.run(Fault(kind, trial.moment(), path=str(file)))
    file.with_name(f"{file.name}.away").unlink(missing_ok=True)
    file.write_bytes(kept[0])
    os.utime(file, ns=(kept[1], kept[1]))
    trial.check_and_go_on(f"a source: {file.name}, {kind}", ended)


def removed(trial: Trial) -> None:
    ended = trial.ground.run(Fault("remove", trial.moment(), path=str(trial.ground.folder)))
    trial.check_and_go_on("folders removed", ended)


def clock(trial: Trial) -> None:
    days = trial.choice((-3650, -1, 1, 3650))
    jump = Fault("clock", trial.moment(), days * 86_400)
    ended = trial.ground.run(jump, Fault("signal", trial.moment(), signal.SIGTERM))
    trial.check_and_go_on(f"clock jumps by {days} days, then SIGTERM", ended)


def memory(trial: Trial) -> None:
    room = trial.choice(ROOMS)
    trial.check_and_go_on(f"memory, {room} MB", trial.ground.run(room=room * MEGABYTE))


def memory_at_start(trial: Trial) -> None:
    limit = trial.choice(LIMITS)
    trial.check_and_go_on(f"ulimit -v, {limit} MB", trial.ground.run(is_cold=True, limit=limit * MEGABYTE))


def stale_lock(trial: Trial) -> None:
    locks = {line.rpartition(" ")[2] for line in trial.ground.operations if line.endswith("/lock")}
    for lock in map(Path, locks):
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.write_text("999999999")
    trial.check_and_go_on("a lock of a process that is gone", trial.ground.run())


def twice(trial: Trial) -> None:
    at = trial.moment()
    again = Fault("signal", at + trial.choice((1, 2, 5)), signal.SIGINT)
    trial.check_and_go_on("SIGINT twice", trial.ground.run(Fault("signal", at, signal.SIGINT), again))


def together(trial: Trial) -> None:
    ground = trial.ground
    runs = [ground.start()]
    time.sleep(trial.choice((0.0, 0.3, 0.9)) * ground.seconds)
    runs.append(ground.start())
    ended = [run.end() for run in runs]
    for one in ended:
        trial.note("two runs at once", one)
        if one.status == 2 and not any(words in one.err for words in _ENDS):
            ground.findings.append(f"two runs at once: {one.err.strip()}")
    if all(one.status for one in ended):
        ground.findings.append(f"two runs at once: neither made it: {[one.err.strip()[-300:] for one in ended]}")
    ground.check("two runs at once")
    if any(words in one.err for one in ended for words in _ENDS[:2]):
        ground.clear_work()  # what the later run has done is kept, as it says, for another output
    ground.go_on("two runs at once")


def lost_rank(trial: Trial) -> None:
    """One of two processes of torchrun is killed; the same command, in one process, goes on or begins anew."""
    ground = trial.ground
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "headwise",
    ]
    before = time.perf_counter()
    with subprocess.Popen(
        [*torchrun, *ground.case.words],
        cwd=ground.folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        rank = trial.choice((0, 1))
        wait = trial.choice((0.25, 0.5, 0.75)) * (30 + 2 * ground.seconds)
        while time.perf_counter() < before + wait and process.poll() is None:
            time.sleep(0.05)
        children = _children(process.pid)
        if len(children) == 2:
            with suppress(ProcessLookupError):
                os.kill(children[rank], signal.SIGKILL)
        try:
            err = process.communicate(timeout=300)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            err = process.communicate()[1]
            ground.findings.append("a rank is lost: the others hang")
    own = [line for line in err.splitlines() if line.startswith("headwise: ")]
    trial.statuses[f"torchrun {process.returncode}"] += 1
    if process.returncode and len(own) != 1 and not (rank == 0 and not own):
        ground.findings.append(f"rank {rank} is lost: {own or err[-800:]}")
    ground.check("a rank is lost")
    ground.clear()  # of two processes sums are made in another order, so that one process begins anew


def _children(parent: int) -> list[int]:
    """The processes that a process has started, the first one first."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            if folder.name.isdigit() and int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(folder.name))
    return sorted(found)


FAULTS: dict[str, Callable[[Trial], None]] = {
    "small disk": small_disk,
    "full disk": full_disk,
    "read-only disk": read_only,
    "error of the system": error,
    "source": source,
    "folders removed": removed,
    "clock": clock,
    "memory": memory,
    "memory, at start": memory_at_start,
    "stale lock": stale_lock,
    "SIGINT twice": twice,
    "two at once": together,
    "lost rank": lost_rank,
}
"""The faults by name."""

_MOUNTED = (small_disk, full_disk, read_only)
_ONCE = (read_only, stale_lock, memory_at_start, lost_rank)
_WITH_RANKS = ("convert", "calibrate", "heal", "frontier")


def campaign(case: str, ground: Ground, faults: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Let faults happen to a case; the row of the results."""
    draw, happened = random.Random(f"{options.seed} {case}"), dict[str, Any]()
    for name in faults:
        fault = FAULTS[name]
        if (fault in _MOUNTED and not options.is_mounted) or (fault is lost_rank and case not in _WITH_RANKS):
            continue
        if fault is memory_at_start and case != "convert":
            continue
        trial = Trial(ground, draw, is_mounted=options.is_mounted)
        times = len(LIMITS) if fault is memory_at_start else 1 if fault in _ONCE else options.times
        for _ in range(times):
            fault(trial)
        happened[name] = {"times": times, "statuses": trial.statuses, "said": trial.said}
    return {
        "command": " ".join(("headwise", *ground.case.words)),
        "faults": happened,
        "outputs": ground.compared,
        "findings": ground.findings,
    }


@contextmanager
def workplace(parent: Path) -> Iterator[tuple[Path, bool]]:
    """A folder to work in, and whether it is a file system of its own."""
    work = parent / "headwise-faults"
    work.mkdir(parents=True)
    is_mounted = mount(work, f"size={DISK}m")
    try:
        yield work, is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(work)], check=False)
        shutil.rmtree(work, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    small = {name: case for name, case in CASES.items() if not case.real}
    parser.add_argument("--folder", type=Path, required=True, help="where to work")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--case", action="append", choices=small, help="may be repeated; all when left out")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="may be repeated; all when left out")
    parser.add_argument("--times", type=int, default=3, help="how often each fault happens to each case")
    parser.add_argument("--text", type=Path, help="to calibrate on; the Brown corpus when left out")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to clean up
    kept = Kept(options.json, {"seed": options.seed, "faults": options.fault or [*FAULTS], "times": options.times})
    with workplace(options.folder) as (work, options.is_mounted):
        make_inputs(work / "inputs", options.text or data.brown(), real=False)
        for name in options.case or small:
            if name in kept.rows:
                continue
            row = campaign(name, Ground(small[name], work), options.fault or [*FAULTS], options)
            kept.add(name, row)
            count = sum(one["times"] for one in row["faults"].values())
            say(f"{name}: {count} faults, {row['outputs']} outputs equal")
            for finding in row["findings"]:
                say(f"  FOUND {finding}")
    if any(row["findings"] for row in kept.rows.values()):
        sys.exit("something was found: see the results")


if __name__ == "__main__":
    main()
