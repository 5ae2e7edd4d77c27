"""softmax(QKᵀ)V, several ways behind `attend`; `reference` defines what is correct."""

from headwise.kernels.attend import BACKENDS, WITHOUT_WEIGHTS, Backend, Choice, attend, choose_backend
from headwise.kernels.mask import as_bool_mask, causal_mask, combine_masks
from headwise.kernels.quantized import attend_quantized, dequantize, pack, quantize, unpack
from headwise.kernels.reference import masked_softmax

__all__ = [
    "BACKENDS",
    "WITHOUT_WEIGHTS",
    "Backend",
    "Choice",
    "as_bool_mask",
    "attend",
    "attend_quantized",
    "causal_mask",
    "choose_backend",
    "combine_masks",
    "dequantize",
    "masked_softmax",
    "pack",
    "quantize",
    "unpack",
]
