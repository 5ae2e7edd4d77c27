"""Codes of cached values: fewer bits a number."""

from headwise.runtime.kernels.native.abi import SINKS
from headwise.runtime.quantization.reader import CodeReader, HeadsReader, LatentReader
from headwise.runtime.quantization.transform_code import TransformCode, wide_bytes

__all__ = ["SINKS", "CodeReader", "HeadsReader", "LatentReader", "TransformCode", "wide_bytes"]
