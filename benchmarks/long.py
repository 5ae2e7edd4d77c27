"""Evaluate a conversion in long contexts: calibrated on windows of 2048 tokens, evaluated at 8192 tokens.

    python -m benchmarks.long      # writes benchmarks/results/long.json

SmolLM2 with half its cache: perplexity by position in the window, on texts that are not calibrated on; and a fact
planted at several depths, which the model is asked for at the end. The conversion, each text and each depth are saved
as soon as they are measured, so that the same command finishes an interrupted run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kept import Kept, say
from benchmarks.shared import exam_windows, shared_fractions

import headwise
from benchmarks import data
from headwise.evaluation import Pair, evaluate, evaluate_planted, open_pair
from headwise.options.evaluate import DEPTHS
from headwise.texts.calibration_texts import CalibrationTexts

SOURCE = "smollm2-135m"


def convert(folder: Path, text: Path, kept: Kept) -> None:
    """Convert the model, unless an earlier run has."""
    settings = kept.settings
    if "conversion" in kept.rows and (folder / "config.json").exists():
        return
    conversion = headwise.convert(
        settings["source"],
        folder,
        to="mla",
        kv_budget=settings["kv_budget"],
        calibrate=text,
        calibration_tokens=settings["calibration_tokens"],
        calibration_window=settings["calibration_window"],
        evaluate=False,
        overwrite=folder.exists(),
    )
    kept.add("conversion", conversion.to_dict())


def measure(pair: Pair, texts: dict[str, Path], study: Path, kept: Kept) -> None:
    """Measure the texts and the depths that have no row yet.

    Args:
        pair: the conversion and its original.
        texts: files by the names of their rows; facts are planted in the first.
        study: the calibration text.
        kept: the results, whose settings say how much is measured.
    """
    settings = kept.settings
    source = pair.checkpoints["against"]
    calibrate = CalibrationTexts((study,), settings["calibration_tokens"], settings["calibration_window"])
    exam = exam_windows(
        source, texts, window=settings["context"], windows=max(settings["windows"], settings["trials"])
    )
    shared = shared_fractions(source, exam, calibrate)
    for name, text in texts.items():
        if f"text/{name}" not in kept.rows:
            evaluation = evaluate(
                pair,
                text=text,
                window=settings["context"],
                windows=settings["windows"],
                context=settings["context"] - 1,
            )
            kept.add(f"text/{name}", {**evaluation.to_dict(), "shared": shared.get(name)})
            for score in evaluation.texts[0].by_position:
                assert score.reference is not None
                say(f"{name:10} {score.start:5}–{score.stop - 1:5}  {score.nll:.4f}  {score.reference.nll:.4f}")
    for depth in DEPTHS:
        if f"planted/{depth}" not in kept.rows:
            # One seed for all depths, so that they use the same codes.
            planted = evaluate_planted(
                pair,
                text=next(iter(texts.values())),
                context=settings["context"],
                depths=(depth,),
                trials=settings["trials"],
                seed=settings["seed"],
            )
            kept.add(f"planted/{depth}", {**planted.to_dict(), "shared": shared.get(next(iter(texts)))})
            (score,) = planted.depths
            assert score.reference is not None
            say(
                f"depth {depth:4}  found {score.found:.2f} / {score.reference.found:.2f}"
                f"  nll {score.nll:.2f} / {score.reference.nll:.2f}"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=SOURCE)
    parser.add_argument("--kv-budget", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, default=65_536, help="of text to calibrate on")
    parser.add_argument("--calibration-window", type=int, default=2048)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--windows", type=int, default=3, help="of each text")
    parser.add_argument("--trials", type=int, default=4, help="of planted facts, at each depth")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/long.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/long"), help="where models are converted")
    options = parser.parse_args(arguments)
    settings = {
        "source": options.source,
        "kv_budget": options.kv_budget,
        "calibration_tokens": options.tokens,
        "calibration_window": options.calibration_window,
        "context": options.context,
        "windows": options.windows,
        "trials": options.trials,
        "seed": options.seed,
        "dtype": "float32",
    }
    kept = Kept(options.json, settings)
    texts = {
        "wikitext": data.wikitext("test", options.cache),
        "brown": data.brown(options.cache),
        "austen": data.austen(options.cache),
    }
    if kept.rows.keys() >= {*(f"text/{name}" for name in texts), *(f"planted/{depth}" for depth in DEPTHS)}:
        return
    # Each conversion has its own folder, so that no row is measured on another conversion.
    names = ("kv_budget", "calibration_tokens", "calibration_window")
    folder = options.work / "-".join([Path(options.source).name, *(str(settings[name]) for name in names)])
    study = data.wikitext("train", options.cache)
    convert(folder, study, kept)
    measure(open_pair(folder, against=options.source, dtype="float32"), texts, study, kept)


if __name__ == "__main__":
    main()
