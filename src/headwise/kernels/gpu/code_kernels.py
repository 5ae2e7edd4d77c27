"""The Triton kernel that attends to keys and values in integer codes as they are stored.

A tile of codes is unpacked in registers, multiplied by its scales, and given to the matrix units in the queries'
dtype; what it stands for is never written to the GPU's memory. Rows of queries and parts of a sequence are those of
`headwise.kernels.gpu.kernels`.
"""

# Triton compiles the source text of these functions, and does not take type annotations.
# mypy: ignore-errors

import triton
import triton.language as tl

from headwise.kernels.gpu.kernels import are_seen, weighed


@triton.jit
def unpacked(at, is_seen, CODE_BYTES: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Codes ``[TOKENS, WIDTH]`` of rows that begin ``at [TOKENS]``; 0 for tokens that are not seen."""
    if BITS == 3:  # a code may lie in two bytes
        first = 3 * tl.arange(0, WIDTH)
        byte = first // 8
        places = at[:, None] + byte[None, :]
        low = tl.load(places, mask=is_seen[:, None] & (byte < CODE_BYTES)[None, :], other=0).to(tl.int32)
        high = tl.load(places + 1, mask=is_seen[:, None] & (byte + 1 < CODE_BYTES)[None, :], other=0).to(tl.int32)
        codes = ((low | (high << 8)) >> (first % 8)[None, :]) & 7
    else:
        byte = tl.arange(0, WIDTH * BITS // 8)
        codes = tl.load(at[:, None] + byte[None, :], mask=is_seen[:, None] & (byte < CODE_BYTES)[None, :], other=0)
        if BITS == 4:
            codes = tl.interleave(codes & 15, codes >> 4)
        if BITS == 2:
            even, odd = tl.interleave(codes & 3, (codes >> 4) & 3), tl.interleave((codes >> 2) & 3, codes >> 6)
            codes = tl.interleave(even, odd)
    return codes.to(tl.float32)


@triton.jit
def halves(at, is_read):
    """Numbers of float16 that may begin at an odd byte; 0 where they are not read."""
    low, high = tl.load(at, mask=is_read, other=0), tl.load(at + 1, mask=is_read, other=0)
    return (low.to(tl.uint16) | (high.to(tl.uint16) << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def of_rows(
    at,
    is_seen,
    CODE_BYTES: tl.constexpr,
    BITS: tl.constexpr,
    COUNT: tl.constexpr,
    GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """What rows with scales stand for, float32 ``[TOKENS, WIDTH]``; ``COUNT`` groups, padded to ``GROUPS``."""
    group = tl.arange(0, GROUPS)
    is_read = is_seen[:, None] & (group < COUNT)[None, :]
    scales = at[:, None] + CODE_BYTES + 2 * group[None, :]
    scale, zero = halves(scales, is_read), halves(scales + 2 * COUNT, is_read)
    codes = tl.reshape(unpacked(at, is_seen, CODE_BYTES, BITS, WIDTH), (TOKENS, GROUPS, WIDTH // GROUPS))
    return tl.reshape(codes * scale[:, :, None] + zero[:, :, None], (TOKENS, WIDTH))


@triton.jit
def attend_part_of_codes(
    query,
    key,
    value,
    block_scales,
    mask,
    mixtures,
    weights,
    scale,
    K,
    G,
    S,
    T,
    N,
    each,
    tiles,
    query_batch,
    query_head,
    query_token,
    key_batch,
    key_head,
    value_batch,
    value_head,
    scales_batch,
    scales_head,
    scales_block,
    mask_batch,
    mask_head,
    mask_new,
    mask_token,
    mixtures_part,
    mixtures_batch,
    weights_part,
    weights_batch,
    weights_kind,
    D: tl.constexpr,
    V: tl.constexpr,
    KEY_ROW: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    KEY_BYTES: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_COUNT: tl.constexpr,
    VALUE_COUNT: tl.constexpr,
    KEY_GROUPS: tl.constexpr,
    VALUE_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_ALIGN: tl.constexpr,
    VALUE_ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    MAIN: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """As `headwise.kernels.gpu.kernels.attend_part`, to the first N of T tokens, which are in codes.

    Token strides and sizes of rows are constants of a model and its format, and say how wide the loads may be.
    """
    unit, part = tl.program_id(0), tl.program_id(1)
    head, tile = unit // tiles, unit % tiles
    b, k = (head // K).to(tl.int64), (head % K).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    is_row = row < G * S
    g, s = k * G + row // S, row % S
    main, width = tl.arange(0, MAIN), tl.arange(0, WIDTH)
    at = query + b * query_batch + g[:, None] * query_head + s[:, None] * query_token
    q = tl.load(at + main[None, :], mask=is_row[:, None] & (main < D)[None, :], other=0.0)
    if WIDEN:  # Triton's interpreter would multiply the bits of bfloat16
        q = q.to(tl.float32)
    high = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixture = tl.zeros([ROWS, WIDTH], tl.float32)
    last = T - S + s  # the last token that a row may see, by the causal rule
    keys = key + tl.multiple_of(b * key_batch + k * key_head, KEY_ALIGN)
    values = value + tl.multiple_of(b * value_batch + k * value_head, VALUE_ALIGN)
    for start in range(part * each, tl.minimum(part * each + each, N), TOKENS):
        token = start + tl.arange(0, TOKENS)
        seen = are_seen(
            mask, b, g, s, is_row, last, token, N, 0, mask_batch, mask_head, mask_new, mask_token, HAS_MASK, CAUSAL
        )
        # Tokens that no row sees are not read: their memory may hold anything.
        is_seen = tl.max(seen.to(tl.int32), axis=0) > 0
        token = token.to(tl.int64)
        if BLOCK:  # a tile lies in one block
            x = unpacked(keys + token * KEY_ROW, is_seen, KEY_BYTES, KEY_BITS, MAIN)
            scales = block_scales + b * scales_batch + k * scales_head + start // BLOCK * scales_block
            key_scale = tl.load(scales + main, mask=main < D, other=0.0).to(tl.float32)
            key_zero = tl.load(scales + D + main, mask=main < D, other=0.0).to(tl.float32)
            x = x * key_scale[None, :] + key_zero[None, :]
        else:
            x = of_rows(keys + token * KEY_ROW, is_seen, KEY_BYTES, KEY_BITS, KEY_COUNT, KEY_GROUPS, TOKENS, MAIN)
        scores = tl.dot(q, tl.trans(x.to(q.dtype)), input_precision="ieee")
        scores = tl.where(seen, scores * scale, -float("inf"))
        shares, keep, high, total = weighed(scores, high, total)
        y = of_rows(
            values + token * VALUE_ROW, is_seen, VALUE_BYTES, VALUE_BITS, VALUE_COUNT, VALUE_GROUPS, TOKENS, WIDTH
        ).to(q.dtype)
        mixture = mixture * keep[:, None] + tl.dot(shares.to(y.dtype), y, input_precision="ieee")
    row_of_all = g * S + s
    at = mixtures + part * mixtures_part + b * mixtures_batch + row_of_all[:, None] * V + width[None, :]
    tl.store(at, mixture, mask=is_row[:, None] & (width < V)[None, :])
    at = weights + part * weights_part + b * weights_batch + row_of_all
    tl.store(at, high, mask=is_row)
    tl.store(at + weights_kind, total, mask=is_row)
