"""Call the Triton kernels that attend to codes: to keys and values in integers, and to latents in trellis codes.

The sequence is split as in `split`.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, N tokens in codes, D head dim, V value
dim, R latent rank, P rotary dims, F frequencies of the model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise.runtime.kernels.gpu.split import (
    LOG2_E,
    ROWS,
    fill_parts,
    join,
    must_widen,
    new_parts,
    on_device_of,
    part_count,
    part_strides,
    why_not_split,
)
from headwise.runtime.kernels.mask import Scoring, mask_strides
from headwise.runtime.kernels.native.build import is_watched
from headwise.runtime.kernels.native.calls import AffineRows, KeyBlocks

WIDEST = 512
"""The widest heads that the kernels of codes support, which hold a whole row of a head at once."""
_PLAIN = (Tensor, torch.nn.Parameter)


def why_not_codes(keys: Tensor, values: Tensor) -> str | None:
    """The reason why the kernel does not support a cache of such keys and values, or None if it does.

    Args:
        keys: unquantised keys of some tokens, ``[B, K, S, D]``.
        values: unquantised values, ``[B, K, S, V]``.
    """
    if (width := max(keys.shape[3], values.shape[3])) > WIDEST:
        return f"heads are {width} wide, and it takes {WIDEST} at most"
    if keys.dtype != values.dtype:
        return "it takes tensors of one dtype"
    if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
        return "it has no backward pass"
    return why_not_plain(keys, values)


def why_not_plain(states: Tensor, *others: Tensor) -> str | None:
    """The reason why kernels do not support such tensors, whatever their shapes, or None if they do.

    Args:
        states: a tensor of the dtype that the kernel computes in.
        others: tensors that have to be on the device of ``states``.
    """
    tensors = (states, *others)
    if not all(type(x) in _PLAIN and x.layout is torch.strided and not x.is_neg() for x in tensors):
        return "it takes plain tensors"
    if not all(x.device == states.device for x in others):
        return "it takes tensors on one device"
    if is_watched(states.device.type):
        return "a compiler, tracer, counter, transform or autocast has to see torch's operations"
    return why_not_split(states.dtype, states.device, 1)


def attend_codes(
    query: Tensor,
    key: AffineRows,
    value: AffineRows,
    scoring: Scoring,
    *,
    blocks: KeyBlocks | None = None,
    late: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute `headwise.attend` with keys and values that are read as they are stored.

    Arguments and result are those of `headwise.runtime.kernels.native.calls.attend_affine`; several
    groups have a power of two of channels each. The tensors must be supported: `why_not_codes` returns None.
    """
    query = query if query.stride(3) == 1 else query.contiguous()
    B, H, S, _ = query.shape
    K, N, V = key.rows.shape[1], key.rows.shape[2], value.width
    out = query.new_empty(B, S, H, V).transpose(1, 2)  # [B, H, S, V]
    if out.numel() == 0:
        return out
    units = B * K * -(-(H // K * S) // ROWS)
    last = 0 if late is None else late[0].shape[2]
    of_codes, of_late = (part_count(units, tokens, query.device) if tokens else 0 for tokens in (N, last))
    mixtures, weights = new_parts(of_codes + of_late, B, H * S, V, query.device)
    with on_device_of(query):
        if of_codes:
            parts = mixtures[:of_codes], weights[:, :of_codes]
            _fill_parts(query, (key, value, blocks), scoring, *parts, last=last)
        if late is not None and of_late:
            keys, values = (x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous() for x in late)
            mask = scoring.mask
            if mask is not None and mask.shape[3] > 1:
                scoring = scoring._replace(mask=mask[..., N:])
            parts = mixtures[of_codes:], weights[:, of_codes:]
            fill_parts((query, keys, values), scoring, *parts)
        join(mixtures, weights, out)
    return out


def _fill_parts(
    query: Tensor,
    coded: tuple[AffineRows, AffineRows, KeyBlocks | None],
    scoring: Scoring,
    mixtures: Tensor,
    weights: Tensor,
    *,
    last: int,
) -> None:
    """Fill ``mixtures`` and ``weights`` from the tokens in codes; see
    `headwise.runtime.kernels.gpu.split.fill_parts`.

    Args:
        query: ``[B, H, S, D]``.
        coded: keys and values of the first N tokens, and scales of the keys' blocks.
        scoring: that of `attend_codes`.
        mixtures: ``[parts, B, H·S, V]``.
        weights: ``[2, parts, B, H·S]``.
        last: the number of tokens behind those in codes.
    """
    import triton

    from headwise.runtime.kernels.gpu.kernels import attend_part_of_codes

    (key, value, blocks), (mask, is_causal, scale, _) = coded, scoring
    keys, values = (rows if rows.stride(3) == 1 else rows.contiguous() for rows in (key.rows, value.rows))
    scales = None if blocks is None else blocks.scales
    if scales is not None and scales.stride(3) != 1:
        scales = scales.contiguous()
    B, H, S, D = query.shape
    K, N = keys.shape[1:3]
    parts, tiles, V = len(mixtures), triton.cdiv(H // K * S, ROWS), value.width
    main, width = (max(16, triton.next_power_of_2(size)) for size in (D, V))
    block = 0 if blocks is None else blocks.tokens
    tokens, warps = _tile(max(main, width), query.element_size(), bool(8 % key.bits or 8 % value.bits))
    tokens = min(block or tokens, tokens)
    # Parts are whole tiles, so that a tile lies in one block.
    each = triton.cdiv(triton.cdiv(N, parts), tokens) * tokens
    sizes = {"D": D, "V": V, "BLOCK": block, "ROWS": ROWS, "TOKENS": tokens, "MAIN": main, "WIDTH": width}
    flags = {"HAS_MASK": mask is not None, "CAUSAL": is_causal, "WIDEN": must_widen(query)}
    attend_part_of_codes[(B * K * tiles, parts)](
        *(query, keys, values, query if scales is None else scales, query if mask is None else mask),
        *(mixtures, weights, scale * LOG2_E),
        *(K, H // K, S, N + last, N, each, tiles),
        *query.stride()[:3],
        *keys.stride()[:2],
        *values.stride()[:2],
        *((0, 0, 0) if scales is None else scales.stride()[:3]),
        *mask_strides(mask),
        *part_strides(mixtures, weights),
        **_about("KEY", key, keys),
        **_about("VALUE", value, values),
        **sizes,
        **flags,
        num_warps=warps,
    )


def _tile(width: int, size: int, is_split: bool) -> tuple[int, int]:
    """Tokens of a tile and warps: the most with which the compiled kernel keeps a tile in registers, or nearly.

    Args:
        width: the width of keys or of values, whichever is wider, as a power of two.
        size: the bytes of a number of the query.
        is_split: whether codes may lie in two bytes, from which each is read then, as those of 3 bits do.
    """
    if size == 4:  # products in float32 are not the matrix units', and take more registers
        return 16, 4 if width <= 64 else 8
    if width > 128:
        return 16, 8
    return (64 if width <= 64 else 32) // (2 if is_split else 1), 4


def _about(name: str, coded: AffineRows, rows: Tensor) -> dict[str, int]:
    """The kernel's constants for rows of keys or of values; ``rows`` are those it is given."""
    size = coded.width // max(coded.groups, 1)
    assert coded.groups <= 1 or (size >= 16 and size & (size - 1) == 0)
    return {
        f"{name}_ROW": rows.stride(2),
        f"{name}_BITS": coded.bits,
        f"{name}_BYTES": coded.code_bytes,
        f"{name}_COUNT": coded.groups,
        f"{name}_GROUPS": 1 << max(coded.groups - 1, 0).bit_length(),
        f"{name}_ALIGN": math.gcd(16, rows.stride(0), rows.stride(1)),
    }
