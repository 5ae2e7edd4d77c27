"""Products in bfloat16 where the processor has them: for gradients, whose direction is all that counts."""

from __future__ import annotations

import torch

QUICK = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
"""Known of the processor and not measured, so that a run that is gone on with computes what it would have."""


def quick_products() -> torch.autocast:
    """A context in which float32 products are bfloat16 ones, or nothing changes."""
    return torch.autocast("cpu", torch.bfloat16, enabled=QUICK)
