// Whole numbers of 1 to 8 bits that are packed in a token's row, the lowest bit first, as bytes.
//
// Numbers of 8 bits lose 128, so that all fit into signed bytes.
#pragma once

#include "matrix_tiles.h"

namespace {

constexpr int CHUNK = 64;  // numbers of a token that are unpacked at a time

// Numbers of a row one by one: `width` of them.
INLINE void unpack_row(const uint8_t* row, int bits, int64_t width, int8_t* to) {
  const int mask = (1 << bits) - 1, flip = bits == 8 ? 128 : 0;
  for (int64_t i = 0; i < width; i++) {
    const int64_t bit = i * bits;
    const int last = bit % 8 + bits > 8 ? row[bit / 8 + 1] : 0;
    to[i] = int8_t(((row[bit / 8] | last << 8) >> bit % 8 & mask) ^ flip);
  }
}

#if HAS_MATRIX_TILES

// Unpacks CHUNK numbers of a row at once.
class Unpacker {
 public:
  // When WOVEN, the numbers lie such that `weave` makes quads of them: those of channels 16 j + 4 l … 16 j + 4 l + 3 at byte
  // 16 l + 4 j; otherwise in their order.
  Unpacker(int bits, int64_t width, bool is_woven) : bits_(bits), bytes_((width * bits + 7) / 8) {
    alignas(64) uint8_t order[64], shift[64];
    for (int four = 0; four < 16; four++) {
      const int channel = is_woven ? four % 4 * 16 + four / 4 * 4 : four * 4, bit = channel * bits;
      for (int i = 0; i < 4; i++) {
        order[four * 4 + i] = uint8_t(bit / 8 + i) & 63;
        shift[four * 4 + i] = uint8_t(four % 2 * 32 + bit % 8 + i * bits);
      }
    }
    order_ = _mm512_load_si512(order), shift_ = _mm512_load_si512(shift);
    mask_ = _mm512_set1_epi8(char((1 << bits) - 1)), flip_ = _mm512_set1_epi8(char(bits == 8 ? 128 : 0));
  }

  // The numbers of chunk `chunk` of a row; bytes behind its codes are not read.
  INLINE __m512i read(const uint8_t* row, int64_t chunk) const {
    const int64_t first = chunk * 8 * bits_, count = std::min<int64_t>(bytes_ - first, 8 * bits_);
    const __m512i bytes = _mm512_maskz_loadu_epi8(~0ull >> (64 - count), row + first);
    const __m512i numbers = _mm512_multishift_epi64_epi8(shift_, _mm512_permutexvar_epi8(order_, bytes));
    return _mm512_ternarylogic_epi64(numbers, mask_, flip_, 0x6a);  // (numbers & mask) ^ flip
  }

 private:
  __m512i order_, shift_, mask_, flip_;
  int64_t bits_, bytes_;
};

// Four tokens' numbers in quads: out[j] has channels 16 j … 16 j + 15, of each the four tokens side by side.
INLINE void weave(const __m512i* token, __m512i* out) {
  const __m512i low01 = _mm512_unpacklo_epi8(token[0], token[1]), high01 = _mm512_unpackhi_epi8(token[0], token[1]);
  const __m512i low23 = _mm512_unpacklo_epi8(token[2], token[3]), high23 = _mm512_unpackhi_epi8(token[2], token[3]);
  out[0] = _mm512_unpacklo_epi16(low01, low23), out[1] = _mm512_unpackhi_epi16(low01, low23);
  out[2] = _mm512_unpacklo_epi16(high01, high23), out[3] = _mm512_unpackhi_epi16(high01, high23);
}

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
    const __m512i even01 = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88), odd01 = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
    const __m512i even23 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88), odd23 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    column[i] = _mm512_shuffle_i32x4(even01, even23, 0x88), column[8 + i] = _mm512_shuffle_i32x4(even01, even23, 0xdd);
    column[4 + i] = _mm512_shuffle_i32x4(odd01, odd23, 0x88), column[12 + i] = _mm512_shuffle_i32x4(odd01, odd23, 0xdd);
  }
}

// Rows of 64 numbers of 4 bits of sixteen tokens as tiles of columns: [16, token, 4], of eight channels those with even
// numbers and then the others.
INLINE void transpose_fours(const uint8_t* const* row, int8_t* to) {
  __m512i a[8], b[8];
  const __m512i mask = _mm512_set1_epi8(15);
  UNROLL for (int i = 0; i < 8; i++)
    a[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)row[i])),
                              _mm256_loadu_si256((const __m256i*)row[i + 8]), 1);
  UNROLL for (int i = 0; i < 8; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  UNROLL for (int i = 0; i < 8; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]), a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]), a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  const __m512i first = _mm512_set_epi64(13, 12, 5, 4, 9, 8, 1, 0), last = _mm512_set_epi64(15, 14, 7, 6, 11, 10, 3, 2);
  UNROLL for (int i = 0; i < 4; i++) {
    b[i] = _mm512_permutex2var_epi64(a[i], first, a[4 + i]), b[4 + i] = _mm512_permutex2var_epi64(a[i], last, a[4 + i]);
  }
  UNROLL for (int i = 0; i < 8; i++) {
    _mm512_store_si512(to + 2 * i * 64, _mm512_and_si512(b[i], mask));
    _mm512_store_si512(to + (2 * i + 1) * 64, _mm512_and_si512(_mm512_srli_epi16(b[i], 4), mask));
  }
}

// Numbers of 64 channels in the order of such a tile's.
INLINE __m512i in_order_of_fours(__m512i x) {
  return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(_mm_set_epi8(15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1, 6, 4, 2, 0)));
}

// 32 numbers of 4 bits of four tokens in two quads: channels with even numbers, and the others.
INLINE void weave_fours(const uint8_t* const* row, int8_t* even, int8_t* odd) {
  alignas(64) static constexpr uint8_t BESIDE[64] = {
      0, 16, 32, 48, 1, 17, 33, 49, 2,  18, 34, 50, 3,  19, 35, 51, 4,  20, 36, 52, 5,  21, 37, 53, 6,  22, 38, 54, 7,  23, 39, 55,
      8, 24, 40, 56, 9, 25, 41, 57, 10, 26, 42, 58, 11, 27, 43, 59, 12, 28, 44, 60, 13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63};
  const __m512i x = _mm512_permutexvar_epi8(_mm512_load_si512(BESIDE), BlockReader::bytes(row, 0)), mask = _mm512_set1_epi8(15);
  _mm512_store_si512(even, _mm512_and_si512(x, mask));
  _mm512_store_si512(odd, _mm512_and_si512(_mm512_srli_epi16(x, 4), mask));
}

// Where among the columns of such quads a channel is.
constexpr int64_t column_of_four(int64_t channel) { return channel / 32 * 32 + channel % 2 * 16 + channel % 32 / 2; }

// Numbers of a row in pieces of 8 bits with their signs, the highest first, `stride` bytes apart: rows of `count` numbers,
// a multiple of sixteen. Returns the number that 1 stands for.
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

#endif

}  // namespace
