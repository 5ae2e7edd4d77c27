"""A budget of bits for a Gaussian: few dims of many bits, or many dims of few."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from docs.drawings.plots import BLUE, GREEN, ORANGE, as_svg, figure, log_ticks, rounded, styled

from headwise.runtime.quantization.trellis import NOISE

DIMS = 128
BUDGETS = (1, 2, 4)
"""Bits, on average for each of `DIMS`."""
SPECTRA = (("1/i²", 2.0), ("1/√i", 0.5))
"""Variances of dim i, with their exponents a in i^(−a): a steep spectrum and a flat one."""
KEPT = tuple(range(4, DIMS + 1, 2))


@dataclass(frozen=True)
class Allocation:
    """Reverse water-filling.

    Attributes:
        level: the error that no kept dim exceeds.
        bits: of each dim.
        errors: of each dim, the smaller of its variance and the level.
    """

    level: float
    bits: tuple[float, ...]
    errors: tuple[float, ...]

    @property
    def kept(self) -> int:
        """The dims that get any bits."""
        return sum(each > 0 for each in self.bits)


def variances(exponent: float) -> np.ndarray:
    """Variances i^(−a), scaled to a sum of 1, the largest first."""
    falling = np.arange(1, DIMS + 1, dtype=float) ** -exponent
    return np.asarray(falling / falling.sum())


def water_filling(spectrum: np.ndarray, budget: float) -> Allocation:
    """The least error of a Gaussian with these variances, falling, at ``budget`` bits for all dims together.

    Of the first k dims each gets ``½ log₂(variance / level)``, for the largest k at which none of these is negative.
    """
    for k in range(len(spectrum), 0, -1):
        level = 2.0 ** (np.log2(spectrum[:k]).mean() - 2 * budget / k)
        if spectrum[k - 1] >= level:
            break
    bits = 0.5 * np.log2(np.maximum(spectrum / level, 1.0))
    return Allocation(float(level), tuple(bits.tolist()), tuple(np.minimum(spectrum, level).tolist()))


def even(spectrum: np.ndarray, budget: float, kept: int) -> float:
    """The error where the first dims share the bits evenly, at the bound of ``4^(−bits)`` for a variance of 1."""
    return float(spectrum[kept:].sum() + spectrum[:kept].sum() * 4.0 ** (-budget / kept))


def coded(spectrum: np.ndarray, bits: int, kept: int) -> float:
    """The error where the first dims are stored in headwise's trellis code of some bits each."""
    return float(spectrum[kept:].sum() + spectrum[:kept].sum() * NOISE[bits])


def code_sizes(budget: float) -> list[tuple[int, int]]:
    """(bits, dims) of whole bits that use up a budget, 128 dims at most."""
    sizes = ((bits, int(budget // bits)) for bits in range(1, 9))
    return [(bits, kept) for bits, kept in sizes if kept <= DIMS]


def draw() -> dict[str, str]:
    """Errors by the number of dims that are kept, for two spectra."""
    with styled():
        made, panels = figure(5.6, rows=2)
        for axes, (name, exponent) in zip(panels, SPECTRA, strict=True):
            spectrum = variances(exponent)
            for mean, colour in zip(BUDGETS, (ORANGE, BLUE, GREEN), strict=True):
                budget = mean * DIMS
                errors = rounded(even(spectrum, budget, kept) for kept in KEPT)
                axes.plot(KEPT, errors, color=colour, label=f"{budget} bits")
                sizes = code_sizes(budget)
                axes.plot(
                    [kept for _, kept in sizes],
                    rounded(coded(spectrum, bits, kept) for bits, kept in sizes),
                    "o",
                    color=colour,
                )
                best = rounded(water_filling(spectrum, budget).errors)
                axes.axhline(float(f"{sum(best):.6g}"), color=colour, linestyle=":", linewidth=1.2)
            log_ticks(axes, "x", (4, 8, 16, 32, 64, 128), base=2)
            log_ticks(axes, "y", [1e-4, 0.001, 0.01, 0.1, 1])
            axes.set_title(f"variance of dim i: {name}", loc="left")
            axes.set_ylabel("error, relative")
        panels[1].legend(loc="lower left")
        panels[1].set_xlabel(f"dims kept, of {DIMS}")
        return {"bits.svg": as_svg(made)}
