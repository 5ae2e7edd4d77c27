"""CPU kernels in C++, compiled on the machine that runs them: attention, and linear layers of a few tokens."""

from headwise.kernels.native.attention import attend_fused
from headwise.kernels.native.build import Build, are_plain, built, why_not
from headwise.kernels.native.linear import linear

__all__ = ["Build", "are_plain", "attend_fused", "built", "linear", "why_not"]
