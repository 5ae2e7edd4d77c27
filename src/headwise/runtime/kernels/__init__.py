"""Attention, softmax(QKᵀ)V: `attend` with several backends; `reference` defines the correct result."""

from headwise.runtime.kernels.attend import (
    BACKENDS,
    WITHOUT_WEIGHTS,
    AttendOptions,
    Backend,
    Choice,
    attend,
    attend_with_weights,
    choose_backend,
)
from headwise.runtime.kernels.mask import as_bool_mask, causal_mask, combine_masks
from headwise.runtime.kernels.quantized import attend_quantized, dequantize, pack, quantize, unpack
from headwise.runtime.kernels.reference import masked_softmax
