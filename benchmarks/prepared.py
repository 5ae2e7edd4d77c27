"""What llama.cpp's own caches lose of models as they are, and prepared for them: in stock llama.cpp.

    python -m benchmarks.prepared --python ENV/bin/python      # of an environment with llama-cpp-python

A model is prepared from its weights alone, and on 4,096 tokens of WikiText-2 train. Perplexity and divergence are
beside the file as it is with a float16 cache. Kept in benchmarks/results/prepared.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kept import Kept, say

import headwise
from benchmarks import data
from headwise.checkpoints import load_tokenizer
from headwise.texts import read_text, token_windows

MODELS = {"Qwen2.5-Coder-0.5B": data.qwen}
TEXTS = ("wikitext-test", "brown", "python-reference")
CACHES = (("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"))
WAYS = ("as it is", "weights", "text")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the interpreter of an environment with llama-cpp-python")
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--texts", nargs="+", choices=[*data.ALL], default=[*TEXTS], metavar="TEXT")
    parser.add_argument("--prepare-for", default="llama.cpp:q4_0", metavar="ENGINE:FORMAT")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=1024, help="tokens in each")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/prepared.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where models and texts are")
    parser.add_argument("--work", type=Path, default=Path("build/prepared"), help="where models are prepared")
    options = parser.parse_args(arguments)
    settings = {"windows": options.windows, "window": options.window, "prepared for": options.prepare_for}
    kept = Kept(options.json, settings)
    options.work.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        source = MODELS[name](options.cache)
        files, seconds = {"as it is": source}, {"as it is": 0.0}
        for way in WAYS[1:]:
            files[way] = options.work / f"{name}-{way}.gguf"
            text = {"calibrate": data.wikitext("train", options.cache)} if way == "text" else {}
            begin = time.perf_counter()
            headwise.prepare(source, files[way], cache=options.prepare_for, overwrite=True, **text)
            seconds[way] = time.perf_counter() - begin
        tokenizer = load_tokenizer(source)
        for text_name in options.texts:
            if f"{name} {text_name}" in kept.rows:
                continue
            content = read_text(data.ALL[text_name](options.cache))
            windows = token_windows(tokenizer, content, window=options.window, windows=options.windows)
            asked = {
                "models": [str(files[way]) for way in WAYS], "caches": CACHES, "windows": windows.tolist(),
                "threads": os.cpu_count(),
            }  # fmt: skip
            answer = run_worker(options.python, asked, options.work / "asked.json")
            of_file = {str(file): way for way, file in files.items()}
            rows = [{**row, "model": of_file[row["model"]]} for row in answer["rows"]]
            kept.add(
                f"{name} {text_name}",
                {"rows": rows, "engine": answer["version"], "seconds": seconds, "text": text_name, "name": name},
            )
            for row in rows:
                say(f"{name} {text_name} {row['model']} {row['cache']}: {row['perplexity']:.3f}, KL {row['kl']:.4f}")


def run_worker(python: str, asked: dict[str, object], file: Path) -> dict[str, list[dict[str, object]]]:
    """What the engine's process answers; it reads what is asked from a file, as a command line is too short."""
    file.write_text(json.dumps(asked))
    worker = Path(__file__).with_name("engines") / "caches_llama_cpp.py"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    with file.with_suffix(".log").open("w") as log:  # the engine tells of every tensor
        command = [python, str(worker), f"@{file}"]
        said = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, stderr=log, text=True)
    answer: dict[str, list[dict[str, object]]] = json.loads(said.stdout.splitlines()[-1])
    return answer


if __name__ == "__main__":
    main()
