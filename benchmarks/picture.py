"""Draw the README's picture from the results: perplexity against bytes of cache, for all ways to shrink it.

python -m benchmarks.picture --write docs/frontier.svg
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.joined import Row
from benchmarks.tables import RESULTS

from benchmarks import joined

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 36, 56
SHARES = (1.0, 0.5, 0.25, 0.19, 0.125, 0.094, 0.0625)
"""The ticks of the axis of bytes, which begins and ends a little beyond them."""
RATIOS = (1.001, 1.002, 1.005, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 3)
"""The ticks of the axis of perplexity, logarithmic in what is lost, ratio - 1: 1.01 and 2 are both legible."""
GREY = "#7a828e"
FAINT = ' fill-opacity=".4"'


@dataclass(frozen=True, kw_only=True)
class Series:
    """The points of one way, the smallest cache first.

    Attributes:
        label: its name in the legend.
        colour: of the line and points.
        points: fractions of a bf16 cache, and ratios of perplexity over all texts.
        ranges: the smallest and the largest ratio of each point's calibration samples.
        width: of the line, which joins the points that no smaller cache is as good as.
    """

    label: str
    colour: str
    points: tuple[tuple[float, float], ...]
    ranges: tuple[tuple[float, float], ...] = ()
    width: float = 2


def series(results: Path) -> list[Series]:
    """What the results hold; a way without results is left out."""
    samples = [rows for _, rows in sorted(joined.samples(results).items())]
    published = joined.published(results)
    found = [
        Series(
            label="headwise, converted and quantised",
            colour="#3f7fd9",
            points=_points(map(joined.median, samples)),
            ranges=tuple((min(row.ratio for row in rows), max(row.ratio for row in rows)) for rows in samples),
            width=3,
        ),
        Series(
            label="headwise, converted to MLA",
            colour="#8a63d2",
            points=_points(row for row in joined.conversions(results) if row.target != "mqa"),
        ),
        Series(label="formats, nothing converted", colour="#d98218", points=_points(joined.formats(results))),
        *(
            Series(label=name, colour=colour, points=_points(row for row in published if row.way == name))
            for name, colour in (("KVQuant", "#c2487f"), ("Palu", "#2f9e76"), ("TransMLA", GREY))
        ),
    ]
    return [one for one in found if one.points]


def _points(rows: Iterable[Row]) -> tuple[tuple[float, float], ...]:
    return tuple(sorted((row.fraction, row.ratio) for row in rows))


def svg(drawn: Sequence[Series]) -> str:
    """The picture as SVG, with colours that suit light and dark pages.

    Args:
        drawn: of `series`.
    """
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{GREY}">',
        "<title>Perplexity ratio against the bytes of the cache</title>",
        f'<clipPath id="plot"><rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{HEIGHT - TOP - BOTTOM}"/></clipPath>',
    ]
    parts += [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_y(tick):.1f}" y2="{_y(tick):.1f}" stroke="{GREY}" '
        f'stroke-opacity=".25"/><text x="{LEFT - 8}" y="{_y(tick) + 4:.1f}" text-anchor="end">'
        f"{'≤ ' * (tick == RATIOS[0])}×{tick}</text>"
        for tick in RATIOS
    ]
    parts += [
        f'<line x1="{_x(tick):.1f}" x2="{_x(tick):.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 5}" '
        f'stroke="{GREY}"/><text x="{_x(tick):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">'
        f"{100 * tick:g} %</text>"
        for tick in SHARES
    ]
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">'
        f"bytes of the cache, of a bfloat16 cache; what is worse than ×{RATIOS[-1]} is not drawn</text>"
        f'<text x="{LEFT}" y="18">perplexity, × the original’s: SmolLM2-135M, WikiText-2, Brown and Austen,'
        " no training</text>"
    )
    parts += [_line(one) for one in drawn]
    parts += [_legend(place, one) for place, one in enumerate(reversed(drawn))]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(share: float) -> float:
    low, high = math.log(0.9 * SHARES[-1]), math.log(1.08 * SHARES[0])
    return LEFT + (WIDTH - LEFT - RIGHT) * (math.log(share) - low) / (high - low)


def _y(ratio: float) -> float:
    low, high = math.log(RATIOS[0] - 1), math.log(RATIOS[-1] - 1)
    lost = math.log(max(ratio, RATIOS[0]) - 1)
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (lost - low) / (high - low)


def _line(one: Series) -> str:
    """The line, the ranges of samples and the points of a series; what lies beyond the axis is cut off."""
    best = [
        (share, ratio)
        for place, (share, ratio) in enumerate(one.points)
        if all(ratio < smaller for _, smaller in one.points[:place])
    ]
    corners = " ".join(f"{_x(share):.1f},{_y(ratio):.1f}" for share, ratio in best)
    ranges = [
        f'<line x1="{_x(share):.1f}" x2="{_x(share):.1f}" y1="{_y(low):.1f}" y2="{_y(high):.1f}" '
        f'stroke="{one.colour}" stroke-width="1.5"/>'
        for (share, _), (low, high) in zip(one.points, one.ranges, strict=bool(one.ranges))
        if low < high
    ]
    circles = [
        f'<circle cx="{_x(share):.1f}" cy="{_y(ratio):.1f}" r="4" fill="{one.colour}"'
        f"{'' if (share, ratio) in best else FAINT}/>"
        for share, ratio in one.points
        if ratio <= RATIOS[-1]
    ]
    line = f'<polyline points="{corners}" fill="none" stroke="{one.colour}" stroke-width="{one.width}"/>'
    return "\n".join(['<g clip-path="url(#plot)">', line, *ranges, "</g>", *circles])


def _legend(place: int, one: Series) -> str:
    """A line of the legend, at the lower left, where no cache is: so few bytes at so small a loss."""
    y = HEIGHT - BOTTOM - 16 - 20 * place
    return (
        f'<line x1="{LEFT + 12}" x2="{LEFT + 34}" y1="{y}" y2="{y}" stroke="{one.colour}" '
        f'stroke-width="{one.width}"/><rect x="{LEFT + 19}" y="{y - 4}" width="8" height="8" rx="4" '
        f'fill="{one.colour}"/><text x="{LEFT + 42}" y="{y + 4}" fill="{one.colour}">{one.label}</text>'
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write", type=Path, required=True)
    options = parser.parse_args(arguments)
    options.write.write_text(svg(series(options.results)), encoding="utf-8")


if __name__ == "__main__":
    main()
