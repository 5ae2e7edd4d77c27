"""Measure published ways to shrink SmolLM2's cache at given sizes, on texts that they are not calibrated on.

    python -m benchmarks.rivals                                 # every method at every size
    python -m benchmarks.rivals palu --bytes 0.25 0.125         # writes benchmarks/results/rivals.json

A row is ``METHOD/F``, where F is the fraction of a bf16 cache's bytes that was asked for; ``fraction`` is what the
method takes, with everything that it stores for a token. Where a method has several settings of so many bytes, the
best on two windows of WikiText-2 valid is measured. Rows are saved as soon as they are measured, so that the same
command finishes an interrupted run. Nothing is trained, and arithmetic is float32: only what a method rounds is
rounded.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.kept import Kept, say
from benchmarks.rivals import care, elitekv, kvquant, palu, svd_llm, transmla
from benchmarks.rivals.calibration import collect
from benchmarks.rivals.simulation import Design, Study, mean_nll, simulated
from safetensors.torch import load_file, save_file
from torch import Tensor

import headwise
from benchmarks import data
from headwise.measure.texts import calibration_windows, read_text, token_windows
from headwise.models.checkpoints import load_tokenizer, open_checkpoint

SOURCE = "smollm2-135m"
METHODS: dict[str, Callable[[Study, float], list[Design]]] = {
    "kvquant": kvquant.designs,
    "palu": palu.designs,
    "care": care.designs,
    "svd-llm-v2": svd_llm.designs,
    "elitekv": elitekv.designs,
    "transmla": transmla.designs,
}
FRACTIONS = (0.5, 0.28, 0.25, 0.19, 0.15, 0.125, 0.094, 0.0625)
TUNING_WINDOWS = 2
ORIGINAL = "original"


class Bench:
    """The source, the texts, and the rows that are measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.checkpoint = open_checkpoint(options.source)
        self.tokenizer = load_tokenizer(self.checkpoint.path)
        settings = {
            "source": options.source,
            "calibration_tokens": options.tokens,
            "windows": options.windows,
            "window": options.window,
            "dtype": "float32",
        }
        self.kept = Kept(options.json, settings)
        self.texts = {
            "wikitext-2.test": data.wikitext("test", options.cache),
            "brown": data.brown(options.cache),
            "austen": data.austen(options.cache),
        }
        self.study = self._study()

    def measure(self, method: str, fraction: float) -> None:
        """Measure a method's best design of a fraction of the bytes; nothing if it has none that is so small."""
        name = f"{method}/{fraction:g}"
        start = time.perf_counter()
        designs = METHODS[method](self.study, fraction)
        if not designs:
            say(f"{name}: the method has no cache of so few bytes")
            return
        best = self._best(name, designs) if len(designs) > 1 else designs[0]
        row: dict[str, Any] = {"method": method, "wanted": fraction, "settings": best.settings}
        row["texts"] = self._texts(best)
        row["token_bytes"] = self._token_bytes(best)
        row["fraction"] = row["token_bytes"] / self.study.full
        row["seconds"] = round(time.perf_counter() - start, 1)
        self.kept.add(name, row)
        ratios = " ".join(f"{text['perplexity_ratio']:9.3f}" for text in row["texts"].values())
        say(f"{name:18} {100 * row['fraction']:6.2f} %  {ratios}  {best.settings}")

    def measure_original(self) -> None:
        """Measure the source, which ratios are of."""
        if ORIGINAL not in self.kept.rows:
            texts = {name: {"nll": mean_nll(self.study.model, ids)} for name, ids in self._exams().items()}
            self.kept.add(ORIGINAL, {"texts": texts, "token_bytes": self.study.full, "fraction": 1.0})

    def _best(self, name: str, designs: Sequence[Design]) -> Design:
        losses = []
        for design in designs:
            with simulated(self.study.model, design.layers):
                losses.append(mean_nll(self.study.model, self.study.valid, coarse=True))
            say(f"  {name:18} {design.settings} {losses[-1]:.4f} nats on valid")
        return designs[losses.index(min(losses))]

    def _texts(self, design: Design) -> dict[str, dict[str, float]]:
        texts = {}
        with simulated(self.study.model, design.layers):
            for name, ids in self._exams().items():
                nll = mean_nll(self.study.model, ids)
                more = nll - self.kept.rows[ORIGINAL]["texts"][name]["nll"]
                texts[name] = {"nll": nll, "perplexity_ratio": math.exp(more) if more < 50 else math.inf}
        return texts

    def _token_bytes(self, design: Design) -> float:
        quantised = [layer for layer in design.layers if isinstance(layer, kvquant.QuantisedLayer)]
        if not quantised:
            return design.token_bytes
        return kvquant.measured_bytes(quantised, design.settings["bits"], self.options.window)

    def _exams(self) -> dict[str, Tensor]:
        return {name: self._windows(path, self.options.windows) for name, path in self.texts.items()}

    def _windows(self, path: Path, windows: int) -> Tensor:
        return token_windows(self.tokenizer, read_text(path), window=self.options.window, windows=windows)

    def _study(self) -> Study:
        options = self.options
        model = headwise.load(options.source, dtype=torch.float32).eval()
        if model.config.model_type != "llama" or model.config.attention_bias:
            raise SystemExit(f"--source {options.source!r}: must be a llama model without attention biases")
        train = data.wikitext("train", options.cache)
        windows = calibration_windows(self.tokenizer, [train], tokens=options.tokens, window=options.window)
        options.work.mkdir(parents=True, exist_ok=True)
        path = options.work / "statistics.safetensors"
        if not path.exists():
            save_file(collect(model, windows, say), path)
        valid = self._windows(data.wikitext("valid", options.cache), min(TUNING_WINDOWS, options.windows))
        return Study(model, load_file(path), windows, valid, options.work)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=list(METHODS), metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--bytes", nargs="+", type=float, default=FRACTIONS, metavar="F", help="of a bf16 cache")
    parser.add_argument("--source", default=SOURCE)
    parser.add_argument("--tokens", type=int, default=65_536, help="of WikiText-2 train to calibrate on")
    parser.add_argument("--windows", type=int, default=6, help="of each text")
    parser.add_argument("--window", type=int, default=2048, help="tokens in each")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/rivals.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/rivals"), help="for statistics, one source's")
    parser.add_argument("--again", action="store_true", help="measure rows again that are kept")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.methods) - set(METHODS))
    if unknown:
        parser.error(f"METHOD {unknown[0]!r}: must be one of {', '.join(METHODS)}")
    bench = Bench(options)
    bench.measure_original()
    for fraction in options.bytes:
        for method in options.methods:
            if options.again or f"{method}/{fraction:g}" not in bench.kept.rows:
                bench.measure(method, fraction)


if __name__ == "__main__":
    main()
