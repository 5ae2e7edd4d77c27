"""Join all measured ways to shrink SmolLM2's cache in one page, as `headwise frontier` writes it.

    python -m benchmarks.frontier --output build/frontier        # frontier.html, .md and .json
    python -m benchmarks.frontier --output build/frontier --screenshot docs/report.png    # of headwise report, too

It measures nothing: rows are read from the results of `benchmarks.formats`, `benchmarks.budgets`, `benchmarks.rivals`
and `benchmarks.conversion`. Of several calibration samples at a budget, the page has the median one.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.formats import SOURCE
from benchmarks.kept import say
from benchmarks.tables import RESULTS

from benchmarks import joined
from headwise.base.jobs import write_file
from headwise.base.pages import refuse_no_matplotlib
from headwise.conversion.frontiers.page import markdown, page
from headwise.conversion.frontiers.points import advice
from headwise.models.checkpoints import open_checkpoint


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--source", default=SOURCE)
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--screenshot", type=Path, help="of the page that headwise report writes of it")
    options = parser.parse_args(arguments)
    refuse_no_matplotlib("output", str(options.output))
    label = open_checkpoint(options.source).spec.layers[0].label
    found = joined.frontier(options.results, options.source, label)
    options.output.mkdir(parents=True, exist_ok=True)
    name = options.output / "frontier"
    write_file(name.with_suffix(".json"), json.dumps(found.to_dict(), indent=1, ensure_ascii=False) + "\n")
    write_file(name.with_suffix(".md"), markdown(found))
    write_file(name.with_suffix(".html"), page(found))
    say("\n".join(advice(found)))
    if options.screenshot is not None:
        take_screenshot(options.output, options.screenshot)


def take_screenshot(folder: Path, picture: Path) -> None:
    """The top of the page that ``headwise report`` writes of a frontier's folder, on a laptop, at 8,192 tokens."""
    from playwright.sync_api import sync_playwright

    from headwise.cli import main as headwise

    html = folder / "report.html"
    with suppress(SystemExit):
        headwise(["report", str(folder), "--html", str(html), "--hardware", "laptop", "--context", "8192"])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 900})
        page.goto(html.absolute().as_uri())
        page.wait_for_selector("#options tbody tr")
        # A picture has room for the first rows.
        page.add_style_tag(content="#options tbody tr:nth-child(n+9) { display: none; }")
        page.screenshot(path=picture, clip={"x": 0, "y": 0, "width": 1100, "height": 700})
        browser.close()


if __name__ == "__main__":
    main()
