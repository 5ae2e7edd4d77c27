"""Scales of codes: what values far from the mean do to them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwise.conversion.codes import allot, fit_first_scales, fit_scales
from headwise.runtime.quantization import TransformCode
from headwise.runtime.quantization.trellis import NOISE, REACH, encode

SECTIONS, PARTS = (64, 16, 16), (64, 32)


def heavy_tailed(tokens: int, seed: int) -> Tensor:
    """Values of falling size, whose largest channel is six deviations off for two tokens in a hundred."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tokens, 96, generator=generator) * torch.logspace(0, -2, 96)
    values[::50, 0] += 6.0
    return values + torch.linspace(-1, 1, 96)


@pytest.mark.parametrize("seen", [1, 8, 500])
def test_first_tokens_are_coded_by_how_they_lie_themselves(seen: int) -> None:
    """They are far from all others, and some texts begin otherwise than those that were seen."""
    values, generator = heavy_tailed(4096, 4), torch.Generator().manual_seed(4)
    spread = torch.logspace(-2, -4, 96)
    first = 40.0 + spread * torch.randn(seen + 200, 96, generator=generator)
    table = fit_scales(values, PARTS, torch.ones(4096))
    others = allot(table, SECTIONS, PARTS, 1 + 96 * 4 // 8)
    own = fit_first_scales(first[:seen], first[:seen].mean(0), table, PARTS)
    code = replace(others, first=allot(own, SECTIONS, PARTS, others.token_bytes))
    are_first = torch.ones(200, dtype=torch.bool)

    def error(rows: Tensor, code: TransformCode) -> float:
        return float((code.rounded(rows, are_first) - rows).square().mean())

    unseen = first[seen:]
    assert error(unseen, others) > 100  # which is what the others' code makes of them
    assert error(unseen, code) < 0.02
    # bfloat16 of numbers about 40 is off by up to 0.125; codes add little to that.
    limit = 1.1 * float((unseen.bfloat16().float() - unseen).square().mean())
    assert seen < 500 or error(unseen, code) < limit


def test_channels_that_are_always_zero_have_scales() -> None:
    """Gemma 3's norms of keys have weights of 0."""
    values = heavy_tailed(4096, 0)
    values[:, [0, 70]] = 0
    table = fit_scales(values, PARTS, torch.ones(4096))
    first = fit_first_scales(values[:600], values[:600].mean(0), table, PARTS)
    for fitted in (table, first):
        code = allot(fitted, SECTIONS, PARTS, 1 + 96 * 4 // 8)
        assert bool((code.scale > 0).all())
        assert float(code.rounded(values[:8])[:, [0, 70]].abs().max()) < 1e-15


def test_no_error_is_left_that_bits_do_not_lessen() -> None:
    table = fit_scales(heavy_tailed(4096, 0), PARTS, torch.ones(4096))
    fresh = heavy_tailed(1024, 1)
    errors = [
        float((allot(table, SECTIONS, PARTS, 1 + 96 * bits // 8).rounded(fresh) - fresh).square().sum(1).mean())
        for bits in (2, 3, 4, 5, 6)
    ]
    for fewer, more in itertools.pairwise(errors):
        assert more < 0.5 * fewer
    assert errors[-1] < 1e-3 * float((fresh - fresh.mean(0)).square().sum(1).mean())


def test_important_tokens_are_coded_better() -> None:
    values = heavy_tailed(4096, 2)
    important = torch.zeros(4096)
    important[::50] = 1.0
    weights = torch.where(important > 0, 300.0, 1.0)
    errors = []
    for each in (torch.ones(4096), weights):
        code = allot(fit_scales(values, PARTS, each / each.mean()), SECTIONS, PARTS, 1 + 96 * 2 // 8)
        error = (code.rounded(values) - values).square().sum(1)
        errors.append((float(error[important > 0].mean()), float(error[important == 0].mean())))
    assert errors[1][0] < 0.9 * errors[0][0]


def test_noise_and_reach_are_those_of_the_trellis() -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(256, 256, generator=generator)
    starts = torch.randint(0, 256, (256,), generator=generator).to(torch.uint8)
    for bits in range(1, 9):
        counts = torch.full((256,), bits, dtype=torch.uint8)
        levels, _ = encode(values, torch.ones(256), counts, starts, pack=False)
        noise = float((levels - values).square().mean())
        assert 0.8 * NOISE[bits] < noise < 1.25 * NOISE[bits]
        far = values.clone()
        far[:, ::16] = (REACH[bits] + 1.5) * far[:, ::16].sign()
        levels, _ = encode(far, torch.ones(256), counts, starts, pack=False)
        more = float((levels - far).square().sum() / (256 * 16)) - 16 * noise
        assert 0.7 < more / 1.5**2 < 1.6
