"""softmax(QKᵀ)V, several ways behind `attend`; `reference` defines what is correct."""

from headwise.kernels.attend import BACKENDS, WITHOUT_WEIGHTS, Backend, Choice, attend, choose_backend
from headwise.kernels.mask import as_bool_mask, causal_mask, combine_masks
from headwise.kernels.reference import masked_softmax

__all__ = [
    "BACKENDS",
    "WITHOUT_WEIGHTS",
    "Backend",
    "Choice",
    "as_bool_mask",
    "attend",
    "causal_mask",
    "choose_backend",
    "combine_masks",
    "masked_softmax",
]
