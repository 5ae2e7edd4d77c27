"""Measure the speed of a model and of its conversions in the engines that serve them, and how many texts fit.

    python -m benchmarks.serving --python llama.cpp=ENV/bin/python vllm=ENV/bin/python

SmolLM2 in 16 bits: itself, also with the engine's own small caches, MQA, MLA of half its cache, and caches in
headwise's codes. Each measurement is a process that loads one model, reads prompts of C tokens and writes further
ones; the models take turns, and a row has the medians of the rounds. Speeds are of all texts of the batch together.
``fits`` is how many texts of C tokens a cache of 1 GiB holds, as the engine allocates it. Kept in
benchmarks/results/serving.json.
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
MODELS: dict[str, dict[str, tuple[str, str]]] = {
    "llama.cpp": {name: (name, "f16") for name in ("original", "MQA", "MLA, deepseek --bias-free")},
    "vllm": {
        "original": ("original", "auto"),
        "original, fp8 cache": ("original", "fp8"),
        **{name: (name, "auto") for name in ("MQA", "MLA, headwise", "grouped in codes", "MLA in codes")},
    },
}
"""What each engine is timed with, by its name in the table: an output of `benchmarks.engines`, and the engine's word
for how it is cached. vLLM's build for CPUs takes ``int8_per_token_head`` too, and computes nonsense with it."""
LOADS = {"llama.cpp": ((1024, 1), (4096, 1), (1024, 8)), "vllm": ((2048, 1), (2048, 8), (2048, 64))}
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
        models = {
            name: {"model": str(_model(engine, make(output, options.work, options.cache, say))), "stored": stored}
            for name, (output, stored) in MODELS[engine].items()
        }
        for context, batch in LOADS[engine]:
            if f"{engine}/{list(models)[-1]}/{context}x{batch}" in kept.rows:
                continue
            load = {"context": context, "batch": batch, "new": options.new, "threads": options.threads}
            said: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
            for _ in range(options.rounds):
                for name, model in models.items():
                    said[name].append(_measure(WORKERS[engine], python, {**load, **model}))
            for name, runs in said.items():
                medians = {key: statistics.median(run[key] for run in runs) for key in ("prompt", "decode")}
                spread = [min(run["decode"] for run in runs), max(run["decode"] for run in runs)]
                rest = {key: runs[0][key] for key in ("fits", "cache_bytes", "version")}
                kept.add(
                    f"{engine}/{name}/{context}x{batch}",
                    {"engine": engine, "output": name, **load, **medians, "spread": spread, **rest},
                )
                say(engine, name, f"{context} x {batch}", {k: round(v, 1) for k, v in medians.items()}, spread, rest)


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
