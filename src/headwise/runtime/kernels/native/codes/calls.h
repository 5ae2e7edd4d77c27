// What all kernels of caches in codes share: the parts of a call, and one step of the softmax.
#pragma once

#include <cmath>
#include <new>

#include "../parts.h"

namespace {

// The scores of a block's tokens, [BLOCK] with NOTHING behind the last one, become weights, times the tokens' gains where
// there are any, and enter the row's partial result. `keep` becomes the factor of what was summed before.
INLINE void weigh_block(const float* scores, float* weights, float& keep, int row, const Partial& partial,
                        const float* gain) {
  Vector top = load(scores);
  for (int t = W; t < BLOCK; t += W) top = larger(top, load(scores + t));
  keep = 1;
  if (exceeds(top, partial.high[row])) {
    const float high = largest(top);
    keep = std::exp2(partial.high[row] - high);
    partial.high[row] = high;
  }
  const float base = partial.high[row] == NOTHING ? 0.0f : partial.high[row];  // nothing seen yet: all weights are 0
  Vector sums_of = load(partial.sum + row * W) * keep;
  for (int t = 0; t < BLOCK; t += W) {
    const Vector block = power_of_two<false>(load(scores + t) - base);
    sums_of += block;
    store(weights + t, gain ? block * load(gain + t) : block);
  }
  store(partial.sum + row * W, sums_of);
}

// One row's scores of neighbouring tokens from `from` on become weights; see weigh_block.
INLINE void weigh_row(const Mask& mask, int64_t b, int row, int64_t from, int count, float* scores, float* weights,
                      float& keep, const Partial& partial, const float* gain) {
  int32_t token[BLOCK];
  for (int t = 0; t < count; t++) token[t] = int32_t(from + t);
  mask.hide_in_row(b, 0, row, token, count, scores);
  mask.hide_shared(b, from, count, scores);
  std::fill(scores + count, scores + BLOCK, NOTHING);
  weigh_block(scores, weights, keep, row, partial, gain);
}

// Many new tokens are taken some at a time, with `run` for each part; see attention.cpp.
template <class Q, class Call, class Run>
void in_calls(const Call& c, Run run) {
  const int64_t most = std::max<int64_t>(1, 128 / c.call.G);
  for (int64_t from = 0; from < c.call.S; from += most) {
    Call part = c;
    Arguments& a = part.call;
    a.S = std::min(most, c.call.S - from);
    a.query = (const Q*)c.call.query + from * a.query_stride[2];
    a.out = (Q*)c.call.out + from * a.out_stride[2];
    if (a.mask) a.mask += from * a.mask_stride[2];
    if (a.causal) a.T -= c.call.S - from - a.S;  // tokens after this part's last one are hidden from it
    run(part);
  }
}

}  // namespace
