// The arguments of a call, and which tokens its rows see: by the causal rule, by the window, by the mask.
#pragma once

#include "lanes.h"

namespace {

struct Arguments {
  const void *query, *key, *value;
  void* out;
  const uint8_t* mask;                        // true where a query attends, or null
  const float *key_scale, *value_scale;       // one for each token and head, or null
  int64_t B, K, G, S, T, D, V;                // G query heads share a key–value head
  int64_t query_stride[3], out_stride[3];     // batch, head, token
  int64_t key_stride[3], value_stride[3];     // in numbers; the last dimension is dense
  int64_t key_scale_stride[3], value_scale_stride[3];
  int64_t mask_stride[4];                     // batch, query head, new token, token
  int64_t causal, window;                     // a new token sees those up to itself; the latest `window`, or all when 0
  int64_t threads;
  double scale;
};

struct Range {
  int64_t from, to;
  int64_t length() const { return std::max<int64_t>(0, to - from); }
  Range cut(Range other) const { return {std::max(from, other.from), std::min(to, other.to)}; }
};

// Which tokens the rows of one call see.
class Mask {
  const Arguments& a_;

 public:
  explicit Mask(const Arguments& a) : a_(a) {}

  // Tokens that any row of a sequence may see.
  Range range(int64_t b) const {
    Range all{seen(0).from, seen(a_.S - 1).to};
    if (shares_mask()) {
      const uint8_t* mask = a_.mask + b * a_.mask_stride[0];
      while (all.from < all.to && !mask[all.from * a_.mask_stride[3]]) all.from++;
      while (all.from < all.to && !mask[(all.to - 1) * a_.mask_stride[3]]) all.to--;
    }
    return all;
  }

  // Whether any row of a unit sees a token.
  bool is_seen(int64_t b, int64_t k, int64_t t) const {
    const int64_t* stride = a_.mask_stride;
    const uint8_t* mask = a_.mask + b * stride[0] + t * stride[3];
    if (shares_mask()) return *mask;
    for (int64_t s = 0; s < a_.S; s++) {
      const Range sees = seen(s);
      if (t < sees.from || t >= sees.to) continue;
      for (int64_t g = 0; g < (stride[1] ? a_.G : 1); g++)
        if (mask[(k * a_.G + g) * stride[1] + s * stride[2]]) return true;
    }
    return false;
  }

  // Sets one row's scores with tokens that it does not see to −∞.
  void hide_in_row(int64_t b, int64_t k, int row, const int32_t* token, int count, float* scores) const {
    const Range sees = seen(row % a_.S);
    if (token[0] < sees.from || token[count - 1] >= sees.to)
      for (int t = 0; t < count; t++)
        if (token[t] < sees.from || token[t] >= sees.to) scores[t] = NOTHING;
    if (!a_.mask || shares_mask()) return;
    const uint8_t* mask = mask_of(b, k, row);
    if (is_dense(token, count)) {
      mask += token[0];
      for (int t = 0; t < count; t++) scores[t] = mask[t] ? scores[t] : NOTHING;
    } else {
      for (int t = 0; t < count; t++)
        if (!mask[token[t] * a_.mask_stride[3]]) scores[t] = NOTHING;
    }
  }

  // Sets one row's scores of `count` tokens from `first` on that the mask of all rows hides to −∞; blocks of other calls
  // leave such tokens out.
  void hide_shared(int64_t b, int64_t first, int count, float* scores) const {
    if (!shares_mask()) return;
    const uint8_t* mask = a_.mask + b * a_.mask_stride[0] + first * a_.mask_stride[3];
    if (a_.mask_stride[3] == 1)
      for (int t = 0; t < count; t++) scores[t] = mask[t] ? scores[t] : NOTHING;
    else
      for (int t = 0; t < count; t++) scores[t] = mask[t * a_.mask_stride[3]] ? scores[t] : NOTHING;
  }

#if HAS_LANES
  // Sets a group's scores with tokens that its rows do not see to −∞.
  void hide_in_group(int64_t b, int64_t k, int group, const int32_t* token, int count, float* scores) const {
    const auto leave = [&](int pair, __mmask16 seen) {
      store(scores + pair * W, chosen(seen, all(NOTHING), load(scores + pair * W)));
    };
    const int pairs = (count + 1) / 2;
    if (token[0] < seen(a_.S - 1).from || token[count - 1] >= seen(0).to) {
      alignas(64) int32_t from[W], to[W];
      for (int lane = 0; lane < W; lane++) {
        const Range sees = seen((group * SIDE + lane / 2) % a_.S);
        from[lane] = int32_t(sees.from), to[lane] = int32_t(sees.to);
      }
      for (int p = 0; p < pairs; p++) {
        int64_t both;
        memcpy(&both, token + 2 * p, 8);
        const __m512i tokens = _mm512_set1_epi64(both);
        leave(p, _mm512_cmpge_epi32_mask(tokens, _mm512_load_si512(from)) &
                     _mm512_cmplt_epi32_mask(tokens, _mm512_load_si512(to)));
      }
    }
    if (a_.mask && !shares_mask()) {
      alignas(64) uint64_t sees[SIDE];  // a bit for each of the block's tokens
      for (int r = 0; r < SIDE; r++) sees[r] = bits_of_mask(b, k, group * SIDE + r, token, count);
      const __m512i rows = _mm512_load_si512(sees);
      const __m512i first = _mm512_shuffle_epi32(rows, _MM_PERM_CCAA), last = _mm512_shuffle_epi32(rows, _MM_PERM_DDBB);
      for (int p = 0; p < pairs; p++) {
        const __m512i bit = _mm512_set1_epi64(int64_t((1ull | 2ull << 32) << (2 * p % 32)));
        leave(p, _mm512_test_epi32_mask(p < 16 ? first : last, bit));
      }
    }
    if (count % 2) leave(count / 2, 0x5555);
  }
#endif

 private:
  // Tokens that new token s may see, by the causal rule and the window.
  Range seen(int64_t s) const {
    const int64_t to = a_.causal ? a_.T - a_.S + s + 1 : a_.T;
    return {a_.window ? std::max<int64_t>(0, to - a_.window) : 0, std::max<int64_t>(0, to)};
  }

  // Whether all rows of a sequence share one mask; the tokens it hides are then left out of the blocks.
  bool shares_mask() const { return a_.mask && !a_.mask_stride[1] && !a_.mask_stride[2]; }

  const uint8_t* mask_of(int64_t b, int64_t k, int row) const {
    return a_.mask + b * a_.mask_stride[0] + (k * a_.G + row / a_.S) * a_.mask_stride[1] + row % a_.S * a_.mask_stride[2];
  }
  // Whether the mask of the block's tokens lies side by side in memory.
  bool is_dense(const int32_t* token, int count) const {
    return a_.mask_stride[3] == 1 && token[count - 1] - token[0] == count - 1;
  }

#if HAS_LANES
  // The block's tokens that a row's mask shows, one bit each.
  uint64_t bits_of_mask(int64_t b, int64_t k, int row, const int32_t* token, int count) const {
    if (row >= a_.G * a_.S) return 0;
    const uint8_t* mask = mask_of(b, k, row);
    if (is_dense(token, count)) {
      const __m512i bytes = _mm512_maskz_loadu_epi8(~0ull >> (64 - count), mask + token[0]);
      return _mm512_test_epi8_mask(bytes, bytes);
    }
    uint64_t bits = 0;
    for (int t = 0; t < count; t++) bits |= uint64_t(mask[token[t] * a_.mask_stride[3]] != 0) << t;
    return bits;
  }
#endif
};

}  // namespace
