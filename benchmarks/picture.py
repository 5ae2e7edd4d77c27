"""Draw the README's picture from the results: perplexity against cache for each method.

python -m benchmarks.picture --write docs/frontier.svg
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import METHODS, RESULTS

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 36, 56
COLOURS = {"headwise": "#3f7fd9", "transmla": "#d98218", "mha2mla": "#c2487f"}
TICKS = (1, 1.5, 2, 3, 5, 10, 30, 100)
TEXT = "wikitext-2.test"


def points(document: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """The points of each method: the share of the source's cache and the perplexity ratio, sorted by share."""
    by_method: dict[str, list[tuple[float, float]]] = {name: [] for name in COLOURS}
    for row in document["rows"].values():
        is_plain = "evaluate" in row and len(row["texts"]) == 1 and not row.get("stock") and row["kv_lora_rank"]
        if not is_plain or row["method"] not in by_method:
            continue
        evaluation = row["evaluate"]
        share = evaluation["cache_bytes_per_token"] / evaluation["reference_cache_bytes_per_token"]
        for score in evaluation["texts"]:
            if Path(score["text"]).stem == TEXT:
                by_method[row["method"]].append((share, score["perplexity_ratio"]))
    return {name: sorted(set(line)) for name, line in by_method.items()}


def svg(by_method: dict[str, list[tuple[float, float]]]) -> str:
    """The picture as SVG, with colours that suit light and dark pages.

    Args:
        by_method: of `points`.
    """
    most = math.log(max(ratio for line in by_method.values() for _, ratio in line)) * 1.05

    def x(share: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * share / 0.65

    def y(ratio: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(ratio) / most

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#7a828e">',
        "<title>Perplexity ratio against the share of cached values kept</title>",
    ]
    for tick in TICKS:
        if math.log(tick) <= most:
            parts.append(
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#7a828e" '
                f'stroke-opacity=".25"/><text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">×{tick}</text>'
            )
    for share in (0.25, 0.333, 0.5, 0.5625):
        parts.append(f'<text x="{x(share):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{share:.0%}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">'
        "cached values kept (SmolLM2-135M, WikiText-2 test, no training)</text>"
        f'<text x="{LEFT}" y="18">perplexity, × the original’s (log scale)</text>'
    )
    for name, line in by_method.items():
        corners = " ".join(f"{x(share):.1f},{y(ratio):.1f}" for share, ratio in line)
        parts.append(f'<polyline points="{corners}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(share):.1f}" cy="{y(ratio):.1f}" r="4" fill="{COLOURS[name]}"/>' for share, ratio in line
        ]
        share, ratio = line[-1]
        parts.append(
            f'<text x="{x(share) + 8:.1f}" y="{y(ratio) - 8:.1f}" fill="{COLOURS[name]}" font-weight="600">'
            f"{METHODS[name]}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / "conversion.json")
    parser.add_argument("--write", type=Path, required=True)
    options = parser.parse_args(arguments)
    document = json.loads(options.results.read_text(encoding="utf-8"))
    options.write.write_text(svg(points(document)), encoding="utf-8")


if __name__ == "__main__":
    main()
