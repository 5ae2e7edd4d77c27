"""Convert SmolLM2 by every method to the same cache sizes, and evaluate each on texts that it is not calibrated on.

    python -m benchmarks.conversion                          # every row; writes benchmarks/results/conversion.json
    python -m benchmarks.conversion --rows 'mla-192/*' --tokens 16384 --split valid --json build/tuning.json

A row is ``mla-VALUES/METHOD`` or ``mqa/METHOD``; ``mla-192/headwise-mixture`` is calibrated on several texts, and
``mla-192/headwise-stock`` is a ``deepseek_v3`` folder, with one size and one list of rotary channels for all layers.
Each row is saved as soon as it is measured, and a killed conversion is continued, so that the same command finishes
an interrupted run. Nothing is trained. The settings of the published methods (the number of frequencies that TransMLA
folds, the rotated dims) are chosen for each row by perplexity on WikiText-2 valid, as their authors do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import torch
from benchmarks.kept import Kept, say
from benchmarks.shared import exam_windows, shared_fractions

import headwise
from benchmarks import data
from headwise.conversion.calibrate import collect_statistics
from headwise.conversion.calibration.saved import write_statistics
from headwise.conversion.calibration.windows import plain_windows
from headwise.measure.evaluation import evaluate, evaluate_choices, open_pair, score_window
from headwise.measure.texts import calibration_windows, read_text, token_windows
from headwise.measure.texts.calibration import CalibrationTexts
from headwise.models.checkpoints import Checkpoint, FolderWriter, load_tokenizer, open_checkpoint
from headwise.models.specs import AttentionSpec, split_budget

SOURCE = "smollm2-135m"
MLA = ("216", "192", "128", "96")
MIXED = "192"
"""The size that is also calibrated on a mixture of texts, and written as a stock folder."""
ROTATED = (32, 48, 64)
"""Widths of the shared rotary key that the published methods may choose from."""
FOLDS = (1, 2, 4, 8, 16)
TUNING_WINDOWS = 2
PUBLISHED = ("transmla", "mha2mla")
"""Published methods, which use statistics of windows as long as the evaluation's."""

TEXTS: dict[str, Callable[[Path], Path]] = {
    "wikitext": lambda cache: data.wikitext("train", cache),
    "moby-dick": data.moby_dick,
    "xsum": data.xsum,
}
"""The texts to calibrate on: an encyclopaedia, a novel of 1851, news of the 2010s."""


@dataclass(frozen=True)
class Row:
    """One conversion.

    Attributes:
        name: ``target/method``.
        method: ``headwise``, ``transmla``, ``mha2mla``, ``mean`` or ``first_head``.
        kv_lora_rank: the latent's width, for MLA.
        qk_rope_head_dim: the rotary key's width, for MLA.
        texts: names in `TEXTS` to calibrate on.
        stock: whether it is written as ``deepseek_v3``.
    """

    name: str
    method: str
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    texts: tuple[str, ...] = ()
    stock: bool = False

    @property
    def target(self) -> dict[str, Any]:
        """The target as keywords of `headwise.convert`."""
        if self.kv_lora_rank is None:
            return {"to": "mqa"}
        return {"to": "mla", "kv_lora_rank": self.kv_lora_rank, "qk_rope_head_dim": self.qk_rope_head_dim}

    @property
    def slug(self) -> str:
        """A file name for the row."""
        return self.name.replace("/", "-").replace(" ", "-")


def plan(layer: AttentionSpec, sizes: Iterable[str], wanted: Sequence[str] = ("*",)) -> list[Row]:
    """List the rows to measure.

    Args:
        layer: a layer of the source.
        sizes: MLA's cached values a token, split as by `headwise.convert`, or ``R+P``.
        wanted: patterns of row names.
    """
    rows = []
    for size in sizes:
        latent, _, rotary = size.partition("+")
        R, P = (int(latent), int(rotary)) if rotary else split_budget(layer, int(latent))
        name = f"mla-{R + P}"
        for method in ("headwise", *PUBLISHED):
            rows.append(Row(f"{name}/{method}", method, R, P, ("wikitext",)))
        if str(R + P) == MIXED:
            rows.append(Row(f"{name}/headwise-mixture", "headwise", R, P, tuple(TEXTS)))
            rows.append(Row(f"{name}/headwise-stock", "headwise", R, P, ("wikitext",), stock=True))
    rows.append(Row("mqa/headwise", "headwise", texts=("wikitext",)))
    rows += [Row(f"mqa/{method}", method) for method in ("mean", "first_head")]
    return [row for row in rows if any(fnmatchcase(row.name, pattern) for pattern in wanted)]


def variants(row: Row) -> Iterator[dict[str, Any]]:
    """Yield the settings to try for a published method: each split of the bytes with each value of its parameter."""
    assert row.kv_lora_rank is not None
    assert row.qk_rope_head_dim is not None
    cached = row.kv_lora_rank + row.qk_rope_head_dim
    splits = sorted({row.qk_rope_head_dim, *(P for P in ROTATED if cached - P >= P)})
    name, values = ("freqfold", FOLDS) if row.method == "transmla" else ("norms_on_text", (True, False))
    for P, value in product(splits, values):
        yield {"qk_rope_head_dim": P, name: value}


class Bench:
    """The benchmark's source, settings and results, which all rows share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.source, self.cache, self.work = options.source, options.cache, options.work
        self.tokens, self.items = options.tokens, options.items
        self.windows, self.window = options.windows, options.window
        self.split = options.split
        self.checkpoint: Checkpoint = open_checkpoint(self.source)
        settings = {
            "source": self.source,
            "calibration_tokens": self.tokens,
            "split": self.split,
            "windows": self.windows,
            "window": self.window,
            "choices": self.items,
            "dtype": "float32",
        }
        self.kept = Kept(options.json, settings)

    def measure(self, row: Row, *, keep: bool) -> None:
        """Convert, evaluate and keep the result; the folder is removed unless ``keep``."""
        folder, report = self.work / row.slug, self.work / f"{row.slug}.json"
        identity = json.loads(json.dumps({**asdict(row), "source": self.source, "tokens": self.tokens}))
        conversion = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
        if conversion.get("identity") != identity or not (folder / "config.json").exists():
            report.unlink(missing_ok=True)  # it describes another folder
            start = time.perf_counter()
            conversion = self._convert(row, folder)
            conversion |= {"identity": identity, "seconds": round(time.perf_counter() - start, 1)}
            report.write_text(json.dumps(conversion), encoding="utf-8")
        del conversion["identity"]
        start = time.perf_counter()
        pair = open_pair(folder, against=self.source, dtype="float32")
        result = evaluate(pair, text=self._exams(), window=self.window, windows=self.windows)
        # From the size of the cache's tensors, so that padding of a format counts.
        values = result.cache_bytes_per_token / 4 / self.checkpoint.spec.num_layers
        measurements: dict[str, Any] = {"values": round(values), "evaluate": result.to_dict()}
        measurements["shared"] = self._shared(row)
        if row.method == "headwise" and self.split == "test" and self.items:
            measurements["choices"] = evaluate_choices(pair, file=data.piqa(self.cache), limit=self.items).to_dict()
        measurements["evaluation_seconds"] = round(time.perf_counter() - start, 1)
        self.kept.add(row.name, {**asdict(row), **conversion, **measurements})
        for text in result.texts:
            say(f"{row.name:26} {text.text:32} {text.perplexity:12.3f}  ratio {text.perplexity_ratio:.4f}")
        if not keep:
            shutil.rmtree(folder)
            report.unlink()

    def _shared(self, row: Row) -> dict[str, float]:
        """The fraction of each evaluated text's tokens that the row was calibrated on."""
        texts = {str(path): path for path in self._exams()}
        exam = exam_windows(self.checkpoint, texts, window=self.window, windows=self.windows)
        window = self.window if row.method in PUBLISHED else None
        studied = tuple(TEXTS[name](self.cache) for name in row.texts)
        return shared_fractions(self.checkpoint, exam, CalibrationTexts(studied, self.tokens, window))

    def _convert(self, row: Row, folder: Path) -> dict[str, Any]:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if row.method in PUBLISHED:
            return self._convert_published(row, folder)
        texts = [TEXTS[name](self.cache) for name in row.texts]
        report = headwise.convert(
            self.source,
            folder,
            **row.target,
            calibrate=texts or None,
            calibration_tokens=self.tokens if texts else None,
            method=row.method if row.method in ("mean", "first_head") else None,
            format="deepseek-longrope" if row.stock else "headwise",
            overwrite=True,
            evaluate=False,
        )
        return {"conversion": report.to_dict()}

    def _convert_published(self, row: Row, folder: Path) -> dict[str, Any]:
        """Convert with the settings that are best on the tuning text; each perplexity is saved at once."""
        tried: dict[str, tuple[float, dict[str, Any]]] = {}
        for setting in variants(row):
            name = f"{row.name}?" + "&".join(f"{key}={value}" for key, value in setting.items())
            if name not in self.kept.rows:
                self._write_published(row, setting, folder)
                self.kept.add(name, {**setting, "valid_perplexity": self._tuned(folder)})
            tried[name] = self.kept.rows[name]["valid_perplexity"], setting
            say(f"  {name:64} {tried[name][0]:12.3f} on valid")
        best, setting = min(tried.values(), key=lambda trial: trial[0])
        self._write_published(row, setting, folder)
        return {"setting": setting, "valid_perplexity": best}

    def _write_published(self, row: Row, setting: dict[str, Any], folder: Path) -> None:
        assert row.kv_lora_rank is not None
        assert row.qk_rope_head_dim is not None
        P = setting["qk_rope_head_dim"]
        headwise.convert(
            self.source,
            folder,
            to="mla",
            kv_lora_rank=row.kv_lora_rank + row.qk_rope_head_dim - P,
            qk_rope_head_dim=P,
            method=f"transmla:{setting['freqfold']}" if row.method == "transmla" else "mha2mla",
            statistics=self._statistics(row) if setting.get("norms_on_text", True) else None,
            overwrite=True,
            evaluate=False,
        )

    @torch.inference_mode()
    def _tuned(self, folder: Path) -> float:
        """The perplexity of a converted folder on the tuning text."""
        model = headwise.load(folder, dtype=torch.float32)
        text = read_text(data.wikitext("valid", self.cache))
        windows = token_windows(
            load_tokenizer(self.checkpoint.path), text, window=self.window, windows=min(TUNING_WINDOWS, self.windows)
        )
        nll = torch.stack([score_window({"model": model}, ids)["nll"] for ids in windows])
        return float(nll.mean().exp())

    def _statistics(self, row: Row) -> Path:
        """The source's statistics for the published methods, on windows as long as the evaluation's."""
        folder = self.work / f"statistics-{Path(self.source).name}-{'-'.join(row.texts)}-{self.tokens}"
        if not folder.exists():
            texts = [TEXTS[name](self.cache) for name in row.texts]
            tokenizer = load_tokenizer(self.checkpoint.path)
            ids = calibration_windows(tokenizer, texts, tokens=self.tokens, window=self.window)
            windows = plain_windows(ids)  # text alone, as in the papers
            with FolderWriter(folder, {}) as writer:
                results = collect_statistics(self.checkpoint, windows, writer.work)
                write_statistics(writer.folder, results, self.checkpoint, texts, windows)
        return folder

    def _exams(self) -> list[Path]:
        if self.split == "valid":
            return [data.wikitext("valid", self.cache)]
        return [data.wikitext("test", self.cache), data.brown(self.cache), data.austen(self.cache)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=SOURCE)
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="of rows' names; * for any part")
    parser.add_argument("--mla", nargs="+", default=MLA, metavar="SIZE", help="values a token, or R+P")
    parser.add_argument("--tokens", type=int, default=65_536, help="of text to calibrate on")
    parser.add_argument("--windows", type=int, default=6, help="of each text")
    parser.add_argument("--window", type=int, default=2048, help="tokens in each")
    parser.add_argument("--items", type=int, default=500, help="of PIQA; 0 for none")
    parser.add_argument("--split", choices=("test", "valid"), default="test", help="valid: WikiText-2's, for tuning")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/conversion.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts are")
    parser.add_argument("--work", type=Path, default=Path("build/conversion"), help="where models are converted")
    parser.add_argument("--keep", action="store_true", help="keep the converted folders")
    parser.add_argument("--again", action="store_true", help="measure rows again that are kept")
    parser.add_argument("--list", action="store_true", help="only list the rows, and which are done")
    options = parser.parse_args(arguments)
    bench = Bench(options)
    for row in plan(bench.checkpoint.spec.layers[0], options.mla, options.rows):
        done = row.name in bench.kept.rows and not options.again
        if options.list:
            say(f"{row.name:26} {'done' if done else ''}")
        elif not done:
            if options.again:
                shutil.rmtree(bench.work / row.slug, ignore_errors=True)
            bench.measure(row, keep=options.keep)


if __name__ == "__main__":
    main()
