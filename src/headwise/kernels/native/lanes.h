// Eight query rows side by side, for many rows of bfloat16.
//
// Lanes 2 r and 2 r + 1 of a vector are row r of eight. Four numbers of a key, broadcast, meet the same four of all
// eight queries in one product; and the softmax goes on in all lanes without adding any up. Scores are
// [rows / 8, BLOCK / 2, 8, 2], two neighbouring tokens in a row's two lanes; weights are [BLOCK / 2, rows, 2].
#pragma once

#include "tiles.h"

#if HAS_PAIRS
namespace {

constexpr int SIDE = 8;    // rows in a vector
constexpr int SCORED = 8;  // tokens whose scores are made together
constexpr int64_t DIMS_A_STEP = 32;

// A row's two lanes the other way round.
INLINE Vector swapped(Vector x) { return (Vector)_mm512_shuffle_ps((__m512)x, (__m512)x, 0xb1); }
// Lanes of b where the bit is set, else of a.
INLINE Vector chosen(__mmask16 is_b, Vector a, Vector b) { return (Vector)_mm512_mask_blend_ps(is_b, (__m512)a, (__m512)b); }

// Rows of eight, padded with zeros, as [rows / 8, D / 4, 8, 4]; `row(r)` is where row r lies.
template <class F>
void set_side_by_side(int rows, int64_t D, F row, bfloat16* made) {
  std::fill_n(made, (rows + SIDE - 1) / SIDE * SIDE * D, bfloat16{0});
  for (int r = 0; r < rows; r++)
    for (int64_t d = 0; d < D; d += 4) memcpy(made + r / SIDE * SIDE * D + d * SIDE + r % SIDE * 4, row(r) + d, 8);
}

// Scores of GROUPS · 8 rows with the block's keys, of which there are whole SCORED.
template <int GROUPS>
INLINE void score_groups(const bfloat16* query, const bfloat16* const* key, int count, int64_t D, float* scores,
                         Ahead& ahead) {
  constexpr int CHAINS = GROUPS == 1 ? 2 : 1;  // sums whose turn comes round more slowly than an addition takes
  for (int t = 0; t < count; t += SCORED) {
    const bfloat16* at[SCORED];
    UNROLL for (int s = 0; s < SCORED; s++) at[s] = key[t + s];
    Vector made[CHAINS][GROUPS][SCORED];
    UNROLL for (int c = 0; c < CHAINS; c++)
      UNROLL for (int g = 0; g < GROUPS; g++)
        UNROLL for (int s = 0; s < SCORED; s++) made[c][g][s] = Vector{};
    const auto add = [&](int64_t d, int c) __attribute__((always_inline)) {
      __m512bh y[GROUPS];
      UNROLL for (int g = 0; g < GROUPS; g++) y[g] = Paired::load(query + (g * D + d) * SIDE);
      UNROLL for (int s = 0; s < SCORED; s++) {
        int64_t four;
        memcpy(&four, at[s] + d, 8);
        __m512bh x = (__m512bh)_mm512_set1_epi64(four);
        IN_REGISTER(x);
        UNROLL for (int g = 0; g < GROUPS; g++) Paired::add(made[c][g][s], y[g], x);
      }
    };
    int64_t d = 0;
    for (; d + CHAINS * 4 <= D; d += CHAINS * 4) {
      if (d % DIMS_A_STEP == 0) ahead.step();
      UNROLL for (int c = 0; c < CHAINS; c++) add(d + c * 4, c);
    }
    if (d < D) add(d, 0);
    UNROLL for (int g = 0; g < GROUPS; g++)
      UNROLL for (int s = 0; s < SCORED; s += 2) {
        Vector even = made[0][g][s], odd = made[0][g][s + 1];
        if constexpr (CHAINS == 2) even += made[1][g][s], odd += made[1][g][s + 1];
        store(scores + (g * BLOCK + t + s) * SIDE, chosen(0xaaaa, even, odd) + swapped(chosen(0x5555, even, odd)));
      }
  }
}

INLINE int64_t steps_of_groups(int groups, int count, int64_t D) {
  return (groups + 1) / 2 * ((count + SCORED - 1) / SCORED) * ((D + DIMS_A_STEP - 1) / DIMS_A_STEP);
}

// Scores of all rows; keys are filled up to whole SCORED with the last one.
inline void score_side_by_side(const bfloat16* query, int groups, const bfloat16** key, int count, int64_t D,
                               float* scores, Ahead& ahead) {
  for (int t = count; t % SCORED; t++) key[t] = key[count - 1];
  in_blocks<2>(groups, [&](int group, auto GROUPS) {
    score_groups<GROUPS()>(query + group * SIDE * D, key, count, D, scores + group * SIDE * BLOCK, ahead);
  });
}

// What is known of eight rows' softmax so far, in both lanes of each.
struct Softmax {
  float *high, *sum;
};

// A group's scores become weights, the rows' two lanes a pair of neighbouring tokens; `keep` is told how much of what
// was found before them stays. Weights of a pair of tokens are `stride` numbers after the last pair's.
INLINE void weigh_group(const float* scores, int count, float scale, Softmax known, bfloat16* weights, int64_t stride,
                        float* keep) {
  const int pairs = (count + 1) / 2;
  Vector top = load(scores);
  for (int p = 1; p < pairs; p++) top = larger(top, load(scores + p * W));
  top = larger(top, swapped(top)) * scale;
  Vector high = load(known.high), sum = load(known.sum);
  const __mmask16 is_higher = _mm512_cmp_ps_mask((__m512)top, (__m512)high, _CMP_GT_OQ);
  Vector kept = all(1.0f);
  if (is_higher) {
    const Vector raised = chosen(is_higher, high, top);
    kept = chosen(is_higher, kept, power_of_two<false>(high - raised));
    high = raised;
    sum *= kept;
    store(known.high, high);
  }
  const __m512i even = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 14, 12, 10, 8, 6, 4, 2, 0);
  _mm256_storeu_ps(keep, _mm512_castps512_ps256(_mm512_permutexvar_ps(even, (__m512)kept)));
  // Nothing seen yet: all weights are 0.
  const Vector base = chosen(_mm512_cmp_ps_mask((__m512)high, (__m512)all(NOTHING), _CMP_EQ_OQ), high, Vector{});
  for (int p = 0; p < pairs; p++) {
    const Vector made = power_of_two<true>(load(scores + p * W) * scale - base);
    sum += made;
    *(__m256bh*)(weights + p * stride) = _mm512_cvtneps_pbh((__m512)made);
  }
  store(known.sum, sum);
}

}  // namespace
#endif
