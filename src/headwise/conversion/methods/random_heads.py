"""Reduce key–value heads to new random ones, which have to be trained.

The GQA paper's last choice (Ainslie et al. 2023, figure 4): what training wins back without the source's heads.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.conversion.methods.base import Evidence, MergingMethod
from headwise.conversion.methods.first_head import first_head
from headwise.conversion.methods.repeat import head_tensors
from headwise.models.specs import GroupedSpec


class RandomHeads(MergingMethod):
    """Fewer key–value heads, drawn at random, each tensor with the mean square of the source's.

    Equal states give equal heads.
    """

    name = "random"
    label = "random heads"
    uses_text = False
    is_cheap = True

    def solve_heads(
        self, state: Mapping[str, Tensor], source: GroupedSpec, target: GroupedSpec, evidence: Evidence
    ) -> dict[str, Tensor]:
        """Draw the heads, in the dtype of ``state``."""
        out = first_head(state, source, target)
        for name in head_tensors(state, source):
            whole = state[name].double()
            seed = zlib.crc32(whole.cpu().contiguous().numpy().tobytes(), zlib.crc32(name.encode()))
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randn(out[name].shape, generator=generator, dtype=torch.float64, device="cpu")
            out[name] = (drawn.to(whole.device) * whole.square().mean().sqrt()).to(state[name].dtype)
        return out


METHOD = RandomHeads()
