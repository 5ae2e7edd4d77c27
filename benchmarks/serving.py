"""Measure the speed of a model and of its conversions in the engines that serve them, and how many texts fit.

    python -m benchmarks.serving --python llama.cpp=ENV/bin/python vllm=ENV/bin/python

SmolLM2 in 16 bits: itself, also with the engine's own small caches, MQA, MLA of half its cache, and caches in
headwise's codes. A process of each engine reads prompts of C tokens and writes further ones, with the models in
turns; a row has the medians of the rounds. Speeds are of all texts of the batch together. ``fits`` is how many texts
of C tokens a cache of 1 GiB holds, as the engine allocates it. Kept in benchmarks/results/serving.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines.outputs import make
from benchmarks.kept import Kept, say

from benchmarks import data
from headwise.conversion import export_gguf

WORKERS = {"llama.cpp": "speed_llama_cpp", "vllm": "speed_vllm"}
MODELS: dict[str, dict[str, tuple[str, str, int]]] = {
    "llama.cpp": {name: (name, "f16", 0) for name in ("original", "MQA", "MLA, deepseek --bias-free")},
    "vllm": {
        "original": ("original", "auto", 4),
        "original, fp8 cache": ("original", "fp8", 2),
        **{name: (name, "auto", 2) for name in ("MQA", "MLA, headwise", "grouped in codes", "MLA in codes")},
    },
}
"""What each engine is timed with, by its name in the table: an output of `benchmarks.engines`, the engine's word for
how it is cached, and GiB of cache, where they are given beforehand: enough for 64 texts. vLLM's build for CPUs takes
``int8_per_token_head`` too, and computes nonsense with it."""
LOADS: dict[str, tuple[dict[str, int], ...]] = {
    "llama.cpp": tuple({"context": C, "batch": B} for C, B in ((1024, 1), (4096, 1), (1024, 8))),
    "vllm": tuple({"context": 2048, "batch": B, "prompts": N} for B, N in ((1, 3), (8, 3), (64, 1))),
}
"""Tokens of context, texts at once, and how often vLLM reads prompts anew; llama.cpp reads them in every round."""


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
    settings = {"new": options.new, "threads": options.threads}
    kept = Kept(options.json, settings)
    options.work.mkdir(parents=True, exist_ok=True)
    for engine, python in (pair.split("=", 1) for pair in options.python):
        loads = [
            load
            for load in LOADS[engine]
            if any(_row(engine, name, **load) not in kept.rows for name in MODELS[engine])
        ]
        if not loads:
            continue
        models = {
            name: {"model": _model(engine, options.work, output, options.cache), "stored": stored, "room": room}
            for name, (output, stored, room) in MODELS[engine].items()
        }
        asked = {"models": models, "loads": loads, "rounds": options.rounds, **settings}
        for row in _measure(WORKERS[engine], python, asked):
            prompt, decode = row.pop("prompt"), row.pop("decode")
            kept.add(
                _row(engine, **row),
                {
                    "engine": engine,
                    **row,
                    "prompt": statistics.median(prompt),
                    "decode": statistics.median(decode),
                    "spread": [min(decode), max(decode)],
                },
            )
            say(engine, row, prompt, decode)


def _row(engine: str, output: str, context: int, batch: int, **_: Any) -> str:
    """The name of a row."""
    return f"{engine}/{output}/{context}x{batch}"


def _model(engine: str, work: Path, output: str, texts: Path) -> str:
    """What the engine reads: the folder of an output, or a GGUF file of it."""
    folder = make(output, work, texts, say)
    if engine != "llama.cpp":
        return str(folder)
    file = folder / "speed.gguf"
    if not file.exists():
        export_gguf(folder, file, outtype="f16")
    return str(file)


def _measure(worker: str, python: str, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A process of an engine: tokens a second of prompts and of decoding, by model and load, as they are measured."""
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": str(asked["threads"])}
    command = [python, "-m", f"benchmarks.engines.{worker}", json.dumps(asked)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, env=environment) as process:
        assert process.stdout is not None
        yield from (json.loads(line) for line in process.stdout if line.startswith('{"output"'))
    if process.returncode:
        sys.exit(f"{worker}: status {process.returncode}")


if __name__ == "__main__":
    main()
