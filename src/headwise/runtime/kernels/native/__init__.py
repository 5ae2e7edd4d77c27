"""CPU kernels in C++, compiled on the machine that runs them: attention, and linear layers."""

from headwise.runtime.kernels.native.build import Build, are_plain, built, why_not
from headwise.runtime.kernels.native.calls import attend_fused
from headwise.runtime.kernels.native.linear import linear, linear_of_many, multiplies_bfloat16
