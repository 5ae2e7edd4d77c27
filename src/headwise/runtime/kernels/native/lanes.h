// Eight query rows side by side in a vector, for many rows.
//
// Lanes 2 r and 2 r + 1 of a vector belong to row r of eight. Eight bytes of a key, broadcast, are multiplied by the same
// numbers of all eight queries at once, so that no key is transposed; the softmax works in all lanes too, and adds them up
// only at the end. The scores of such a group are [BLOCK / 2, 8, 2]: two neighbouring tokens in a row's two lanes.
#pragma once

#include "tiles.h"

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define HAS_LANES 1
#else
#define HAS_LANES 0
#endif

#if HAS_LANES
namespace {

constexpr int SIDE = 8;    // rows in a vector
constexpr int SCORED = 8;  // tokens whose scores are acc together

// Numbers of a key that are broadcast at once.
template <class A>
constexpr int AT_ONCE = 8 / sizeof(typename A::Query);

// Swaps the two lanes of each row.
INLINE Vector swapped(Vector x) { return (Vector)_mm512_shuffle_ps((__m512)x, (__m512)x, 0xb1); }
// Lanes of b where the bit is set, else of a.
INLINE Vector chosen(__mmask16 is_b, Vector a, Vector b) { return (Vector)_mm512_mask_blend_ps(is_b, (__m512)a, (__m512)b); }

// Scores of GROUPS groups of eight rows with the block's keys, whose number is a multiple of SCORED. Queries are
// [GROUPS, D / AT_ONCE, 8, AT_ONCE].
template <class A, int GROUPS>
INLINE void score_groups(const typename A::Query* query, const typename A::Query* const* key, int count, int64_t D,
                         float* scores, Ahead& shared) {
  Ahead ahead = shared;  // a local copy can be in registers
  constexpr int CHAINS = GROUPS == 1 ? 2 : 1;  // independent sums, so that no addition waits for the one before
  constexpr int DIMS = CHAINS * AT_ONCE<A>;
  for (int t = 0; t < count; t += SCORED) {
    const typename A::Query* at[SCORED];
    UNROLL for (int s = 0; s < SCORED; s++) at[s] = key[t + s];
    Vector acc[CHAINS][GROUPS][SCORED];
    UNROLL for (int c = 0; c < CHAINS; c++)
      UNROLL for (int g = 0; g < GROUPS; g++)
        UNROLL for (int s = 0; s < SCORED; s++) acc[c][g][s] = Vector{};
    const auto add = [&](int64_t d, int c) __attribute__((always_inline)) {
      typename A::Operand y[GROUPS];
      UNROLL for (int g = 0; g < GROUPS; g++) y[g] = A::load(query + (g * D + d) * SIDE);
      UNROLL for (int s = 0; s < SCORED; s++) {
        int64_t bytes;
        memcpy(&bytes, at[s] + d, 8);
        typename A::Operand x = (typename A::Operand)_mm512_set1_epi64(bytes);
        IN_REGISTER(x);
        UNROLL for (int g = 0; g < GROUPS; g++) A::add(acc[c][g][s], y[g], x);
      }
    };
    int64_t d = 0;
    for (; d + DIMS <= D; d += DIMS) {
      if (d % A::DIMS == 0) ahead.step();
      UNROLL for (int c = 0; c < CHAINS; c++) add(d + c * AT_ONCE<A>, c);
    }
    if (d < D) add(d, 0);
    UNROLL for (int g = 0; g < GROUPS; g++)
      UNROLL for (int s = 0; s < SCORED; s += 2) {
        Vector even = acc[0][g][s], odd = acc[0][g][s + 1];
        if constexpr (CHAINS == 2) even += acc[1][g][s], odd += acc[1][g][s + 1];
        store(scores + (g * BLOCK + t + s) * SIDE, chosen(0xaaaa, even, odd) + swapped(chosen(0x5555, even, odd)));
      }
  }
  shared = ahead;
}

template <class A>
INLINE int64_t steps_of_groups(int groups, int count, int64_t D) {
  return (groups + 1) / 2 * ((count + SCORED - 1) / SCORED) * ((D + A::DIMS - 1) / A::DIMS);
}

// Scores of all groups; the keys are padded to a multiple of SCORED with the last one.
template <class A>
void score_side_by_side(const typename A::Query* query, int groups, const typename A::Query** key, int count, int64_t D,
                        float* scores, Ahead& ahead) {
  for (int t = count; t % SCORED; t++) key[t] = key[count - 1];
  in_blocks<2>(groups, [&](int group, auto GROUPS) {
    score_groups<A, GROUPS()>(query + group * SIDE * D, key, count, D, scores + group * SIDE * BLOCK, ahead);
  });
}

// Stores the weights of two tokens for eight rows, in [BLOCK, rows] or, where products take pairs of tokens,
// [BLOCK / 2, rows, 2].
INLINE void store_weights(float* at, int64_t rows, Vector weights) {
  const __m512i apart = _mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512 both = _mm512_permutexvar_ps(apart, (__m512)weights);
  _mm256_storeu_ps(at, _mm512_castps512_ps256(both));
  _mm256_storeu_ps(at + rows, _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(both), 1)));
}
#if HAS_PAIRS
INLINE void store_weights(bfloat16* at, int64_t, Vector weights) {
  _mm256_storeu_si256((__m256i*)at, (__m256i)_mm512_cvtneps_pbh((__m512)weights));
}
#endif

// A group's scores become weights, stored among those of all rows. `high` and `sum` are the softmax's highest score and sum
// of weights so far, in both lanes of each row; `keep` is what the partial results so far are multiplied by.
template <class Weight>
INLINE void weigh_group(const float* scores, int count, float scale, float* high, float* sum, Weight* weights,
                        int64_t rows, float* keep) {
  const int pairs = (count + 1) / 2;
  Vector top = load(scores);
  for (int p = 1; p < pairs; p++) top = larger(top, load(scores + p * W));
  top = larger(top, swapped(top)) * scale;
  Vector highest = load(high), sum_of = load(sum), kept = all(1.0f);
  if (const __mmask16 is_higher = _mm512_cmp_ps_mask((__m512)top, (__m512)highest, _CMP_GT_OQ)) {
    const Vector raised = chosen(is_higher, highest, top);
    kept = chosen(is_higher, kept, power_of_two<false>(highest - raised));
    highest = raised;
    sum_of *= kept;
    store(high, highest);
  }
  const __m512i even = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 14, 12, 10, 8, 6, 4, 2, 0);
  _mm256_storeu_ps(keep, _mm512_castps512_ps256(_mm512_permutexvar_ps(even, (__m512)kept)));
  // Nothing seen yet: all weights are 0.
  const __mmask16 is_nothing = _mm512_cmp_ps_mask((__m512)highest, (__m512)all(NOTHING), _CMP_EQ_OQ);
  const Vector base = chosen(is_nothing, highest, Vector{});
  for (int p = 0; p < pairs; p++) {
    const Vector pair = power_of_two<!std::is_same_v<Weight, float>>(load(scores + p * W) * scale - base);
    sum_of += pair;
    store_weights(weights + 2 * p * rows, rows, pair);
  }
  store(sum, sum_of);
}

}  // namespace
#endif
