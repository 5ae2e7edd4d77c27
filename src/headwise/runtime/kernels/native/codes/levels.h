// Levels of trellis codes: a token's codes are a stream of bits, and each channel's level is that of its window.
//
// A channel's window is the last eight bits of the stream up to and including its own bits. Channels lie in blocks of up
// to sixteen of one number of bits.
#pragma once

#include "../vectors.h"

#if defined(__AVX512VBMI__) && defined(__AVX512BW__)
#define HAS_BYTE_TABLES 1  // tables of 256 bytes in registers
#else
#define HAS_BYTE_TABLES 0
#endif
#if !HAS_BYTE_TABLES && defined(__AVX2__)
#define HAS_NIBBLE_TABLES 1  // tables of sixteen bytes in registers
#else
#define HAS_NIBBLE_TABLES 0
#endif

namespace {

constexpr int CHANNELS = HEADWISE_CHANNELS;  // in a block, at most; as all numbers HEADWISE_…, from sizes.py
static_assert(CHANNELS == 16, "blocks are decoded by sixteen channels");
constexpr int OVERRUN = 32;   // bytes behind a token's codes that may be read

struct CodedBlock {
  int32_t column, width, bits;  // where its levels go, its channels, the bits of a channel
  int32_t first;                // the bit of the stream with which the first channel's window begins
};

// Of each token a block's reader takes sixteen bytes from the block's first window on. Eight channels' windows lie in eight
// of them, which are turned round so that the first bit is the highest.
struct BlockPlan : CodedBlock {
#if HAS_BYTE_TABLES
  uint64_t turned[2], shift[2];
  uint64_t last[2];  // where the last channel ends behind the eight bytes: its shift one byte on

  explicit BlockPlan(const CodedBlock& block) : CodedBlock(block) {
    const int half = first % 8 + 8 * bits;
    for (int h = 0; h < 2; h++) {
      const int begin = h ? half / 8 : 0, offset = h ? half % 8 : first % 8;
      turned[h] = shift[h] = 0;
      for (int i = 0; i < 8; i++) {
        turned[h] |= uint64_t(begin + 7 - i) << (8 * i);
        shift[h] |= uint64_t((56 - offset - i * bits) & 63) << (8 * i);
      }
      last[h] = uint64_t((8 - offset) & 63) << 56;
    }
  }
#elif HAS_NIBBLE_TABLES
  // Of eight channels: the two bytes that a window is in, the first as the higher one, and what moves it to the highest bits.
  uint8_t order[16];
  uint16_t factor[8];

  explicit BlockPlan(const CodedBlock& block) : CodedBlock(block) {
    for (int i = 0; i < 8; i++) {
      const int bit = first % 8 + i * bits;
      order[2 * i] = uint8_t(bit / 8 + 1), order[2 * i + 1] = uint8_t(bit / 8);
      factor[i] = uint16_t(1 << bit % 8);
    }
  }
#else
  explicit BlockPlan(const CodedBlock& block) : CodedBlock(block) {}
#endif
};

#if HAS_BYTE_TABLES
struct BlockReader {
  __m512i order, shifts, last_shifts, table[4];
  int64_t byte;
  bool is_whole_byte;

  INLINE BlockReader(const BlockPlan& plan, const int8_t* tables) : byte(plan.first / 8), is_whole_byte(plan.bits == 8) {
    order = _mm512_broadcast_i32x4(_mm_set_epi64x(plan.turned[1], plan.turned[0]));
    shifts = _mm512_broadcast_i32x4(_mm_set_epi64x(plan.shift[1], plan.shift[0]));
    last_shifts = _mm512_broadcast_i32x4(_mm_set_epi64x(plan.last[1], plan.last[0]));
    for (int i = 0; i < 4; i++) table[i] = _mm512_loadu_si512(tables + 256 * plan.bits + 64 * i);
  }

  static INLINE __m512i bytes(const uint8_t* const* at, int64_t byte) {
    // A broadcast from memory leaves the shuffle unit alone, which limits decoding.
    const auto sixteen = [byte](const uint8_t* token) { return _mm_loadu_si128((const __m128i*)(token + byte)); };
    __m512i x = _mm512_castsi128_si512(sixteen(at[0]));
    x = _mm512_mask_broadcast_i32x4(x, 0x00f0, sixteen(at[1]));
    x = _mm512_mask_broadcast_i32x4(x, 0x0f00, sixteen(at[2]));
    return _mm512_mask_broadcast_i32x4(x, 0xf000, sixteen(at[3]));
  }

  // The levels of sixteen channels of four tokens.
  INLINE __m512i read(const uint8_t* const* at) const {
    __m512i windows = _mm512_multishift_epi64_epi8(shifts, _mm512_shuffle_epi8(bytes(at, byte), order));
    if (is_whole_byte) {
      const __m512i next = _mm512_multishift_epi64_epi8(last_shifts, _mm512_shuffle_epi8(bytes(at, byte + 1), order));
      windows = _mm512_mask_blend_epi8(0x8080808080808080ull, windows, next);
    }
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(windows), _mm512_permutex2var_epi8(table[0], windows, table[1]),
                                  _mm512_permutex2var_epi8(table[2], windows, table[3]));
  }
};

// Stores the levels of four tokens `row` bytes apart.
INLINE void store_rows(__m512i four, int8_t* to, int64_t row) {
  _mm_storeu_si128((__m128i*)to, _mm512_castsi512_si128(four));
  _mm_storeu_si128((__m128i*)(to + row), _mm512_extracti32x4_epi32(four, 1));
  _mm_storeu_si128((__m128i*)(to + 2 * row), _mm512_extracti32x4_epi32(four, 2));
  _mm_storeu_si128((__m128i*)(to + 3 * row), _mm512_extracti32x4_epi32(four, 3));
}

// Decodes a block of `count` tokens, whose codes are at `at`, to rows of levels that are `row` bytes apart. Sixteen levels
// may be written of each token, and of up to three tokens behind the last.
INLINE void decode_block(const BlockPlan& block, const int8_t* tables, const uint8_t* const* at, int count, int8_t* levels,
                         int64_t row) {
  const BlockReader reader(block, tables);
  if (row == CHANNELS) {
    for (int t = 0; t < count; t += 4) _mm512_storeu_si512(levels + t * CHANNELS, reader.read(at + t));
    return;
  }
  for (int t = 0; t < count; t += 4) store_rows(reader.read(at + t), levels + t * row, row);
}
#elif HAS_NIBBLE_TABLES
// Levels of 32 windows: of all sixteen parts of the table by the lower half of each window, those that the higher half names.
INLINE __m256i look_up(const int8_t* table, __m256i windows) {
  const __m256i low = _mm256_and_si256(windows, _mm256_set1_epi8(15));
  const __m256i bit6 = _mm256_add_epi8(windows, windows), bit5 = _mm256_add_epi8(bit6, bit6), bit4 = _mm256_add_epi8(bit5, bit5);
  const auto part = [&](int i) __attribute__((always_inline)) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table + i)), low);
  };
  const auto two = [&](int i) __attribute__((always_inline)) { return _mm256_blendv_epi8(part(i), part(i + 1), bit4); };
  const auto four = [&](int i) __attribute__((always_inline)) { return _mm256_blendv_epi8(two(i), two(i + 2), bit5); };
  const auto eight = [&](int i) __attribute__((always_inline)) { return _mm256_blendv_epi8(four(i), four(i + 4), bit6); };
  return _mm256_blendv_epi8(eight(0), eight(8), windows);
}

// See above.
INLINE void decode_block(const BlockPlan& block, const int8_t* tables, const uint8_t* const* at, int count, int8_t* levels,
                         int64_t row) {
  const int8_t* table = tables + 256 * block.bits;
  const __m256i order = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)block.order));
  const __m256i factor = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)block.factor));
  const int64_t byte = block.first / 8, half = byte + block.bits;
  const auto windows = [=](const uint8_t* const* token, int64_t from) __attribute__((always_inline)) {
    const __m128i *first = (const __m128i*)(token[0] + from), *second = (const __m128i*)(token[1] + from);
    const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(first)), _mm_loadu_si128(second), 1);
    return _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(bytes, order), factor), 8);
  };
  for (int t = 0; t < count; t += 2, levels += 2 * row) {
    const __m256i two = look_up(table, _mm256_packus_epi16(windows(at + t, byte), windows(at + t, half)));
    _mm_storeu_si128((__m128i*)levels, _mm256_castsi256_si128(two));
    _mm_storeu_si128((__m128i*)(levels + row), _mm256_extracti128_si256(two, 1));
  }
}
#else
INLINE void decode_block(const BlockPlan& block, const int8_t* tables, const uint8_t* const* at, int count, int8_t* levels,
                         int64_t row) {
  const int8_t* table = tables + 256 * block.bits;
  for (int c = 0; c < block.width; c++) {
    const int bit = block.first + c * block.bits, shift = 8 - bit % 8;
    for (int t = 0; t < count; t++) {
      const uint8_t* byte = at[t] + bit / 8;
      levels[t * row + c] = table[(byte[0] << 8 | byte[1]) >> shift & 255];
    }
  }
}
#endif

}  // namespace
