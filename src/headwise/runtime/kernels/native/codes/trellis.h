// Tokens in trellis codes: a token's codes are a stream of bits, and each channel's level is that of its window.
//
// A channel's window is the last eight bits of the stream up to and including its own bits. Channels lie in blocks of
// up to sixteen of one number of bits.
#pragma once

#include "../matrix_tiles.h"

#if !HAS_BYTE_TABLES && defined(__AVX2__)
#define HAS_PAIR_TABLES 1  // two levels at a time, from tables in memory
#else
#define HAS_PAIR_TABLES 0
#endif

namespace {

constexpr int OVERRUN = 32;  // bytes behind a token's codes that may be read
constexpr int KEYS = 16;     // tokens whose keys are computed at a time
static_assert(CHANNELS == 16, "blocks are decoded by sixteen channels");
static_assert(TURN % BLOCK == 0, "the tokens of a block share a rotated query");

// --- levels --------------------------------------------------------------------------------------------------------

// The levels of windows: of one channel, and of two neighbouring ones that share a window of 8 more than their bits.
struct Levels {
  const int8_t* single;  // [9, 256]
  const int16_t* pairs;  // those of b bits from 2^(8 + b) on
  template <class Call>
  explicit Levels(const Call& a) : single(a.tables), pairs((const int16_t*)a.pairs) {}
};

// Of each token a block's reader takes sixteen bytes from the block's first window on. Eight channels' windows lie in
// eight of them, which are turned round so that the first bit is the highest.
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
#elif HAS_PAIR_TABLES
  // Of each of four pairs of channels: the four bytes from its windows on, the first as the highest one, and how many
  // bits are behind these.
  uint8_t order[16];
  uint32_t behind[4];

  explicit BlockPlan(const CodedBlock& block) : CodedBlock(block) {
    for (int i = 0; i < 4; i++) {
      const int bit = first % 8 + 2 * i * bits;
      for (int byte = 0; byte < 4; byte++) order[4 * i + byte] = uint8_t(bit / 8 + 3 - byte);
      behind[i] = uint32_t(32 - bit % 8 - (8 + bits));
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

  INLINE BlockReader(const BlockPlan& plan, const Levels& tables)
      : byte(plan.first / 8), is_whole_byte(plan.bits == 8) {
    order = _mm512_broadcast_i32x4(_mm_set_epi64x(plan.turned[1], plan.turned[0]));
    shifts = _mm512_broadcast_i32x4(_mm_set_epi64x(plan.shift[1], plan.shift[0]));
    last_shifts = _mm512_broadcast_i32x4(_mm_set_epi64x(plan.last[1], plan.last[0]));
    for (int i = 0; i < 4; i++) table[i] = _mm512_loadu_si512(tables.single + 256 * plan.bits + 64 * i);
  }

  // The levels of sixteen channels of four tokens.
  INLINE __m512i read(const uint8_t* const* at) const {
    __m512i windows = _mm512_multishift_epi64_epi8(shifts, _mm512_shuffle_epi8(bytes_of_four(at, byte), order));
    if (is_whole_byte) {
      const __m512i next =
          _mm512_multishift_epi64_epi8(last_shifts, _mm512_shuffle_epi8(bytes_of_four(at, byte + 1), order));
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

// Decodes a block of `count` tokens, whose codes are at `at`, to rows of levels that are `row` bytes apart. Sixteen
// levels may be written of each token, and of up to three tokens behind the last.
INLINE void decode_block(const BlockPlan& block, const Levels& tables, const uint8_t* const* at, int count,
                         int8_t* levels, int64_t row) {
  const BlockReader reader(block, tables);
  if (row == CHANNELS) {
    for (int t = 0; t < count; t += 4) _mm512_storeu_si512(levels + t * CHANNELS, reader.read(at + t));
    return;
  }
  for (int t = 0; t < count; t += 4) store_rows(reader.read(at + t), levels + t * row, row);
}
#elif HAS_PAIR_TABLES
// See above. All windows are found first, so that no store of levels is between those and what reads them. It is
// compiled once, by itself: within a kernel the compiler runs out of registers and does not unroll it.
__attribute__((noinline)) void decode_block(const BlockPlan& block, const Levels& tables, const uint8_t* const* at,
                                            int count, int8_t* levels, int64_t row) {
  constexpr int PAIRS = CHANNELS / 2, STEP = 4;
  alignas(32) uint32_t windows[BLOCK * PAIRS];
  const __m256i order = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)block.order));
  const __m256i behind = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)block.behind));
  const __m256i own = _mm256_set1_epi32((1 << (8 + block.bits)) - 1);
  const int64_t byte = block.first / 8, half = byte + block.bits;
  uint32_t* to = windows;
  for (int t = 0; t < count; t += STEP, at += STEP, to += STEP * PAIRS) UNROLL
    for (int i = 0; i < STEP; i++) {
      const __m128i *first = (const __m128i*)(at[i] + byte), *second = (const __m128i*)(at[i] + half);
      const __m256i bytes =
          _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(first)), _mm_loadu_si128(second), 1);
      const __m256i of_token = _mm256_srlv_epi32(_mm256_shuffle_epi8(bytes, order), behind);
      _mm256_store_si256((__m256i*)(to + i * PAIRS), _mm256_and_si256(of_token, own));
    }
  const int16_t* pairs = tables.pairs + (1 << (8 + block.bits));
  asm("" : "+r"(pairs));  // one address for the table: the compiler would rather add its place to each window
  const uint32_t* from = windows;
  for (int t = 0; t < count; t += STEP, from += STEP * PAIRS) UNROLL
    for (int i = 0; i < STEP; i++, levels += row) {
      uint64_t two[PAIRS / 2];  // loads limit decoding: one takes two windows
      memcpy(two, from + i * PAIRS, sizeof two);
      __m128i all{};
      all = _mm_insert_epi16(all, pairs[uint32_t(two[0])], 0), all = _mm_insert_epi16(all, pairs[two[0] >> 32], 1);
      all = _mm_insert_epi16(all, pairs[uint32_t(two[1])], 2), all = _mm_insert_epi16(all, pairs[two[1] >> 32], 3);
      all = _mm_insert_epi16(all, pairs[uint32_t(two[2])], 4), all = _mm_insert_epi16(all, pairs[two[2] >> 32], 5);
      all = _mm_insert_epi16(all, pairs[uint32_t(two[3])], 6), all = _mm_insert_epi16(all, pairs[two[3] >> 32], 7);
      _mm_storeu_si128((__m128i*)levels, all);
    }
}
#else
INLINE void decode_block(const BlockPlan& block, const Levels& tables, const uint8_t* const* at, int count,
                         int8_t* levels, int64_t row) {
  const int8_t* table = tables.single + 256 * block.bits;
  for (int c = 0; c < block.width; c++) {
    const int bit = block.first + c * block.bits, shift = 8 - bit % 8;
    for (int t = 0; t < count; t++) {
      const uint8_t* byte = at[t] + bit / 8;
      levels[t * row + c] = table[(byte[0] << 8 | byte[1]) >> shift & 255];
    }
  }
}
#endif

#if HAS_WHOLE_SUMS
// Decodes a block of channels to quads, and when ROWS to rows of levels too that are `row` bytes apart.
template <bool ROWS>
INLINE void decode_quads(const BlockPlan& block, const Levels& tables, const uint8_t* const* at, int count,
                         int8_t* quads, int8_t* levels, int64_t row) {
  const BlockReader reader(block, tables);
  for (int t = 0; t < count; t += 4) {
    const __m512i four = reader.read(at + t);
    _mm512_store_si512(quads + t * TILE, as_quad(four));
    if constexpr (ROWS) store_rows(four, levels + t * row, row);
  }
}
#endif

// --- attention -----------------------------------------------------------------------------------------------------

// What the kernels share that read tokens in trellis codes.
//
// Scores and mixtures are of levels: a value's scale and offset are multiplied into the result and added to it, and a
// token's gain is multiplied into its scores and weights; values that are stored without codes are divided into levels
// first. A key that rotates needs its values, which are rotated by their slot: the key by the slot's place within TURN,
// the query back by where these begin. Latents are one head, whose rows are all heads' queries.
//
// A Kernel has begin(place), which reads the queries; turn(place), which rotates them back by place.cos and place.sin;
// score_codes(from, count, token, end, place), of a block of tokens in codes, which more follow up to `end`;
// value_gain(place), what their weights are multiplied by; mix_codes(count, token, place, partial); score_wide(from,
// count, wide, place), of tokens without codes; score_keys(head, t, n, place), of n keys; and tile_rows(), see
// TileSetting.
template <class Kernel, class Call, class Query>
class TrellisAttention : public AttentionKernel<Kernel, Call, Query> {
 protected:
  using Base = AttentionKernel<Kernel, Call, Query>;
  using Base::a_, Base::rows_, Base::kernel;
  const Levels tables_;
  const bool tiles_;          // whether matrix tiles are used
  const int heads_, group_;   // of keys and values, and rows of each
  const int64_t half_;        // pairs that rotate, padded
  const int64_t value_;       // columns of a head's values, padded
  const int64_t column_;      // the first one's column
  const int64_t wide_;        // values without codes of a token
  const int64_t wide_value_;  // which of them is the first head's first value

  TrellisAttention(const Call& a, int64_t heads, bool tiles, int64_t column, int64_t wide, int64_t wide_value)
      : Base(a),
        tables_(a),
        tiles_(tiles),
        heads_(int(heads)),
        group_(int(rows_ / heads)),
        half_(up(a.P / 2, CHANNELS)),
        value_(up(a.V, CHANNELS)),
        column_(column),
        wide_(wide),
        wide_value_(wide_value) {}

  // What every thread works on.
  struct Tokens : Base::Unit {
    float *query, *turned;      // the queries as they are, and rotated back by `turn` slots
    float *cos, *sin;           // [half_], of those slots
    int64_t turn = -1;          // none yet
    float* weights;             // [row, BLOCK]
    float* keys;                // of KEYS tokens
    float* wide;                // [a_.wide, heads, value_], values of first tokens in levels
    bfloat16* first;            // [wide_], of a first token with a code of its own
    float *gain, *second_gain;  // [BLOCK]
    BlockPlan* plans;           // of the blocks
    uint8_t* copies;            // codes at the end of memory
  };
  void take(Tokens& at, Arena& arena, int64_t rows, int64_t query, int64_t key) const {
    at.query = arena.take<float>(query), at.turned = arena.take<float>(query);
    at.cos = arena.take<float>(half_), at.sin = arena.take<float>(half_);
    at.Base::Unit::take(arena, rows);
    at.weights = arena.take<float>(rows * BLOCK);
    at.keys = arena.take<float>(KEYS * key);
    at.wide = arena.take<float>(a_.wide * heads_ * value_);
    at.first = arena.take<bfloat16>(a_.first_blocks ? wide_ : 0);
    at.gain = arena.take<float>(BLOCK), at.second_gain = arena.take<float>(BLOCK);
    at.plans = arena.take<BlockPlan>(a_.count);
    at.copies = arena.take<uint8_t>(BLOCK * (a_.bytes + OVERRUN));
  }

 public:
  int64_t width() const { return value_; }

  template <class Place>
  void attend(Range tokens, Place& at, const Partial& partial) const {
    for (int64_t i = 0; i < a_.count; i++) new (at.plans + i) BlockPlan(a_.blocks[i]);
    std::fill_n(at.cos, half_, 0.0f), std::fill_n(at.sin, half_, 0.0f);
    kernel().begin(at);
    const Range wide{a_.first[at.b], a_.first[at.b] + a_.wide};
    const TileSetting setting(kernel().tile_rows());
    attend_codes(tokens.cut({0, wide.from}), at, partial);
    attend_wide(tokens.cut(wide), at, partial);
    attend_codes(tokens.cut({wide.to, a_.T}), at, partial);
  }

 protected:
  // Prefetches a block of tokens from a slot on, as far as they lie behind each other, in so many steps.
  Ahead ahead_of(int64_t b, int64_t slot, int64_t end, int64_t steps) const {
    if (slot >= end) return {};
    const int64_t stride = a_.key_stride[2], bytes = stride < a_.bytes + 64 ? stride : a_.bytes;
    return Ahead(codes_of(b, slot), stride, std::min<int64_t>({BLOCK, end - slot, neighbours(slot)}), bytes, steps, 0);
  }

  // Scores of all rows with a block's tokens; read(head, t, n) computes a head's keys of n of them.
  template <class Place, class F>
  void score_tokens(int64_t from, int count, Place& at, F read) const {
    for (int t = 0, n; t < count; t += n) {
      n = int(std::min<int64_t>(count - t, KEYS - (from + t) % KEYS));
      turn_back((from + t) / TURN * TURN, at);
      for (int64_t head = 0; head < heads_; head++) {
        read(head, t, n);
        kernel().score_keys(head, t, n, at);
      }
    }
  }

  // Rotates the queries back by `slot`.
  template <class Place>
  void turn_back(int64_t slot, Place& at) const {
    if (!a_.P || at.turn == slot) return;
    at.turn = slot;
    const float *cos = a_.cos + slot * a_.frequencies, *sin = a_.sin + slot * a_.frequencies;
    for (int64_t d = 0; d < a_.P / 2; d++) at.cos[d] = cos[a_.frequency[d]], at.sin[d] = sin[a_.frequency[d]];
    kernel().turn(at);
  }

  // Writes the key of a token without codes that rotates, the halves `half` numbers apart.
  void rotate_wide(const bfloat16* from, int64_t slot, int64_t half, float* key) const {
    const float *cos = a_.turn_cos + slot % TURN * half_, *sin = a_.turn_sin + slot % TURN * half_;
    const int64_t pairs = a_.P / 2;
    for (int64_t d = 0; d < pairs; d++) {
      key[d] = number(from[d]) * cos[d] - number(from[pairs + d]) * sin[d];
      key[half + d] = number(from[pairs + d]) * cos[d] + number(from[d]) * sin[d];
    }
  }

  // Adds a head's values of some tokens, `stride` numbers apart, to the mixtures.
  template <class Place, class T>
  void mix_values(int64_t head, const T* values, int64_t stride, int count, const Place& at,
                  const Partial& partial) const {
    const int64_t row = head * group_;
    const T* value[BLOCK];
    for (int t = 0; t < count; t++) value[t] = values + t * stride;
    Ahead none;
    mix<Single>(partial.mixture + row * value_, group_, Weights<float>{at.weights + row * BLOCK, BLOCK, 1},
                at.keep + row, value, count, value_, none);
  }

 private:
  template <class Place>
  void attend_codes(Range tokens, Place& at, const Partial& partial) const {
    for (int64_t from = tokens.from, to; from < tokens.to; from = to) {
      to = std::min(tokens.to, (from / BLOCK + 1) * BLOCK);
      const int count = int(to - from);
      const uint8_t* token[BLOCK + 3];
      find_tokens(from, count, token, at);
      kernel().score_codes(from, count, token, tokens.to, at);
      this->weigh(at, from, count, partial, kernel().value_gain(at));
      kernel().mix_codes(count, token, at, partial);
    }
  }

  // The values of a first token with a code of its own.
  const bfloat16* decode_first(int64_t slot, Tokens& at) const {
    const uint8_t* token[BLOCK + 3];
    find_tokens(slot, 1, token, at);
    const int64_t part = wide_value_ ? wide_value_ : a_.V;  // the channels that have the first gain
    int64_t channel = 0;
    for (const CodedBlock *block = a_.first_blocks, *end = block + a_.count; block < end; block++) {
      alignas(64) int8_t levels[4 * CHANNELS];
      decode_block(BlockPlan(*block), tables_, token, 1, levels, CHANNELS);
      const float gain = *(channel < part ? at.gain : at.second_gain);
      alignas(64) float values[CHANNELS];
      for (int c = 0; c < CHANNELS; c += W) {
        Vector product = load(levels + c) * gain * load(a_.first_scale + block->column + c);
        asm("" : "+m"(product));  // is rounded, as where values are decoded alone
        store(values + c, product + load(a_.first_offset + block->column + c));
      }
      for (int c = 0; c < block->width; c++) put(at.first + channel++, values[c]);
    }
    return at.first;
  }

  // Tokens without codes.
  template <class Place>
  void attend_wide(Range tokens, Place& at, const Partial& partial) const {
    if (!tokens.length()) return;
    const int count = int(tokens.length());
    const bfloat16* wide = (const bfloat16*)a_.value + (at.b * a_.wide + tokens.from - a_.first[at.b]) * wide_;
    if (a_.first_blocks) wide = decode_first(tokens.from, at);
    for (int t = 0; t < count; t++)
      for (int64_t head = 0; head < heads_; head++) {
        const bfloat16* from = wide + t * wide_ + wide_value_ + head * a_.V;
        const float *scale = a_.level_scale + column_ + head * value_,
                    *offset = a_.level_offset + column_ + head * value_;
        float* to = at.wide + (t * heads_ + head) * value_;
        for (int64_t d = 0; d < value_; d++) to[d] = d < a_.V ? (number(from[d]) - offset[d]) / scale[d] : 0.0f;
      }
    kernel().score_wide(tokens.from, count, wide, at);
    this->weigh(at, tokens.from, count, partial, nullptr);
    for (int64_t head = 0; head < heads_; head++)
      mix_values(head, at.wide + head * value_, heads_ * value_, count, at, partial);
  }

  // Where the codes of a slot are: in their sequence's row, or in one of its pages.
  const uint8_t* codes_of(int64_t b, int64_t slot) const {
    const uint8_t* codes = (const uint8_t*)a_.key;
    if (!a_.table) return codes + b * a_.key_stride[0] + slot * a_.key_stride[2];
    const int64_t page = a_.table[b * a_.table_stride + slot / a_.page];
    return codes + page * a_.key_stride[0] + slot % a_.page * a_.key_stride[2];
  }

  // How many slots from one on lie behind each other in memory.
  int64_t neighbours(int64_t slot) const { return a_.table ? a_.page - slot % a_.page : a_.T - slot; }

  // The last codes in memory.
  const uint8_t* last_codes(int64_t b) const {
    if (!a_.table) return codes_of(b, a_.T - 1);
    return (const uint8_t*)a_.key + (a_.pages - 1) * a_.key_stride[0] + (a_.page - 1) * a_.key_stride[2];
  }

  // Where the codes of a block of tokens are, with the last one's three times more behind them, and both gains of each
  // token.
  void find_tokens(int64_t from, int count, const uint8_t** token, Tokens& at) const {
    for (int t = 0; t < count;) {
      const uint8_t* codes = codes_of(at.b, from + t);
      for (int to = int(std::min<int64_t>(count, t + neighbours(from + t))); t < to; t++, codes += a_.key_stride[2])
        token[t] = codes;
    }
    // What lies behind the last token may be no memory of this process.
    const uint8_t* end = last_codes(at.b) + a_.bytes;
    for (int t = 0; t < count; t++) {
      if (token[t] + a_.bytes + OVERRUN <= end) continue;
      uint8_t* copy = at.copies + t * (a_.bytes + OVERRUN);
      memcpy(copy, token[t], a_.bytes);
      memset(copy + a_.bytes, 0, OVERRUN);
      token[t] = copy;
    }
    for (int t = count; t < count + 3; t++) token[t] = token[count - 1];
    for (int t = 0; t < BLOCK; t++) {
      const uint8_t numbers = *token[std::min(t, count - 1)];
      at.gain[t] = a_.gains[numbers & 15], at.second_gain[t] = a_.gains[numbers >> 4];
    }
  }
};

}  // namespace
