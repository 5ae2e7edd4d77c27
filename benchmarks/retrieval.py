"""Convert MiniLM, a sentence encoder of 12 heads, to fewer key–value heads, and measure the loss of retrieval.

    python -m benchmarks.retrieval           # every row; writes benchmarks/results/retrieval.json

A row is ``gqa:K/METHOD``, and for ``aligned`` also the calibration text and its tokens. For each of BoolQ's 3270 dev
questions, its passage is ranked among all passages. The calibration text ``boolq`` is BoolQ's test split without
the articles of the dev split: text of the same kind that is not evaluated on.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

import torch
from benchmarks.kept import Kept, say
from benchmarks.shared import shared_fractions

import headwise
from benchmarks import data
from headwise.measure.evaluation import load_encoder
from headwise.measure.evaluation.retrieval import Questions, rank_scores
from headwise.measure.texts import read_jsonl, token_ids
from headwise.measure.texts.calibration import CalibrationTexts
from headwise.models.checkpoints import load_tokenizer, open_checkpoint

HEADS = (6, 3)
TOKENS = (16_384, 65_536)
ORIGINAL = "original"


@dataclass(frozen=True)
class Row:
    """One conversion.

    Attributes:
        heads: key–value heads after the conversion.
        method: how heads are merged.
        text: name of the calibration text; empty for none.
        tokens: the number of calibration tokens.
    """

    heads: int
    method: str
    text: str = ""
    tokens: int = 0

    @property
    def name(self) -> str:
        """The row's name in the results."""
        return f"gqa:{self.heads}/{self.method}" + (f" {self.text} {self.tokens}" if self.text else "")


def plan(wanted: Sequence[str] = ("*",), tokens: Sequence[int] = TOKENS) -> list[Row]:
    """List the rows to measure, whose names match one of the patterns."""
    rows = []
    for heads in HEADS:
        rows += [Row(heads, method) for method in ("mean", "first_head", "aligned")]
        rows += [Row(heads, "aligned", text, count) for text, count in product(("boolq", "wikitext"), tokens)]
    return [row for row in rows if any(fnmatchcase(row.name, pattern) for pattern in wanted)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="of rows' names; * for any part")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="of text to calibrate on")
    parser.add_argument("--limit", type=int, help="questions; all when left out")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/retrieval.json"))
    parser.add_argument("--cache", type=Path, default=data.CACHE, help="where the texts and the model are")
    parser.add_argument("--work", type=Path, default=Path("build/retrieval"), help="where models are converted")
    parser.add_argument("--keep", action="store_true", help="keep the converted folders")
    parser.add_argument("--again", action="store_true", help="measure rows again that are kept")
    options = parser.parse_args(arguments)
    source = data.minilm(options.cache)
    settings = {"source": "all-MiniLM-L6-v2", "limit": options.limit, "dtype": "float32"}
    kept = Kept(options.json, settings)
    exam = Questions.read(data.boolq(options.cache), options.limit)
    reference = load_encoder(source)
    if ORIGINAL not in kept.rows:
        kept.add(ORIGINAL, {"ranks": exam.ranks(reference).tolist(), "passages": len(exam.passages)})
    original = torch.tensor(kept.rows[ORIGINAL]["ranks"])
    for row in plan(options.rows, options.tokens):
        if row.name in kept.rows and not options.again:
            continue
        folder = options.work / row.name.replace("/", "-").replace(" ", "-").replace(":", "-")
        start = time.perf_counter()
        headwise.convert(
            source,
            folder,
            to=f"gqa:{row.heads}",
            method=row.method,
            calibrate=study(row.text, options.cache, options.work) if row.text else None,
            calibration_tokens=row.tokens or None,
            overwrite=True,
            evaluate=False,
        )
        seconds = round(time.perf_counter() - start, 1)
        texts = (study(row.text, options.cache, options.work),) if row.text else ()
        shared = shared_passages(source, exam.passages, CalibrationTexts(texts, row.tokens))
        scores = rank_scores(exam.ranks(load_encoder(folder, reference=reference)), original)
        rates = {name: scores[name].to_dict() for name in ("recall_at_1", "recall_at_10")}
        mrr = {"mrr": scores["mrr"], "reference_mrr": rank_scores(original)["mrr"]}
        kept.add(row.name, {**asdict(row), "conversion_seconds": seconds, **shared, **rates, **mrr})
        recall = {key: 100 * value for key, value in rates["recall_at_1"].items()}
        say(
            f"{row.name:30} R@1 {recall['reference_rate']:.2f} → {recall['rate']:.2f}: {recall['difference']:+.2f}"
            f" [{recall['difference_low']:+.2f}, {recall['difference_high']:+.2f}]"
        )
        if not options.keep:
            shutil.rmtree(folder)


def shared_passages(source: Path, passages: Sequence[str], calibrate: CalibrationTexts) -> dict[str, float]:
    """A row's ``shared``: the fraction of the passages' tokens that are calibrated on; empty without calibration."""
    tokenizer = load_tokenizer(source)
    ids = [torch.tensor(token_ids(tokenizer, passage), dtype=torch.long) for passage in passages]
    return shared_fractions(open_checkpoint(source), {"shared": ids}, calibrate)


def study(text: str, cache: Path, work: Path) -> Path:
    """The calibration text as a file; BoolQ's has a question on each line and its passage on the next."""
    if text == "wikitext":
        return data.wikitext("train", cache)
    path = work / "boolq-study.txt"
    work.mkdir(parents=True, exist_ok=True)
    rows = read_jsonl(data.boolq_study(cache), name="study")
    path.write_text("".join(f"{row['question']}\n{row['passage']}\n" for row in rows), encoding="utf-8")
    return path


if __name__ == "__main__":
    main()
