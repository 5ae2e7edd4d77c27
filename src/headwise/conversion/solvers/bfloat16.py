"""Matrix products in bfloat16 where the processor has them: for gradients, and the source's layers."""

from __future__ import annotations

import torch

QUICK = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
"""Whether the processor multiplies bfloat16 matrices. Read from its features, not timed, so that a continued run
computes the numbers that an uninterrupted one would have."""


def quick_products() -> torch.autocast:
    """A context in which float32 matrix products are computed in bfloat16: on a GPU, and on a CPU where `QUICK`."""
    kind = torch.get_default_device().type
    return torch.autocast("cuda" if kind == "cuda" else "cpu", torch.bfloat16, enabled=QUICK or kind == "cuda")
