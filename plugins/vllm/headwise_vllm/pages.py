"""Tokens in bytes, in the pages of a paged cache; torch alone.

A page is ``[N, C + X]`` bytes: a row for each of its N tokens, of C bytes of codes and X bytes to spare. The spare
bytes of all rows, read in their order, are an area in which the first page of a sequence keeps the values of its
first tokens, which have no codes. So a page says all that a cache knows of its tokens: engines may share it among
sequences, move it and store it without knowing what it means.

Shapes: Q new tokens of all requests, n requests, T the most tokens of one of them, W values of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_bytes(code_bytes: int, wide_bytes: int, tokens: int) -> int:
    """Bytes of a token's row: C, and its share X of the area of first tokens.

    For example ``row_bytes(100, 2048, 256)`` is 108.

    Args:
        code_bytes: C.
        wide_bytes: of the area.
        tokens: N.
    """
    return code_bytes + -(-wide_bytes // tokens)


def write_codes(cache: Tensor, codes: Tensor, slots: Tensor) -> None:
    """Write codes of new tokens.

    Args:
        cache: uint8 ``[blocks, 1, N, C + X]``.
        codes: uint8 ``[Q, C]``.
        slots: int64 ``[Q]``, the number of a page times N, plus the place in it.
    """
    tokens = cache.shape[2]
    cache[:, 0, :, : codes.shape[1]][slots // tokens, slots % tokens] = codes


def write_wide(cache: Tensor, values: Tensor, slots: Tensor, positions: Tensor, code_bytes: int) -> None:
    """Write values of first tokens to the areas of their pages, in bfloat16.

    Args:
        cache: uint8 ``[blocks, 1, N, C + X]``.
        values: ``[n, W]``.
        slots: int64 ``[n]``, of the tokens.
        positions: int64 ``[n]``, of the tokens in their sequences.
        code_bytes: C.
    """
    content = values.to(torch.bfloat16).contiguous().view(torch.uint8)  # [n, 2 W]
    width, spare = content.shape[1], cache.shape[3] - code_bytes
    places = positions[:, None] * width + torch.arange(width, device=cache.device)
    pages = (slots // cache.shape[2])[:, None]
    cache[:, 0, :, code_bytes:][pages, places // spare, places % spare] = content


def gather_codes(cache: Tensor, block_table: Tensor, length: int, code_bytes: int) -> Tensor:
    """Codes of the first tokens of some requests, uint8 ``[n, 1, length, C]``; rows are ``C + X`` bytes apart.

    Args:
        cache: uint8 ``[blocks, 1, N, C + X]``.
        block_table: ``[n, most blocks]``, the blocks of each request in their order; behind a request's end anything.
        length: how many tokens.
        code_bytes: C.
    """
    blocks = block_table[:, : -(-length // cache.shape[2])].long()
    return cache[blocks, 0].flatten(1, 2)[:, None, :length, :code_bytes]


def gather_wide(cache: Tensor, block_table: Tensor, tokens: int, code_bytes: int, width: int) -> Tensor:
    """Values of the first tokens of some requests, bfloat16 ``[n, tokens, W]``; anything for one that is not there.

    Args:
        cache: uint8 ``[blocks, 1, N, C + X]``.
        block_table: as for `gather_codes`.
        tokens: how many tokens.
        code_bytes: C.
        width: W.
    """
    area = cache[block_table[:, 0].long(), 0, :, code_bytes:].flatten(1)  # [n, N X]
    return area[:, : 2 * tokens * width].reshape(-1).view(torch.bfloat16).view(-1, tokens, width)
