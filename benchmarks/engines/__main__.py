"""Run what headwise writes in the engines that people serve models with, beside transformers.

    python -m benchmarks.engines --python llama.cpp=ENV/bin/python vllm=ENV/bin/python    # environments of engines
    python -m benchmarks.engines --engines mlx-lm --outputs MQA                             # a part

Each engine reads each output in a process of its own. A row says whether it loads; the largest difference of its
log-probabilities from transformers', of the text's own tokens and of every token that has one above -20; whether 32
greedy tokens are equal, or the gap between transformers' two best where they first differ; and the bytes of cache a
token as the engine allocates them. Of caches in codes it says how far log-probabilities are from headwise's on
average, and how far headwise's own in float64 are. Kept in benchmarks/results/engines.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.engines.outputs import OUTPUTS, SMOLLM2, make
from benchmarks.kept import Kept, say

from benchmarks import data
from headwise.conversion import export_gguf
from headwise.errors import HeadwiseError
from headwise.measure.texts import read_text, token_windows
from headwise.models.checkpoints import load_tokenizer, model_path

WORKERS = {
    "transformers": "with_transformers",
    "llama.cpp": "with_llama_cpp",
    "mlx-lm": "with_mlx",
    "vllm": "with_vllm",
}
DTYPES = dict.fromkeys(WORKERS, ("float32",)) | {"llama.cpp": ("float32", "float16")}
WITHIN = {"float32": 1e-3, "float16": 1e-2}
"""How far log-probabilities may be from transformers'."""
OF_CODES = 4.0
"""How many times as far they may be on average, of caches in codes, as headwise's own in float64 are."""
IDS, PROMPT, NEW = 128, 64, 32
LEAST = -20.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="*", default=[], metavar="ENGINE=PATH", help="the interpreter of an engine")
    parser.add_argument("--engines", nargs="+", choices=[*WORKERS], default=[*WORKERS])
    parser.add_argument("--outputs", nargs="+", choices=[*OUTPUTS], default=[*OUTPUTS], metavar="OUTPUT")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/engines.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/engines"), help="where models are converted")
    options = parser.parse_args(arguments)
    kept = Kept(options.json, {"ids": IDS, "prompt": PROMPT, "new": NEW})
    pythons = dict.fromkeys(WORKERS, sys.executable) | dict(pair.split("=", 1) for pair in options.python)
    options.work.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(model_path(SMOLLM2))
    ids = token_windows(tokenizer, read_text(data.wikitext("test", options.cache)), window=IDS, windows=1)[0].tolist()
    for name in options.outputs:
        folder = make(name, options.work, options.cache, say)
        references: dict[str, tuple[np.ndarray[Any, Any], dict[str, Any]]] = {}
        for engine in options.engines:
            if engine not in (OUTPUTS[name].engines or WORKERS):
                continue
            for dtype in DTYPES[engine]:
                key = f"{name}/{engine}/{dtype}"
                if key in kept.rows or (dtype != "float32" and OUTPUTS[name].source != SMOLLM2):
                    continue
                if "float32" not in references:
                    references["float32"] = run("transformers", pythons["transformers"], folder, ids, "float32")
                row = _row(engine, pythons[engine], folder, ids, dtype, references["float32"])
                if "tokens" in row:
                    row["tokens_equal"] = row.pop("tokens") == tokenizer(row.pop("text"))["input_ids"]
                kept.add(key, {"output": name, "engine": engine, "dtype": dtype, **row})
                say(key, {k: v for k, v in kept.rows[key].items() if k not in ("run", "greedy", "output")})


def _row(
    engine: str,
    python: str,
    folder: Path,
    ids: list[int],
    dtype: str,
    reference: tuple[np.ndarray[Any, Any], dict[str, Any]],
) -> dict[str, Any]:
    """What one engine does with one output."""
    model = folder
    if engine == "llama.cpp":
        model = folder / f"{dtype}.gguf"
        try:
            if not model.exists():
                export_gguf(folder, model, outtype={"float32": "f32", "float16": "f16"}[dtype])
        except HeadwiseError as error:
            return {"loads": False, "why": f"headwise: {error}"}
    try:
        log_probs, said = run(engine, python, model, ids, dtype)
    except RuntimeError as error:
        return {"loads": False, "why": str(error)}
    finally:
        if engine == "llama.cpp":
            model.unlink(missing_ok=True)
    expected, theirs = reference
    expected_own = expected[np.arange(len(ids) - 1), ids[1:]]
    has_all = log_probs.ndim == 2
    own = log_probs[np.arange(len(ids) - 1), ids[1:]] if has_all else log_probs
    differ = [at for at, pair in enumerate(zip(said["greedy"], theirs["greedy"], strict=True)) if pair[0] != pair[1]]
    gap = abs(theirs["gaps"][differ[0]]) if differ else None
    own_difference = float(np.abs(own - expected_own).max())
    of_all = float(np.abs(log_probs - expected)[expected > LEAST].max()) if has_all else None
    holds = own_difference <= WITHIN[dtype] and (gap is None or gap < 1e-2)
    of_codes: dict[str, Any] = {}
    if theirs["in_float64"] is not None:
        of_codes = {
            "mean_difference": float(np.abs(own - expected_own).mean()),
            "mean_difference_in_float64": float(np.abs(np.asarray(theirs["in_float64"]) - expected_own).mean()),
        }
        holds = of_codes["mean_difference"] <= OF_CODES * of_codes["mean_difference_in_float64"]
    return {
        "loads": True,
        "difference": own_difference,
        "difference_of_all": of_all,
        "perplexity_ratio": float(np.exp((expected_own - own).mean())),
        "greedy_equal": not differ,
        "gap": gap,
        "holds": holds,
        **of_codes,
        "cache_bytes": said["cache_bytes"],
        "version": said["version"],
        **{key: said[key] for key in ("tokens", "text") if key in said},
    }


def run(
    engine: str, python: str, model: Path, ids: list[int], dtype: str, *, stored: str | None = None, new: int = NEW
) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
    """The log-probabilities of an engine, and what else it says.

    Args:
        engine: its name.
        python: the interpreter of its environment.
        model: what it loads.
        ids: of tokens.
        dtype: that it computes in.
        stored: the engine's name of a quantised cache; a full one when None.
        new: greedy tokens after a part of the given ones.

    Raises:
        RuntimeError: it fails; with the last line of its errors.
    """
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "log_probs.npy"
        asked = {
            "model": str(model),
            "ids": ids,
            "prompt": PROMPT,
            "new": new,
            "stored": stored,
            "dtype": dtype,
            "log_probs": str(file),
        }
        command = [python, "-m", f"benchmarks.engines.{WORKERS[engine]}", json.dumps(asked)]
        # The engine's environment may not have headwise; the protocol needs nothing of it.
        environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, env=environment)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "Error: " in line]
            raise RuntimeError(lines[-1] if lines else f"status {done.returncode}")
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return np.load(file), said


if __name__ == "__main__":
    main()
