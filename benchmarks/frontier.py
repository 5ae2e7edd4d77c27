"""Join all measured ways to shrink SmolLM2's cache in one page, as `headwise frontier` writes it.

    python -m benchmarks.frontier --output build/frontier        # frontier.html, .md and .json

It measures nothing: rows are read from the results of `benchmarks.formats`, `benchmarks.budgets`, `benchmarks.rivals`
and `benchmarks.conversion`. Of several calibration samples at a budget, the page has the median one.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.formats import SOURCE
from benchmarks.kept import say
from benchmarks.tables import RESULTS

from benchmarks import joined
from headwise.checkpoints import open_checkpoint
from headwise.frontiers.page import markdown, page, refuse_no_plotly
from headwise.frontiers.points import Frontier, advice, collect
from headwise.frontiers.results import write_file


def joined_frontier(results: Path, source: str) -> Frontier:
    """The frontier of all rows that are kept.

    Args:
        results: the folder of results files.
        source: the model that all of them are of.
    """
    samples = joined.samples(results)
    ways = {
        "plain formats": joined.formats(results),
        "conversions": joined.conversions(results),
        "conversions with codes": [joined.median(rows) for rows in samples.values()],
        "published methods": joined.published(results),
    }
    rows = [row for of_way in ways.values() for row in of_way]
    if not rows:
        raise SystemExit(f"{results}: has no results of these benchmarks")
    for row in rows:
        _refuse_other_texts(row, rows[0])
    tokens = max(
        (row.result["conversion"]["calibration_tokens"] for row in rows if row.result["conversion"]), default=0
    )
    notes = [
        "Published methods are written anew from their papers and simulated (docs/rivals.md). Their KL was not"
        " measured; in what chance explains, the rise of the mean negative log-likelihood stands for it.",
        *(
            f"{joined.median(own).target} is the median of {len(own)} calibration samples, which have perplexity"
            f" × {min(row.ratio for row in own):.4f} to × {max(row.ratio for row in own):.4f}"
            for own in samples.values()
            if len(own) > 1
        ),
    ]
    return collect(
        [(row, row.result) for row in rows],
        source=source,
        label=open_checkpoint(source).spec.layers[0].label,
        calibrate=("WikiText-2 train",) if tokens else (),
        calibration_tokens=tokens,
        methods=False,
        versions={
            library: " and ".join(sorted({row.versions[library] for row in rows})) for library in rows[0].versions
        },
        notes=notes,
    )


def _refuse_other_texts(row: joined.Row, first: joined.Row) -> None:
    """Refuse a row that was measured on other windows than the first: the original has another perplexity there."""
    own, others = (one.result["evaluation"]["texts"] for one in (row, first))
    is_same = [text["text"] for text in own] == [text["text"] for text in others] and all(
        math.isclose(text["reference_perplexity"], other["reference_perplexity"], rel_tol=1e-4)
        for text, other in zip(own, others, strict=True)
    )
    if not is_same:
        raise SystemExit(f"{row.target} was measured on other text than {first.target}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--source", default=SOURCE)
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    options = parser.parse_args(arguments)
    refuse_no_plotly()
    found = joined_frontier(options.results, options.source)
    options.output.mkdir(parents=True, exist_ok=True)
    name = options.output / "frontier"
    write_file(name.with_suffix(".json"), json.dumps(found.to_dict(), indent=1, ensure_ascii=False) + "\n")
    write_file(name.with_suffix(".md"), markdown(found))
    write_file(name.with_suffix(".html"), page(found))
    say("\n".join(advice(found)))


if __name__ == "__main__":
    main()
