// Mixtures of levels by sums of products of whole numbers, and by the processor's matrix tiles (AMX), which many rows
// are worth.
//
// Weights become whole numbers of 8 bits a piece, three pieces where the result is float, so that every product and sum
// of a block of tokens is exact. Levels lie in quads: [columns / 16, BLOCK / 4, 16, 4], four neighbouring tokens side
// by side.
#pragma once

#include "attend.h"

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__linux__) && HAS_WHOLE_SUMS
#define HAS_MATRIX_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_MATRIX_TILES 0
#endif

#if HAS_MATRIX_TILES && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_BFLOAT16_TILES 1
#else
#define HAS_BFLOAT16_TILES 0
#endif

namespace {

constexpr int TILE = 16;             // rows of a tile, and its columns of 32 bits
constexpr int QUADS = BLOCK * TILE;  // bytes of a block's levels of sixteen columns
constexpr int CHUNK = 64;            // bytes of a row of a tile

#if HAS_BYTE_TABLES
// Sixteen bytes of each of four tokens, which lie at `byte` of their rows.
INLINE __m512i bytes_of_four(const uint8_t* const* at, int64_t byte) {
  // A broadcast from memory leaves the shuffle unit alone, which limits decoding.
  const auto sixteen = [byte](const uint8_t* token) { return _mm_loadu_si128((const __m128i*)(token + byte)); };
  __m512i x = _mm512_castsi128_si512(sixteen(at[0]));
  x = _mm512_mask_broadcast_i32x4(x, 0x00f0, sixteen(at[1]));
  x = _mm512_mask_broadcast_i32x4(x, 0x0f00, sixteen(at[2]));
  return _mm512_mask_broadcast_i32x4(x, 0xf000, sixteen(at[3]));
}

#endif

#if HAS_WHOLE_SUMS
// Sixteen bytes of each of four tokens as a quad: the four tokens' side by side.
INLINE __m512i as_quad(__m512i four) {
  alignas(64) static constexpr uint8_t BESIDE[64] = {0,  16, 32, 48, 1,  17, 33, 49, 2,  18, 34, 50, 3,  19, 35, 51,
                                                     4,  20, 36, 52, 5,  21, 37, 53, 6,  22, 38, 54, 7,  23, 39, 55,
                                                     8,  24, 40, 56, 9,  25, 41, 57, 10, 26, 42, 58, 11, 27, 43, 59,
                                                     12, 28, 44, 60, 13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63};
  return _mm512_permutexvar_epi8(_mm512_load_si512(BESIDE), four);
}

// Whole weights of a block's tokens in PIECES pieces of 8 bits, the highest first, [piece, BLOCK]; returns the weight
// of 1.
template <int PIECES>
INLINE float whole_weights(const float* weights, uint8_t* pieces) {
  Vector top = load(weights);
  for (int t = W; t < BLOCK; t += W) top = larger(top, load(weights + t));
  const float most = largest(top), whole = float((1 << (8 * PIECES)) - 1);
  const Vector factor = all(most > 0 ? whole / most : 0.0f);
  for (int t = 0; t < BLOCK; t += W) {
    const Vector scaled = load(weights + t) * factor;
    const __m512i number =
        _mm512_min_epi32(_mm512_cvtps_epi32((__m512)scaled), _mm512_set1_epi32((1 << (8 * PIECES)) - 1));
    UNROLL for (int p = 0; p < PIECES; p++)
      _mm_storeu_si128((__m128i*)(pieces + p * BLOCK + t),
                       _mm512_cvtepi32_epi8(_mm512_srli_epi32(number, 8 * (PIECES - 1 - p))));
  }
  return most / whole;
}

// out = keep · out + one · (a row's sums of pieces), for sixteen columns.
template <int PIECES>
INLINE void add_sums(float* out, float keep, const __m512i* sums, float one) {
  // The two highest pieces' sums fit into 32 bits together.
  Vector total = (Vector)_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(sums[0], 8), sums[1]));
  if constexpr (PIECES == 3) total = total * 256.0f + (Vector)_mm512_cvtepi32_ps(sums[2]);
  store(out, load(out) * keep + total * one);
}

// Mixtures of rows of weights.
template <int PIECES>
class WholeMixer {
  static constexpr int ROWS = 4;  // whose sums for two column blocks are in registers
  const int rows_;
  uint8_t* pieces_;  // [row, piece, BLOCK]
  float* one_;       // [row], the weight of 1

 public:
  WholeMixer(Arena& arena, int rows)
      : rows_(rows), pieces_(arena.take<uint8_t>(rows * PIECES * BLOCK)), one_(arena.take<float>(rows)) {}

  // out[r] = keep[r] · out[r] + Σ weights[r, t] · level[t]; weights are [row, BLOCK], rows of out `columns` apart.
  void mix(float* out, const float* weights, const float* keep, const int8_t* quads, int64_t columns) const {
    for (int r = 0; r < rows_; r++) one_[r] = whole_weights<PIECES>(weights + r * BLOCK, pieces_ + r * PIECES * BLOCK);
    in_blocks<ROWS>(rows_, [&](int row, auto SIZE) __attribute__((always_inline)) {
      int64_t d = 0;
      for (; d + 2 * TILE <= columns; d += 2 * TILE) mix_columns<SIZE, 2>(row, out, keep, quads, d, columns);
      if (d < columns) mix_columns<SIZE, 1>(row, out, keep, quads, d, columns);
    });
  }

 private:
  template <int SIZE, int BLOCKS>
  INLINE void mix_columns(int row, float* out, const float* keep, const int8_t* quads, int64_t d,
                          int64_t columns) const {
    __m512i sums[BLOCKS][SIZE][PIECES];
    UNROLL for (int c = 0; c < BLOCKS; c++) UNROLL
      for (int r = 0; r < SIZE; r++) UNROLL
        for (int p = 0; p < PIECES; p++) sums[c][r][p] = _mm512_setzero_si512();
    const uint8_t* pieces = pieces_ + row * PIECES * BLOCK;
    quads += d * BLOCK;
    for (int t = 0; t < BLOCK; t += 4) {
      __m512i levels[BLOCKS];
      UNROLL for (int c = 0; c < BLOCKS; c++)
        levels[c] = _mm512_load_si512(quads + c * QUADS + t * TILE);
      UNROLL for (int r = 0; r < SIZE; r++) UNROLL
        for (int p = 0; p < PIECES; p++) {
          int32_t four;
          memcpy(&four, pieces + (r * PIECES + p) * BLOCK + t, 4);
          const __m512i weights = _mm512_set1_epi32(four);
          UNROLL for (int c = 0; c < BLOCKS; c++)
            sums[c][r][p] = _mm512_dpbusd_epi32(sums[c][r][p], weights, levels[c]);
        }
    }
    UNROLL for (int c = 0; c < BLOCKS; c++) UNROLL
      for (int r = 0; r < SIZE; r++)
        add_sums<PIECES>(out + (row + r) * columns + d + c * TILE, keep[row + r], sums[c][r], one_[row + r]);
  }
};
#endif

#if HAS_WORDS && !HAS_WHOLE_SUMS && BYTES == 32
#define HAS_WORD_MIXER 1
// Mixtures of rows of weights that are rounded to words, of levels in blocks [columns / 16, BLOCK, 16].
class WordMixer {
  static constexpr int ROWS = 4;       // whose sums for sixteen columns are in registers
  static constexpr float ONE = 32767;  // sums of a block of tokens are less than 2³¹
  const int rows_;
  int16_t* words_;  // [row, BLOCK]
  float* one_;      // [row], the weight of 1

 public:
  WordMixer(Arena& arena, int rows)
      : rows_(rows), words_(arena.take<int16_t>(rows * BLOCK)), one_(arena.take<float>(rows)) {}

  // out[r] = keep[r] · out[r] + Σ weights[r, t] · level[t]; weights are [row, BLOCK], rows of out `columns` apart.
  void mix(float* out, const float* weights, const float* keep, const int8_t* levels, int64_t columns) const {
    for (int r = 0; r < rows_; r++) {
      Vector top{};
      for (int t = 0; t < BLOCK; t += W) top = larger(top, load(weights + r * BLOCK + t));
      const float most = largest(top), factor = most > 0 ? ONE / most : 0.0f;
      for (int t = 0; t < BLOCK; t += W) store_words(words_ + r * BLOCK + t, load(weights + r * BLOCK + t) * factor);
      one_[r] = most / ONE;
    }
    in_blocks<ROWS>(rows_, [&](int row, auto SIZE) __attribute__((always_inline)) {
      for (int64_t d = 0; d < columns; d += TILE)
        mix_columns<SIZE>(row, out + row * columns + d, keep, levels + d * BLOCK, columns);
    });
  }

 private:
  template <int SIZE>
  INLINE void mix_columns(int row, float* out, const float* keep, const int8_t* levels, int64_t columns) const {
    Words sums[SIZE][2];
    UNROLL for (int r = 0; r < SIZE; r++)
      sums[r][0] = sums[r][1] = Words{};
    const int16_t* words = words_ + row * BLOCK;
    for (int t = 0; t < BLOCK; t += 2) {
      // Of two tokens the levels of columns 0 … 3 and 8 … 11, side by side, and of the others.
      const Words first = _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i*)(levels + t * TILE)));
      const Words second = _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i*)(levels + (t + 1) * TILE)));
      const Words low = _mm256_unpacklo_epi16(first, second), high = _mm256_unpackhi_epi16(first, second);
      UNROLL for (int r = 0; r < SIZE; r++) {
        int32_t two;
        memcpy(&two, words + r * BLOCK + t, 4);
        const Words of_row = _mm256_set1_epi32(two);
        add_products(sums[r][0], low, of_row), add_products(sums[r][1], high, of_row);
      }
    }
    UNROLL for (int r = 0; r < SIZE; r++) {
      const Words in_order[2] = {_mm256_permute2x128_si256(sums[r][0], sums[r][1], 0x20),
                                 _mm256_permute2x128_si256(sums[r][0], sums[r][1], 0x31)};
      UNROLL for (int i = 0; i < 2; i++) {
        float* to = out + r * columns + i * W;
        store(to, load(to) * keep[row + r] + (Vector)_mm256_cvtepi32_ps(in_order[i]) * one_[row + r]);
      }
    }
  }
};
#else
#define HAS_WORD_MIXER 0
#endif

#if HAS_MATRIX_TILES
// Whether this process may use tiles: the kernel is asked once.
inline bool may_use_tiles() {
  static const bool may = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  return may;
}

// Tiles of sixteen rows of 64 bytes, as long as this lives; the first five may have fewer rows. None where these have
// 0.
class TileSetting {
  const int rows_;

 public:
  explicit TileSetting(int rows) : rows_(rows) {
    if (!rows) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
    } setting;
    std::fill_n(setting.rows, 5, uint8_t(rows));
    asm volatile("" : : "r"(&setting) : "memory");
    _tile_loadconfig(&setting);
  }
  ~TileSetting() {
    if (rows_) _tile_release();
  }
};

// Transposes sixteen rows of sixteen words of 32 bits.
INLINE void transpose(const __m512i* row, __m512i* column) {
  __m512i a[16], b[16];
  UNROLL for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]), a[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  UNROLL for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]), b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]), b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    const __m512i even01 = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88),
                  odd01 = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
    const __m512i even23 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88),
                  odd23 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    column[i] = _mm512_shuffle_i32x4(even01, even23, 0x88), column[8 + i] = _mm512_shuffle_i32x4(even01, even23, 0xdd);
    column[4 + i] = _mm512_shuffle_i32x4(odd01, odd23, 0x88), column[12 + i] = _mm512_shuffle_i32x4(odd01, odd23, 0xdd);
  }
}

// Numbers of a row in pieces of 8 bits with their signs, the highest first, `stride` bytes apart: rows of `count`
// numbers, a multiple of sixteen. Returns the number that 1 stands for.
template <int PIECES>
INLINE float signed_pieces(const float* row, int64_t count, int8_t* pieces, int64_t stride) {
  constexpr float MOST = PIECES == 3 ? 8355000 : 32600;  // what pieces up to 127 stand for, and room for rounding
  Vector top{};
  for (int64_t d = 0; d < count; d += W) {
    const Vector x = load(row + d);
    top = larger(top, larger(x, -x));
  }
  const float most = largest(top), factor = most > 0 && most < 1e38f ? MOST / most : 0.0f;
  for (int64_t d = 0; d < count; d += W) {
    __m512i rest = _mm512_cvtps_epi32((__m512)(load(row + d) * factor));
    UNROLL for (int p = PIECES - 1; p >= 0; p--) {
      const __m128i low = _mm512_cvtepi32_epi8(rest);
      _mm_storeu_si128((__m128i*)(pieces + p * stride + d), low);
      if (p) rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, _mm512_cvtepi8_epi32(low)), 8);
    }
  }
  return most / MOST;
}

// products[column block, row, column] = Σ pieces[row, t] · level for TILES tiles of rows, two column blocks at a time;
// calls done(i) for each block a while after its products are stored.
template <int TILES, class F>
INLINE void multiply_tiles(const uint8_t* pieces, const int8_t* quads, int blocks, int32_t* products, F done) {
  constexpr int STRIDE = TILES * TILE * TILE;
  asm volatile("" : : : "memory");  // what the compiler has not stored yet
  _tile_loadd(4, pieces, BLOCK);
  if constexpr (TILES == 2) _tile_loadd(5, pieces + TILE * BLOCK, BLOCK);
  const auto two = [&](int i) __attribute__((always_inline)) {
    const bool has_other = i + 1 < blocks;
    _tile_loadd(6, quads + i * QUADS, 64);
    _tile_zero(0);
    _tile_dpbusd(0, 4, 6);
    if constexpr (TILES == 2) {
      _tile_zero(1);
      _tile_dpbusd(1, 5, 6);
    }
    if (has_other) {
      _tile_loadd(7, quads + (i + 1) * QUADS, 64);
      _tile_zero(2);
      _tile_dpbusd(2, 4, 7);
      if constexpr (TILES == 2) {
        _tile_zero(3);
        _tile_dpbusd(3, 5, 7);
      }
    }
    int32_t* to = products + i % 4 * STRIDE;
    _tile_stored(0, to, 64);
    if constexpr (TILES == 2) _tile_stored(1, to + TILE * TILE, 64);
    if (has_other) {
      _tile_stored(2, to + STRIDE, 64);
      if constexpr (TILES == 2) _tile_stored(3, to + STRIDE + TILE * TILE, 64);
    }
    asm volatile("" : : : "memory");
  };
  for (int i = 0; i < blocks; i += 2) {
    two(i);
    if (i) done(i - 2), done(i - 1);
  }
  for (int i = (blocks - 1) / 2 * 2; i < blocks; i++) done(i);
}

// Mixtures of rows of weights.
template <int PIECES>
class TileMixer {
  const int rows_;
  uint8_t* pieces_;    // [row, piece, BLOCK]; a group of rows may read behind the last one
  int32_t* products_;  // of four column blocks
  float* one_;         // [row], the weight of 1

 public:
  TileMixer(Arena& arena, int rows)
      : rows_(rows),
        pieces_(arena.take<uint8_t>((rows * PIECES + 2 * TILE - 1) / TILE * TILE * BLOCK)),
        products_(arena.take<int32_t>(4 * 2 * TILE * TILE)),
        one_(arena.take<float>(rows)) {}

  // out[r] = keep[r] · out[r] + Σ weights[r, t] · level[t]; weights are [row, BLOCK], rows of out `columns` apart.
  void mix(float* out, const float* weights, const float* keep, const int8_t* quads, int64_t columns) const {
    const int rows = rows_, blocks = int(columns / TILE);
    int32_t* products = products_;
    for (int r = 0; r < rows; r++) one_[r] = whole_weights<PIECES>(weights + r * BLOCK, pieces_ + r * PIECES * BLOCK);
    // Rows whose pieces fit into two tiles.
    constexpr int MOST = 2 * TILE / PIECES;
    for (int first = 0; first < rows; first += MOST) {
      const int some = std::min(MOST, rows - first);
      const uint8_t* of_rows = pieces_ + first * PIECES * BLOCK;
      const float* one = one_;
      const auto add = [&](int tiles, int i) __attribute__((always_inline)) {
        const __m512i* sum = (const __m512i*)(products + i % 4 * tiles * TILE * TILE);
        for (int r = 0; r < some; r++, sum += PIECES)
          add_sums<PIECES>(out + (first + r) * columns + i * TILE, keep[first + r], sum, one[first + r]);
      };
      if (some * PIECES > TILE)
        multiply_tiles<2>(of_rows, quads, blocks, products, [&](int i) { add(2, i); });
      else
        multiply_tiles<1>(of_rows, quads, blocks, products, [&](int i) { add(1, i); });
    }
  }
};

#else
inline bool may_use_tiles() { return false; }

struct TileSetting {
  explicit TileSetting(int) {}
};
#endif

#if HAS_BFLOAT16_TILES
constexpr int DEPTH = 32;  // dims of a tile of bfloat16

// Rounds groups of eight rows, [group, D / 2, 8, 2], to tiles [sixteen rows, depth / 2, 16, 2]; `depth` is D or padded.
INLINE void round_groups(const float* groups, int sixteens, int64_t D, int64_t depth, bfloat16* tiles) {
  for (int i = 0; i < sixteens; i++)
    for (int64_t d = 0; d < D; d += 2) {
      const float* first = groups + 2 * i * 8 * D + d * 8;
      const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(first + 8 * D), _mm512_loadu_ps(first));
      _mm512_storeu_si512(tiles + (i * depth + d) * TILE, (__m512i)both);
    }
}

// Rounds rows of D numbers, a multiple of 16, to rows of `depth`, a multiple of DEPTH.
INLINE void round_rows(const float* rows, int count, int64_t D, int64_t depth, bfloat16* to) {
  for (int i = 0; i < count; i++)
    for (int64_t d = 0; d < depth; d += DEPTH) {
      const __m512 first = _mm512_loadu_ps(rows + i * D + d);
      const __m512 last = d + TILE < D ? _mm512_loadu_ps(rows + i * D + d + TILE) : _mm512_setzero_ps();
      _mm512_storeu_si512(to + i * depth + d, (__m512i)_mm512_cvtne2ps_pbh(last, first));
    }
}

// products[key, row] of sixteen keys and sixteen rows.
INLINE void score_tiles(const bfloat16* keys, const bfloat16* rows, int64_t depth, float* products) {
  asm volatile("" : : : "memory");
  _tile_zero(0);
  for (int64_t d = 0; d < depth; d += DEPTH) {
    _tile_loadd(1, keys + d, depth * 2);
    _tile_loadd(2, rows + d * TILE, 64);
    _tile_dpbf16ps(0, 1, 2);
  }
  _tile_stored(0, products, 64);
  asm volatile("" : : : "memory");
}
#endif

}  // namespace
