"""One pass over keys and values for a few new tokens, in C++ that is compiled for the machine it runs on."""

from headwise.kernels.fused.build import Build, built
from headwise.kernels.fused.decode import attend_fused, why_not_fused

__all__ = ["Build", "attend_fused", "built", "why_not_fused"]
