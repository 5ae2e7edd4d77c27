"""Codes of cached values: fewer bits a number."""

from headwise.runtime.kernels.native.abi import SINKS
from headwise.runtime.quantization.transform_code import TransformCode, unquantised_bytes
