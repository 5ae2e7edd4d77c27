"""Codes of cached values: fewer bits a number."""

from headwise.quantization.reader import CodeReader, HeadsReader, LatentReader
from headwise.quantization.transform_code import BLOCK, SINKS, TransformCode, wide_bytes

__all__ = ["BLOCK", "SINKS", "CodeReader", "HeadsReader", "LatentReader", "TransformCode", "wide_bytes"]
