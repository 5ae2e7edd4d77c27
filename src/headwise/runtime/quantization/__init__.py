"""Codes of cached values: fewer bits a number."""

from headwise.runtime.quantization.transform_code import TransformCode
