"""Calling the Triton kernel: how many parts a sequence is cut into, and what is put together at the end.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_WIDEST = 576
_LEAST_TOKENS = 256
"""Tokens of a part at least: less would cost more to put together than it gains."""
_PROGRAMS_A_PROCESSOR = 4
_ROWS = 16
"""Rows of a tile: the fewest that a GPU's matrix units take."""


def why_not_split(dtype: torch.dtype, device: torch.device, width: int, *, needs_grad: bool = False) -> str | None:
    """Why the kernel cannot serve such tensors, or None where it can.

    Args:
        dtype: of queries, keys and values.
        device: where they are; on a CPU only under Triton's interpreter (``TRITON_INTERPRET=1``).
        width: D, the head dim.
        needs_grad: whether a gradient is wanted.
    """
    if not has_triton():
        return "triton is not installed"
    if device.type != "cuda" and not is_interpreted():
        return f"it is for CUDA GPUs, not {device.type}"
    if dtype not in _DTYPES:
        return f"it knows {', '.join(str(known) for known in _DTYPES)}, not {dtype}"
    if width > _WIDEST:
        return f"heads are {width} wide, and it takes {_WIDEST} at most"
    if needs_grad:
        return "it has no backward pass"
    return None


@cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, step by step."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def attend_split(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    window: int | None,
    scale: float,
    *,
    parts: int | None = None,
) -> Tensor:
    """As `headwise.kernels.reference.attend_reference`, of tensors that `why_not_split` has nothing against.

    Args:
        query: ``[B, H, S, D]``, of any strides.
        key: ``[B, K, T, D]``; copied where a token's numbers do not lie side by side.
        value: ``[B, K, T, V]``, likewise; where it is the key's first columns it is not read again.
        mask: bool, broadcastable to ``[B, H, S, T]``; a slot that nobody sees is never read.
        is_causal: bottom-right.
        window: how many of the latest keys a query sees.
        scale: multiplies the scores.
        parts: into how many parts a sequence is cut; by the GPU's size when None.

    Returns:
        ``[B, H, S, V]``, in memory ``[B, S, H, V]``, as the output projection reads it.
    """
    import triton

    from headwise.kernels.gpu.kernels import attend_part, join_parts

    query, key, value = (x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous() for x in (query, key, value))
    B, H, S, D = query.shape
    K, T, V = key.shape[1], key.shape[2], value.shape[3]
    rows = H // K * S
    out = query.new_empty(B, S, H, V).transpose(1, 2)
    if out.numel() == 0:
        return out
    tiles = triton.cdiv(rows, _ROWS)
    if parts is None:
        parts = _parts(B * K * tiles, T, query.device)
    each = triton.cdiv(max(T, 1), parts)
    found = torch.empty(parts, B, H * S, V, dtype=torch.float32, device=query.device)
    weights = torch.empty(2, parts, B, H * S, dtype=torch.float32, device=query.device)
    main = 1 << (D.bit_length() - 1)  # the largest power of two in D; the rest is multiplied apart
    rest = D - main
    shared = value.data_ptr() == key.data_ptr() and value.stride() == key.stride() and main == V
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        strides = tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
    attend_part[(B * K * tiles, parts)](
        query,
        key,
        value,
        query if mask is None else mask,
        found,
        weights,
        scale * 1.4426950408889634,
        *(K, H // K, S, T, D, V, each, tiles),
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *strides,
        found.stride(0),
        found.stride(1),
        weights.stride(1),
        weights.stride(2),
        weights.stride(0),
        0 if window is None else window,
        ROWS=_ROWS,
        TOKENS=16 if main >= 512 else 32 if main >= 256 else 64,
        MAIN=main,
        REST=max(16, triton.next_power_of_2(rest)) if rest else 0,
        WIDTH=max(16, triton.next_power_of_2(V)),
        HAS_MASK=mask is not None,
        CAUSAL=is_causal,
        SHARED=shared,
        WIDEN=is_interpreted() and query.dtype == torch.bfloat16,
        num_warps=4 if main <= 128 else 8,
    )
    join_parts[(B * H * S,)](
        found,
        weights,
        out,
        *(H, S, V, parts),
        found.stride(0),
        found.stride(1),
        weights.stride(1),
        weights.stride(2),
        weights.stride(0),
        *out.stride()[:3],
        WIDTH=triton.next_power_of_2(V),
        num_warps=1 if V <= 128 else 4,
    )
    return out


def _parts(units: int, T: int, device: torch.device) -> int:
    """As many as keep the GPU busy and are worth putting together."""
    processors = 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = -(-_PROGRAMS_A_PROCESSOR * processors // units)
    return max(1, min(wanted, T // _LEAST_TOKENS))
