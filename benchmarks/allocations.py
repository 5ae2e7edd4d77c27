"""Let llama.cpp and vLLM say what they allocate for the caches of toy models.

Tests hold `headwise.costs.prediction.memory` to it.

    python -m benchmarks.allocations --llama-cpp SOURCE --python llama.cpp=ENV/bin/python vllm=ENV/bin/python

``SOURCE`` is a checkout of llama.cpp, whose converter writes the toys; they have random weights and no vocabulary. A
toy that the converter or the engine does not take is left out. llama.cpp allocates, and its log is read; of vLLM, the
functions that plan the cache are called.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from benchmarks.kept import Kept, say
from tests.toy_configs import TOYS
from transformers import AutoConfig, AutoModelForCausalLM

from headwise.costs.formulas.layer import cache_values
from headwise.errors import HeadwiseError
from headwise.models.specs import ModelSpec, read_config
from headwise.models.specs.indexed_latent import IndexedLatentSpec
from headwise.models.specs.latent import LatentSpec

CONTEXTS = ((1000, 1), (30_001, 3), (600, 4), (8192, 2))
"""Tokens of each sequence, and sequences."""

MORE: dict[str, dict[str, Any]] = {
    "llama, one head": {**TOYS["llama"], "num_key_value_heads": 1},
    "llama, all heads": {**TOYS["llama"], "num_key_value_heads": TOYS["llama"]["num_attention_heads"]},
    "llama, wide heads": {**TOYS["llama"], "head_dim": 96},
    "gemma3, window of 600": {**TOYS["gemma3_text"], "sliding_window": 600},
    "gpt_oss, window of 128": {**TOYS["gpt_oss"], "sliding_window": 128},
    "olmo3, window of 4096": {**TOYS["olmo3"], "sliding_window": 4096},
}
ENGINES = Path(__file__).parent / "engines"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="llama.cpp's source, for its converter")
    parser.add_argument("--python", nargs="+", required=True, metavar="ENGINE=PYTHON")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/allocations.json"))
    options = parser.parse_args(arguments)
    pythons = dict(each.split("=", 1) for each in options.python)
    kept = Kept(options.json, {"contexts": [list(each) for each in CONTEXTS]})
    for name, config in {**TOYS, **MORE}.items():
        for engine, python in pythons.items():
            key = f"{engine}/{name}"
            if key in kept.rows:
                continue
            with tempfile.TemporaryDirectory() as work:
                ask = _llama_cpp if engine == "llama.cpp" else _vllm
                try:
                    row = ask(config, Path(work), python, options.llama_cpp)
                except (subprocess.CalledProcessError, HeadwiseError, ValueError, AssertionError, KeyError) as error:
                    said = getattr(error, "stderr", None) or str(error)
                    say(f"{key}: left out, {said.strip().splitlines()[-1][:120] if said.strip() else error!r}")
                    continue
            kept.add(key, {"engine": engine, "name": name, "config": config, **row})
            say(f"{key}: {row['allocated']}")


def _llama_cpp(config: dict[str, Any], work: Path, python: str, source: Path) -> dict[str, Any]:
    """What the log says, in MiB to two decimals, of each part of the cache."""
    _save(config, work / "model")
    file = work / "model.gguf"
    _output([sys.executable, ENGINES / "toy_gguf.py", source, work / "model", file])
    said = _output([python, ENGINES / "allocations_llama_cpp.py", file, json.dumps(CONTEXTS)])
    return {"allocated": said["mib"], "version": said["version"]}


def _vllm(config: dict[str, Any], work: Path, python: str, source: Path) -> dict[str, Any]:
    """Bytes of one request of each length."""
    model = read_config(config)
    _save(TOYS["llama"], work / "model")
    layers = [_layer(model, index) for index in range(model.num_layers)]
    asked = [[layers, tokens, "bfloat16"] for tokens, _ in CONTEXTS]
    said = _output([python, ENGINES / "allocations_vllm.py", work / "model", json.dumps(asked)])
    return {"allocated": said["bytes"], "version": said["version"]}


def _layer(model: ModelSpec, index: int) -> list[Any]:
    spec = model.layers[index]
    if isinstance(spec, LatentSpec) and not isinstance(spec, IndexedLatentSpec):
        return ["latent", None, 1, cache_values(spec)]
    heads, values = getattr(spec, "num_kv_heads", 0), cache_values(spec)
    if not heads or not values:
        raise ValueError(f"{spec.label} is not asked about")
    return ["full" if spec.sliding_window is None else "window", spec.sliding_window, heads, values // heads // 2]


def _save(config: dict[str, Any], folder: Path) -> None:
    """A model of the config with random weights."""
    torch.manual_seed(0)
    fields = {name: value for name, value in config.items() if name != "model_type"}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields)).save_pretrained(folder)


def _output(command: Sequence[object]) -> Any:
    """The JSON on the last line of a command's output; None without one."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    with suppress(IndexError, ValueError):
        return json.loads(done.stdout.strip().splitlines()[-1])
    return None


if __name__ == "__main__":
    main()
