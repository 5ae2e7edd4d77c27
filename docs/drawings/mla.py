"""The work of MLA's two implementations, by the number of new tokens in a pass."""

from __future__ import annotations

from docs.drawings.plots import BLUE, INK, ORANGE, as_svg, figure, log_ticks, number, rounded, styled

from headwise import LatentSpec
from headwise.costs.formulas import forward_flops
from headwise.costs.prediction import most_absorbed
from headwise.models.specs import layer_spec

MODEL = "deepseek-v3"
TOTAL = 32_768
"""Tokens attended to, the new ones included."""
NEW = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def layer() -> LatentSpec:
    """One layer of the model."""
    found = layer_spec(MODEL)
    assert isinstance(found, LatentSpec)
    return found


def flops(impl: str, new: int) -> float:
    """FLOPs of one layer for each new token."""
    return forward_flops(layer(), new, TOTAL, impl=impl, causal=True) / new


def crossing() -> int:
    """The most new tokens for which absorbed attention takes fewer FLOPs."""
    return most_absorbed(layer(), TOTAL)


def draw() -> dict[str, str]:
    """FLOPs for each new token."""
    with styled():
        made, (axes,) = figure(3.2)
        for impl, colour, style in (("expanded", ORANGE, "D-"), ("absorbed", BLUE, "o-")):
            axes.plot(NEW, rounded(flops(impl, new) / 1e9 for new in NEW), style, color=colour, label=impl)
        axes.axvline(crossing(), color=INK, linestyle=":", linewidth=1)
        axes.text(1.1 * crossing(), 1.2, f"{number(crossing())} tokens", va="bottom")
        log_ticks(axes, "x", NEW[::2], base=2)
        log_ticks(axes, "y", [1, 10, 100, 1000])
        axes.set_ylim(1, 2000)
        axes.set_xlabel("new tokens in a pass")
        axes.set_ylabel("GFLOPs a new token and layer")
        axes.legend(loc="upper right")
        return {"absorption.svg": as_svg(made)}
