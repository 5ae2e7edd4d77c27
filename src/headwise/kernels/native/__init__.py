"""What torch does not do at the machine's limit, in C++ that is compiled for the machine it runs on."""

from headwise.kernels.native.attention import attend_fused
from headwise.kernels.native.build import Build, are_plain, built, why_not
from headwise.kernels.native.linear import linear

__all__ = ["Build", "are_plain", "attend_fused", "built", "linear", "why_not"]
