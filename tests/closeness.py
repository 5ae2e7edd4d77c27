"""Compare tensors up to a fraction of the largest expected value."""

from __future__ import annotations

from torch import Tensor


def assert_close(actual: Tensor, expected: Tensor, relative: float, *, largest_of: Tensor | None = None) -> None:
    """Same shape, nothing infinite or NaN, and off by at most ``relative`` of the largest expected value.

    Where all that is expected is zeros, zeros it must be. A few numbers may all happen to cancel to nearly
    nothing: ``largest_of`` is then what they were summed from.
    """
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    error = (actual.double() - expected.double()).abs().max().item()
    largest = (expected if largest_of is None else largest_of).double().abs().max().item()
    assert error <= relative * largest, f"off by {error:.3g}, {error / max(largest, 1e-300):.3g} of the largest"
