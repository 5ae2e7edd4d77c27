"""Measure the speed of a model and of its conversions in the engines that serve them, and how many texts fit.

    python -m benchmarks.serving --python llama.cpp=ENV/bin/python vllm=ENV/bin/python

SmolLM2 in 16 bits: itself, MQA, and MLA of half its cache. Each measurement is a process that loads one model, reads
prompts of C tokens and writes further ones; the models take turns, and a row has the medians of the rounds. Speeds
are of all texts of the batch together. ``fits`` is how many texts of C tokens a cache of 1 GiB holds, as the engine
allocates it. Kept in benchmarks/results/serving.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines.outputs import make
from benchmarks.kept import Kept, say

from benchmarks import data
from headwise.conversion import export_gguf

WORKERS = {"llama.cpp": "speed_llama_cpp", "vllm": "speed_vllm"}
MODELS = {
    "llama.cpp": ("original", "MQA", "MLA, deepseek --bias-free"),
    "vllm": ("original", "MQA", "MLA, headwise"),
}
"""The outputs of `benchmarks.engines` that each engine is timed with."""
LOADS = ((1024, 1), (4096, 1), (1024, 8))
"""Tokens of context, and texts at once."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", required=True, metavar="ENGINE=PATH", help="interpreters of engines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=48, help="tokens that are timed one by one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/serving.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/engines"), help="where models are converted")
    options = parser.parse_args(arguments)
    kept = Kept(options.json, {"rounds": options.rounds, "new": options.new, "threads": options.threads})
    options.work.mkdir(parents=True, exist_ok=True)
    for engine, python in (pair.split("=", 1) for pair in options.python):
        models = {name: _model(engine, make(name, options.work, options.cache, say)) for name in MODELS[engine]}
        for context, batch in LOADS:
            if f"{engine}/{MODELS[engine][-1]}/{context}x{batch}" in kept.rows:
                continue
            load = {"context": context, "batch": batch, "new": options.new, "threads": options.threads}
            said: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
            for _ in range(options.rounds):
                for name, model in models.items():
                    said[name].append(_measure(WORKERS[engine], python, {**load, "model": str(model)}))
            for name, runs in said.items():
                medians = {key: statistics.median(run[key] for run in runs) for key in ("prompt", "decode")}
                spread = [min(run["decode"] for run in runs), max(run["decode"] for run in runs)]
                rest = {key: runs[0][key] for key in ("cache_bytes", "version")}
                fits = int(2**30 // (rest["cache_bytes"] * context))
                row = {"engine": engine, "output": name, **load, **medians, "spread": spread, "fits": fits, **rest}
                kept.add(f"{engine}/{name}/{context}x{batch}", row)
                say(engine, name, f"{context} x {batch}", {k: round(v, 1) for k, v in medians.items()}, spread, fits)


def _model(engine: str, folder: Path) -> Path:
    """What the engine reads: the folder, or a GGUF file of it."""
    if engine != "llama.cpp":
        return folder
    file = folder / "speed.gguf"
    if not file.exists():
        export_gguf(folder, file, outtype="f16")
    return file


def _measure(worker: str, python: str, asked: dict[str, Any]) -> dict[str, Any]:
    """One process of an engine: tokens a second of prompts and of decoding, and bytes of cache a token."""
    root = Path(__file__).parents[1]
    threads = str(asked["threads"])
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": threads}
    command = [python, "-m", f"benchmarks.engines.{worker}", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, env=environment)
    if done.returncode:
        sys.exit(f"{worker}: status {done.returncode}\n{done.stderr[-2000:]}")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


if __name__ == "__main__":
    main()
