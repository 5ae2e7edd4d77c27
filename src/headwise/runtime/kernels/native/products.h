// Products of query rows with a block of keys, and of their weights with a block of values.
//
// Scores and weights are [rows, BLOCK]; keys and values are given by pointers, so that a block can be any tokens. Many
// rows lie side by side in vectors, where the processor has wide ones.
#pragma once

#include <type_traits>

#include "processor.h"

namespace {

constexpr int BLOCK = 64;  // tokens at a time, at most

// How many accumulators, rows and vectors of columns fit into the registers.
constexpr int SUMS = W == 16 ? 16 : 8;
constexpr int SCORE_ROWS = 4;
constexpr int MIX_SUMS = W == 16 ? 24 : 9;

#if defined(__AVX512BF16__)
#define HAS_PAIRS 1  // products of two bfloat16 at a time
#else
#define HAS_PAIRS 0
#endif

// Prefetches memory that is soon read, a few cache lines at a time between products.
class Ahead {
 public:
  // Nothing.
  Ahead() = default;

  // Prefetches `count` rows of `bytes` bytes, `stride` bytes apart, in `steps` steps; into the first cache where they
  // are no more than `few` bytes, else into the second.
  Ahead(const void* first, int64_t stride, int64_t count, int64_t bytes, int64_t steps, int64_t few = 16384)
      : at_((const char*)first) {
    near_ = count * bytes <= few;
    if (stride == bytes) bytes *= count, count = 1;
    const int64_t lines = (bytes + 63) / 64;
    left_ = steps > 0 ? count * lines : 0;
    each_ = steps > 0 ? (left_ + steps - 1) / steps : 0;
    end_ = at_ + lines * 64;
    stride_ = stride, skip_ = stride - lines * 64;
  }
  INLINE void step() { near_ ? ask<3>() : ask<2>(); }

 private:
  template <int LOCALITY>
  INLINE void ask() {
    const int64_t now = std::min(each_, left_);
    left_ -= now;
    for (int64_t i = 0; i < now; i++) {
      __builtin_prefetch(at_, 0, LOCALITY);
      at_ += 64;
      if (at_ == end_) at_ += skip_, end_ += stride_;
    }
  }
  const char *at_ = nullptr, *end_ = nullptr;
  int64_t stride_ = 0, skip_ = 0, left_ = 0, each_ = 0;
  bool near_ = true;
};

// Calls f(first row, size) for blocks of rows of nearly one size, at most MOST; the size is a compile-time constant.
template <int MOST, class F>
INLINE void in_blocks(int rows, F f) {
  const int blocks = (rows + MOST - 1) / MOST;
  for (int i = 0, row = 0; i < blocks; i++) {
    const int size = (rows - row) / (blocks - i);
    with_constant<MOST>(size, [&](auto SIZE) __attribute__((always_inline)) { f(row, SIZE); });
    row += size;
  }
}

// --- arithmetic --------------------------------------------------------------------------------------------------

// Arithmetic in float, whatever the stored type.
struct Single {
  using Query = float;
  using Weight = float;
  using Operand = Vector;
  static constexpr int DIMS = W;    // dims of a key in an operand
  static constexpr int TOKENS = 1;  // tokens of values in an operand
  static constexpr int MIX_ROWS = W == 16 ? 6 : 4;
  template <class T>
  static INLINE Operand load(const T* at) {
    return ::load(at);
  }
  template <class T>
  static INLINE Operand load(const T* at, int count) {
    return ::load(at, count);
  }
  static INLINE void add(Vector& to, Operand a, Operand b) { to += a * b; }
  static INLINE Operand weight(const float* at) { return all(*at); }
  template <int COLUMNS, class T>
  static INLINE void columns(const T* const* value, int64_t d, Operand* out) {
    UNROLL for (int c = 0; c < COLUMNS; c++)
      out[c] = ::load(*value + d + c * W);
  }
  template <class T>
  static INLINE void last_columns(const T* const* value, int64_t d, int count, Operand* out) {
    *out = ::load(*value + d, count);
  }
};

#if HAS_PAIRS
INLINE void store(bfloat16* at, Vector x) { _mm256_storeu_si256((__m256i*)at, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }

// Arithmetic on two bfloat16 at a time: neighbouring dims of keys, neighbouring tokens of values.
struct Paired {
  using Query = bfloat16;
  using Weight = bfloat16;
  using Operand = __m512bh;
  static constexpr int DIMS = 2 * W;
  static constexpr int TOKENS = 2;
  static constexpr int MIX_ROWS = 8;
  static INLINE Operand load(const bfloat16* at) { return (Operand)_mm512_loadu_si512(at); }
  static INLINE Operand load(const bfloat16* at, int count) {
    return (Operand)_mm512_maskz_loadu_epi16((1u << count) - 1, at);
  }
  static INLINE void add(Vector& to, Operand a, Operand b) { to = (Vector)_mm512_dpbf16_ps((__m512)to, a, b); }
  static INLINE Operand weight(const bfloat16* at) {
    int32_t pair;
    memcpy(&pair, at, 4);
    return (Operand)_mm512_set1_epi32(pair);
  }
  template <int COLUMNS>
  static INLINE void columns(const bfloat16* const* value, int64_t d, Operand* out) {
    static_assert(COLUMNS % 2 == 0);
    UNROLL for (int c = 0; c < COLUMNS; c += 2)
      weave(load(value[0] + d + c * W), load(value[1] + d + c * W), out + c);
  }
  static INLINE void last_columns(const bfloat16* const* value, int64_t d, int count, Operand* out) {
    weave(load(value[0] + d, count), load(value[1] + d, count), out);
  }

 private:
  static INLINE void weave(Operand even, Operand odd, Operand* out) {
    alignas(64) static constexpr uint16_t FIRST[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i first = _mm512_load_si512(FIRST);
    const __m512i last = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    out[0] = (Operand)_mm512_permutex2var_epi16((__m512i)even, first, (__m512i)odd);
    out[1] = (Operand)_mm512_permutex2var_epi16((__m512i)even, last, (__m512i)odd);
  }
};
#endif

// --- scores ------------------------------------------------------------------------------------------------------

// ROWS · TOKENS dot products of D numbers; queries are padded with zeros to a multiple of an operand.
template <class A, int ROWS, int TOKENS, class T>
INLINE void dot(const typename A::Query* query, const T* const* key, int64_t D, float* scores) {
  static_assert(ROWS * TOKENS <= SUMS);
  const int64_t whole = D / A::DIMS * A::DIMS, padded = whole == D ? D : whole + A::DIMS;
  Vector acc[SUMS];
  UNROLL for (int i = 0; i < SUMS; i++)
    acc[i] = Vector{};
  const T* at[TOKENS];
  UNROLL for (int t = 0; t < TOKENS; t++)
    at[t] = key[t];
  const auto add = [&](int64_t d, const typename A::Operand* x) __attribute__((always_inline)) {
    UNROLL for (int r = 0; r < ROWS; r++) {
      typename A::Operand y = A::load(query + r * padded + d);
      if constexpr (ROWS > 1) IN_REGISTER(y);
      UNROLL for (int t = 0; t < TOKENS; t++)
        A::add(acc[r * TOKENS + t], y, x[t]);
    }
  };
  typename A::Operand x[TOKENS];
  for (int64_t d = 0; d < whole; d += A::DIMS) {
    UNROLL for (int t = 0; t < TOKENS; t++)
      x[t] = A::load(at[t] + d);
    add(d, x);
  }
  if (whole < D) {
    UNROLL for (int t = 0; t < TOKENS; t++)
      x[t] = A::load(at[t] + whole, int(D - whole));
    add(whole, x);
  }
  float flat[SUMS];
  UNROLL for (int i = 0; i < SUMS; i += W)
    store(flat + i, sums(acc + i));
  UNROLL for (int r = 0; r < ROWS; r++)
    memcpy(scores + r * BLOCK, flat + r * TOKENS, TOKENS * sizeof(float));
}

template <class A, int ROWS, class T>
INLINE void dots(const typename A::Query* query, const T* const* key, int count, int64_t D, float* scores,
                 Ahead& shared) {
  Ahead ahead = shared;
  constexpr int TOKENS = ROWS == 3 ? SUMS / 4 : SUMS / ROWS;
  int t = 0;
  for (; t + TOKENS <= count; t += TOKENS) {
    ahead.step();
    dot<A, ROWS, TOKENS>(query, key + t, D, scores + t);
  }
  for (; t < count; t++) dot<A, ROWS, 1>(query, key + t, D, scores + t);
  shared = ahead;
}

INLINE int64_t steps_of_scores(int rows, int count) {
  if (!rows) return 0;
  const int64_t blocks = (rows + SCORE_ROWS - 1) / SCORE_ROWS;
  const int tokens = blocks > 1 ? SUMS / SCORE_ROWS : rows == 3 ? SUMS / 4 : SUMS / rows;
  return blocks * (count / tokens);
}

// scores[r, t] of all rows with the block's keys. Keys are taken a few at a time: these stay in the first cache while
// the queries come from the second.
template <class A, class T>
void score(const typename A::Query* query, int rows, const T* const* key, int count, int64_t D, float* scores,
           Ahead& ahead) {
  constexpr int FEW = SUMS / SCORE_ROWS;
  const int together = rows <= SCORE_ROWS ? count : FEW;
  const int64_t padded = (D + A::DIMS - 1) / A::DIMS * A::DIMS;
  for (int t = 0; t < count; t += together)
    in_blocks<SCORE_ROWS>(rows, [&](int row, auto ROWS) {
      dots<A, ROWS()>(query + row * padded, key + t, std::min(together, count - t), D, scores + row * BLOCK + t, ahead);
    });
}

// --- mixtures ----------------------------------------------------------------------------------------------------

// Where a row's weight of a token, or of a pair of tokens, is.
template <class Weight>
struct Weights {
  const Weight* at;
  int64_t row, token;
};

// out[r, d …] = keep[r] · out[r, d …] + Σ weights[r, t] · value[t, d …] for COLUMNS vectors of columns; when IS_LAST,
// only `left` columns are there. Rows of out are `stride` apart.
template <class A, int ROWS, int COLUMNS, bool IS_LAST, class T>
INLINE void mix_columns(float* out, int64_t stride, Weights<typename A::Weight> weights, const float* keep,
                        const T* const* value, int count, int64_t d, int left, Ahead& shared) {
  Ahead ahead = shared;  // a local copy can be in registers
  Vector acc[ROWS][COLUMNS];
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL
    for (int c = 0; c < COLUMNS; c++) acc[r][c] = load(out + r * stride + d + c * W) * keep[r];
  const typename A::Weight* weight = weights.at;
  for (int t = 0; t < count; t += A::TOKENS, weight += A::TOKENS * weights.token) {
    ahead.step();
    typename A::Operand x[COLUMNS];
    if constexpr (IS_LAST)
      A::last_columns(value + t, d, left, x);
    else
      A::template columns<COLUMNS>(value + t, d, x);
    UNROLL for (int r = 0; r < ROWS; r++) {
      const typename A::Operand y = A::weight(weight + r * weights.row);
      UNROLL for (int c = 0; c < COLUMNS; c++)
        A::add(acc[r][c], y, x[c]);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL
    for (int c = 0; c < COLUMNS; c++) store(out + r * stride + d + c * W, acc[r][c]);
  shared = ahead;
}

// The most vectors of columns that are summed together: with few rows more registers are free.
template <class A>
constexpr int wide(int rows) {
  return std::clamp(MIX_SUMS / rows / A::TOKENS * A::TOKENS, A::TOKENS, 8);
}

template <class A>
INLINE int64_t steps_of_mixture(int rows, int count, int64_t V) {
  if (!rows) return 0;
  const int blocks = (rows + A::MIX_ROWS - 1) / A::MIX_ROWS, most = (rows + blocks - 1) / blocks;
  const int64_t columns = V / W / A::TOKENS, together = wide<A>(most) / A::TOKENS;
  return blocks * ((columns + together - 1) / together) * ((count + A::TOKENS - 1) / A::TOKENS);
}

// out[r] = keep[r] · out[r] + Σ weights[r, t] · value[t]; rows of out are padded to a multiple of an operand.
template <class A, class T>
void mix(float* out, int rows, Weights<typename A::Weight> weights, const float* keep, const T* const* value, int count,
         int64_t V, Ahead& ahead) {
  constexpr int64_t OPERAND = A::TOKENS * W;
  const int64_t stride = (V + OPERAND - 1) / OPERAND * OPERAND;
  in_blocks<A::MIX_ROWS>(rows, [&](int row, auto ROWS) {
    const Weights<typename A::Weight> block{weights.at + row * weights.row, weights.row, weights.token};
    const auto columns = [&](int64_t d, auto COLUMNS, auto IS_LAST) {
      mix_columns<A, ROWS(), COLUMNS(), IS_LAST()>(out + row * stride, stride, block, keep + row, value, count, d,
                                                   int(V - d), ahead);
    };
    in_blocks<wide<A>(ROWS()) / A::TOKENS>(int(V / OPERAND), [&](int operand, auto OPERANDS) {
      columns(operand * OPERAND, std::integral_constant<int, OPERANDS() * A::TOKENS>(), std::false_type());
    });
    if (V % OPERAND) columns(V / OPERAND * OPERAND, std::integral_constant<int, A::TOKENS>(), std::true_type());
  });
}

// --- rows side by side -------------------------------------------------------------------------------------------

// Lanes 2 r and 2 r + 1 of a vector belong to row r of eight. Eight bytes of a key, broadcast, are multiplied by the
// same numbers of all eight queries at once, so that no key is transposed; the softmax works in all lanes too, and adds
// them up only at the end. The scores of such a group are [BLOCK / 2, 8, 2]: two neighbouring tokens in a row's two
// lanes.
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define HAS_LANES 1
#else
#define HAS_LANES 0
#endif

#if HAS_LANES
constexpr int SIDE = 8;    // rows in a vector
constexpr int SCORED = 8;  // tokens whose scores are acc together

// Numbers of a key that are broadcast at once.
template <class A>
constexpr int AT_ONCE = 8 / sizeof(typename A::Query);

// Swaps the two lanes of each row.
INLINE Vector swapped(Vector x) { return (Vector)_mm512_shuffle_ps((__m512)x, (__m512)x, 0xb1); }
// Lanes of b where the bit is set, else of a.
INLINE Vector chosen(__mmask16 is_b, Vector a, Vector b) {
  return (Vector)_mm512_mask_blend_ps(is_b, (__m512)a, (__m512)b);
}

// Scores of GROUPS groups of eight rows with the block's keys, whose number is a multiple of SCORED. Queries are
// [GROUPS, D / AT_ONCE, 8, AT_ONCE].
template <class A, int GROUPS>
INLINE void score_groups(const typename A::Query* query, const typename A::Query* const* key, int count, int64_t D,
                         float* scores, Ahead& shared) {
  Ahead ahead = shared;                        // a local copy can be in registers
  constexpr int CHAINS = GROUPS == 1 ? 2 : 1;  // independent sums, so that no addition waits for the one before
  constexpr int DIMS = CHAINS * AT_ONCE<A>;
  for (int t = 0; t < count; t += SCORED) {
    const typename A::Query* at[SCORED];
    UNROLL for (int s = 0; s < SCORED; s++)
      at[s] = key[t + s];
    Vector acc[CHAINS][GROUPS][SCORED];
    UNROLL for (int c = 0; c < CHAINS; c++) UNROLL
      for (int g = 0; g < GROUPS; g++) UNROLL
        for (int s = 0; s < SCORED; s++) acc[c][g][s] = Vector{};
    const auto add = [&](int64_t d, int c) __attribute__((always_inline)) {
      typename A::Operand y[GROUPS];
      UNROLL for (int g = 0; g < GROUPS; g++)
        y[g] = A::load(query + (g * D + d) * SIDE);
      UNROLL for (int s = 0; s < SCORED; s++) {
        int64_t bytes;
        memcpy(&bytes, at[s] + d, 8);
        typename A::Operand x = (typename A::Operand)_mm512_set1_epi64(bytes);
        IN_REGISTER(x);
        UNROLL for (int g = 0; g < GROUPS; g++)
          A::add(acc[c][g][s], y[g], x);
      }
    };
    int64_t d = 0;
    for (; d + DIMS <= D; d += DIMS) {
      if (d % A::DIMS == 0) ahead.step();
      UNROLL for (int c = 0; c < CHAINS; c++)
        add(d + c * AT_ONCE<A>, c);
    }
    if (d < D) add(d, 0);
    UNROLL for (int g = 0; g < GROUPS; g++) UNROLL
      for (int s = 0; s < SCORED; s += 2) {
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
INLINE void store_weights(bfloat16* at, int64_t, Vector weights) { store(at, weights); }
#endif

// A group's scores become weights, stored among those of all rows. `high` and `sum` are the softmax's highest score and
// sum of weights so far, in both lanes of each row; `keep` is what the partial results so far are multiplied by.
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

#endif

}  // namespace
