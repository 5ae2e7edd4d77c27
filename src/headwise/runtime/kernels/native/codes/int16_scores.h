// Scores of keys in trellis codes by matrix tiles (AMX), for queries that are rounded to 16 bits themselves.
//
// A key is its token's gain times levels · scales + offsets / gain. The sum becomes words, whole numbers of 16 bits of
// one unit a head, which are rotated by the slot; the gain and the units are multiplied into the score at the end.
// Queries are words too. Words are two pieces of 8 bits, whose products tiles add up exactly. A chunk of a key is 32
// words: sixteen of the first half of what rotates and their sixteen partners, then, behind what rotates, 32
// neighbours.
#pragma once

#include "../matrix_tiles.h"

#if HAS_MATRIX_TILES
namespace {

class WordScores {
  static constexpr int WORDS = 32, EIGHT = 8;
  static constexpr int MOST_CHUNKS = 15;  // sums of 15 · 32 · 128 · 32767 fit into 32 bits
  static constexpr int STEP = 2 * TILE;   // tokens that are scored at a time
  // Of the rotations; those behind BLOCK are read for tokens whose scores are dropped.
  static constexpr int SLOTS = BLOCK + STEP;
  static constexpr float MOST = 23000, ONE = 32767;  // rotated, √2 · MOST is still less than 2¹⁵ − 128
  // Offsets that many times as large as levels would leave too few of a word's bits to levels.
  static constexpr float FAR = 16;

  // Columns of a head's levels are two rotating halves and others, in blocks of CHANNELS.
  const int64_t half_, columns_, heads_;
  const int group_, sets_, rows_;  // rows of a head, sets of eight of them, rows of a tile of queries
  const int64_t chunks_;
  int16_t *scale_, *offset_;   // [head, columns_], of words
  int16_t *cos_, *sin_;        // [half_ / 8, SLOTS, 8]
  int16_t* query_;             // [row, chunk, 32], before they are rotated back
  float *unit_, *query_unit_;  // [head], [row], what 1 in a word stands for
  int16_t* turn_;              // [half_ / 16, 2, 32], cosines and sines of the slot that queries are rotated back by
  char* tiles_;        // [head, set, chunk, 2, rows_, 64 bytes]: queries' pieces in the higher byte, and in the lower
  int16_t* inverse_;   // [BLOCK, 8], of the tokens' gains
  char* keys_;         // [2, chunk, 2, 16, 64 bytes]: two words of sixteen tokens side by side
  int32_t* products_;  // [2, set, 2, 2, 16, 16]
  float least_gain_;

 public:
  // Whether such keys can be scored in words; see `begin`.
  static bool may(int64_t half, int64_t columns, int64_t heads, const float* scale, const float* offset,
                  const float* gains) {
    if (half % CHANNELS || half / CHANNELS + (columns - 2 * half + WORDS - 1) / WORDS > MOST_CHUNKS) return false;
    const float least_gain = *std::min_element(gains, gains + 16);
    for (int64_t head = 0; head < heads; head++, scale += columns, offset += columns) {
      Vector levels{}, offsets{}, any{};
      for (int64_t d = 0; d < columns; d += W) {
        const Vector s = size(load(scale + d)) * 127.0f, o = size(load(offset + d));
        levels = larger(levels, s), offsets = larger(offsets, o), any += (s + o) * 0.0f;
      }
      if (!(largest(offsets) / least_gain + sum(any) <= FAR * largest(levels)))
        return false;  // also where any number is NaN
    }
    return true;
  }

  WordScores(Arena& arena, int64_t half, int64_t columns, int64_t heads, int group)
      : half_(half),
        columns_(columns),
        heads_(heads),
        group_(group),
        sets_((group + EIGHT - 1) / EIGHT),
        rows_(std::min(TILE, 2 * group)),
        chunks_(half / CHANNELS + (columns - 2 * half + WORDS - 1) / WORDS) {
    scale_ = arena.take<int16_t>(heads * columns), offset_ = arena.take<int16_t>(heads * columns);
    cos_ = arena.take<int16_t>(half * SLOTS), sin_ = arena.take<int16_t>(half * SLOTS);
    query_ = arena.take<int16_t>(heads * group * chunks_ * WORDS);
    unit_ = arena.take<float>(heads), query_unit_ = arena.take<float>(heads * group);
    turn_ = arena.take<int16_t>(half * 4);
    tiles_ = arena.take<char>(tiles_bytes());
    inverse_ = arena.take<int16_t>(BLOCK * EIGHT);
    keys_ = arena.take<char>(2 * chunks_ * 2048);
    products_ = arena.take<int32_t>(2 * sets_ * 1024);
  }

  // What all keys have in common: scales, offsets [head, columns], gains by number, and the rotations of BLOCK slots,
  // [BLOCK, half].
  void begin(const float* scale, const float* offset, const float* gains, const float* cos, const float* sin) {
    least_gain_ = *std::min_element(gains, gains + 16);
    for (int64_t head = 0; head < heads_; head++) {
      const float *of_scale = scale + head * columns_, *of_offset = offset + head * columns_;
      Vector most = all(1e-30f);
      for (int64_t d = 0; d < columns_; d += W)
        most = larger(most, size(load(of_scale + d)) * 127.0f + size(load(of_offset + d)) * (1 / least_gain_));
      const float one = unit_[head] = largest(most) / MOST;
      for (int64_t d = head * columns_; d < (head + 1) * columns_; d += W) {
        store_words(scale_ + d, load(scale + d) * (128 / one));  // a level is multiplied as a word's higher byte
        store_words(offset_ + d, load(offset + d) * (1 / least_gain_ / one));
      }
    }
    for (int slot = 0; slot < SLOTS; slot++)
      for (int64_t d = 0; d < half_; d += CHANNELS)
        for (const auto& [table, to] : {std::pair{cos, cos_}, std::pair{sin, sin_}}) {
          const __m256i words = as_words(load(table + std::min(slot, BLOCK - 1) * half_ + d) * ONE);
          int16_t* at = to + (d / EIGHT * SLOTS + slot) * EIGHT;
          _mm_store_si128((__m128i*)at, _mm256_castsi256_si128(words));
          _mm_store_si128((__m128i*)(at + SLOTS * EIGHT), _mm256_extracti128_si256(words, 1));
        }
    pending_ = stored_ = {};
  }

  // Reads the queries of all heads' rows, `stride` numbers apart; `factor` is multiplied into what rotates.
  void read_queries(const float* query, int64_t stride, float factor) {
    for (int64_t row = 0; row < heads_ * group_; row++, query += stride) {
      Vector most = Vector{}, any = Vector{};
      const auto read = [&](int64_t d) { return load(query + d) * (d < 2 * half_ ? factor : 1.0f); };
      for (int64_t d = 0; d < columns_; d += W) most = larger(size(read(d)), most), any += read(d) * 0.0f;
      const float whole = largest(most), words = whole > 1e-30f && whole < 1e38f ? MOST / whole : 0.0f;
      query_unit_[row] = whole / MOST + sum(any);  // NaN where any number is NaN or infinite
      int16_t* to = query_ + row * chunks_ * WORDS;
      for (int64_t d = 0; d < half_; d += CHANNELS, to += WORDS) {
        store_words(to, read(d) * words);
        store_words(to + CHANNELS, read(half_ + d) * words);
      }
      for (int64_t d = 2 * half_; d < columns_; d += CHANNELS, to += CHANNELS) store_words(to, read(d) * words);
      if ((columns_ - 2 * half_) % WORDS) store_words(to, Vector{});
    }
    memset(tiles_, 0, tiles_bytes());
  }

  // Rotates the queries back by a slot, of whose rotation cosines and sines [half] are given. Tiles 0 to 4 have as many
  // rows as queries of a head have pieces, or sixteen.
  void turn_back(const float* cos, const float* sin) {
    for (int64_t d = 0; d < half_; d += CHANNELS) {
      int16_t* to = turn_ + d / CHANNELS * 2 * WORDS;
      const Vector c = load(cos + d) * ONE, s = load(sin + d) * ONE;
      store_words(to, c), store_words(to + CHANNELS, c), store_words(to + WORDS, s),
          store_words(to + WORDS + CHANNELS, -s);
    }
    const __m512i higher = _mm512_set1_epi16(int16_t(0xff00)), lower = _mm512_set1_epi16(0xff),
                  round = _mm512_set1_epi16(128);
    for (int64_t row = 0; row < heads_ * group_; row++) {
      const int r = int(row % group_);
      char* to = tiles_ + (row / group_ * sets_ + r / EIGHT) * chunks_ * 2 * rows_ * 64 + r % EIGHT * 2 * 64;
      for (int64_t chunk = 0; chunk < chunks_; chunk++, to += 2 * rows_ * 64) {
        __m512i x = _mm512_load_si512(query_ + (row * chunks_ + chunk) * WORDS);
        if (chunk < half_ / CHANNELS) {
          const __m512i* turn = (const __m512i*)(turn_ + chunk * 2 * WORDS);
          const __m512i partners = _mm512_shuffle_i64x2(x, x, 0x4e);
          x = _mm512_add_epi16(_mm512_mulhrs_epi16(x, turn[0]), _mm512_mulhrs_epi16(partners, turn[1]));
        }
        const __m512i first = _mm512_and_si512(_mm512_add_epi16(x, round), higher);
        _mm512_store_si512(to, first), _mm512_store_si512(to + 64, _mm512_slli_epi16(x, 8));
        _mm512_store_si512(to + rows_ * 64, _mm512_srli_epi16(first, 8));
        _mm512_store_si512(to + rows_ * 64 + 64, _mm512_and_si512(x, lower));
      }
    }
  }

  // The gains [BLOCK] of the tokens that are scored next.
  void read_gains(const float* gain) {
    alignas(32) int16_t words[BLOCK];
    for (int t = 0; t < BLOCK; t += W) store_words(words + t, all(least_gain_ * ONE) / load(gain + t));
    for (int t = 0; t < BLOCK; t++) _mm_store_si128((__m128i*)(inverse_ + t * EIGHT), _mm_set1_epi16(words[t]));
  }

  // Scores [group, BLOCK] of a head's rows with `count` tokens, the first of which lies `slot` slots behind that of
  // turn_back; levels are [columns / CHANNELS, BLOCK, CHANNELS]. The last scores are there after the next `flush`.
  void score(int64_t head, int slot, int count, const int8_t* levels, const float* gain, float* scores) {
    const int16_t *scale = scale_ + head * columns_, *offset = offset_ + head * columns_;
    for (int t = 0; t < count; t += STEP) {
      const Group next{head, gain + t, scores + t, keys_ + number_ % 2 * chunks_ * 2048, nullptr};
      start();
      int64_t chunk = 0;
      for (int64_t d = 0; d < half_; d += CHANNELS) {
        multiply(0, chunk);
        char* to = next.keys + chunk++ * 2048;
        for (int i = t; i < t + STEP; i += TILE, to += 1024) {
          const int64_t first = (d / EIGHT * SLOTS + slot + i) * EIGHT, second = first + SLOTS * EIGHT;
          const int8_t* of_tokens = levels + d * BLOCK + i * CHANNELS;
          rotated<0>(scale + d, offset + d, cos_ + first, sin_ + first, of_tokens, inverse_ + i * EIGHT, to);
          rotated<1>(scale + d, offset + d, cos_ + second, sin_ + second, of_tokens, inverse_ + i * EIGHT, to);
        }
      }
      for (int64_t d = 2 * half_; d < columns_; d += WORDS) {
        multiply(0, chunk);
        char* to = next.keys + chunk++ * 2048;
        for (int i = t; i < t + STEP; i += TILE, to += 1024)
          for (int64_t other = 0; other < WORDS; other += CHANNELS) {
            const int64_t channel = d + other;
            char* at = to + other / CHANNELS * 512;
            if (channel == columns_) {
              memset(at, 0, 512);
              break;
            }
            const int8_t* of_tokens = levels + channel * BLOCK + i * CHANNELS;
            unrotated<0>(scale + channel, offset + channel, of_tokens, inverse_ + i * EIGHT, at);
            unrotated<1>(scale + channel, offset + channel, of_tokens, inverse_ + i * EIGHT, at);
          }
      }
      end(next);
    }
  }

  // Finishes all scores.
  void flush() {
    for (int i = 0; i < 2; i++) {
      start();
      for (int64_t chunk = 0; chunk < chunks_; chunk++) multiply(0, chunk);
      end({});
    }
  }

 private:
  int64_t tiles_bytes() const { return heads_ * sets_ * chunks_ * 2 * rows_ * 64; }

  // STEP tokens. Their keys are written, multiplied while those of the next ones are written, and finished one step
  // later, so that nothing waits for the tiles.
  struct Group {
    int64_t head;
    const float* gain;
    float* scores;
    char* keys;
    int32_t* products;
  };
  Group pending_{}, stored_{};
  int64_t number_ = 0;

  static INLINE Vector size(Vector x) { return (Vector)_mm512_abs_ps((__m512)x); }
  static INLINE __m256i as_words(Vector x) { return _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32((__m512)x)); }
  static INLINE void store_words(int16_t* to, Vector x) { _mm256_storeu_si256((__m256i*)to, as_words(x)); }

  void start() const {
    asm volatile("" : : : "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  // Adds the products of a chunk of the pending tokens with a set of rows.
  INLINE void multiply(int set, int64_t chunk) const {
    if (!pending_.keys) return;
    const char* queries = tiles_ + ((pending_.head * sets_ + set) * chunks_ + chunk) * 2 * rows_ * 64;
    asm volatile("" : : : "memory");
    _tile_loadd(6, pending_.keys + chunk * 2048, 64);
    _tile_loadd(7, pending_.keys + chunk * 2048 + 1024, 64);
    _tile_loadd(4, queries, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(2, 4, 7);
    _tile_loadd(4, queries + rows_ * 64, 64);
    _tile_dpbsud(1, 4, 6);
    _tile_dpbsud(3, 4, 7);
  }

  // Ends the products of the pending tokens and the scores of those before, and makes others pending.
  void end(const Group& next) {
    if (pending_.keys) {
      int32_t* products = pending_.products = products_ + number_ % 2 * sets_ * 1024;
      for (int set = 0; set < sets_; set++, products += 1024) {
        if (set) {
          start();
          for (int64_t chunk = 0; chunk < chunks_; chunk++) multiply(set, chunk);
        }
        _tile_stored(0, products, 64);
        _tile_stored(1, products + 256, 64);
        _tile_stored(2, products + 512, 64);
        _tile_stored(3, products + 768, 64);
      }
      asm volatile("" : : : "memory");
    }
    if (stored_.keys) finish(stored_);
    stored_ = pending_, pending_ = next;
    number_++;
  }

  // Eight words of a block's channels of four tokens.
  template <int PART>
  struct Channels {
    __m512i scale, offset;
    INLINE Channels(const int16_t* scales, const int16_t* offsets)
        : scale(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)scales + PART))),
          offset(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)offsets + PART))) {}
    INLINE __m512i words(const int8_t* levels, __m512i inverse) const {
      const __m512i four = _mm512_loadu_si512(levels), none = _mm512_setzero_si512();
      const __m512i level = PART ? _mm512_unpackhi_epi8(none, four) : _mm512_unpacklo_epi8(none, four);
      return _mm512_adds_epi16(_mm512_mulhrs_epi16(level, scale), _mm512_mulhrs_epi16(offset, inverse));
    }
  };

  // Pairs of words of sixteen tokens beside each other: token 4 i + l, of lane l of words[i], in place 4 l + i.
  static INLINE void store_pairs(const __m512i* words, char* to) {
    const __m512i first = _mm512_unpacklo_epi32(words[0], words[1]), second = _mm512_unpackhi_epi32(words[0], words[1]);
    const __m512i third = _mm512_unpacklo_epi32(words[2], words[3]), fourth = _mm512_unpackhi_epi32(words[2], words[3]);
    _mm512_store_si512(to, _mm512_unpacklo_epi64(first, third));
    _mm512_store_si512(to + 64, _mm512_unpackhi_epi64(first, third));
    _mm512_store_si512(to + 128, _mm512_unpacklo_epi64(second, fourth));
    _mm512_store_si512(to + 192, _mm512_unpackhi_epi64(second, fourth));
  }

  template <int PART>
  INLINE void rotated(const int16_t* scale, const int16_t* offset, const int16_t* cos, const int16_t* sin,
                      const int8_t* levels, const int16_t* inverse, char* to) const {
    const Channels<PART> first(scale, offset), second(scale + half_, offset + half_);
    __m512i real[4], imaginary[4];
    UNROLL for (int i = 0; i < 4; i++) {
      const __m512i of_gain = _mm512_load_si512(inverse + 4 * i * EIGHT);
      const __m512i x = first.words(levels + 4 * i * CHANNELS, of_gain);
      const __m512i y = second.words(levels + 4 * i * CHANNELS + half_ * BLOCK, of_gain);
      const __m512i c = _mm512_loadu_si512(cos + 4 * i * EIGHT), s = _mm512_loadu_si512(sin + 4 * i * EIGHT);
      real[i] = _mm512_sub_epi16(_mm512_mulhrs_epi16(x, c), _mm512_mulhrs_epi16(y, s));
      imaginary[i] = _mm512_add_epi16(_mm512_mulhrs_epi16(y, c), _mm512_mulhrs_epi16(x, s));
    }
    store_pairs(real, to + PART * 256);
    store_pairs(imaginary, to + 512 + PART * 256);
  }

  template <int PART>
  INLINE void unrotated(const int16_t* scale, const int16_t* offset, const int8_t* levels, const int16_t* inverse,
                        char* to) const {
    const Channels<PART> channels(scale, offset);
    __m512i words[4];
    UNROLL for (int i = 0; i < 4; i++)
      words[i] = channels.words(levels + 4 * i * CHANNELS, _mm512_load_si512(inverse + 4 * i * EIGHT));
    store_pairs(words, to + PART * 256);
  }

  // Scores from the sums of products.
  void finish(const Group& group) const {
    const __m512i in_order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    for (int t = 0; t < STEP; t += TILE) {
      const Vector gains = load(group.gain + t) * unit_[group.head];
      for (int row = 0; row < group_; row++) {
        const int32_t* at = group.products + row / EIGHT * 1024 + t / TILE * 512 + row % EIGHT * 2 * TILE;
        const auto piece = [&](int p) {
          const __m512i higher = _mm512_load_si512(at + p * TILE), lower = _mm512_load_si512(at + 256 + p * TILE);
          return (Vector)_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(higher, 8), lower));
        };
        const Vector sum = (piece(0) * 256.0f + piece(1)) * query_unit_[group.head * group_ + row];
        store(group.scores + row * BLOCK + t, (Vector)_mm512_permutexvar_ps(in_order, (__m512)sum) * gains);
      }
    }
  }
};

}  // namespace
#endif
