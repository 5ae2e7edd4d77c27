"""End every command that writes at random moments, let it go on, and compare its output with an undisturbed one's.

    python -m benchmarks.trust.kills --folder FOLDER --json benchmarks/results/trust/kills.json
    python -m benchmarks.trust.kills --folder FOLDER --json kills.json --case heal --case frontier --kills 8

Each case of `benchmarks.trust.cases` is run to its end twice. Other runs of it are ended by SIGKILL, SIGINT or
SIGTERM, up to `EACH` times in a row, and then the same command is run to its end. Some moments are uniform over the
time of a run, some uniform over its operations on files, and a third are among the last operations of a run that
nothing has disturbed before: the move into place and the clearing up. One kill in eight is of a Python that starts,
and imports, for this run. After each kill the inputs are hashed, and what has its final name is compared; at the end
the output is compared, and nothing may be left beside it. A command that SIGINT or SIGTERM reaches says so in one
line. Rows that a file has are kept, so that a campaign goes on where it was ended.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kept import Kept, say
from benchmarks.trust.cases import CASES, Case, make_inputs
from benchmarks.trust.ground import Ground
from benchmarks.trust.runs import Ended, Fault

from benchmarks import data

EACH = 4
"""The most kills of one run, so that there are several outputs, and not all kills come near the end of one."""

LAST = 30
"""The operations on files that count as the last ones: the move into place, and the clearing up."""

SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Kill:
    """A kill that is to be.

    Attributes:
        number: the number of the signal.
        moment: ``seconds``, ``operation``, ``last operations`` or ``starting``.
        value: the seconds, or the number of the operation.
    """

    number: signal.Signals
    moment: str
    value: float

    def __str__(self) -> str:
        return f"{self.number.name} at {self.moment} {self.value:.4g}"


def drawn(draw: random.Random, ground: Ground, *, is_fresh: bool) -> Kill:
    """A random kill of a case's run."""
    number, operations = draw.choice(SIGNALS), len(ground.operations)
    kind = draw.random()
    if kind < 1 / 8:
        return Kill(number, "starting", draw.uniform(0.3, 8))
    if kind < 0.45 and is_fresh:
        return Kill(number, "last operations", draw.randint(max(operations - LAST, 1), operations))
    if kind < 0.7:
        return Kill(number, "operation", draw.randint(1, operations))
    return Kill(number, "seconds", draw.uniform(0, ground.seconds))


def killed(ground: Ground, kill: Kill) -> Ended:
    """Run the command, and end it."""
    if kill.moment in ("seconds", "starting"):
        run = ground.start(is_cold=kill.moment == "starting")
        if not run.wait(kill.value):
            run.send(kill.number)
        return run.end()
    return ground.run(Fault("signal", int(kill.value), kill.number))


def left(ground: Ground) -> str:
    """What a run that was ended has left."""
    if ground.is_done:
        return "the output in its place"
    kept = (
        path for path in ground.folder.rglob("*") if path.is_file() and ground.folder / "inputs" not in path.parents
    )
    return "work that is kept" if any(path.name not in ("lock", "run") for path in kept) else "nothing"


def campaign(case: Case, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill one case's runs; the row of the results."""
    ground, draw = Ground(case, folder), random.Random(seed)
    rows: list[dict[str, Any]] = []
    late = 0
    while len(rows) < kills:
        words = []
        for turn in range(min(EACH, kills - len(rows))):
            kill = drawn(draw, ground, is_fresh=not turn)
            ended = killed(ground, kill)
            words.append(str(kill))
            if ended.status == 0:  # it had ended before the kill
                late += 1
                break
            row = {"signal": kill.number.name, "moment": kill.moment, "value": kill.value, "left": left(ground)}
            is_late = ended.status not in (-kill.number, 130) and ground.is_done
            rows.append({**row, "status": ended.status, **({"operation": _last(ended)} if ended.operations else {})})
            if kill.number != signal.SIGKILL and (complaint := _complaint(kill, ended)) and not is_late:
                ground.findings.append(f"{kill}: {complaint}")
            ground.check(str(kill))
            if ground.is_done:  # killed while it cleared up
                break
        ground.go_on(", ".join(words))
    return {
        "command": " ".join(("headwise", *case.words)),
        "seconds": ground.seconds,
        "operations": len(ground.operations),
        "kills": rows,
        "signals": Counter(row["signal"] for row in rows),
        "moments": Counter(row["moment"] for row in rows),
        "left": Counter(row["left"] for row in rows),
        "late": late,
        "outputs": ground.compared,
        "findings": ground.findings,
    }


def _complaint(kill: Kill, ended: Ended) -> str | None:
    """What is wrong with the end of a run after SIGINT or SIGTERM."""
    if kill.moment == "starting" and ended.status == -kill.number:
        return None  # Python itself, before headwise was there
    return ended.complaint


def _last(ended: Ended) -> str:
    """The operation before which a run was ended, without the folder and what is random in names."""
    event, _, path = ended.operations[-1].rpartition(" ")
    return f"{event} {Path(path).name}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where to work")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--case", action="append", choices=CASES, help="may be repeated; all when left out")
    parser.add_argument("--kills", type=int, help="of each case; its own number when left out")
    parser.add_argument("--text", type=Path, help="to calibrate on; the Brown corpus when left out")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to clean up
    kept = Kept(options.json, {"seed": options.seed})
    names = [name for name in options.case or CASES if name not in kept.rows]
    work = options.folder / "headwise-kills"
    work.mkdir(parents=True)
    try:
        make_inputs(work / "inputs", options.text or data.brown(), real=any(CASES[name].real for name in names))
        for name in names:
            case = CASES[name]
            row = campaign(case, work, options.kills or case.kills, options.seed)
            kept.add(name, row)
            say(f"{name}: {len(row['kills'])} kills, {row['outputs']} outputs equal, {dict(row['left'])}")
            for finding in row["findings"]:
                say(f"  FOUND {finding}")
    finally:
        shutil.rmtree(work)
    if any(row["findings"] for row in kept.rows.values()):
        sys.exit("something was found: see the results")


if __name__ == "__main__":
    main()
