// Products of a few query rows with a block of keys, and of their weights with a block of values.
//
// Scores and weights are [rows, BLOCK]; a key or value is where its pointer says, so that any tokens make a block.
#pragma once

#include <type_traits>

#include "vectors.h"

namespace {

constexpr int BLOCK = 64;  // tokens at a time, at most

// How many accumulators, rows and vectors of columns fit into the registers.
constexpr int SUMS = W == 16 ? 16 : 8;
constexpr int SCORE_ROWS = W == 16 ? 4 : 2;
constexpr int MIX_ROWS = W == 16 ? 6 : 3;
constexpr int MIX_COLUMNS = W == 16 ? 4 : 3;

#if defined(__AVX512BF16__)
#define HAS_PAIRS 1  // products of two bfloat16 at a time
#else
#define HAS_PAIRS 0
#endif

// Memory that is soon read, asked for a few cache lines at a time between products.
class Ahead {
 public:
  // Rows of so many bytes, in so many steps; into the first cache where they are few enough, else into the second.
  Ahead(const void* const* rows, int count, int64_t bytes, int64_t steps)
      : row_((const char* const*)rows), end_(row_ + (bytes ? count : 0)), bytes_(bytes), near_(count * bytes <= 16384) {
    const int64_t lines = count * ((bytes + 63) / 64);
    each_ = steps > 0 ? (lines + steps - 1) / steps : 0;
  }
  INLINE void step() {
    for (int64_t left = row_ < end_ ? each_ : 0; left > 0;) {
      const char* line = *row_ + at_;
      const int64_t run = std::min(left, (bytes_ - at_ + 63) / 64);
      if (near_)
        for (int64_t i = 0; i < run; i++) __builtin_prefetch(line + 64 * i, 0, 3);
      else
        for (int64_t i = 0; i < run; i++) __builtin_prefetch(line + 64 * i, 0, 2);
      left -= run;
      at_ += 64 * run;
      if (at_ >= bytes_) {
        at_ = 0;
        if (++row_ == end_) break;
      }
    }
  }

 private:
  const char* const* row_;
  const char* const* end_;
  int64_t bytes_, at_ = 0, each_;
  bool near_;
};

// f(first row, how many) over blocks of nearly one size, at most MOST; the size is known when compiled.
template <int MOST, class F>
INLINE void in_blocks(int rows, F f) {
  const int blocks = (rows + MOST - 1) / MOST;
  for (int i = 0, row = 0; i < blocks; i++) {
    const int size = (rows - row) / (blocks - i);
    switch (size) {
      case 1: f(row, std::integral_constant<int, 1>()); break;
      case 2: if constexpr (MOST >= 2) f(row, std::integral_constant<int, 2>()); break;
      case 3: if constexpr (MOST >= 3) f(row, std::integral_constant<int, 3>()); break;
      case 4: if constexpr (MOST >= 4) f(row, std::integral_constant<int, 4>()); break;
      case 5: if constexpr (MOST >= 5) f(row, std::integral_constant<int, 5>()); break;
      case 6: if constexpr (MOST >= 6) f(row, std::integral_constant<int, 6>()); break;
    }
    row += size;
  }
}

// --- arithmetic --------------------------------------------------------------------------------------------------

// In float, whatever the numbers are stored as.
struct Single {
  using Query = float;
  using Weight = float;
  using Operand = Vector;
  static constexpr int DIMS = W;    // of keys, an operand
  static constexpr int TOKENS = 1;  // of values, an operand
  template <class T>
  static INLINE Operand load(const T* at) { return ::load(at); }
  static INLINE void add(Vector& to, Operand a, Operand b) { to += a * b; }
  static INLINE Operand weight(const float* at) { return all(*at); }
  template <int COLUMNS, class T>
  static INLINE void columns(const T* const* value, int64_t d, Operand* made) {
    UNROLL for (int c = 0; c < COLUMNS; c++) made[c] = ::load(*value + d + c * W);
  }
};

#if HAS_PAIRS
// Two bfloat16 at a time: neighbouring dims of keys, neighbouring tokens of values.
struct Paired {
  using Query = bfloat16;
  using Weight = bfloat16;
  using Operand = __m512bh;
  static constexpr int DIMS = 2 * W;
  static constexpr int TOKENS = 2;
  static INLINE Operand load(const bfloat16* at) { return (Operand)_mm512_loadu_si512(at); }
  static INLINE void add(Vector& to, Operand a, Operand b) { to = (Vector)_mm512_dpbf16_ps((__m512)to, a, b); }
  static INLINE Operand weight(const bfloat16* at) {
    int32_t pair;
    memcpy(&pair, at, 4);
    return (Operand)_mm512_set1_epi32(pair);
  }
  template <int COLUMNS>
  static INLINE void columns(const bfloat16* const* value, int64_t d, Operand* made) {
    static_assert(COLUMNS % 2 == 0);
    alignas(64) static constexpr uint16_t FIRST[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i first = _mm512_load_si512(FIRST);
    const __m512i last = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    UNROLL for (int c = 0; c < COLUMNS; c += 2) {
      const __m512i even = _mm512_loadu_si512(value[0] + d + c * W), odd = _mm512_loadu_si512(value[1] + d + c * W);
      made[c] = (Operand)_mm512_permutex2var_epi16(even, first, odd);
      made[c + 1] = (Operand)_mm512_permutex2var_epi16(even, last, odd);
    }
  }
};
#endif

// --- scores ------------------------------------------------------------------------------------------------------

// ROWS · TOKENS dot products of D numbers.
template <class A, int ROWS, int TOKENS, class T>
INLINE void dot(const typename A::Query* query, const T* const* key, int64_t D, float* scores) {
  static_assert(ROWS * TOKENS <= SUMS);
  Vector made[SUMS];
  UNROLL for (int i = 0; i < SUMS; i++) made[i] = Vector{};
  const T* at[TOKENS];
  UNROLL for (int t = 0; t < TOKENS; t++) at[t] = key[t];
  for (int64_t d = 0; d < D; d += A::DIMS) {
    typename A::Operand x[TOKENS];
    UNROLL for (int t = 0; t < TOKENS; t++) x[t] = A::load(at[t] + d);
    UNROLL for (int r = 0; r < ROWS; r++) {
      typename A::Operand y = A::load(query + r * D + d);
      if constexpr (ROWS > 1) IN_REGISTER(y);
      UNROLL for (int t = 0; t < TOKENS; t++) A::add(made[r * TOKENS + t], y, x[t]);
    }
  }
  float flat[SUMS];
  UNROLL for (int i = 0; i < SUMS; i += W) store(flat + i, sums(made + i));
  UNROLL for (int r = 0; r < ROWS; r++) memcpy(scores + r * BLOCK, flat + r * TOKENS, TOKENS * sizeof(float));
}

template <class A, int ROWS, class T>
INLINE void dots(const typename A::Query* query, const T* const* key, int count, int64_t D, float* scores,
                 Ahead& ahead) {
  constexpr int TOKENS = ROWS == 3 ? SUMS / 4 : SUMS / ROWS;
  int t = 0;
  for (; t + TOKENS <= count; t += TOKENS) {
    ahead.step();
    dot<A, ROWS, TOKENS>(query, key + t, D, scores + t);
  }
  for (; t < count; t++) dot<A, ROWS, 1>(query, key + t, D, scores + t);
}

INLINE int64_t steps_of_scores(int rows, int count) {
  const int64_t blocks = (rows + SCORE_ROWS - 1) / SCORE_ROWS;
  const int tokens = blocks > 1 ? SUMS / SCORE_ROWS : rows == 3 ? SUMS / 4 : SUMS / rows;
  return blocks * (count / tokens);
}

// scores[r, t] of all rows with the block's keys. A few keys stay in the first cache, queries come from the second.
template <class A, class T>
void score(const typename A::Query* query, int rows, const T* const* key, int count, int64_t D, float* scores,
           Ahead& ahead) {
  constexpr int FEW = SUMS / SCORE_ROWS;
  const int together = rows <= SCORE_ROWS ? count : FEW;
  for (int t = 0; t < count; t += together)
    in_blocks<SCORE_ROWS>(rows, [&](int row, auto ROWS) {
      dots<A, ROWS()>(query + row * D, key + t, std::min(together, count - t), D, scores + row * BLOCK + t, ahead);
    });
}

constexpr int64_t PANEL_DIMS_A_STEP = 8;

INLINE int64_t steps_of_panel(int rows, int64_t D) { return (rows + 5) / 6 * (D / PANEL_DIMS_A_STEP); }

#if HAS_PAIRS
// 16 rows of 16 words as 16 columns, each BLOCK words after the last.
INLINE void turn(const bfloat16* const* rows, int64_t d, uint32_t* made) {
  __m512 a[16], b[16];
  UNROLL for (int i = 0; i < 16; i++) a[i] = (__m512)_mm512_loadu_si512(rows[i] + d);
  UNROLL for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  // a[4 i + j] becomes column j of each four, of rows 4 i … 4 i + 3
  UNROLL for (int i = 0; i < 16; i += 4)
    UNROLL for (int j = 0; j < 2; j++) {
      a[i + 2 * j] = (__m512)_mm512_unpacklo_pd((__m512d)b[i + j], (__m512d)b[i + j + 2]);
      a[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd((__m512d)b[i + j], (__m512d)b[i + j + 2]);
    }
  UNROLL for (int j = 0; j < 4; j++) {
    const __m512 even = _mm512_shuffle_f32x4(a[j], a[4 + j], 0x88), odd = _mm512_shuffle_f32x4(a[j], a[4 + j], 0xdd);
    const __m512 even_last = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0x88);
    const __m512 odd_last = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0xdd);
    _mm512_storeu_ps(made + j * BLOCK, _mm512_shuffle_f32x4(even, even_last, 0x88));
    _mm512_storeu_ps(made + (4 + j) * BLOCK, _mm512_shuffle_f32x4(odd, odd_last, 0x88));
    _mm512_storeu_ps(made + (8 + j) * BLOCK, _mm512_shuffle_f32x4(even, even_last, 0xdd));
    _mm512_storeu_ps(made + (12 + j) * BLOCK, _mm512_shuffle_f32x4(odd, odd_last, 0xdd));
  }
}

// As `score`: for many rows it pays to turn the keys, so that sums come out side by side.
void score_turned(const bfloat16* query, int rows, const bfloat16** key, int count, int64_t D, float* scores,
                  uint32_t* panel, Ahead& ahead) {
  for (int t = count; t % 16; t++) key[t] = key[count - 1];
  for (int t = 0; t < count; t += 16)
    for (int64_t d = 0; d < D; d += 32) turn(key + t, d, panel + d / 2 * BLOCK + t);
  in_blocks<6>(rows, [&](int row, auto ROWS) {
    constexpr int VECTORS = BLOCK / W, COUNT = decltype(ROWS)::value;
    Vector made[COUNT][VECTORS];
    UNROLL for (int r = 0; r < COUNT; r++)
      UNROLL for (int v = 0; v < VECTORS; v++) made[r][v] = Vector{};
    for (int64_t d = 0; d < D; d += 2) {
      if (d % PANEL_DIMS_A_STEP == 0) ahead.step();
      __m512bh x[VECTORS];
      UNROLL for (int v = 0; v < VECTORS; v++) x[v] = (__m512bh)_mm512_loadu_si512(panel + d / 2 * BLOCK + v * W);
      UNROLL for (int r = 0; r < COUNT; r++) {
        const __m512bh y = Paired::weight(query + (row + r) * D + d);
        UNROLL for (int v = 0; v < VECTORS; v++) Paired::add(made[r][v], y, x[v]);
      }
    }
    UNROLL for (int r = 0; r < COUNT; r++)
      UNROLL for (int v = 0; v < VECTORS; v++) store(scores + (row + r) * BLOCK + v * W, made[r][v]);
  });
}
#endif

// --- mixtures ----------------------------------------------------------------------------------------------------

// out[r, d …] = keep[r] · out[r, d …] + Σ weights[r, t] · value[t, d …], of COLUMNS vectors.
template <class A, int ROWS, int COLUMNS, class T>
INLINE void mix_columns(float* out, int64_t V, const typename A::Weight* weights, const float* keep,
                        const T* const* value, int count, int64_t d, Ahead& ahead) {
  Vector made[ROWS][COLUMNS];
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int c = 0; c < COLUMNS; c++) made[r][c] = load(out + r * V + d + c * W) * keep[r];
  for (int t = 0; t < count; t += A::TOKENS) {
    ahead.step();
    typename A::Operand x[COLUMNS];
    A::template columns<COLUMNS>(value + t, d, x);
    UNROLL for (int r = 0; r < ROWS; r++) {
      const typename A::Operand y = A::weight(weights + r * BLOCK + t);
      UNROLL for (int c = 0; c < COLUMNS; c++) A::add(made[r][c], y, x[c]);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int c = 0; c < COLUMNS; c++) store(out + r * V + d + c * W, made[r][c]);
}

// How many vectors of columns go together: few rows leave room for more.
template <class A>
constexpr int wide(int rows) {
  return W == 16 && rows <= 2 ? 8 : MIX_COLUMNS / A::TOKENS * A::TOKENS;
}
template <class A>
constexpr int narrow() {
  return A::TOKENS;  // a pair of tokens makes two vectors
}

template <class A>
INLINE int64_t steps_of_mixture(int rows, int count, int64_t V) {
  const int blocks = (rows + MIX_ROWS - 1) / MIX_ROWS, most = (rows + blocks - 1) / blocks;
  const int64_t columns = V / W, many = wide<A>(most);
  return blocks * (columns / many + columns % many / narrow<A>()) * ((count + A::TOKENS - 1) / A::TOKENS);
}

// out[r] = keep[r] · out[r] + Σ weights[r, t] · value[t]; V is a multiple of the vectors.
template <class A, class T>
void mix(float* out, int rows, const typename A::Weight* weights, const float* keep, const T* const* value, int count,
         int64_t V, Ahead& ahead) {
  in_blocks<MIX_ROWS>(rows, [&](int row, auto ROWS) {
    constexpr int MANY = wide<A>(ROWS()), FEW = narrow<A>();
    const auto columns = [&](int64_t d, auto COLUMNS) {
      mix_columns<A, ROWS(), COLUMNS()>(out + row * V, V, weights + row * BLOCK, keep + row, value, count, d, ahead);
    };
    int64_t d = 0;
    for (; d + MANY * W <= V; d += MANY * W) columns(d, std::integral_constant<int, MANY>());
    for (; d < V; d += FEW * W) columns(d, std::integral_constant<int, FEW>());
  });
}

}  // namespace
