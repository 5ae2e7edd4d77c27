"""Give every reader malformed files by the ten thousand: each ends in success or in one clean line.

    python -m benchmarks.trust.fuzz --json benchmarks/results/trust/fuzz.json
    python -m benchmarks.trust.fuzz gguf codes --inputs 500 --seed 1
    python -m benchmarks.trust.fuzz gguf --replay 1234
    python -m benchmarks.trust.fuzz config --guided --json FILE    # by atheris: pip install atheris

An input is a whole folder one file of which is spoiled, or now and then is a link, a pipe, a folder or missing. It
follows from the seed and its number, so that ``--replay`` reads it again and shows the traceback. A finding is any
exception but a HeadwiseError, a line of more than `LONGEST` characters, more than `SECONDS` of time or `MEMORY`
bytes, a change of any other file of the folder, or the end of the process. With ``--guided``, atheris (libFuzzer)
keeps and spoils again the inputs that reach new code; without, each spoils a whole file.

Each reader runs in a process of its own, whose lines are counted by coverage.py, where that is installed.
"""

from __future__ import annotations

import argparse
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.trust.fuzz.campaign import MEMORY, SECONDS, campaign
from benchmarks.trust.fuzz.lines import share

INPUTS = 10_000


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readers", nargs="*", metavar="READER", help="all when none is named")
    parser.add_argument("--inputs", type=int, default=INPUTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=int, metavar="NUMBER", help="read this input alone, and show the traceback")
    parser.add_argument("--guided", action="store_true", help="by atheris; one reader, not resumed")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm") if Path("/dev/shm").is_dir() else None)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.guided:
        from benchmarks.trust.fuzz.guided import guided

        guided(options.readers[0], options)
    if options.replay is not None:
        replay(options)
        return
    from benchmarks.kept import Kept
    from benchmarks.trust.fuzz.readers import READERS

    settings = {"inputs": options.inputs, "seed": options.seed, "seconds": SECONDS, "memory": MEMORY}
    kept = Kept(options.json, settings) if options.json else None
    failed = False
    for name in options.readers or READERS:
        if kept is not None and name in kept.rows:
            continue
        row = campaign(name, options)
        failed |= bool(row["findings"])
        run = f"{share(row['lines']):.1%}" if row["lines"] else "not counted"
        print(f"{name}: {row['inputs']} inputs, {row['seconds']:.0f} s, {row['ended']}, lines {run}", flush=True)
        for finding in row["findings"]:
            print(f"  {finding}", flush=True)
        if kept is not None:
            kept.add(name, row)
    raise SystemExit(1 if failed else 0)


def replay(options: argparse.Namespace) -> None:
    """Read one input again, with its traceback."""
    from benchmarks.trust.fuzz.trial import Trial

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        trial = Trial(options.readers[0], Path(folder))
        draw = trial.draw(options.replay, options.seed)
        trial._finding = staticmethod(show)  # type: ignore[method-assign]
        print(trial.read(draw) or trial.refused or "success")


def show(seed: Any, error: BaseException, what: str) -> dict[str, str]:
    """Print a traceback where a finding would be noted."""
    traceback.print_exception(error)
    return {"file": seed.file, "kind": what}


if __name__ == "__main__":
    main()
