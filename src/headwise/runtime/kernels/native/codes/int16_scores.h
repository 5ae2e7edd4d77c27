// Scores of keys in trellis codes, in words, for queries that are rounded to 16 bits themselves.
//
// A key is its token's gain times levels · scales + offsets / gain. The sum becomes words, whole numbers of 16 bits of
// one unit a head, which are rotated by the slot; the gain and the units are multiplied into the score at the end.
// Queries are words too, as large as the sums of all products with keys fit into 32 bits, which are then exact.
#pragma once

#include "../attend.h"

#if HAS_WORDS
namespace {

class WordScores {
  static constexpr int EIGHT = 8, STEP = W;         // words of a token beside each other, and tokens that are scored at
                                                    // a time, in four vectors
  static constexpr int TOKENS = STEP / 4;           // of a vector
  static constexpr int ROWS = BYTES == 64 ? 4 : 2;  // of queries, whose sums are in registers
  static constexpr int SLOTS =
      BLOCK + STEP;  // of the rotations; those behind BLOCK are of tokens whose scores are dropped
  static constexpr float MOST = 23000, ONE = 32767;  // rotated, √2 · MOST is less than 2¹⁵
  static constexpr float MOST_SUM = 2e9;             // less than 2³¹ by what 1,024 columns are rounded up
  // Offsets that many times as large as levels would leave too few of a word's bits to levels.
  static constexpr float FAR = 16;

  // Columns of a head's levels are two rotating halves and others, in blocks of CHANNELS.
  const int64_t half_, columns_, heads_;
  const int group_;           // rows of a head
  int16_t *scale_, *offset_;  // [head, columns_], of words
  float *most_, *unit_;       // [head, columns_], the largest words of keys; [head], what 1 in a word stands for
  int16_t *cos_, *sin_;       // [half_ / 8, SLOTS, 8]
  float* words_of_;           // [row], what a query is multiplied by
  int16_t* query_;            // [row, columns_]
  int16_t* inverse_;          // [BLOCK, 8], of the tokens' gains
  char* keys_;                // [columns_ / 8, STEP, 8]
  float least_gain_;

 public:
  static constexpr int64_t MOST_COLUMNS = 1024;

  // Whether such keys can be scored in words; see `begin`.
  static bool may(int64_t half, int64_t columns, int64_t heads, const float* scale, const float* offset,
                  const float* gains) {
    if (half % CHANNELS || columns > MOST_COLUMNS) return false;
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
      : half_(half), columns_(columns), heads_(heads), group_(group) {
    scale_ = arena.take<int16_t>(heads * columns), offset_ = arena.take<int16_t>(heads * columns);
    most_ = arena.take<float>(heads * columns), unit_ = arena.take<float>(heads);
    cos_ = arena.take<int16_t>(half * SLOTS), sin_ = arena.take<int16_t>(half * SLOTS);
    words_of_ = arena.take<float>(heads * group);
    query_ = arena.take<int16_t>(heads * group * columns);
    inverse_ = arena.take<int16_t>(BLOCK * EIGHT);
    keys_ = arena.take<char>(columns * STEP * 2);
  }

  // What all keys have in common: scales, offsets [head, columns], gains by number, and the rotations of BLOCK slots,
  // [BLOCK, half].
  void begin(const float* scale, const float* offset, const float* gains, const float* cos, const float* sin) {
    least_gain_ = *std::min_element(gains, gains + 16);
    for (int64_t head = 0; head < heads_; head++) {
      Vector most = all(1e-30f);
      for (int64_t d = head * columns_; d < (head + 1) * columns_; d += W) {
        const Vector of_column = size(load(scale + d)) * 127.0f + size(load(offset + d)) * (1 / least_gain_);
        store(most_ + d, of_column);
        most = larger(most, of_column);
      }
      const float one = unit_[head] = largest(most) / MOST;
      for (int64_t d = head * columns_; d < (head + 1) * columns_; d += W) {
        store_words(scale_ + d, load(scale + d) * (128 / one));  // a level is multiplied as a word's higher byte
        store_words(offset_ + d, load(offset + d) * (1 / least_gain_ / one));
        store(most_ + d, load(most_ + d) * (1 / one));
      }
    }
    for (int slot = 0; slot < SLOTS; slot++)
      for (int64_t d = 0; d < half_; d += CHANNELS)
        for (const auto& [table, to] : {std::pair{cos, cos_}, std::pair{sin, sin_}}) {
          int16_t words[CHANNELS];
          for (int i = 0; i < CHANNELS; i += W)
            store_words(words + i, load(table + std::min(slot, BLOCK - 1) * half_ + d + i) * ONE);
          int16_t* at = to + (d / EIGHT * SLOTS + slot) * EIGHT;
          memcpy(at, words, EIGHT * 2), memcpy(at + SLOTS * EIGHT, words + EIGHT, EIGHT * 2);
        }
  }

  // Reads the queries of all heads' rows, `stride` numbers apart, however they are rotated; `factor` is what a rotation
  // multiplies by.
  void read_queries(const float* query, int64_t stride, float factor) {
    for (int64_t row = 0; row < heads_ * group_; row++, query += stride) {
      const float* of_key = most_ + row / group_ * columns_;
      Vector most{}, sum_of{};
      const auto add = [&](Vector x, Vector key) { most = larger(most, x), sum_of += x * key; };
      for (int64_t d = 0; d < half_; d += W)
        add(length(load(query + d), load(query + half_ + d)) * factor,
            length(load(of_key + d), load(of_key + half_ + d)));
      for (int64_t d = 2 * half_; d < std::min(columns_, stride); d += W) add(size(load(query + d)), load(of_key + d));
      const float words = std::min(MOST / largest(most), MOST_SUM / sum(sum_of));
      words_of_[row] = std::min(words, 1e30f);  // in this order NaN stays NaN
    }
  }

  // Takes the queries, `stride` numbers apart, as they are rotated back.
  void turn_back(const float* query, int64_t stride) {
    for (int64_t row = 0; row < heads_ * group_; row++)
      for (int64_t d = 0; d < std::min(columns_, stride); d += W)
        store_words(query_ + row * columns_ + d, load(query + row * stride + d) * words_of_[row]);
  }

  // The gains [BLOCK] of the tokens that are scored next.
  void read_gains(const float* gain) {
    alignas(32) int16_t words[BLOCK];
    for (int t = 0; t < BLOCK; t += W) store_words(words + t, all(least_gain_ * ONE) / load(gain + t));
    for (int t = 0; t < BLOCK; t++) _mm_store_si128((__m128i*)(inverse_ + t * EIGHT), _mm_set1_epi16(words[t]));
  }

  // Scores [group, BLOCK] of a head's rows with `count` tokens, the first of which lies `slot` slots behind that of
  // turn_back; levels are [columns / CHANNELS, BLOCK, CHANNELS].
  void score(int64_t head, int slot, int count, const int8_t* levels, const float* gain, float* scores) const {
    const int16_t *scale = scale_ + head * columns_, *offset = offset_ + head * columns_;
    for (int t = 0; t < count; t += STEP) {
      const int16_t* inverse = inverse_ + t * EIGHT;
      const int8_t* of_tokens = levels + t * CHANNELS;
      for (int64_t d = 0; d < half_; d += CHANNELS) {
        const int64_t first = (d / EIGHT * SLOTS + slot + t) * EIGHT, second = first + SLOTS * EIGHT;
        rotated<0>(scale + d, offset + d, cos_ + first, sin_ + first, of_tokens + d * BLOCK, inverse, place(d));
        rotated<1>(scale + d, offset + d, cos_ + second, sin_ + second, of_tokens + d * BLOCK, inverse,
                   place(d + EIGHT));
      }
      for (int64_t d = 2 * half_; d < columns_; d += CHANNELS) {
        unrotated<0>(scale + d, offset + d, of_tokens + d * BLOCK, inverse, place(d));
        unrotated<1>(scale + d, offset + d, of_tokens + d * BLOCK, inverse, place(d + EIGHT));
      }
      const Vector gains = load(gain + t) * unit_[head];
      in_blocks<ROWS>(group_, [&](int row, auto SIZE) __attribute__((always_inline)) {
        multiply<SIZE>(head * group_ + row, gains, scores + row * BLOCK + t);
      });
    }
  }

 private:
  static INLINE Vector size(Vector x) { return larger(x, -x); }
  static INLINE Vector length(Vector x, Vector y) {
    Vector result = x * x + y * y;
    for (int i = 0; i < W; i++) result[i] = std::sqrt(result[i]);
    return result;
  }

  char* place(int64_t column) const { return keys_ + column * STEP * 2; }

  // Eight words of a block's channels of TOKENS tokens.
  template <int PART>
  struct Channels {
    Words scale, offset;
    INLINE Channels(const int16_t* scales, const int16_t* offsets)
        : scale(repeated(scales + PART * EIGHT)), offset(repeated(offsets + PART * EIGHT)) {}
    INLINE Words words(Words levels, Words inverse) const {
      const Words none{},
          level = PART ? OF_VECTOR(unpackhi_epi8)(none, levels) : OF_VECTOR(unpacklo_epi8)(none, levels);
      return OF_VECTOR(adds_epi16)(product(level, scale), product(offset, inverse));
    }
  };
  static INLINE Words product(Words a, Words b) { return OF_VECTOR(mulhrs_epi16)(a, b); }

  template <int PART>
  INLINE void rotated(const int16_t* scale, const int16_t* offset, const int16_t* cos, const int16_t* sin,
                      const int8_t* levels, const int16_t* inverse, char* to) const {
    const Channels<PART> first(scale, offset), second(scale + half_, offset + half_);
    char* partner = to + half_ * STEP * 2;
    UNROLL for (int i = 0; i < 4; i++) {
      const Words of_gain = words_at(inverse + i * TOKENS * EIGHT);
      const Words x = first.words(words_at(levels + i * BYTES), of_gain);
      const Words y = second.words(words_at(levels + i * BYTES + half_ * BLOCK), of_gain);
      const Words c = words_at(cos + i * TOKENS * EIGHT), s = words_at(sin + i * TOKENS * EIGHT);
      put_words(to + i * BYTES, OF_VECTOR(sub_epi16)(product(x, c), product(y, s)));
      put_words(partner + i * BYTES, OF_VECTOR(add_epi16)(product(y, c), product(x, s)));
    }
  }

  template <int PART>
  INLINE void unrotated(const int16_t* scale, const int16_t* offset, const int8_t* levels, const int16_t* inverse,
                        char* to) const {
    const Channels<PART> channels(scale, offset);
    UNROLL for (int i = 0; i < 4; i++)
      put_words(to + i * BYTES, channels.words(words_at(levels + i * BYTES), words_at(inverse + i * TOKENS * EIGHT)));
  }

  // Of token TOKENS i + l, the four sums are in lanes of sixteen bytes l of vector i.
  static constexpr int in_order(int token) { return token % TOKENS * 4 + token / TOKENS; }

  // Scores of STEP keys with rows of queries.
  template <int SIZE>
  INLINE void multiply(int64_t row, Vector gains, float* scores) const {
    const int16_t* query = query_ + row * columns_;
    Words sums[SIZE][4];
    UNROLL for (int r = 0; r < SIZE; r++) UNROLL
      for (int i = 0; i < 4; i++) sums[r][i] = Words{};
    for (int64_t d = 0; d < columns_; d += EIGHT) {
      Words keys[4];
      UNROLL for (int i = 0; i < 4; i++)
        keys[i] = words_at(place(d) + i * BYTES);
      UNROLL for (int r = 0; r < SIZE; r++) {
        const Words of_row = repeated(query + r * columns_ + d);
        UNROLL for (int i = 0; i < 4; i++)
          add_products(sums[r][i], keys[i], of_row);
      }
    }
    UNROLL for (int r = 0; r < SIZE; r++) {
      const auto both = [&](int i) __attribute__((always_inline)) {
        return OF_VECTOR(add_epi32)(OF_VECTOR(unpacklo_epi32)(sums[r][i], sums[r][i + 1]),
                                    OF_VECTOR(unpackhi_epi32)(sums[r][i], sums[r][i + 1]));
      };
      const Words first = both(0), second = both(2);
      const Words sum =
          OF_VECTOR(add_epi32)(OF_VECTOR(unpacklo_epi64)(first, second), OF_VECTOR(unpackhi_epi64)(first, second));
      const Vector score = (Vector)OF_VECTOR(cvtepi32_ps)(sum);
      store(scores + r * BLOCK, picked<in_order>(score, score) * gains * (1 / words_of_[row + r]));
    }
  }
};

}  // namespace
#endif
