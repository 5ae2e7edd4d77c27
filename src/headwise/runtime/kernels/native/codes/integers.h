// Whole numbers of 1 to 8 bits that are packed in a token's row, the lowest bit first, as bytes.
//
// Numbers of 8 bits lose 128, so that all fit into signed bytes.
#pragma once

#include "../matrix_tiles.h"

namespace {

// Unpacks rows of numbers.
class RowUnpacker {
 public:
#if defined(__AVX2__)
  explicit RowUnpacker(int bits) : bits_(bits) {
    alignas(32) uint8_t order[32];
    alignas(32) uint16_t factor[16];
    for (int i = 0; i < 16; i++) {
      const int bit = i % 8 * bits;
      order[2 * i] = uint8_t(bit / 8), order[2 * i + 1] = uint8_t(bit / 8 + 1);
      factor[i] = uint16_t(1 << (16 - bits - bit % 8));
    }
    order_ = _mm256_load_si256((const __m256i*)order), factor_ = _mm256_load_si256((const __m256i*)factor);
    unused_ = _mm_cvtsi32_si128(16 - bits);
  }

  // Writes `width` numbers of each of `count` rows, and what pads them to a multiple of CHUNK; rows are `stride` bytes
  // apart, and what is written `apart`. From the first row on, `readable` bytes may be read.
  __attribute__((noinline)) void unpack(const uint8_t* row, int64_t stride, int count, int64_t width, int64_t readable,
                                        int8_t* to, int64_t apart) const {
    const RowUnpacker own = *this;  // a local copy, which the compiler knows that no store changes
    const int64_t step = AT_ONCE / 8 * bits_;
    for (int t = 0; t < count; t++, row += stride, readable -= stride, to += apart) {
      __builtin_prefetch(row + count * stride);
      const int64_t last = readable - 3 * own.bits_ - 16;
      for (int64_t i = 0, byte = 0; i < width; i += AT_ONCE, byte += step) {
        const __m256i numbers =
            byte <= last ? own.read(row + byte) : read_last(own, row + byte, (width - i) * own.bits_);
        _mm256_storeu_si256((__m256i*)(to + i), numbers);
      }
    }
  }

 private:
  static constexpr int AT_ONCE = 32;
  // Of each number the two bytes that it is in, the second as the higher one; what moves it to the highest bits; and
  // how many of sixteen are not its own.
  __m256i order_, factor_;
  __m128i unused_;
  int bits_;

  INLINE __m256i read(const uint8_t* at) const {
    if (bits_ == 8) return _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)at), _mm256_set1_epi8(char(128)));
    if (bits_ == 4) {
      const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)at));
      return _mm256_and_si256(_mm256_or_si256(bytes, _mm256_slli_epi16(bytes, 4)), _mm256_set1_epi8(15));
    }
    const auto eights =
        [=](int first) __attribute__((always_inline)) {  // eight numbers, and eight that follow sixteen later
          const __m128i *low = (const __m128i*)(at + first * bits_), *high = (const __m128i*)(at + (first + 2) * bits_);
          const __m256i bytes =
              _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)), _mm_loadu_si128(high), 1);
          return _mm256_srl_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(bytes, order_), factor_), unused_);
        };
    return _mm256_packus_epi16(eights(0), eights(1));
  }

  // The last numbers of a row, whose codes are so many bits.
  static __attribute__((noinline)) __m256i read_last(RowUnpacker own, const uint8_t* at, int64_t bits) {
    uint8_t copy[3 * 8 + 16] = {};
    memcpy(copy, at, std::min<int64_t>(AT_ONCE / 8 * own.bits_, (bits + 7) / 8));
    return own.read(copy);
  }
#else
  explicit RowUnpacker(int bits) : bits_(bits) {}

  // See above.
  void unpack(const uint8_t* row, int64_t stride, int count, int64_t width, int64_t, int8_t* to, int64_t apart) const {
    const int bits = bits_, mask = (1 << bits) - 1, flip = bits == 8 ? 128 : 0;
    for (int t = 0; t < count; t++, row += stride, to += apart)
      for (int64_t i = 0; i < width; i++) {
        const int64_t bit = i * bits;
        const int last = bit % 8 + bits > 8 ? row[bit / 8 + 1] : 0;
        to[i] = int8_t(((row[bit / 8] | last << 8) >> bit % 8 & mask) ^ flip);
      }
  }

 private:
  int bits_;
#endif
};

#if HAS_MATRIX_TILES

// Unpacks CHUNK numbers of a row at once.
class Unpacker {
 public:
  // When WOVEN, the numbers lie such that `weave` makes quads of them: those of channels 16 j + 4 l … 16 j + 4 l + 3 at
  // byte 16 l + 4 j; otherwise in their order.
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
  return _mm512_shuffle_epi8(
      x, _mm512_broadcast_i32x4(_mm_set_epi8(15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1, 6, 4, 2, 0)));
}

// 32 numbers of 4 bits of four tokens in two quads: channels with even numbers, and the others.
INLINE void weave_fours(const uint8_t* const* row, int8_t* even, int8_t* odd) {
  const __m512i x = as_quad(bytes_of_four(row, 0)), mask = _mm512_set1_epi8(15);
  _mm512_store_si512(even, _mm512_and_si512(x, mask));
  _mm512_store_si512(odd, _mm512_and_si512(_mm512_srli_epi16(x, 4), mask));
}

// Where among the columns of such quads a channel is.
constexpr int64_t column_of_four(int64_t channel) { return channel / 32 * 32 + channel % 2 * 16 + channel % 32 / 2; }

#endif

}  // namespace
