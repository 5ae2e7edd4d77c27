"""How long conversions take, stage by stage, beside what the dry run expects.

    python -m benchmarks.minutes                       # kept in benchmarks/results/minutes.json
    python -m benchmarks.minutes --kv-bytes 0.25 --json benchmarks/results/minutes-bytes.json
    python -m benchmarks.minutes smollm2-135m qwen --kv-bytes 0.25 --json build/minutes-mla.json
    python -m benchmarks.minutes smollm2-135m qwen --to same --kv-bytes 0.28 --json build/minutes-same.json

SmolLM2, and a qwen2 of random weights in the shape of 0.5B parameters (24 layers of 14 query heads and 2 key–value
heads, width 896, vocabulary 151,936), or with ``qwen`` the real Qwen2.5-Coder-0.5B, to half of their values, or with
codes to a part of the bytes, from 16,384 tokens of WikiText-2 train, with every stage of the default. Run it on an
idle machine; the seconds of all processors, ``cpu_seconds``, depend less on what else runs. Wider processors are held
to AVX2 by ``MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2``, which torch's products
follow, and ``CXX="g++ -mno-avx512f -mno-amx-tile -mno-avxvnni"``, which headwise's kernels are compiled by.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.kept import Kept, say
from benchmarks.large import make_checkpoint

import headwise
from benchmarks import data

QWEN2 = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
SOURCES = ("smollm2-135m", "0.5B")
"""What is converted unless sources are named. ``qwen`` is Qwen2.5-Coder-0.5B, of `benchmarks.data`."""


class Stopwatch:
    """Progress that measures how long each stage takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.expected: dict[str, float] = {}
        self._stage, self._since = "", 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.perf_counter()
        if self._stage:
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = ("" if done == total else stage), now

    def expect(self, seconds: Mapping[str, float]) -> None:
        self.expected = dict(seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sources", nargs="*", default=SOURCES, metavar="SOURCE", help=f"{', '.join(SOURCES)}, or qwen"
    )
    parser.add_argument("--to", default="mla", help="mla, or same, which needs --kv-bytes")
    parser.add_argument("--kv-budget", type=float, default=0.5, help="fraction of the source's cache")
    parser.add_argument("--kv-bytes", type=float, help="fraction of its bytes in bfloat16; not --kv-budget then")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--device", help="such as cuda; the CPU when left out")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/minutes.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/minutes"), help="for models and conversions")
    options = parser.parse_args(arguments)
    settings = {"tokens": options.tokens, "device": options.device, **size(options)}
    if options.to != "mla":  # files of before do not name it
        settings["to"] = options.to
    kept = Kept(options.json, settings)
    for name in options.sources:
        if name not in kept.rows:
            kept.add(name, measure(name, options))
        row = kept.rows[name]
        stages = ", ".join(f"{stage} {seconds:.0f}" for stage, seconds in row["stages"].items())
        say(f"{name}: {row['seconds']:.0f} s, expected {sum(row['expected'].values()):.0f} ({stages})")


def size(options: argparse.Namespace) -> dict[str, float]:
    """The size of the cache, as `headwise.convert` takes it."""
    by_values = {"kv_budget": options.kv_budget}
    return by_values if options.kv_bytes is None else {"kv_bytes": options.kv_bytes}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Convert a source once."""
    source: str | Path = name
    if name == "0.5B":
        source = options.work / name
        if not (source / "config.json").exists():
            make_checkpoint(source, QWEN2, options.device)
    elif name == "qwen":
        source = data.qwen(options.cache)
    watch, before = Stopwatch(), time.process_time()
    done = headwise.convert(
        source,
        options.work / "converted",
        to=options.to,
        **size(options),
        calibrate=data.wikitext("train", options.cache),
        calibration_tokens=options.tokens,
        device=options.device,
        evaluate=False,
        overwrite=True,
        progress=watch,
    )
    shutil.rmtree(options.work / "converted")
    return {
        "seconds": done.seconds,
        "cpu_seconds": time.process_time() - before,
        "stages": watch.seconds,
        "expected": watch.expected,
        "peak_rss_bytes": done.peak_rss_bytes,
        "device_bytes": done.peak_device_bytes,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main()
