"""What engines' own caches lose of models as they are, and prepared for them: in the engines themselves.

    python -m benchmarks.prepared llama.cpp --python ENV/bin/python      # of an environment with llama-cpp-python
    python -m benchmarks.prepared mlx-lm --python ENV/bin/python         # preload OpenBLAS: its own is slow
    python -m benchmarks.prepared vllm --python ENV/bin/python           # with AVX-512 in bfloat16, or AMX

A model is prepared from its weights alone, on 4,096 tokens of WikiText-2 train, and on these with the biases of its
keys shifted. Perplexity and divergence are beside the model as it is with a full cache. Each cell is kept in
benchmarks/results/prepared-ENGINE.json as soon as it is measured, and prepared models in --work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from benchmarks.kept import Kept, say

import headwise
from benchmarks import data
from headwise.base.options import EngineOptions
from headwise.base.progress import silent
from headwise.costs.prediction import RUNNABLE
from headwise.measure.evaluation.evaluate import cut_evaluation_windows, read_texts, timing_prompt
from headwise.measure.evaluation.model_pair import open_pair
from headwise.models.checkpoints import dtype_name, load_tokenizer
from headwise.serving.engines.in_engine import ask


def folder(cache: Path, dtype: torch.dtype) -> Path:
    """Qwen2.5-Coder-0.5B as a folder."""
    source, path = data.qwen(cache), cache / f"qwen2.5-coder-0.5b-{dtype_name(dtype)}"
    if not (path / "model.safetensors").exists():
        headwise.load(source).to(dtype).save_pretrained(path)  # type: ignore[arg-type]
        load_tokenizer(source).save_pretrained(path)
        config = json.loads((path / "config.json").read_text())
        base = config["rope_parameters"]["rope_theta"]  # MLX-LM reads it where transformers 4 wrote it
        (path / "config.json").write_text(json.dumps(config | {"rope_theta": base}, indent=2))
    return path


def larger_biases(cache: Path) -> Path:
    """Qwen2.5-Coder-0.5B with biases of norm 450 in the three slowest pairs of the first layer's keys, the size that
    they have in the 1.5B of its family."""
    source, path = data.qwen(cache), cache / "qwen2.5-coder-0.5b-larger-biases.gguf"
    if not path.exists():
        shutil.copyfile(source, path)
        bias = next(tensor for tensor in gguf.GGUFReader(path, "r+").tensors if tensor.name == "blk.0.attn_k.bias")
        slowest = bias.data.reshape(2, 2, 32)[:, :, -3:]  # heads, halves of a head, pairs
        slowest *= 450 / np.sqrt(np.square(slowest).sum(1, keepdims=True))
    return path


@dataclass(frozen=True)
class Setup:
    """What is measured in an engine.

    Attributes:
        models: how each is made.
        caches: the engine's, the full one last.
        prepared_for: the format.
        together: cells that are measured beside one run of the reference, each with a model in memory.
    """

    models: dict[str, Callable[[Path], Path]]
    caches: tuple[str, ...]
    prepared_for: str
    together: int = 4


MODEL = "Qwen2.5-Coder-0.5B"
ENGINES = {
    "llama.cpp": Setup(
        {MODEL: data.qwen, "the same with larger biases": larger_biases}, ("q4_0", "q8_0", "f16"), "llama.cpp:q4_0"
    ),
    "mlx-lm": Setup({MODEL: partial(folder, dtype=torch.float32)}, ("4", "8", "float32"), "mlx:4"),
    "vllm": Setup({MODEL: partial(folder, dtype=torch.bfloat16)}, ("fp8", "bfloat16"), "vllm:fp8", together=1),
}
TEXTS = ("wikitext-test", "brown", "python-reference")
AS_IT_IS = "as it is"
WAYS: dict[str, dict[str, Any]] = {
    AS_IT_IS: {},
    "weights": {},
    "text": {"calibrate": True},
    "refitted": {"calibrate": True, "refit": True},
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=[*ENGINES])
    parser.add_argument("--python", required=True, help="the interpreter of the engine's environment")
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--texts", nargs="+", choices=[*data.ALL], default=[*TEXTS], metavar="TEXT")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS])
    parser.add_argument("--caches", nargs="+")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=1024, help="tokens in each")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where models and texts are")
    parser.add_argument("--work", type=Path, default=Path("build/prepared"), help="where prepared models are")
    options = parser.parse_args(arguments)
    setup = ENGINES[options.engine]
    settings = {"windows": options.windows, "window": options.window, "prepared for": setup.prepared_for}
    kept = Kept(options.json or Path(f"benchmarks/results/prepared-{options.engine}.json"), settings)
    options.work.mkdir(parents=True, exist_ok=True)
    for name in options.models or setup.models:
        files = prepare_all(name, options)
        for text in options.texts:
            places = [
                (way, cache)
                for way, cache in itertools.product(options.ways, options.caches or setup.caches)
                # With a full cache the other ways compute what the model computes, as a proof says of each.
                if (cache != setup.caches[-1] or "refit" in WAYS[way])
                and f"{name} {text} {cache} {way}" not in kept.rows
            ]
            for start in range(0, len(places), setup.together):
                some = places[start : start + setup.together]
                for (way, cache), row in measured(files, text, some, options).items():
                    cell = f"{name} {text} {cache} {way}"
                    kept.add(cell, {"name": name, "text": text, "cache": cache, "way": way, **row})
                    say(f"{cell}: ×{row['perplexity'] / row['full']['perplexity']:.4f}, KL {row['kl']:.4f}")


def prepare_all(name: str, options: argparse.Namespace) -> dict[str, Path]:
    """The file of a model for each way; one that is there already is not made again."""
    setup = ENGINES[options.engine]
    source = setup.models[name](options.cache)
    files = {AS_IT_IS: source}
    for way, fitted in ((way, dict(WAYS[way])) for way in options.ways if way != AS_IT_IS):
        files[way] = options.work / f"{name}-{way}{source.suffix if source.is_file() else ''}"
        if "calibrate" in fitted:
            fitted["calibrate"] = data.wikitext("train", options.cache)
        if not files[way].exists():
            headwise.prepare(source, files[way], cache=setup.prepared_for, **fitted)
    return files


def measured(
    files: dict[str, Path], text: str, cells: Sequence[tuple[str, str]], options: argparse.Namespace
) -> dict[tuple[str, str], dict[str, Any]]:
    """A row for each way and cache, all beside the file as it is with a full cache, which is read once."""
    file = data.ALL[text](options.cache)
    passages = EngineOptions(text=file, engine=options.engine, windows=options.windows, window=options.window)
    texts, context = cut_evaluation_windows(read_texts(file), open_pair(files[AS_IT_IS]), passages)
    widest = ENGINES[options.engine].caches[-1]
    names = {f"{way} {cache}": (way, cache) for way, cache in cells}
    models = {
        key: {"file": str(files[way]), "cache": None if cache == widest else cache}
        for key, (way, cache) in names.items()
    }
    request = {
        "models": models | {"against": {"file": str(files[AS_IT_IS]), "cache": None}},
        "windows": texts[0][1].tolist(),
        "prompt": timing_prompt(texts, context)[0].tolist(),
        "threads": torch.get_num_threads(),
    }
    answer = ask(RUNNABLE[options.engine], options.python, request, silent)
    room = {key: speed["bytes"] / speed["room"] for key, speed in answer["speed"].items()}
    full = {"bytes": room["against"], "perplexity": float(np.exp(np.mean(answer["scores"]["against"]["nll"])))}
    rows = {}
    for key, place in names.items():
        scores = {score: np.array(values) for score, values in answer["scores"][key].items()}
        rows[place] = {
            "engine": answer["version"], "bytes": room[key], "perplexity": float(np.exp(scores["nll"].mean())),
            "kl": float(scores["kl"].mean()), "kl_999": float(np.quantile(scores["kl"], 0.999)),
            "same_top": float(scores["agree"].mean()), "full": full,
        }  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
