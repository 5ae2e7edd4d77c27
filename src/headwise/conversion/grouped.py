"""One layer of MHA, MQA or GQA → another number of key–value heads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.specs import GroupedSpec

_SHARED = ("k_proj", "v_proj")


def convert_to_grouped(state: Mapping[str, Tensor], source: GroupedSpec, target: GroupedSpec) -> dict[str, Tensor]:
    """Repeat key and value heads (lossless), or mean-pool those that come to share one.

    Mean pooling is the GQA paper's (Ainslie et al. 2023, section 2.1): neighbouring heads are averaged, biases
    with them. Repeated heads are bit for bit the source's.

    Args:
        state: the layer's tensors by its own names (``q_proj.weight`` …).
        source: what they are.
        target: the same layer with a multiple or a divisor of the key–value heads.
    """
    out = dict(state)
    for name, tensor in state.items():
        if name.partition(".")[0] in _SHARED:
            heads = torch.unflatten(tensor, 0, (source.num_kv_heads, -1))
            if target.num_kv_heads >= source.num_kv_heads:
                changed = heads.repeat_interleave(target.num_kv_heads // source.num_kv_heads, dim=0)
            else:
                merged = torch.unflatten(heads.double(), 0, (target.num_kv_heads, -1))
                changed = merged.mean(1).to(tensor.dtype)
            out[name] = changed.flatten(0, 1)
    return out
