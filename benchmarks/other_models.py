"""Convert models that nothing was tuned on to half of their values, by every method, from several samples of text.

    python -m benchmarks.other_models              # kept in benchmarks/results/other-models.json
    python -m benchmarks.other_models gpt2

The models are those that `benchmarks.small_models` trains; each is made once, in the work folder. Samples share no
article, and each conversion is evaluated on texts of which no article is in any sample. Published methods are run on
the first sample alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kept import Kept, say
from benchmarks.samples import SAMPLES, sample
from benchmarks.small_models import MODELS, WINDOW, made

import headwise
from benchmarks import data
from headwise.errors import HeadwiseError
from headwise.measure.texts import read_text

TRAINED = tuple(name for name in MODELS if name != "glassllm")
METHODS = ("headwise", "transmla", "mha2mla")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=TRAINED, metavar="MODEL", help=", ".join(TRAINED))
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="METHOD", help="the first with every sample")
    parser.add_argument("--kv-budget", type=float, default=0.5, help="fraction of the source's cache")
    parser.add_argument("--tokens", type=int, default=16_384, help="of each sample")
    parser.add_argument("--windows", type=int, default=32, help="of each text to evaluate on")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/other-models.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/other-models"), help="for models and conversions")
    options = parser.parse_args(arguments)
    kept = Kept(options.json, {name: getattr(options, name) for name in ("kv_budget", "tokens", "windows")})
    train = read_text(data.wikitext("train", options.cache))
    exams = [data.wikitext("test", options.cache), data.brown(options.cache)]
    options.work.mkdir(parents=True, exist_ok=True)
    for model in options.models:
        folder = made(model, options.work / model, options.cache)
        cases = [(method, name) for method in options.methods for name in SAMPLES]
        for method, name in cases:
            row = f"{model}/{method}/{name}"
            if row in kept.rows or (method != options.methods[0] and name != SAMPLES[0]):
                continue
            text = options.work / f"{name.replace(' ', '-')}.txt"
            text.write_text(sample(train, name), encoding="utf-8")
            try:
                report = headwise.convert(
                    folder,
                    options.work / "converted",
                    to="mla",
                    kv_budget=options.kv_budget,
                    method=method,
                    calibrate=text,
                    calibration_tokens=options.tokens,
                    evaluate=False,
                    overwrite=True,
                )
            except HeadwiseError as error:  # a method that does not suit the model
                say(f"{row:40}", error)
                continue
            result = headwise.evaluate(
                options.work / "converted", against=folder, text=exams, window=WINDOW, windows=options.windows
            )
            scores = {"conversion": report.to_dict(), "evaluate": result.to_dict()}
            kept.add(row, {"model": model, "method": method, "sample": name, **scores})
            say(f"{row:40}", ", ".join(f"{score['perplexity_ratio']:.4f}" for score in result.to_dict()["texts"]))


if __name__ == "__main__":
    main()
