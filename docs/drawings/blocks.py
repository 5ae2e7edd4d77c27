"""Block diagrams as SVG: rows of boxes, arrows between them, and lines that several boxes share.

A diagram is 360 units wide, about as wide as a telephone's page. Its colours are of middling lightness and nothing is
behind it, so that it can be read on a light page and on a dark one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Literal

WIDTH, MARGIN = 360, 4
SIZE, LINE = 12, 14
"""Of text, and from one line of it to the next."""
GAP = 8
"""Between the boxes of a row."""

INK, BLUE, ORANGE, GREEN = "#7a828e", "#3f7fd9", "#d98218", "#2f9e76"

Kind = Literal["plain", "cached", "head", "decoder"]
_COLOURS: dict[Kind, tuple[str, str]] = {
    "plain": (INK, "0.06"),
    "cached": (BLUE, "0.16"),
    "head": (ORANGE, "0.08"),
    "decoder": (GREEN, "0.08"),
}


@dataclass(frozen=True)
class Box:
    """A box with a few lines of text.

    Attributes:
        text: lines, separated by newlines.
        kind: what it is, by colour.
        share: of the row's width, beside those of the other boxes.
    """

    text: str
    kind: Kind = "plain"
    share: float = 1.0


@dataclass(frozen=True)
class Placed:
    """A box in its place."""

    box: Box
    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        """Of its width."""
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        """Its lower edge."""
        return self.y + self.height


@dataclass
class Diagram:
    """A drawing that grows from the top down."""

    title: str
    y: float = MARGIN
    shapes: list[str] = field(default_factory=list)

    def row(self, *boxes: Box, left: float = MARGIN, right: float = MARGIN) -> list[Placed]:
        """Place boxes side by side below what is there.

        Args:
            boxes: from left to right.
            left: the margin on the left.
            right: the margin on the right.
        """
        height = 10 + LINE * max(box.text.count("\n") + 1 for box in boxes)
        room = WIDTH - left - right - GAP * (len(boxes) - 1)
        whole, x = sum(box.share for box in boxes), float(left)
        placed = []
        for box in boxes:
            width = room * box.share / whole
            placed.append(self._draw(Placed(box, x, self.y, width, height)))
            x += width + GAP
        self.y += height
        return placed

    def space(self, height: float) -> None:
        """Leave room below what is there."""
        self.y += height

    def note(self, text: str) -> None:
        """Lines of text across the whole width, below what is there."""
        for line in text.split("\n"):
            self.y += LINE
            self._text(WIDTH / 2, self.y, line)
        self.y += 4

    def key(self, *kinds: tuple[Kind, str]) -> None:
        """What the colours mean."""
        self.y += 8
        widths = [34 + 6.6 * len(text) for _, text in kinds]
        x = WIDTH / 2 - sum(widths) / 2 + 6
        for (kind, text), width in zip(kinds, widths, strict=True):
            colour, opacity = _COLOURS[kind]
            self.shapes.append(
                f'<rect x="{x:.6g}" y="{self.y:.6g}" width="12" height="12" rx="2" fill="{colour}" '
                f'fill-opacity="{opacity}" stroke="{colour}"/>'
            )
            self._text(x + 17, self.y + 10, text, anchor="start")
            x += width
        self.y += 14

    def arrow(self, *points: tuple[float, float], dashed: bool = False, head: bool = True) -> None:
        """A line through points, with a head at its end."""
        path = " ".join(f"{x:.6g},{y:.6g}" for x, y in points)
        style = (' stroke-dasharray="4 3"' if dashed else "") + (' marker-end="url(#head)"' if head else "")
        self.shapes.append(f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.3"{style}/>')

    def down(self, source: Placed, target: Placed, *, at: float | None = None, to: float | None = None) -> None:
        """An arrow from the lower edge of one box to the upper edge of another.

        Args:
            source: the box above.
            target: the box below.
            at: where it begins; above its end when None.
            to: where it ends; the middle of the target when None.
        """
        end = target.middle if to is None else to
        self.arrow((end if at is None else at, source.bottom), (end, target.y - 1))

    def rail(self, start: tuple[float, float], y: float, targets: list[float], bottom: float) -> None:
        """A dashed line from a point down to a height, along it, and from it to several places."""
        x = start[0]
        self.arrow(start, (x, y), (max(targets, key=lambda target: abs(target - x)), y), dashed=True, head=False)
        for target in targets:
            self.arrow((target, y), (target, bottom - 1), dashed=True)

    def svg(self) -> str:
        """The drawing."""
        height = self.y + MARGIN
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{1.5 * WIDTH:g}" '
            f'height="{1.5 * height:g}" role="img" font-family="\'DejaVu Sans\', Verdana, Arial, sans-serif" '
            f'font-size="{SIZE}">'
        )
        marker = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6.5" markerHeight="6.5" '
            f'orient="auto"><path d="M0,0.5 L8,4 L0,7.5 z" fill="{INK}"/></marker></defs>'
        )
        return "\n".join((opening, f"<title>{escape(self.title)}</title>", marker, *self.shapes, "</svg>", ""))

    def _draw(self, placed: Placed) -> Placed:
        colour, opacity = _COLOURS[placed.box.kind]
        self.shapes.append(
            f'<rect x="{placed.x:.6g}" y="{placed.y:.6g}" width="{placed.width:.6g}" height="{placed.height:.6g}" '
            f'rx="4" fill="{colour}" fill-opacity="{opacity}" stroke="{colour}" stroke-width="1.3"/>'
        )
        lines = placed.box.text.split("\n")
        first = placed.y + placed.height / 2 - LINE * len(lines) / 2 + 11
        for index, line in enumerate(lines):
            self._text(placed.middle, first + LINE * index, line)
        return placed

    def _text(self, x: float, y: float, text: str, anchor: str = "middle") -> None:
        self.shapes.append(f'<text x="{x:.6g}" y="{y:.6g}" text-anchor="{anchor}" fill="{INK}">{escape(text)}</text>')
