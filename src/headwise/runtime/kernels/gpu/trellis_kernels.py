"""The Triton kernels of trellis codes: attend to them, decode them, and choose them.

A tile of codes is decoded in registers; what it stands for is never written to the GPU's memory where it is attended
to.
"""

# Triton compiles the source text of these functions, and does not take type annotations.
# mypy: ignore-errors
# ruff: noqa: PLR0915

import triton
import triton.language as tl

from headwise.runtime.kernels.gpu.kernels import are_seen, store_part, weighed


@triton.jit
def of_trellis(rows, is_seen, gain, ends, bits, tables, scale, offset, channel, is_channel):
    """What the trellis codes of some channels stand for, float32 ``[TOKENS, channels]``; 0 for other channels.

    A level is looked up by the eight bits of a token's stream that end with its code; the stream's first byte is
    that of the token's gains. ``gain`` is ``[TOKENS, 1]``, or of each channel.
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
    return level * gain * of_channel[None, :] + zero[None, :]


@triton.jit
def with_wide(x, wide, is_wide, channel, is_channel):
    """Replace decoded values of first tokens by their unquantised ones; ``wide [TOKENS]`` points to those."""
    is_read = is_wide[:, None] & is_channel[None, :]
    return tl.where(is_read, tl.load(wide[:, None] + channel[None, :], mask=is_read, other=0.0).to(tl.float32), x)


@triton.jit
def of_channels(
    rows, is_seen, gain, ends, bits, tables, scale, offset, sinks, is_wide, has_wide, channel, is_channel
):  # fmt: skip
    """The values of some channels of a tile of tokens, the unquantised ones of first tokens in their place."""
    x = of_trellis(rows, is_seen, gain, ends, bits, tables, scale, offset, channel, is_channel)
    if has_wide:
        x = with_wide(x, sinks, is_wide, channel, is_channel)
    return x


@triton.jit
def attend_part_of_trellis(
    query, codes, wide, first, mask, ends, bits, tables, gains, scales, offsets, turn, cos, sin, frequency,
    lengths, blocks, mixtures, weights, scale,
    K, G, S, T, F, tiles, window,
    query_batch, query_head, query_token, codes_batch, wide_batch, wide_token, blocks_batch,
    mask_batch, mask_head, mask_new, mask_token,
    mixtures_part, mixtures_batch, weights_part, weights_batch, weights_kind,
    CONTENT: tl.constexpr, HALF: tl.constexpr, V: tl.constexpr, SHARED: tl.constexpr,
    TURN: tl.constexpr, SINKS: tl.constexpr, ROW: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, MAIN: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr,
    HAS_CONTENT: tl.constexpr, HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """As `attend_part`, to latents and rotary keys, or to keys and values of heads, in trellis codes.

    A key has CONTENT channels that are not rotated and 2·HALF that are. With SHARED it is a latent, which is decoded
    once, as keys and as values; its rotary key lies behind it. Otherwise each head's key begins with its rotary
    channels, and all values lie behind all keys. With PAGE, the tokens of sequence b are ``lengths[b]``, in the pages
    that ``blocks[b]`` numbers. The rotation of a slot is that of its tile's first slot times one of the first TURN
    slots' rotations, so that a row of ``cos`` and ``sin`` is read for each tile, not each token.
    """
    unit, part = tl.program_id(0), tl.program_id(1)
    head, tile = unit // tiles, unit % tiles
    b, k = (head // K).to(tl.int64), head % K
    row = tile * ROWS + tl.arange(0, ROWS)
    is_row = row < G * S
    h, s = k * G + row // S, row % S
    main, pair, width = tl.arange(0, MAIN), tl.arange(0, PAIRS), tl.arange(0, WIDTH)
    is_main, is_pair, is_width = main < CONTENT, pair < HALF, width < V
    if SHARED:
        content, rotary, values = 0, CONTENT, 0
        at_content, at_rotary = 0, CONTENT if HAS_CONTENT else 0
    else:
        D: tl.constexpr = CONTENT + 2 * HALF
        content, rotary, values = k * D + 2 * HALF, k * D, K * D + k * V
        at_content, at_rotary = 2 * HALF, 0
    at = query + b * query_batch + h[:, None] * query_head + s[:, None] * query_token
    if HAS_CONTENT:
        q = tl.load(at + at_content + main[None, :], mask=is_row[:, None] & is_main[None, :], other=0.0)
        if WIDEN:  # Triton's interpreter would multiply the bits of bfloat16
            q = q.to(tl.float32)
    if HALF:
        is_read = is_row[:, None] & is_pair[None, :]
        q_real = tl.load(at + at_rotary + pair[None, :], mask=is_read, other=0.0)
        q_imaginary = tl.load(at + at_rotary + HALF + pair[None, :], mask=is_read, other=0.0)
        if WIDEN:
            q_real, q_imaginary = q_real.to(tl.float32), q_imaginary.to(tl.float32)
        of_pair = tl.load(frequency + pair, mask=is_pair, other=0)
    high = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixture = tl.zeros([ROWS, WIDTH], tl.float32)
    if PAGE:
        T = tl.load(lengths + b).to(tl.int32)
    last = T - S + s  # the last token that a row may see, by the causal rule
    first_slot = tl.load(first + b)
    each = tl.cdiv(tl.cdiv(T, tl.num_programs(1)), TOKENS) * TOKENS
    begin, end = part * each, tl.minimum(part * each + each, T)
    if CAUSAL and window > 0:
        begin = tl.maximum(begin, (T - S - window + 1) // TOKENS * TOKENS)
    for start in range(begin, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        seen = are_seen(
            mask, b, h, s, is_row, last, token, T, window,
            mask_batch, mask_head, mask_new, mask_token, HAS_MASK, CAUSAL,
        )  # fmt: skip
        # Tokens that no row sees are not read: their memory may hold anything.
        is_seen = tl.max(seen.to(tl.int32), axis=0) > 0
        sink = token - first_slot
        is_wide = is_seen & (sink >= 0) & (sink < SINKS)
        has_wide = tl.max(is_wide.to(tl.int32), axis=0) > 0
        sinks = wide + b * wide_batch + sink * wide_token
        if PAGE:  # a tile lies in one page
            page = tl.load(blocks + b * blocks_batch + start // PAGE).to(tl.int64)
            rows = codes + page * codes_batch + (token % PAGE).to(tl.int64) * ROW
        else:
            rows = codes + b * codes_batch + token.to(tl.int64) * ROW
        numbers = tl.load(rows, mask=is_seen, other=0).to(tl.int32)
        gain, other_gain = tl.load(gains + (numbers & 15))[:, None], tl.load(gains + (numbers >> 4))[:, None]
        scores = tl.zeros([ROWS, TOKENS], tl.float32)
        if HAS_CONTENT or SHARED:
            x = of_channels(
                rows, is_seen, gain, ends, bits, tables, scales, offsets, sinks, is_wide, has_wide,
                content + main, is_main,
            )  # fmt: skip
            if not WIDEN:
                x = x.to(query.dtype.element_ty)
        if HAS_CONTENT:
            scores += tl.dot(q, tl.trans(x), input_precision="ieee")
        if HALF:
            of_rotary = other_gain if SHARED else gain
            real = of_channels(
                rows, is_seen, of_rotary, ends, bits, tables, scales, offsets, sinks, is_wide, has_wide,
                rotary + pair, is_pair,
            )  # fmt: skip
            imaginary = of_channels(
                rows, is_seen, of_rotary, ends, bits, tables, scales, offsets, sinks, is_wide, has_wide,
                rotary + HALF + pair, is_pair,
            )  # fmt: skip
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
        if SHARED:
            y = x
        else:
            y = of_channels(
                rows, is_seen, other_gain, ends, bits, tables, scales, offsets, sinks, is_wide, has_wide,
                values + width, is_width,
            )  # fmt: skip
            if not WIDEN:
                y = y.to(query.dtype.element_ty)
        mixture = mixture * keep[:, None] + tl.dot(shares.to(y.dtype), y, input_precision="ieee")
    at = mixtures + part * mixtures_part + b * mixtures_batch
    of_weights = weights + part * weights_part + b * weights_batch
    store_part(at, of_weights, mixture, high, total, h * S + s, is_row, V, weights_kind, WIDTH)


@triton.jit
def decode_tokens(
    codes, places, out, ends, bits, tables, gains, scales, offsets,
    N, W, PART: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What the codes of N tokens stand for, of WIDTH channels; ``places [N]`` is where each token's bytes begin.

    The channels before PART have a token's first gain, the others its second.
    """
    number = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_token, is_channel = number < N, channel < W
    rows = codes + tl.load(places + number, mask=is_token, other=0)
    numbers = tl.load(rows, mask=is_token, other=0).to(tl.int32)
    gain, other_gain = tl.load(gains + (numbers & 15)), tl.load(gains + (numbers >> 4))
    gain = tl.where((channel < PART)[None, :], gain[:, None], other_gain[:, None])
    x = of_trellis(rows, is_token, gain, ends, bits, tables, scales, offsets, channel, is_channel)
    at = out + number.to(tl.int64)[:, None] * W + channel[None, :]
    tl.store(at, x.to(out.dtype.element_ty), mask=is_token[:, None] & is_channel[None, :])


@triton.jit
def moved_on(cost, error, at, BITS: tl.constexpr):
    """The least cost of a path to each of the 256 windows after one more code, of their costs before it.

    Windows that differ in their first BITS bits alone have the same successors; which of them is the cheapest is
    stored ``at [256 >> BITS]``.
    """
    STATES: tl.constexpr = 256 >> BITS
    least, source = tl.min(tl.reshape(cost, (1 << BITS, STATES)), axis=0, return_indices=True)
    tl.store(at + tl.arange(0, STATES), source.to(tl.uint8))
    return tl.reshape(tl.broadcast_to(least[:, None], (STATES, 1 << BITS)), (256,)) + error


@triton.jit
def walk_trellis(values, squares, bits, tables, starts, sources, windows, W):
    """The windows of the cheapest path through one token's trellis: Viterbi's algorithm, all windows at a time.

    ``sources [tokens, W, 128]`` is memory for the cheapest predecessors.
    """
    token = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, 256)
    cost = tl.where(every == tl.load(starts + token).to(tl.int32), 0.0, 1e30)
    for i in range(W):
        count = tl.load(bits + i).to(tl.int32)
        difference = tl.load(tables + count * 256 + every) - tl.load(values + token * W + i)
        error = difference * difference * tl.load(squares + token * W + i)
        at = sources + (token * W + i) * 128
        if count == 1:
            cost = moved_on(cost, error, at, 1)
        elif count == 2:
            cost = moved_on(cost, error, at, 2)
        elif count == 3:
            cost = moved_on(cost, error, at, 3)
        elif count == 4:
            cost = moved_on(cost, error, at, 4)
        elif count == 5:
            cost = moved_on(cost, error, at, 5)
        elif count == 6:
            cost = moved_on(cost, error, at, 6)
        elif count == 7:
            cost = moved_on(cost, error, at, 7)
        else:
            cost = moved_on(cost, error, at, 8)
    window = tl.argmin(cost, axis=0)
    tl.debug_barrier()  # the way back reads what other threads of the program have stored
    for j in range(W):
        i = W - 1 - j
        count = tl.load(bits + i).to(tl.int32)
        tl.store(windows + token * W + i, window.to(tl.uint8))
        state = window >> count
        source = tl.load(sources + (token * W + i) * 128 + state).to(tl.int32)
        window = (source << (8 - count)) | state
