"""The compiled encoder of trellis codes against torch's."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from headwise.runtime.kernels.native import built
from headwise.runtime.quantization import trellis

pytestmark = pytest.mark.skipif(built().library is None, reason=f"no compiled kernel: {built().reason}")


def by_torch(monkeypatch: pytest.MonkeyPatch, *arguments: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`trellis.encode` without the compiled kernel."""
    with monkeypatch.context() as patch:
        patch.setattr(trellis, "can_encode", lambda: False)
        return trellis.encode(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(40))
def test_it_chooses_the_codes_that_torch_chooses(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pick, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, width = pick.choice([1, 3, 40]), pick.choice([1, 2, 16, 33, 100])
    bits = torch.randint(1, 9, (width,), generator=noise, dtype=torch.uint8)
    if pick.random() < 0.3:
        bits.fill_(pick.randint(1, 8))
    values = torch.randn(rows, width, generator=noise) * pick.choice([1, 1, 5])
    if pick.random() < 0.5:  # many paths of equal cost
        values = (values * 2).round() / 2
    weights = torch.rand(width, generator=noise) if pick.random() < 0.5 else torch.ones(width)
    gains = torch.rand(rows, width, generator=noise) + 0.5 if pick.random() < 0.5 else None
    starts = torch.randint(0, 256, (rows,), generator=noise, dtype=torch.uint8)
    levels, codes = trellis.encode(values, weights, bits, starts, gains)
    expected_levels, expected_codes = by_torch(monkeypatch, values, weights, bits, starts, gains)
    assert expected_codes is not None
    assert torch.equal(levels, expected_levels)
    assert codes is not None
    assert torch.equal(codes, expected_codes)
    assert torch.equal(trellis.decode(codes, bits, starts), levels)
