"""Call every compiled kernel with hostile inputs, under the address and undefined-behaviour sanitizers.

    python -m benchmarks.trust.sanitizers --folder FOLDER --json benchmarks/results/trust/sanitizers.json
    python -m benchmarks.trust.sanitizers --folder FOLDER --sets avx2 --parts trellis files --calls 500

The kernels are compiled by GCC with both sanitizers, once for each instruction set of this processor that they have
code for, and called by the Python that users come to them by, in a process of its own (`kernel_calls`): each kernel
`--calls` times in each set. Shapes are random, from 0 tokens on, with windows, masks, strides and pages; numbers are
of any bits, NaN, infinities and denormals among them; and what is read ends where memory ends (`hostile`). Files of
codes are made to lie (`lying_codes`), and read, and attended to where no rule refuses them.

A case may end well, or in one `HeadwiseError` of one line; whatever else happens is a finding, and the cases go on
behind it. Before all others come three faults that the sanitizers must report, so that a campaign that reports
nothing could have done so.

The GPU's kernels are called likewise, where Triton is installed, but by its interpreter, without sanitizers
(`triton_calls`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.kept import run, say
from benchmarks.trust.kernel_calls import FAULTS, FOLDERS, SANITIZERS, parts
from tests.tiny_families import save_family

import headwise
from headwise.runtime.kernels.native.abi import KERNELS
from headwise.runtime.quantization.transform_code import FILE

SETS = {
    "amx": (("amx_int8",), ""),
    "avx512": (("avx512_vnni", "avx512vbmi"), "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"),
    "avx2": (("avx2",), "-mno-avx512f -mno-amx-tile -mno-avxvnni"),
}
"""Instruction sets, widest first: the flags of /proc/cpuinfo that a processor has with each, and GCC's options that
hold a wider processor to it."""

TRITON = "triton"
"""What stands among the sets for the GPU's kernels in Triton's interpreter."""

TEXT = "the quick brown fox jumps over the lazy dog, and then it does so again. " * 40
"""What the tiny models whose files of codes lie are calibrated on."""

_MOST_FINDINGS = 20
"""After so many a part ends: each begins a new process."""


def sets_here() -> list[str]:
    """The instruction sets that this processor has, and Triton's interpreter where that is installed."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    sets = [name for name, (needed, _) in SETS.items() if flags.issuperset(needed)]
    return sets + [TRITON] * (find_spec("triton") is not None)


def environment(folder: Path, options: str) -> dict[str, str]:
    """That of a process whose kernels are compiled with sanitizers, and which loads the sanitizer first."""
    # With the library of C++, whose exceptions AddressSanitizer follows from its own beginning.
    names = ["g++", "-print-file-name=libasan.so"], ["g++", "-print-file-name=libstdc++.so.6"]
    loaded = [subprocess.run(name, capture_output=True, text=True, check=True).stdout.strip() for name in names]
    return {
        **os.environ,
        "CXX": f"env -u LD_PRELOAD g++ {options}",
        "XDG_CACHE_HOME": str(folder / "compiled"),
        "LD_PRELOAD": " ".join(loaded),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=32",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
        # Threads that wait sleep, as there are few cores; they are begun as if they did not.
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "HF_HUB_OFFLINE": "1",
    }


def command(module: str, folder: Path, what: str, *more: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", f"benchmarks.trust.{module}", str(folder), what, *more]


def reported(errors: str) -> str:
    """The line of a sanitizer's report that says what is wrong, or the last line of all."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = (line for line in lines if "ERROR: AddressSanitizer" in line or "runtime error:" in line)
    line = next(named, lines[-1] if lines else "it printed nothing")
    return line.split("ERROR: ")[-1].split(" 0x")[0].split("/")[-1][:300]  # without addresses and folders


class Runner(NamedTuple):
    """How the cases of a set are run.

    Attributes:
        module: of `benchmarks.trust`, which runs them.
        folder: where kernels and tiny models are.
        env: the environment of its processes.
    """

    module: str
    folder: Path
    env: dict[str, str]

    def check_faults(self, faults: Iterable[str]) -> dict[str, str]:
        """What is reported of each of the faults that a process commits.

        Raises:
            SystemExit: one was not reported.
        """
        reports = {}
        for name in faults:
            asked = command(self.module, self.folder, name)
            ended = subprocess.run(asked, env=self.env, capture_output=True, text=True, check=False)
            report = reported(ended.stderr)
            is_seen = "AddressSanitizer" in report or "runtime error" in report
            if ended.returncode == 0 or not (is_seen or ended.returncode == -signal.SIGSEGV):
                raise SystemExit(f"the fault '{name}' was not reported: {report}")
            reports[name] = report if is_seen else "the process ends by SIGSEGV"
        return reports

    def cases(self, part: str, wanted: int) -> Iterator[dict[str, Any]]:
        """The outcome of each case of a part; where a process ends early, another goes on from the next case."""
        calls: Counter[str] = Counter()
        start = found = 0
        while found < _MOST_FINDINGS:
            more = ("--start", str(start), "--wanted", str(wanted), "--so-far", json.dumps(calls))
            asked, errors = command(self.module, self.folder, part, *more), self.folder / f"{part}.stderr"
            with (
                open(errors, "w") as file,
                subprocess.Popen(asked, env=self.env, stdout=subprocess.PIPE, stderr=file) as process,
            ):
                assert process.stdout is not None
                for line in process.stdout:
                    outcome = json.loads(line)
                    calls.update(outcome["calls"])
                    start = outcome["seed"] + 1
                    yield outcome
            if not process.returncode:
                return
            found += 1
            what = f"{reported(errors.read_text())} (status {process.returncode})"
            yield {"seed": start, "outcome": what, "calls": {}}
            start += 1

    def tried(self, wanted: Mapping[str, int]) -> dict[str, Any]:
        """How the cases of some parts ended, and how often kernels were called.

        Args:
            wanted: the calls of each kernel that the parts are to make, or of the part of files their number.
        """
        parts_of: dict[str, Any] = {}
        findings, calls = [], Counter[str]()
        for part, count in wanted.items():
            began, ended = time.perf_counter(), Counter[str]()
            for case in self.cases(part, count):
                calls.update(case["calls"])
                is_clean = case["outcome"] in ("done", "refused")
                ended[case["outcome"] if is_clean else "findings"] += 1
                if not is_clean:
                    findings.append({"part": part, "seed": case["seed"], "what": case["outcome"]})
                    say(findings[-1])
            parts_of[part] = {**ended, "seconds": round(time.perf_counter() - began)}
            say(part, parts_of[part])
        return {"parts": parts_of, "findings": findings, "calls": dict(sorted(calls.items()))}


def try_set(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """All cases with one instruction set, or in Triton's interpreter."""
    say(name)
    if name == TRITON:
        from benchmarks.trust.triton_calls import FAULTS as FAULTS_IN_TRITON
        from benchmarks.trust.triton_calls import PARTS

        runner = Runner("triton_calls", options.folder, {**os.environ, "TRITON_INTERPRET": "1"})
        faults = runner.check_faults(FAULTS_IN_TRITON)
        return {"faults_reported": faults, **runner.tried(dict.fromkeys(PARTS, options.launches))}
    start, env = time.perf_counter(), environment(options.folder, SETS[name][1])
    runner = Runner("kernel_calls", options.folder, env)
    asked = command(runner.module, options.folder, "build")
    made = json.loads(subprocess.run(asked, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout)
    if not made["is_built"]:
        raise SystemExit(f"{name}: {made['reason']}")
    seconds = round(time.perf_counter() - start)
    wanted = {part: options.files if part == "files" else options.calls for part in options.parts}
    return {"seconds_of_compiling": seconds, "faults_reported": runner.check_faults(FAULTS), **runner.tried(wanted)}


def prepare(folder: Path) -> None:
    """Two tiny converted models, with their codes and without."""
    for name, target in FOLDERS.items():
        if (folder / f"{name}-plain").exists():
            continue
        source = save_family(folder / f"{name}-source", "llama")
        (folder / "text.txt").write_text(TEXT)
        sizes = {"calibration_tokens": 1024, "calibration_window": 64}
        more = {**target, **sizes, "calibrate": folder / "text.txt", "evaluate": False}
        headwise.convert(source, folder / name, bits=3, **more)
        shutil.copytree(folder / name, folder / f"{name}-plain", ignore=shutil.ignore_patterns(FILE))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, required=True, help="for compiled kernels and tiny models, which are kept"
    )
    parser.add_argument("--sets", nargs="+", choices=[*SETS, TRITON], default=sets_here())
    parser.add_argument("--parts", nargs="+", choices=list(parts(Path())), default=list(parts(Path())))
    parser.add_argument("--calls", type=int, default=10_000, help="of each kernel in each set, at least")
    parser.add_argument("--files", type=int, default=3_500, help="that lie, in each set")
    parser.add_argument(
        "--launches", type=int, default=100, help="of each kernel of the GPU, by Triton's interpreter"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    prepare(options.folder)
    sets = {name: try_set(name, options) for name in options.sets}
    found = sum(len(each["findings"]) for each in sets.values())
    total = {kernel: sum(each["calls"].get(kernel, 0) for each in sets.values()) for kernel in KERNELS}
    settings = {
        "calls": options.calls,
        "files": options.files,
        "launches": options.launches,
        "parts": options.parts,
        "sanitizers": SANITIZERS,
    }
    result = {"settings": settings, "sets": sets, "calls": total, "findings": found, "run": run()}
    say(f"{sum(total.values())} calls of {len(total)} kernels in {', '.join(sets)}; {found} findings")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if found:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
