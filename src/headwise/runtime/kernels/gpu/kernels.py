"""The Triton kernels: attend to one part of a sequence for a tile of rows, and combine the parts.

Rows are the new tokens of all query heads that share a key–value head, so that each key or value is loaded once for
all of them.
"""

# Triton compiles the source text of these functions, and does not take type annotations.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def are_seen(
    mask,
    b,
    g,
    s,
    is_row,
    last,
    token,
    end,
    window,
    mask_batch,
    mask_head,
    mask_new,
    mask_token,
    HAS_MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Whether each row sees each token before ``end``, ``[ROWS, TOKENS]``; ``last`` is a row's by the causal rule."""
    seen = is_row[:, None] & (token < end)[None, :]
    if CAUSAL:
        seen = seen & (token[None, :] <= last[:, None])
        if window > 0:
            seen = seen & (token[None, :] > last[:, None] - window)
    if HAS_MASK:
        place = mask + b * mask_batch + g[:, None] * mask_head + s[:, None] * mask_new + token[None, :] * mask_token
        seen = seen & (tl.load(place, mask=seen, other=0) != 0)
    return seen


@triton.jit
def weighed(scores, high, total):
    """One step of the online softmax, with the scores of a tile of tokens.

    Returns the weights 2^(score − highest score), the factor of what was summed before, the new highest score, and
    the sum of all weights.
    """
    higher = tl.maximum(high, tl.max(scores, axis=1))
    base = tl.where(higher == -float("inf"), 0.0, higher)  # nothing seen yet: all weights are 0
    shares = tl.exp2(scores - base[:, None])
    keep = tl.exp2(high - base)
    return shares, keep, higher, total * keep + tl.sum(shares, axis=1)


@triton.jit
def store_part(mixtures, weights, mixture, high, total, row, is_row, columns, weights_kind, WIDTH: tl.constexpr):
    """Store a part's mixtures, ``columns`` of them, and the highest scores and sums of weights of its rows."""
    width = tl.arange(0, WIDTH)
    at = mixtures + row[:, None] * columns + width[None, :]
    tl.store(at, mixture, mask=is_row[:, None] & (width < columns)[None, :])
    tl.store(weights + row, high, mask=is_row)
    tl.store(weights + row + weights_kind, total, mask=is_row)


@triton.jit
def attend_part(
    query,
    key,
    value,
    mask,
    mixtures,
    weights,
    scale,
    K,
    G,
    S,
    T,
    D,
    V,
    each,
    tiles,
    query_batch,
    query_head,
    query_token,
    key_batch,
    key_head,
    key_token,
    value_batch,
    value_head,
    value_token,
    mask_batch,
    mask_head,
    mask_new,
    mask_token,
    mixtures_part,
    mixtures_batch,
    weights_part,
    weights_batch,
    weights_kind,
    window,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    SHARED: tl.constexpr,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The values of one part summed with weights 2^(score − highest score), and the sum of those weights.

    A head has MAIN channels and up to REST more; with NARROW it has fewer than MAIN.
    """
    unit, part = tl.program_id(0), tl.program_id(1)
    head, tile = unit // tiles, unit % tiles
    b, k = (head // K).to(tl.int64), (head % K).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    is_row = row < G * S
    g, s = k * G + row // S, row % S
    main, rest, width = tl.arange(0, MAIN), MAIN + tl.arange(0, max(REST, 1)), tl.arange(0, WIDTH)
    at = query + b * query_batch + g[:, None] * query_head + s[:, None] * query_token
    is_main = main < (D if NARROW else MAIN)
    q = tl.load(at + main[None, :], mask=is_row[:, None] & is_main[None, :], other=0.0)
    if REST:
        q_rest = tl.load(at + rest[None, :], mask=is_row[:, None] & (rest < D)[None, :], other=0.0)
    if WIDEN:  # Triton's interpreter would multiply the bits of bfloat16
        q = q.to(tl.float32)
        if REST:
            q_rest = q_rest.to(tl.float32)
    high = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixture = tl.zeros([ROWS, WIDTH], tl.float32)
    last = T - S + s  # the last token that a row may see, by the causal rule
    begin, end = part * each, tl.minimum(part * each + each, T)
    if CAUSAL and window > 0:
        begin = tl.maximum(begin, (T - S - window + 1) // TOKENS * TOKENS)
        begin = tl.maximum(begin, 0)
    for start in range(begin, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        seen = are_seen(
            mask,
            b,
            g,
            s,
            is_row,
            last,
            token,
            end,
            window,
            mask_batch,
            mask_head,
            mask_new,
            mask_token,
            HAS_MASK,
            CAUSAL,
        )
        # Tokens that no row sees are not read: their memory may hold anything.
        is_seen = tl.max(seen.to(tl.int32), axis=0) > 0
        token = token.to(tl.int64)
        keys = key + b * key_batch + k * key_head + token[:, None] * key_token
        x = tl.load(keys + main[None, :], mask=is_seen[:, None] & is_main[None, :], other=0.0)
        x = x.to(q.dtype)
        scores = tl.dot(q, tl.trans(x), input_precision=PRECISION)
        if REST:
            x_rest = tl.load(keys + rest[None, :], mask=is_seen[:, None] & (rest < D)[None, :], other=0.0)
            x_rest = x_rest.to(q.dtype)
            scores += tl.dot(q_rest, tl.trans(x_rest), input_precision=PRECISION)
        scores = tl.where(seen, scores * scale, -float("inf"))
        shares, keep, high, total = weighed(scores, high, total)
        if SHARED:
            y = x
        else:
            values = value + b * value_batch + k * value_head + token[:, None] * value_token
            y = tl.load(values + width[None, :], mask=is_seen[:, None] & (width < V)[None, :], other=0.0)
            y = y.to(q.dtype)
        mixture = mixture * keep[:, None] + tl.dot(shares.to(y.dtype), y, input_precision=PRECISION)
    at = mixtures + part * mixtures_part + b * mixtures_batch
    of_weights = weights + part * weights_part + b * weights_batch
    store_part(at, of_weights, mixture, high, total, g * S + s, is_row, V, weights_kind, WIDTH)


@triton.jit
def join_parts(
    mixtures,
    weights,
    out,
    H,
    S,
    V,
    parts,
    mixtures_part,
    mixtures_batch,
    weights_part,
    weights_batch,
    weights_kind,
    out_batch,
    out_head,
    out_token,
    PARTS: tl.constexpr,
    SOME: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Combine the parts of one row of the output, SOME of them at a time; a row that sees nothing gives zeros."""
    row = tl.program_id(0)
    b, of_all = (row // (H * S)).to(tl.int64), row % (H * S)
    width = tl.arange(0, WIDTH)
    at = weights + b * weights_batch + of_all
    every = tl.arange(0, PARTS)
    highs = tl.load(at + every * weights_part, mask=every < parts, other=-float("inf"))
    totals = tl.load(at + every * weights_part + weights_kind, mask=every < parts, other=0.0)
    # The highest score of a part that sees nothing is -inf; with 0 in its place, exp2 below gives 0 and not NaN.
    high = tl.max(highs, axis=0)
    base = tl.where(high == -float("inf"), 0.0, high)
    total = tl.sum(tl.exp2(highs - base) * totals, axis=0)
    mixture = tl.zeros([WIDTH], tl.float32)
    for start in range(0, parts, SOME):
        part = start + tl.arange(0, SOME)
        is_part = part < parts
        share = tl.exp2(tl.load(at + part * weights_part, mask=is_part, other=-float("inf")) - base)
        places = mixtures + part.to(tl.int64)[:, None] * mixtures_part + b * mixtures_batch + of_all * V
        pieces = tl.load(places + width[None, :], mask=is_part[:, None] & (width < V)[None, :], other=0.0)
        mixture += tl.sum(share[:, None] * pieces, axis=0)
    mixture = tl.where(total == 0.0, 0.0, mixture / tl.where(total == 0.0, 1.0, total))
    place = out + b * out_batch + of_all // S * out_head + of_all % S * out_token + width
    tl.store(place, mixture.to(out.dtype.element_ty), mask=width < V)
