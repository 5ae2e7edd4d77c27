"""The GPU kernel that chooses trellis codes, run on the CPU by Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from headwise.runtime.kernels.gpu import encode_windows
from headwise.runtime.kernels.gpu import trellis as calls
from headwise.runtime.quantization.trellis import decode, encode, tables
from tests.runtime.kernels.test_gpu_codes import moved

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize(("n", "W", "rows"), [(1, 1, 1), (2, 12, 1), (3, 9, 2)])
def test_codes_are_the_best_ones(n: int, W: int, rows: int) -> None:
    noise = torch.Generator().manual_seed(int(torch.randint(2**30, ())))
    values = torch.randn(n, W, generator=noise)
    weights, gains = (0.1 + torch.rand(size, generator=noise) for size in ((W,), (n, W)))
    bits = (1 + (torch.randperm(W, generator=noise) % 8)).to(torch.uint8)
    starts = torch.randint(0, 256, (n,), generator=noise).to(torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "_MEMORY", rows * 128 * W)  # several launches
        given = (values, weights * gains.square(), bits, tables(), starts)
        windows = encode_windows(*(moved(x) for x in given)).cpu()
    levels = tables()[bits.long(), windows.long()]
    wanted, codes = encode(values, weights, bits, starts, gains)
    assert codes is not None
    assert torch.equal(wanted, decode(codes, bits, starts))
    costs = [((x - values).double().square() * weights * gains.square()).sum(-1) for x in (levels, wanted)]
    torch.testing.assert_close(*costs, rtol=1e-5, atol=1e-6)
    before = torch.cat((starts[:, None], windows[:, :-1]), -1).long()  # every window goes on from the one before
    assert torch.equal(windows.long() >> bits.long(), before & (255 >> bits.long()))
