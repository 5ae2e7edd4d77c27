"""Join all measured ways to shrink SmolLM2's cache in one page, as `headwise frontier` writes it.

    python -m benchmarks.frontier --output build/frontier        # frontier.html, .md and .json

It measures nothing: rows are read from the results of `benchmarks.formats`, `benchmarks.budgets`, `benchmarks.rivals`
and `benchmarks.conversion`. Of several calibration samples at a budget, the page has the median one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.formats import SOURCE
from benchmarks.kept import say
from benchmarks.tables import RESULTS

from benchmarks import joined
from headwise.checkpoints import open_checkpoint
from headwise.frontiers.page import markdown, page, refuse_no_plotly
from headwise.frontiers.points import advice
from headwise.frontiers.results import write_file


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--source", default=SOURCE)
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    options = parser.parse_args(arguments)
    refuse_no_plotly()
    label = open_checkpoint(options.source).spec.layers[0].label
    found = joined.frontier(options.results, options.source, label)
    options.output.mkdir(parents=True, exist_ok=True)
    name = options.output / "frontier"
    write_file(name.with_suffix(".json"), json.dumps(found.to_dict(), indent=1, ensure_ascii=False) + "\n")
    write_file(name.with_suffix(".md"), markdown(found))
    write_file(name.with_suffix(".html"), page(found))
    say("\n".join(advice(found)))


if __name__ == "__main__":
    main()
