"""Triton kernels for a few new tokens on a GPU: one pass over keys and values, split over the sequence."""

from headwise.kernels.gpu.split import attend_split, why_not_split

__all__ = ["attend_split", "why_not_split"]
