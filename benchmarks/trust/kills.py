"""Kill a conversion or a healing at random moments, repeatedly, and compare its output with an undisturbed one's.

    python -m benchmarks.trust.kills --folder FOLDER --calibrate TEXT --json benchmarks/results/trust/kills.json
    python -m benchmarks.trust.kills --folder FOLDER --calibrate TEXT --source SMALL --kills 3 --tokens 512
    python -m benchmarks.trust.kills --folder FOLDER --calibrate TEXT --heal CONVERTED --kills 5 --tokens 16384 \
        --json benchmarks/results/trust/kills-heal.json

One run is timed and kept. Others are killed (SIGKILL) after a random time within that duration, up to `EACH` times,
and each time continued by the same command, until they are done. Every output must equal the first one byte for byte;
of a healing, whose report says how long it took, the weights. A continued run has less to do, so its time is drawn
from the rest of the duration. With ``--heal`` a converted folder is trained on the text, with the source as its
teacher.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any

from benchmarks.kept import run

EACH = 4
"""The most kills of one run, so that there are several outputs, and not all kills come near the end of one."""


def command(options: argparse.Namespace, out: Path) -> list[str]:
    text, tokens = options.calibrate, options.tokens
    if options.heal is not None:
        arguments = ["heal", options.heal, out, "--teacher", options.source, "--text", text, "--tokens", tokens]
    else:
        arguments = ["convert", options.source, out, "--to", "mla", "--kv-budget", options.kv_budget, "--spread"]
        arguments += ["--calibrate", text, "--calibration-tokens", tokens]
    return [sys.executable, "-m", "headwise", *map(str, arguments), "--no-evaluate", "--json"]


def phase(out: Path) -> str:
    """The phase in which a run was killed, from the files that it left."""
    work = out.with_name(f".{out.name}.headwise-partial") / "work"
    if out.exists():
        return "done"
    if not work.exists() or not any(work.iterdir()):
        return "starting"
    if (work / "layer-00000.safetensors").exists():  # a save of a healing
        return "writing" if any((work.parent / "model").glob("*.safetensors")) else "training"
    state = work / "activations.json"
    if not state.exists():
        return "weighing"
    if not (work / "spread.json").exists():
        return "spreading"
    layer = json.loads(state.read_text())["layer"]
    kept = len(list((work / "layers").glob("*.safetensors"))) if (work / "layers").exists() else 0
    return "between a layer's result and its activations" if kept > layer else "converting"


def attempt(options: argparse.Namespace, out: Path, delay: float | None) -> bool:
    """Run the conversion and kill it after a delay, if there is one; return whether it ended by itself."""
    with Popen(command(options, out), stdout=DEVNULL, stderr=PIPE, text=True) as process:
        try:
            _, errors = process.communicate(timeout=delay)
        except TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            return False
    if process.returncode:
        raise SystemExit(f"the run failed: {errors}")
    return True


def content(folder: Path, pattern: str) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob(pattern) if file.is_file()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--calibrate", required=True)
    parser.add_argument("--source", default="smollm2-135m")
    parser.add_argument("--heal", metavar="CONVERTED", help="train this folder, in place of converting the source")
    parser.add_argument("--kv-budget", default="0.5")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    work = options.folder / "headwise-kills"
    work.mkdir(parents=True)
    draw = random.Random(options.seed)
    kills: list[dict[str, Any]] = []
    outputs = 0
    try:
        start = time.perf_counter()
        attempt(options, work / "whole", None)
        seconds = time.perf_counter() - start
        pattern = "*" if options.heal is None else "*.safetensors"
        expected = content(work / "whole", pattern)
        print(f"{seconds:.0f} s undisturbed", flush=True)
        while len(kills) < options.kills:
            out, left = work / "out", seconds
            for _ in range(min(EACH, options.kills - len(kills))):
                delay = draw.uniform(0, left)
                if attempt(options, out, delay):
                    break
                kills.append({"after": delay, "left": left, "phase": phase(out)})
                print(kills[-1], flush=True)
                if out.exists():  # killed while it cleared up
                    break
                left = max(left - delay, 0.1 * seconds)
            if not out.exists():
                attempt(options, out, None)
            assert content(out, pattern) == expected, "the output differs"
            shutil.rmtree(out)
            outputs += 1
    finally:
        shutil.rmtree(work)
    result = {
        "source": options.source,
        "is_healed": options.heal is not None,
        "tokens": options.tokens,
        "kv_budget": float(options.kv_budget),
        "seconds": seconds,
        "kills": kills,
        "phases": Counter(kill["phase"] for kill in kills),
        "outputs": outputs,
        "identical": True,
        "run": run(),
    }
    print(f"{len(kills)} kills, {outputs} outputs, all identical; {dict(result['phases'])}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
