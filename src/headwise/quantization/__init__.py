"""Codes of cached values: fewer bits a number."""

from headwise.quantization.reader import CodeReader
from headwise.quantization.transform_code import BLOCK, SINKS, TransformCode, wide_bytes

__all__ = ["BLOCK", "SINKS", "CodeReader", "TransformCode", "wide_bytes"]
