"""Engines' quantised caches in the engines, beside headwise's simulation of them: log-probabilities of a text.

    python -m benchmarks.simulated --python llama.cpp=ENV/bin/python mlx-lm=ENV/bin/python

A row has how far the mean log-probability of the text's tokens in the engine is from that in transformers with the
cache simulated, and how far that of one token is, on average and at most; and the same with a full cache, which is
what the engine's arithmetic makes by itself: llama.cpp's flash attention rounds to float16. A number that it rounds
otherwise may fall to another code, and all layers above compute something else then, so that each model is also cut
to its first layer, whose keys both compute alike. Kept in benchmarks/results/simulated.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.engines.__main__ import run
from benchmarks.engines.outputs import make
from benchmarks.kept import Kept, say
from torch.nn.functional import log_softmax
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import headwise
from benchmarks import data, prepared, small_models
from headwise.conversion import export_gguf
from headwise.measure.texts import read_text, token_windows
from headwise.models.checkpoints import load_tokenizer
from headwise.runtime.hf import default_cache
from headwise.runtime.quantization.formats import ENGINE_FORMATS, EngineFormat

MLX: dict[str, Any] = ENGINE_FORMATS["mlx"]
IDS = 256
STEPS = 400
FULL, FIRST = "full", ", first layer"
CACHES = {
    "llama.cpp": ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"),
    "mlx-lm": ("8", "4"),
}
SPELLED = {"llama.cpp": "llama.cpp", "mlx-lm": "mlx"}


def _llama() -> PreTrainedModel:
    """A llama of 8 query heads and 2 key–value heads, which are 64 wide: MLX-LM has groups for them."""
    sizes = {"hidden_size": 256, "intermediate_size": 640, "head_dim": 64}
    config = LlamaConfig(
        **small_models.COMMON, **small_models.ROPE, **sizes, num_attention_heads=8, num_key_value_heads=2
    )
    return LlamaForCausalLM(config)


def _trained(cache: Path, work: Path) -> Path:
    folder = work / "llama"
    if not (folder / "config.json").is_file():
        small_models.train(_llama, folder, cache, steps=STEPS)
    return folder


MODELS: dict[str, Callable[[Path, Path], Path]] = {
    "SmolLM2-135M": lambda cache, work: make("original", work, cache, say),
    "Qwen2.5-Coder-0.5B": lambda cache, work: prepared.folder(cache),
    "llama, trained here": _trained,
}


def _first_layer(folder: Path, output: Path) -> Path:
    """The model with its first layer alone."""
    if not output.exists():
        model: Any = headwise.load(folder)
        model.model.layers = model.model.layers[:1]
        model.save_pretrained(output)
        # The source's own words for RoPE, which MLX-LM reads.
        config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1, "layer_types": None}
        (output / "config.json").write_text(json.dumps(config))
        load_tokenizer(folder).save_pretrained(output)
    return output


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", required=True, metavar="ENGINE=PATH", help="interpreters of engines")
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS], metavar="MODEL")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/simulated.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where models and texts are")
    parser.add_argument("--work", type=Path, default=Path("build/simulated"), help="where models are made")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    kept = Kept(options.json, {"ids": IDS, "steps": STEPS})
    for name in (f"{model}{part}" for model in options.models for part in ("", FIRST)):
        folder = MODELS[name.removesuffix(FIRST)](options.cache, options.work)
        if name.endswith(FIRST):
            folder = _first_layer(folder, options.work / name)
        text = read_text(data.wikitext("test", options.cache))
        ids = token_windows(load_tokenizer(folder), text, window=IDS, windows=1)[0]
        for engine, python in (pair.split("=", 1) for pair in options.python):
            model = folder
            if engine == "llama.cpp":
                model = options.work / f"{name}.gguf"
                if not model.exists():
                    export_gguf(folder, model, outtype="f32")
            for stored in (FULL, *CACHES[engine]):
                if f"{name} {engine} {stored}" not in kept.rows:
                    row = compared(folder, engine, python, model, ids, None if stored == FULL else stored)
                    kept.add(f"{name} {engine} {stored}", row)
                    say(f"{name} {engine} {stored}", row)


def compared(
    folder: Path, engine: str, python: str, model: Path, ids: torch.Tensor, stored: str | None
) -> dict[str, Any]:
    """How far the log-probabilities of a text's tokens in an engine are from those with the cache simulated.

    Args:
        folder: the model in transformers.
        engine: its name.
        python: the interpreter of its environment.
        model: what it loads.
        ids: of the text, ``[S]``.
        stored: the engine's name of the cache; a full one when None.
    """
    # Of the cache: llama.cpp computes in float32 beside it, and MLX-LM in the dtype that its scales have as well.
    dtype = "float16" if engine == "llama.cpp" else "float32"
    found, said = run(engine, python, model, ids.tolist(), dtype, stored=stored, new=1)
    own = torch.from_numpy(found)[torch.arange(len(ids) - 1), ids[1:]]
    simulated = _simulated(folder, ids, None if stored is None else f"{SPELLED[engine]}:{stored}")
    off = (own - simulated).abs()
    return {
        "perplexity": float((-own.mean()).exp()),
        "simulated": float((-simulated.mean()).exp()),
        "mean off": float((own - simulated).mean().abs()),
        "off by token": float(off.mean()),
        "largest": float(off.max()),
        "version": said["version"],
    }


@torch.inference_mode()
def _simulated(folder: Path, ids: torch.Tensor, cache: str | None) -> torch.Tensor:
    """The log-probabilities of a text's tokens, ``[S - 1]``."""
    model = headwise.load(folder, dtype="float32")
    in_float32 = {name: EngineFormat(*2 * [replace(of.keys, dtype=torch.float32)], "mlx") for name, of in MLX.items()}
    with patch.dict(MLX, in_float32), nullcontext() if cache is None else default_cache(model, cache):
        logits = model(ids[None], use_cache=False).logits[0].float()
    return log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]]


if __name__ == "__main__":
    main()
