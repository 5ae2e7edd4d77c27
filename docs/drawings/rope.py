"""The share of a score that is lost where a pair's rotation is replaced by its mean, by frequency."""

from __future__ import annotations

import torch
from docs.drawings.plots import BLUE, GREEN, ORANGE, as_svg, figure, rounded, styled

from headwise import RopeSpec, RotaryEmbedding
from headwise.conversion.solvers.rope_channels import mean_rotation

ROPE = RopeSpec(dim=64)
DISTANCES = (64, 512, 4096)
"""Tokens up to which all distances are as likely."""


def lost(longest: int) -> list[float]:
    """``1 − |c|²`` of each pair, where c is the mean rotation over the distances 0 … longest − 1."""
    even = torch.full((1, longest), 1 / longest, dtype=torch.float64)
    means = mean_rotation(RotaryEmbedding(ROPE).frequencies, even)[0]
    shares: list[float] = (1 - means.abs().square()).tolist()
    return shares


def draw() -> dict[str, str]:
    """The shares by pair."""
    with styled():
        made, (axes,) = figure(3.2)
        pairs = range(ROPE.dim // 2)
        for longest, colour, style in zip(DISTANCES, (GREEN, BLUE, ORANGE), ("s-", "o-", "D-"), strict=True):
            label = f"up to {longest:,} tokens"
            axes.plot(pairs, rounded(lost(longest)), style, color=colour, label=label, markersize=4)
        axes.set_xlabel("pair, from the fastest to the slowest")
        axes.set_ylabel("lost without rotation")
        axes.set_ylim(-0.03, 1.05)
        axes.legend(loc="lower left")
        return {"rope.svg": as_svg(made)}
