"""How near two tensors must be: within a fraction of the largest value expected."""

from __future__ import annotations

from torch import Tensor


def assert_close(actual: Tensor, expected: Tensor, relative: float) -> None:
    """Same shape, nothing infinite or NaN, and off by at most ``relative`` of the largest expected value.

    Where all that is expected is zeros, zeros it must be.
    """
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    error = (actual.double() - expected.double()).abs().max().item()
    largest = expected.double().abs().max().item()
    assert error <= relative * largest, f"off by {error:.3g}, {error / max(largest, 1e-300):.3g} of the largest"
