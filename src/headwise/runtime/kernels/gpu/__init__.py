"""Triton kernels for a few new tokens on a GPU: one pass over keys and values, split over the sequence."""

from headwise.runtime.kernels.gpu.codes import attend_codes, why_not_codes, why_not_plain
from headwise.runtime.kernels.gpu.split import attend_split, why_not_split
from headwise.runtime.kernels.gpu.trellis import (
    TILE,
    ChannelLayout,
    attend_trellis,
    decode_trellis,
    encode_windows,
    why_not_trellis,
)
