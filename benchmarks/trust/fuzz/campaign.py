"""A reader's inputs in a process of its own, which may end: the findings, the memory, and the lines that were run."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import tempfile
import time
import warnings
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.trust.fuzz import lines

SECONDS = 20
"""The most time of an input."""

MEMORY = 2 << 30
"""Bytes that a process may take beyond those of its beginning."""


def work(name: str, options: argparse.Namespace, start: int, queue: Any) -> None:
    """Read the inputs of one reader from ``start`` on, in a process of its own."""
    warnings.simplefilter("ignore")
    for descriptor in (1, 2):  # what transformers and compiled code print, which the command line holds back
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=options.folder))
    tracer = lines.trace()
    if tracer is not None:
        tracer.start()  # before the imports: definitions are lines that are run when a module is imported
    import torch
    from benchmarks.trust.fuzz.trial import Trial

    torch.set_num_threads(1)
    trial = Trial(name, folder)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    refused: Counter[str] = Counter()
    slowest = 0.0
    queue.put(("folder", str(folder)))
    for number in range(start, options.inputs):
        if os.getppid() == 1:  # the campaign was ended
            break
        queue.put(("begin", number))
        trial.refused = ""
        began = time.perf_counter()
        finding = trial.read(trial.draw(number, options.seed))
        slowest = max(slowest, time.perf_counter() - began)
        refused[trial.refused or ("success" if finding is None else "finding")] += 1
        if finding is not None:
            queue.put(("finding", {"number": number, **finding}))
        if number % 500 == 499 and (changed := trial.changed()):
            queue.put(("finding", {"number": number, "kind": "changed", "place": "?", "said": repr(changed[:3])}))
            trial.others = trial._digests(folder / "seeds")
    unrun: dict[str, Any] = {}
    if tracer is not None:
        tracer.stop()
        unrun = lines.missing(tracer, trial.reader.modules)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    queue.put(("end", {"ended": refused, "slowest_s": slowest, "peak_bytes": peak, "lines": unrun}))


def campaign(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of a reader: how its inputs ended, and the findings, each place once with the count."""
    context = get_context("spawn")
    findings: dict[tuple[str, str], dict[str, Any]] = {}
    ended: Counter[str] = Counter()
    start, began, result = 0, time.perf_counter(), dict[str, Any]()

    def found(finding: dict[str, Any]) -> None:
        key = finding["kind"], finding["place"]
        findings.setdefault(key, {**finding, "count": 0})["count"] += 1

    while not result:
        queue = context.SimpleQueue()
        process = context.Process(target=work, args=(name, options, start, queue))
        process.start()
        watch = Watch(process)
        folder, number = None, start
        while (message := watch.next(queue)) is not None:
            kind, value = message
            if kind == "folder":
                folder = value
            elif kind == "begin":
                number = value
            elif kind == "finding":
                found(value)
            else:
                result = value
                break
        process.join()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        if not result:
            if folder is None:
                raise SystemExit(f"{name}: the seeds could not be made")
            kind = f"the process ended with {process.exitcode}"
            found({"number": number, "file": "?", "kind": kind, "place": "?", "said": ""})
            start = number + 1
            if start >= options.inputs:
                result = {"ended": {}, "slowest_s": None, "peak_bytes": None, "lines": {}}
    ended.update(result.pop("ended"))
    return {
        "inputs": options.inputs,
        "seconds": time.perf_counter() - began,
        "ended": dict(ended),
        **result,
        "findings": list(findings.values()),
    }


class Watch:
    """Messages of a process until it ends; one that says nothing for four times `SECONDS` is killed."""

    def __init__(self, process: Any) -> None:
        self.process = process

    def next(self, queue: Any) -> tuple[str, Any] | None:
        """The next message; None where there will be none."""
        deadline = time.monotonic() + (4 * SECONDS if self._began else 600)
        while queue.empty():
            if not self.process.is_alive() and queue.empty():
                return None
            if time.monotonic() > deadline:
                self.process.kill()
            time.sleep(0.0005)
        message: tuple[str, Any] = queue.get()
        self._began = True
        return message

    _began = False
