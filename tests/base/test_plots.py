"""Pictures of plots."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from headwise.base.pages import as_svg, new_figure


@pytest.mark.parametrize(("points", "label"), [([2e2, 9e2], "500"), ([1.0, 1e9], "1e+08")])
def test_logarithmic_axes_are_labelled_by_numbers(points: list[float], label: str) -> None:
    def draw() -> Figure:
        figure, *_ = new_figure(4, 3)
        axes = figure.axes[0]
        axes.plot(points, points)
        axes.set_xscale("log")
        axes.set_yscale("log", base=2)
        return figure

    picture = as_svg(draw)
    assert "mathdefault" not in picture
    assert f">{label}<" in picture
