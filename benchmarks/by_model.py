"""What every way to a smaller cache loses, model by model: engines' caches as they are and prepared, and headwise's.

    python -m benchmarks.by_model                                # kept in benchmarks/results/by-model.json
    python -m benchmarks.by_model gemma-3-270m --ways same@0.28 --samples "articles 1 of 3"

Conversions are made from several samples of WikiText-2 train that share no article, of 16,384 tokens each, or 65,536
below 10 percent, and evaluated on texts of which no article is in any sample. A model of code is calibrated half on
samples of a package's code, and evaluated on another's. Formats need no sample; models are prepared for an engine's
cache on the first one. A way that headwise refuses for a model is printed with its reason, and has no row. Every row
is kept as soon as it is measured; ``--keep`` keeps the models too, in build/by-model/MODEL-SAMPLE/WAY.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kept import Kept, say
from benchmarks.samples import SAMPLES, sample
from benchmarks.small_models import made

import headwise
from benchmarks import data
from headwise.base.disk import write_whole
from headwise.costs.formulas.target import target_options
from headwise.measure.evaluation.beside_source import bfloat16_bytes, served_bytes
from headwise.measure.texts import read_text
from headwise.models.checkpoints import model_path, open_checkpoint

MODELS: dict[str, Callable[[Path], str | Path]] = {
    "smollm2-135m": lambda _: "smollm2-135m",
    "qwen2.5-coder-0.5b": data.qwen,
    "gemma-3-270m": data.gemma,
    "gemma3, trained here": lambda cache: made("gemma3", cache / "gemma3-trained", cache),
    "qwen3, trained here": lambda cache: made("qwen3", cache / "qwen3-trained", cache),
}
"""How each model is found. The first three are real; Gemma 3 has windows and norms of queries and keys."""

CODERS = ("qwen2.5-coder-0.5b",)
"""The models of code, whose samples are half code."""

FORMATS = (
    "llama.cpp:q8_0",
    "vllm:fp8",
    "llama.cpp:q4_0",
    "mlx:4",
    "kivi4",
    "kivi3:32",
    "int3+hadamard/int2",
    "kivi2",
)
PREPARED = ("llama.cpp:q8_0", "llama.cpp:q4_0", "mlx:4")
REFITTED = ("llama.cpp:q4_0",)
"""Prepared, and the biases of keys shifted besides, in models that have some."""
CONVERSIONS = ("same@0.28", "mla@0.19", "mla@0.125")
WAYS = (
    *FORMATS,
    *(f"{cache}, prepared" for cache in PREPARED),
    *(f"{cache}, refitted" for cache in REFITTED),
    *CONVERSIONS,
)

REFUSED = ("cache", "for", "refit")
"""The arguments with which headwise says that a model's heads or keys cannot have a format."""

TOKENS, MORE_TOKENS, NEEDS_MORE = 16_384, 65_536, 0.1
"""Tokens of each sample, and of those for sizes below `NEEDS_MORE`."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*MODELS], metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--ways", nargs="+", default=WAYS, metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--samples", nargs="+", default=SAMPLES, metavar="NAME", help="of the conversions' text")
    parser.add_argument("--texts", nargs="+", default=["wikitext-test", "brown", "django"], metavar="TEXT")
    parser.add_argument("--windows", type=int, default=6, help="of each text to evaluate on")
    parser.add_argument("--window", type=int, default=1024, help="tokens in each")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/by-model.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where models and texts are")
    parser.add_argument("--work", type=Path, default=Path("build/by-model"), help="where models are converted")
    parser.add_argument("--keep", action="store_true", help="keep converted and prepared models there")
    options = parser.parse_args(arguments)
    kept = Kept(options.json, {name: getattr(options, name) for name in ("texts", "windows", "window")})
    for model in options.models:
        for way in options.ways:
            for name in options.samples if way in CONVERSIONS else SAMPLES[:1]:
                row = f"{model}/{way}/{name}" if way in CONVERSIONS else f"{model}/{way}"
                if row not in kept.rows:
                    try:
                        measured = measure(model, way, name, options)
                    except headwise.ArgumentError as refusal:
                        if refusal.field not in REFUSED:
                            raise
                        say(f"{row:50} {refusal}")
                        continue
                    kept.add(row, {"model": model, "way": way, "sample": name, **measured})
                ratios = ", ".join(f"×{text['perplexity_ratio']:.4f}" for text in kept.rows[row]["texts"])
                say(f"{row:50} {kept.rows[row]['bytes']:6.1%}  {ratios}")


def sample_files(model: str, name: str, options: argparse.Namespace) -> list[Path]:
    """The files of a sample: one of prose, and for a model of code another, from which as many tokens are taken."""
    texts = [data.wikitext("train", options.cache), *([data.networkx(options.cache)] if model in CODERS else [])]
    files = [options.work / f"{text.stem}-{name.replace(' ', '-')}.txt" for text in texts]
    options.work.mkdir(parents=True, exist_ok=True)
    for file, text in zip(files, texts, strict=True):
        if not file.exists():
            write_whole(file, sample(read_text(text), name).encode())
    return files


def measure(model: str, way: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Make one way's model, or set its cache's format, and evaluate it beside the source."""
    source = MODELS[model](options.cache)
    output = options.work / f"{model}-{name}".replace(" ", "-") / way
    cache: str | None
    cache, _, done = way.partition(", ")
    made: headwise.Conversion | headwise.Preparation | None = None
    if way in CONVERSIONS:
        cache, fraction = None, float(way.partition("@")[2])
        made = headwise.convert(
            source,
            output,
            calibrate=sample_files(model, name, options),
            calibration_tokens=TOKENS if fraction >= NEEDS_MORE else MORE_TOKENS,
            dtype="float32",
            evaluate=False,
            overwrite=output.exists(),
            **target_options(way),
        )
    elif done:
        if model_path(source).suffix == ".gguf":
            output = output.with_name(f"{way}.gguf")
        output.parent.mkdir(parents=True, exist_ok=True)
        calibrate = sample_files(model, name, options)
        made = headwise.prepare(
            source, output, cache=cache, calibrate=calibrate, refit=done == "refitted", overwrite=True
        )
    measured = source if made is None else output
    result = headwise.evaluate(
        measured,
        against=source,
        cache=cache,
        text=[data.ALL[text](options.cache) for text in options.texts],
        window=options.window,
        windows=options.windows,
        dtype="float32",
    )
    whole = bfloat16_bytes(open_checkpoint(source), options.window)
    names = ("tokens", "perplexity", "perplexity_ratio", "kl", "kl_999", "top1_changed")
    row = {
        "bytes": served_bytes(open_checkpoint(measured), result) / whole,
        "texts": [
            {"text": Path(text["text"]).name, **{name: text[name] for name in names}}
            for text in result.to_dict()["texts"]
        ],
    }
    if made is None:
        return row
    if output.is_file() and not options.keep:
        output.unlink()
    elif not options.keep:
        shutil.rmtree(output)
    return row | {"seconds": made.seconds}


if __name__ == "__main__":
    main()
