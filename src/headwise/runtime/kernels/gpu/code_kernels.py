"""The Triton kernels that attend to codes as they are stored: to keys and values in integer codes, and to latents in
trellis codes.

A tile of codes is unpacked in registers, multiplied by its scales, and given to the matrix units in the queries'
dtype; what it stands for is never written to the GPU's memory. Rows of queries and parts of a sequence are those of
`headwise.runtime.kernels.gpu.kernels`.
"""

# Triton compiles the source text of these functions, and does not take type annotations.
# mypy: ignore-errors
# ruff: noqa: PLR0915

import triton
import triton.language as tl

from headwise.runtime.kernels.gpu.kernels import are_seen, store_part, weighed


@triton.jit
def unpacked(at, is_seen, CODE_BYTES: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Codes ``[TOKENS, WIDTH]`` of rows that begin ``at [TOKENS]``; 0 for tokens that are not seen."""
    # Each code is read from its own byte. `tl.interleave` would read a byte once for all its codes; as operands of
    # matrix units, Triton 3.6 mixes up small tiles that are made so.
    first = BITS * tl.arange(0, WIDTH)
    byte = first // 8
    places = at[:, None] + byte[None, :]
    codes = tl.load(places, mask=is_seen[:, None] & (byte < CODE_BYTES)[None, :], other=0).to(tl.int32)
    if 8 % BITS:  # a code may lie in two bytes
        high = tl.load(places + 1, mask=is_seen[:, None] & (byte + 1 < CODE_BYTES)[None, :], other=0).to(tl.int32)
        codes = codes | (high << 8)
    return ((codes >> (first % 8)[None, :]) & ((1 << BITS) - 1)).to(tl.float32)


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
    """As `headwise.runtime.kernels.gpu.kernels.attend_part`, to the first N of T tokens, which are in codes.

    Token strides and sizes of rows are constants of a model and its format, and say how wide the loads may be.
    """
    unit, part = tl.program_id(0), tl.program_id(1)
    head, tile = unit // tiles, unit % tiles
    b, k = (head // K).to(tl.int64), (head % K).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    is_row = row < G * S
    g, s = k * G + row // S, row % S
    main = tl.arange(0, MAIN)
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
    at = mixtures + part * mixtures_part + b * mixtures_batch
    of_weights = weights + part * weights_part + b * weights_batch
    store_part(at, of_weights, mixture, high, total, g * S + s, is_row, V, weights_kind, WIDTH)


@triton.jit
def of_trellis(rows, is_seen, gain, ends, bits, tables, scale, offset, channel, is_channel):
    """What the trellis codes of some channels stand for, float32 ``[TOKENS, channels]``; 0 for other channels.

    A level is looked up by the eight bits of a token's stream that end with its code; the stream's first byte is
    that of the token's gains.
    """
    end = tl.load(ends + channel, mask=is_channel, other=0)
    table = tl.load(bits + channel, mask=is_channel, other=0) * 256
    is_read = is_seen[:, None] & is_channel[None, :]
    at = rows[:, None] + (end // 8)[None, :]
    before = tl.load(at, mask=is_read, other=0).to(tl.int32)
    here = tl.load(at + 1, mask=is_read, other=0).to(tl.int32)
    window = (((before << 8) | here) >> (7 - end % 8)[None, :]) & 255
    level = tl.load(tables + table[None, :] + window, mask=is_read, other=0).to(tl.float32)
    of_channel = tl.load(scale + channel, mask=is_channel, other=0.0)
    zero = tl.load(offset + channel, mask=is_channel, other=0.0)
    return level * gain[:, None] * of_channel[None, :] + zero[None, :]


@triton.jit
def with_wide(x, wide, is_wide, channel, is_channel):
    """Replace decoded values of first tokens by their unquantised ones; ``wide [TOKENS]`` points to those."""
    is_read = is_wide[:, None] & is_channel[None, :]
    return tl.where(is_read, tl.load(wide[:, None] + channel[None, :], mask=is_read, other=0.0).to(tl.float32), x)


@triton.jit
def attend_part_of_latents(
    query,
    codes,
    wide,
    first,
    mask,
    ends,
    bits,
    tables,
    gains,
    channel_scale,
    channel_offset,
    turn,
    cos,
    sin,
    frequency,
    mixtures,
    weights,
    scale,
    H,
    S,
    T,
    F,
    each,
    tiles,
    query_batch,
    query_head,
    query_token,
    codes_batch,
    wide_batch,
    wide_token,
    mask_batch,
    mask_head,
    mask_new,
    mask_token,
    mixtures_part,
    mixtures_batch,
    weights_part,
    weights_batch,
    weights_kind,
    R: tl.constexpr,
    HALF: tl.constexpr,
    TURN: tl.constexpr,
    SINKS: tl.constexpr,
    ROW: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_CONTENT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """As `headwise.runtime.kernels.gpu.kernels.attend_part`, to latents and rotary keys in trellis codes.

    Latents are decoded once, as keys and as values. The rotation of a slot is that of its tile's first slot times one
    of the first TURN slots' rotations, so that a row of ``cos`` and ``sin`` is read for each tile, not each token.
    """
    unit, part = tl.program_id(0), tl.program_id(1)
    b, tile = (unit // tiles).to(tl.int64), unit % tiles
    row = tile * ROWS + tl.arange(0, ROWS)
    is_row = row < H * S
    h, s = row // S, row % S
    width = tl.arange(0, WIDTH)
    is_width = width < R
    at = query + b * query_batch + h[:, None] * query_head + s[:, None] * query_token
    if HAS_CONTENT:
        q = tl.load(at + width[None, :], mask=is_row[:, None] & is_width[None, :], other=0.0)
        if WIDEN:  # Triton's interpreter would multiply the bits of bfloat16
            q = q.to(tl.float32)
        at += R
    if HALF:
        pair = tl.arange(0, PAIRS)
        is_pair = pair < HALF
        is_read = is_row[:, None] & is_pair[None, :]
        q_real = tl.load(at + pair[None, :], mask=is_read, other=0.0)
        q_imaginary = tl.load(at + HALF + pair[None, :], mask=is_read, other=0.0)
        if WIDEN:
            q_real, q_imaginary = q_real.to(tl.float32), q_imaginary.to(tl.float32)
        of_pair = tl.load(frequency + pair, mask=is_pair, other=0)
    high = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixture = tl.zeros([ROWS, WIDTH], tl.float32)
    last = T - S + s  # the last token that a row may see, by the causal rule
    first_slot = tl.load(first + b)
    for start in range(part * each, tl.minimum(part * each + each, T), TOKENS):
        token = start + tl.arange(0, TOKENS)
        seen = are_seen(
            mask, b, h, s, is_row, last, token, T, 0, mask_batch, mask_head, mask_new, mask_token, HAS_MASK, CAUSAL
        )
        # Tokens that no row sees are not read: their memory may hold anything.
        is_seen = tl.max(seen.to(tl.int32), axis=0) > 0
        sink = token - first_slot
        is_wide = is_seen & (sink >= 0) & (sink < SINKS)
        has_wide = tl.max(is_wide.to(tl.int32), axis=0) > 0
        sinks = wide + b * wide_batch + sink * wide_token
        rows = codes + b * codes_batch + token.to(tl.int64) * ROW
        numbers = tl.load(rows, mask=is_seen, other=0).to(tl.int32)
        gain = tl.load(gains + (numbers & 15))
        x = of_trellis(
            rows, is_seen, gain, ends, bits, tables, channel_scale, channel_offset, width, is_width
        )  # [TOKENS, WIDTH]
        if has_wide:
            x = with_wide(x, sinks, is_wide, width, is_width)
        if not WIDEN:
            x = x.to(query.dtype.element_ty)
        scores = tl.zeros([ROWS, TOKENS], tl.float32)
        if HAS_CONTENT:
            scores += tl.dot(q, tl.trans(x), input_precision="ieee")
        if HALF:
            gain = tl.load(gains + (numbers >> 4))
            real = of_trellis(
                rows, is_seen, gain, ends, bits, tables, channel_scale, channel_offset, R + pair, is_pair
            )
            imaginary = of_trellis(
                rows, is_seen, gain, ends, bits, tables, channel_scale, channel_offset, R + HALF + pair, is_pair
            )
            if has_wide:
                real = with_wide(real, sinks, is_wide, R + pair, is_pair)
                imaginary = with_wide(imaginary, sinks, is_wide, R + HALF + pair, is_pair)
            place = start * F + of_pair
            c, d = tl.load(cos + place, mask=is_pair, other=0.0), tl.load(sin + place, mask=is_pair, other=0.0)
            turns = turn + tl.arange(0, TOKENS)[:, None] * HALF + pair[None, :]
            u = tl.load(turns, mask=is_pair[None, :], other=0.0)
            v = tl.load(turns + TURN * HALF, mask=is_pair[None, :], other=0.0)
            cosine, sine = u * c[None, :] - v * d[None, :], u * d[None, :] + v * c[None, :]
            turned = (real * cosine - imaginary * sine).to(q_real.dtype)
            scores += tl.dot(q_real, tl.trans(turned), input_precision="ieee")
            turned = (imaginary * cosine + real * sine).to(q_real.dtype)
            scores += tl.dot(q_imaginary, tl.trans(turned), input_precision="ieee")
        scores = tl.where(seen, scores * scale, -float("inf"))
        shares, keep, high, total = weighed(scores, high, total)
        mixture = mixture * keep[:, None] + tl.dot(shares.to(x.dtype), x, input_precision="ieee")
    at = mixtures + part * mixtures_part + b * mixtures_batch
    of_weights = weights + part * weights_part + b * weights_batch
    store_part(at, of_weights, mixture, high, total, row, is_row, R, weights_kind, WIDTH)
