"""Codes of fewer than eight bits in bytes: code i of a row takes the bits from ``b·i`` on, the lowest bit first."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_bytes(count: int, bits: int) -> int:
    """The bytes of ``count`` codes: ``packed_bytes(16, 3)`` is 6."""
    return -(-count * bits // 8)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into bytes.

    For example ``pack_bits(torch.tensor([1, 2, 3, 0], dtype=torch.uint8), 2)`` is one byte, ``0b00_11_10_01``.

    Args:
        codes: uint8 ``[…, n]``, each below ``2**bits``.
        bits: 1 to 8.

    Returns:
        uint8 ``[…, packed_bytes(n, bits)]``; unused bits at the end are 0.
    """
    if bits == 8:
        return codes
    n = codes.shape[-1]
    if bits in (2, 4) and n * bits % 8 == 0:
        parts = torch.unflatten(codes, -1, (-1, 8 // bits))
        packed = parts[..., 0].clone()
        for place in range(1, 8 // bits):
            packed |= parts[..., place] << (bits * place)
        return packed
    width = packed_bytes(n, bits)
    padded = torch.nn.functional.pad(codes, (0, -n % 8))
    groups = torch.unflatten(padded, -1, (-1, 8)).to(torch.int64)  # 8 codes fill ``bits`` bytes
    shifts = bits * torch.arange(8, device=codes.device)
    words = (groups << shifts).sum(-1, keepdim=True)
    out = (words >> (8 * torch.arange(bits, device=codes.device))) & 255
    return out.flatten(-2).to(torch.uint8)[..., :width]


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Recover the codes from bytes of `pack_bits`.

    For example ``unpack_bits(pack_bits(codes, 3), 3, codes.shape[-1])`` equals ``codes``.

    Args:
        packed: uint8 ``[…, packed_bytes(count, bits)]``.
        bits: 1 to 8.
        count: n.

    Returns:
        uint8 ``[…, n]``.
    """
    if bits == 8:
        return packed
    if bits in (2, 4) and count * bits % 8 == 0:
        shifts = bits * torch.arange(8 // bits, device=packed.device, dtype=torch.uint8)
        parts: Tensor = (packed[..., None] >> shifts) & (2**bits - 1)
        return parts.flatten(-2)
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % bits))
    groups = torch.unflatten(padded, -1, (-1, bits)).to(torch.int64)
    words = (groups << (8 * torch.arange(bits, device=packed.device))).sum(-1, keepdim=True)
    codes = (words >> (bits * torch.arange(8, device=packed.device))) & (2**bits - 1)
    numbers: Tensor = codes.flatten(-2)
    return numbers.to(torch.uint8)[..., :count]
