// softmax(scale · Q Kᵀ) V on the CPU over keys and values of heads that are read as they are stored, in trellis codes.
//
// A token's row of codes holds all heads' keys before rotation, and then all values. Keys are rotated by their slot as those
// of latents are (see coded.cpp): the key by the slot's place within a few, the query back by where these begin. Mixtures are
// of the values' levels; scales, offsets and gains are multiplied and added as for latents. Queries of 16 bits are scored in words
// where the processor has matrix tiles (see words.h).
#include <cmath>
#include <new>
#include <optional>

#include "stored_tokens.h"
#include "int16_scores.h"

namespace {

// The wide values are heads · (D + V) of a token.
struct HeadsArguments : StoredTokens {
  int64_t heads;  // of keys and values
};

template <class Q>
class HeadsAttention {
  using A = Single;
  static constexpr int PIECES = std::is_same_v<Q, float> ? 3 : 2;  // of a whole weight
  const HeadsArguments& c_;
  const Arguments& a_;
  const Mask mask_;
  const int rows_, group_;  // of all heads, and of one
  const bool tiles_;        // whether matrix tiles are used
  const int fours_;         // groups of four rows of a head whose scores are computed side by side
  const int64_t half_;      // of a table of rotations
  const int64_t D_, V_;     // columns of a head's levels
  const int64_t query_;     // numbers of a row of queries
  const int64_t key_;       // numbers of a row of keys: what is written of it may end behind it
  const int64_t row_;       // values without codes of a token
  // Levels of a head's keys lie in blocks [D_ / CHANNELS, BLOCK, CHANNELS], or where the halves of a rotated key begin within
  // one, in rows [BLOCK, D_]: how far blocks, and tokens, are apart.
  const int64_t block_, token_;
  const bool words_;            // whether scores are computed by tiles too, in words
  const bool mixes_ahead_;      // whether tiles mix a head's values while the next one's are decoded

 public:
  explicit HeadsAttention(const HeadsArguments& c)
      : c_(c),
        a_(c.call),
        mask_(a_),
        rows_(int(a_.G * a_.S)),
        group_(int(rows_ / c.heads)),
#if HAS_MATRIX_TILES
        tiles_(may_use_tiles()),
#else
        tiles_(false),
#endif
        fours_(HAS_LANES ? (group_ + 3) / 4 : 0),
        half_(up(c.P / 2, CHANNELS)),
        D_(up(a_.D, CHANNELS)),
        V_(up(a_.V, CHANNELS)),
        query_(up(a_.D, W)),
        key_(up(a_.D, CHANNELS) + CHANNELS),
        row_(c.heads * (a_.D + a_.V)),
        block_(c.P / 2 % CHANNELS ? CHANNELS : CHANNELS * BLOCK),
        token_(c.P / 2 % CHANNELS ? D_ : CHANNELS),
#if HAS_MATRIX_TILES
        words_(tiles_ && !std::is_same_v<Q, float> && WordScores::may(c.P / 2, D_, c.heads, c.scale, c.offset, c.gains)),
        mixes_ahead_(tiles_ && HeadMixtures<PIECES>::may(group_)) {}
#else
        words_(false),
        mixes_ahead_(false) {}
#endif

  void run() const {
    int64_t tokens = 0;
    for (int64_t b = 0; b < a_.B; b++) tokens += mask_.range(b).length();
    const double work = double(tokens) * (c_.heads * (D_ + V_) + 2.0 * rows_ * (D_ + V_));
    in_parts(*this, a_.B, 1, tokens, useful_threads(work / 50e3, a_.threads));
  }

  Range range(int64_t b) const { return mask_.range(b); }
  int rows() const { return rows_; }
  int64_t width() const { return V_; }
  int64_t scratch_bytes() const {
    return 2 * up(rows_ * (query_ + W) * 4, 64) + c_.heads * fours_ * 4 * query_ * 4 + 2 * up(half_ * 4, 64) + 2 * up(rows_ * BLOCK * 4, 64) + up(rows_ * 4, 64) +
           up(KEYS * key_ * 4, 64) + BLOCK * (c_.heads * D_ + 2 * V_) + 64 + up(tiles_bytes(), 64) +
           up(SINKS * c_.heads * V_ * 4, 64) + 2 * BLOCK * 4 + up(c_.count * sizeof(BlockPlan), 64) +
           up(copies_bytes(c_), 64) + 64 + words_bytes();
  }

  void attend(int64_t b, int64_t, Range tokens, const Partial& partial, char* scratch) const {
    const auto take = [&](int64_t bytes) { return (scratch += up(bytes, 64)) - up(bytes, 64); };
    Place at;
    at.b = b;
    at.query = (float*)take(rows_ * (query_ + W) * 4);
    at.turned = (float*)take(rows_ * (query_ + W) * 4);
    at.fours = (float*)take(c_.heads * fours_ * 4 * query_ * 4);
    at.cos = (float*)take(half_ * 4);
    at.sin = (float*)take(half_ * 4);
    at.scores = (float*)take(rows_ * BLOCK * 4);
    at.weights = (float*)take(rows_ * BLOCK * 4);
    at.keep = (float*)take(rows_ * 4);
    at.keys = (float*)take(KEYS * key_ * 4);
    at.values = (int8_t*)take(2 * BLOCK * V_);
    at.levels = (int8_t*)take(BLOCK * c_.heads * D_ + CHANNELS);
    at.tiles = take(tiles_bytes());
    at.wide = (float*)take(SINKS * c_.heads * V_ * 4);
    at.key_gain = (float*)take(BLOCK * 4);
    at.value_gain = (float*)take(BLOCK * 4);
    at.plans = (BlockPlan*)take(c_.count * sizeof(BlockPlan));
    at.copies = (uint8_t*)take(copies_bytes(c_));
    for (int64_t i = 0; i < c_.count; i++) new (at.plans + i) BlockPlan(c_.blocks[i]);
    std::fill_n(partial.high, rows_, NOTHING);
    std::fill_n(partial.sum, rows_ * W, 0.0f);
    std::fill_n(partial.mixture, rows_ * V_, 0.0f);
    if (!tokens.length()) return;
    read_query(b, at.query);
    std::copy_n(at.query, rows_ * query_, at.turned);
    std::fill_n(at.fours, c_.heads * fours_ * 4 * query_, 0.0f);
    set_side_by_side(at);
    std::fill_n(at.keys, KEYS * key_, 0.0f);
#if HAS_MATRIX_TILES
    if (words_) {
      static_assert(TURN == BLOCK);
      at.words.emplace(c_.P / 2, D_, c_.heads, group_);
      at.words->begin(take(words_bytes()), c_.scale, c_.offset, c_.gains, c_.turn_cos, c_.turn_sin);
      at.words->read_queries(at.query, query_, rotation_size());
    }
#endif

    const Range wide{c_.first[b], c_.first[b] + SINKS};
#if HAS_MATRIX_TILES
    std::optional<TileSetting> setting;
    if (tiles_) setting.emplace(std::min(TILE, group_ * PIECES));
#endif
    attend_codes(tokens.cut({0, wide.from}), at, partial);
    attend_wide(tokens.cut(wide), at, partial);
    attend_codes(tokens.cut({wide.to, a_.T}), at, partial);
  }

  // Writes one row of the output from the partial results of one or several threads; a row that saw nothing gives zeros.
  void finish(int64_t b, int64_t, int row, const Partial* partials, int count) const {
    const Shares share(partials, count, row);
    const float sum = share.sum;
    Q* out = (Q*)a_.out + b * a_.out_stride[0] + row / a_.S * a_.out_stride[1] + row % a_.S * a_.out_stride[2];
    const int64_t column = c_.heads * D_ + row / group_ * V_;
    for (int64_t d = 0; d < a_.V; d++) {
      float mixture = 0;
      for (int i = 0; i < count; i++) mixture += share(i) * partials[i].mixture[row * V_ + d];
      put(out + d, sum == 0 ? 0.0f : mixture / sum * c_.scale[column + d] + c_.offset[column + d]);
    }
  }

 private:
  // What a thread works on.
  struct Place {
    int64_t b;
    float *query, *turned;           // [row, query_], as they are, and rotated back by `turn` slots
    float* fours;                    // the same side by side
    float *cos, *sin;                // [half_], of those slots
    int64_t turn = -1;               // none yet
    float *scores, *weights;         // [row, BLOCK]
    float* keep;                     // [row], what partial results so far are multiplied by
    float* keys;                     // [KEYS, key_], of a head
    int8_t* levels;                  // of keys, head by head, or of one head
    int8_t* values;                  // of a head's values, [BLOCK, V_], or quads of two
    char* tiles;                     // memory for matrix tiles to work in
    float* wide;                     // [SINKS, heads, V_], values without codes in levels
    float *key_gain, *value_gain;    // [BLOCK]
    BlockPlan* plans;                // of the blocks
    uint8_t* copies;                 // codes at the end of memory
#if HAS_MATRIX_TILES
    std::optional<WordScores> words; // where scores are computed by tiles too
    int64_t words_turn = -1;
#endif
  };

  int64_t tiles_bytes() const {
#if HAS_MATRIX_TILES
    if (mixes_ahead_) return HeadMixtures<PIECES>::bytes(c_.heads, group_, V_);
    if (tiles_) return mix_tiles_bytes<PIECES>(group_, V_);
#endif
    return 0;
  }

  int64_t words_bytes() const {
#if HAS_MATRIX_TILES
    if (words_) return up(WordScores(c_.P / 2, D_, c_.heads, group_).bytes(), 64);
#endif
    return 0;
  }

  // --- queries ---------------------------------------------------------------------------------------------------

  void read_query(int64_t b, float* query) const {
    std::fill_n(query, rows_ * query_, 0.0f);
    const float factor = float(a_.scale * LOG2E);
    for (int row = 0; row < rows_; row++) {
      const Q* from = (const Q*)a_.query + b * a_.query_stride[0] + row / a_.S * a_.query_stride[1] +
                      row % a_.S * a_.query_stride[2];
      for (int64_t d = 0; d < a_.D; d++) query[row * query_ + d] = number(from[d]) * factor;
    }
  }

  // Rotates the queries back by `slot`.
  void turn_back(int64_t slot, Place& at) const {
    if (!c_.P || at.turn == slot) return;
    at.turn = slot;
    // Local copies, which the compiler knows that no store changes.
    const float *all_cos = c_.cos + slot * c_.frequencies, *all_sin = c_.sin + slot * c_.frequencies;
    const int64_t *frequency = c_.frequency, pairs = c_.P / 2;
    float *cos = at.cos, *sin = at.sin;
    for (int64_t d = 0; d < pairs; d++) cos[d] = all_cos[frequency[d]], sin[d] = all_sin[frequency[d]];
    for (int row = 0; row < rows_; row++) {
      const float* query = at.query + row * query_;
      float* turned = at.turned + row * query_;
      if (pairs % W)
        for (int64_t d = 0; d < pairs; d++) {
          const float x = query[d], y = query[pairs + d];
          turned[d] = x * cos[d] + y * sin[d];
          turned[pairs + d] = y * cos[d] - x * sin[d];
        }
      else
        for (int64_t d = 0; d < pairs; d += W) {
          const Vector x = load(query + d), y = load(query + pairs + d), c = load(cos + d), s = load(sin + d);
          store(turned + d, x * c + y * s);
          store(turned + pairs + d, y * c - x * s);
        }
    }
    set_side_by_side(at);
  }

  // Puts four numbers of four rows of a head into a vector: [head, fours of rows, query_ / 4, 4, 4].
  void set_side_by_side(Place& at) const {
    if (!fours_) return;
    for (int row = 0; row < rows_; row++) {
      const int r = row % group_;
      float* to = at.fours + (row / group_ * fours_ + r / 4) * 4 * query_ + r % 4 * 4;
      for (int64_t d = 0; d < query_; d += 4) memcpy(to + d * 4, at.turned + row * query_ + d, 16);
    }
  }

  // --- tokens ----------------------------------------------------------------------------------------------------

  void attend_codes(Range tokens, Place& at, const Partial& partial) const {
    const uint8_t* codes = (const uint8_t*)a_.key + at.b * a_.key_stride[0];
    for (int64_t from = tokens.from, to; from < tokens.to; from = to) {
      to = std::min(tokens.to, (from / BLOCK + 1) * BLOCK);
      const int count = int(to - from);
      const uint8_t* token[BLOCK + 3];
      find_tokens(c_, at.b, from, count, at.copies, token, at.key_gain, at.value_gain);
      Ahead ahead(codes + to * a_.key_stride[2], a_.key_stride[2], std::min<int64_t>(BLOCK, tokens.to - to), c_.bytes, c_.count, 0);
      score_codes(at, from, count, token, ahead);
      weigh(at, from, count, partial, at.value_gain);
      mix_codes(at, count, token, partial, ahead);
    }
  }

  // Scores of a block of tokens. Without words, keys of all heads are decoded at once, and then rotated a few tokens at a time, so
  // that what rotates them is read once.
  void score_codes(Place& at, int64_t from, int count, const uint8_t* const* token, Ahead& ahead) const {
    const BlockPlan* plan = at.plans;
    const auto decode_keys = [&](int8_t* levels) {
      for (int64_t d = 0; d < D_; d += CHANNELS, plan++) {
        ahead.step();
        decode_block(*plan, c_.tables, token, count, levels + d / CHANNELS * block_, token_);
      }
    };
#if HAS_MATRIX_TILES
    if (words_) {
      turn_words(at, from);
      for (int64_t head = 0; head < c_.heads; head++) {
        decode_keys(at.levels);
        at.words->score(head, int(from % TURN), count, at.levels, at.key_gain, at.scores + head * group_ * BLOCK);
      }
      return at.words->flush();
    }
#endif
    for (int64_t head = 0; head < c_.heads; head++) decode_keys(at.levels + head * BLOCK * D_);
    score_tokens(at, from, count, [&](int64_t head, int t, int n) { coded_keys(at, head, from, t, n); });
  }

#if HAS_MATRIX_TILES
  // Prepares scores of a block of tokens by tiles, whose gains are there.
  void turn_words(Place& at, int64_t from) const {
    at.words->read_gains(at.key_gain);
    const int64_t slot = from / TURN * TURN;
    if (at.words_turn == slot) return;
    at.words_turn = slot;
    const float *cos = c_.cos + slot * c_.frequencies, *sin = c_.sin + slot * c_.frequencies, one = 1 / rotation_size();
    for (int64_t d = 0; d < c_.P / 2; d++) at.cos[d] = cos[c_.frequency[d]] * one, at.sin[d] = sin[c_.frequency[d]] * one;
    at.words->turn_back(at.cos, at.sin);
  }

  // What a model multiplies its rotations by.
  float rotation_size() const { return c_.P ? c_.cos[c_.frequency[0]] : 1.0f; }
#endif

  // Mixtures of a block of tokens; a head's values are decoded just before they are mixed.
  void mix_codes(Place& at, int count, const uint8_t* const* token, const Partial& partial, Ahead& ahead) const {
    const BlockPlan* plan = at.plans + c_.heads * (D_ / CHANNELS);
#if HAS_MATRIX_TILES
    if (mixes_ahead_) {
      HeadMixtures<PIECES> mixtures(c_.heads, group_, V_, at.weights, at.tiles);
      for (int64_t head = 0; head < c_.heads; head++) {
        int8_t* quads = at.values + head % 2 * BLOCK * V_;
        for (int64_t d = 0; d < V_; d += CHANNELS, plan++, quads += CHANNELS * BLOCK) {
          ahead.step();
          decode_quads<false>(*plan, c_.tables, token, count, quads, nullptr, 0);
          mixtures.add(quads);
        }
        mixtures.finish(partial.mixture, at.keep, V_);
      }
      return;
    }
#endif
    for (int64_t head = 0; head < c_.heads; head++) {
      const int64_t row = head * group_;
      float *mixture = partial.mixture + row * V_, *weights = at.weights + row * BLOCK, *keep = at.keep + row;
#if HAS_MATRIX_TILES
      if (tiles_) {
        for (int64_t d = 0; d < V_; d += CHANNELS, plan++) {
          ahead.step();
          decode_quads<false>(*plan, c_.tables, token, count, at.values + d * BLOCK, nullptr, 0);
        }
        mix_tiles<PIECES>(mixture, group_, weights, keep, at.values, V_, at.tiles);
        continue;
      }
#endif
      for (int64_t d = 0; d < V_; d += CHANNELS, plan++) {
        ahead.step();
        decode_block(*plan, c_.tables, token, count, at.values + d, V_);
      }
      const int8_t* value[BLOCK];
      for (int t = 0; t < count; t++) value[t] = at.values + t * V_;
      Ahead none(at.values, 0, 0, 0, 0);
      mix<A>(mixture, group_, Weights<float>{weights, BLOCK, 1}, keep, value, count, V_, none);
    }
  }

  // A head's keys of tokens t … t + n − 1 of a block, whose levels and gains are there.
  void coded_keys(Place& at, int64_t head, int64_t from, int t, int n) const {
    // Local copies, which the compiler knows that no store changes.
    const int64_t half = c_.P / 2, stride = key_, table = half_, row = token_, D = a_.D;
    const float *cos = c_.turn_cos + (from + t) % TURN * table, *sin = c_.turn_sin + (from + t) % TURN * table;
    const float *gains = at.key_gain + t, *scale = c_.scale + head * D_, *offset = c_.offset + head * D_;
    const int8_t* levels = at.levels + head * BLOCK * D_ + t * row;
    const auto level = [&](int64_t d) { return levels + d / CHANNELS * block_ + d % CHANNELS; };
    float* keys = at.keys;
    // From the last channels on: what is written behind the end of a half is written again.
    for (int64_t d = up(half, W) - W; d >= 0; d -= W) {
      const int some = int(std::min<int64_t>(W, D_ - half - d));
      const int8_t *level1 = level(d), *level2 = level(half + d);
      const Vector scale1 = load(scale + d), scale2 = load(scale + half + d, some);
      const Vector offset1 = load(offset + d), offset2 = load(offset + half + d, some);
      for (int i = 0; i < n; i++) {
        const Vector gain = all(gains[i]), c = load(cos + i * table + d), s = load(sin + i * table + d);
        const Vector x = load(level1 + i * row) * (scale1 * gain) + offset1;
        const Vector y = load(level2 + i * row) * (scale2 * gain) + offset2;
        store(keys + i * stride + d, x * c - y * s);
        store(keys + i * stride + half + d, y * c + x * s);
      }
    }
    for (int64_t d = 2 * half; d < D; d += W) {
      const int some = int(std::min<int64_t>(W, D - d));
      for (int i = 0; i < n; i++)
        store(keys + i * stride + d, load(level(d) + i * row) * (load(scale + d, some) * gains[i]) + load(offset + d, some));
    }
  }

  // Tokens without codes.
  void attend_wide(Range tokens, Place& at, const Partial& partial) const {
    if (!tokens.length()) return;
    const int count = int(tokens.length());
    const int64_t values = c_.heads * a_.D;
    const bfloat16* wide = (const bfloat16*)a_.value + (at.b * SINKS + tokens.from - c_.first[at.b]) * row_;
    for (int t = 0; t < count; t++)
      for (int64_t head = 0; head < c_.heads; head++)
        for (int64_t d = 0; d < V_; d++) {
          const int64_t column = c_.heads * D_ + head * V_ + d;
          at.wide[(t * c_.heads + head) * V_ + d] =
              d < a_.V ? (number(wide[t * row_ + values + head * a_.V + d]) - c_.offset[column]) / c_.scale[column] : 0.0f;
        }
    score_tokens(at, tokens.from, count, [&](int64_t head, int t, int n) {
      for (int i = 0; i < n; i++) {
        const bfloat16* from = wide + (t + i) * row_ + head * a_.D;
        const int64_t turn = (tokens.from + t + i) % TURN * half_, half = c_.P / 2;
        float* key = at.keys + i * key_;
        for (int64_t d = 0; d < half; d++) {
          const float c = c_.turn_cos[turn + d], s = c_.turn_sin[turn + d];
          key[d] = number(from[d]) * c - number(from[half + d]) * s;
          key[half + d] = number(from[half + d]) * c + number(from[d]) * s;
        }
        for (int64_t d = 2 * half; d < a_.D; d++) key[d] = number(from[d]);
      }
    });
    weigh(at, tokens.from, count, partial, nullptr);
    Ahead none(at.wide, 0, 0, 0, 0);
    for (int64_t head = 0; head < c_.heads; head++) {
      const int row = int(head) * group_;
      const float* value[SINKS];
      for (int t = 0; t < count; t++) value[t] = at.wide + (t * c_.heads + head) * V_;
      mix<A>(partial.mixture + row * V_, group_, Weights<float>{at.weights + row * BLOCK, BLOCK, 1}, at.keep + row, value, count,
             V_, none);
    }
  }

  // --- scores and weights ----------------------------------------------------------------------------------------

  // Scores of all rows with a block's tokens; read(head, t, n) computes a head's keys of n of them.
  template <class F>
  void score_tokens(Place& at, int64_t from, int count, F read) const {
    for (int t = 0, n; t < count; t += n) {
      n = int(std::min<int64_t>(count - t, KEYS - (from + t) % KEYS));
      turn_back((from + t) / TURN * TURN, at);
      for (int64_t head = 0; head < c_.heads; head++) {
        read(head, t, n);
        score_keys(at, head, t, n);
      }
    }
  }

  // Scores of a head's rows with n keys.
  void score_keys(Place& at, int64_t head, int t, int n) const {
    float* scores = at.scores + head * group_ * BLOCK + t;
#if HAS_LANES
    for (int r = 0; r < group_; r += 4)
      score_fours(at.fours + (head * fours_ + r / 4) * 4 * query_, at.keys, std::min(4, group_ - r), n, scores + r * BLOCK);
#else
    Ahead none(at.keys, 0, 0, 0, 0);
    const float* key[KEYS];
    for (int i = 0; i < n; i++) key[i] = at.keys + i * key_;
    score<A>(at.turned + head * group_ * query_, group_, key, n, a_.D, scores, none);
#endif
  }

#if HAS_LANES
  // Scores of up to four rows with KEYS keys, of which n are there.
  void score_fours(const float* query, const float* keys, int rows, int n, float* scores) const {
    constexpr int TOKENS = 8;
    alignas(64) float of_rows[4][KEYS];
    const int64_t stride = key_, D = query_;
    for (int t = 0; t < n; t += TOKENS) {
      Vector sum[TOKENS];
      UNROLL for (int i = 0; i < TOKENS; i++) sum[i] = Vector{};
      const float* key = keys + t * stride;
      for (int64_t d = 0; d < D; d += 4) {
        Vector four = load(query + d * 4);
        IN_REGISTER(four);
        UNROLL for (int i = 0; i < TOKENS; i++)
          sum[i] += four * (Vector)_mm512_broadcast_f32x4(_mm_loadu_ps(key + i * stride + d));
      }
      UNROLL for (int i = 0; i < TOKENS; i += 4) {
        const auto both = [&](int a) {
          const __m512 first = (__m512)sum[i + a], second = (__m512)sum[i + a + 1];
          return _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(first, second), _mm512_unpackhi_ps(first, second)));
        };
        const __m512d first = both(0), second = both(2);
        const __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(first, second)),
                                         _mm512_castpd_ps(_mm512_unpackhi_pd(first, second)));
        _mm_store_ps(&of_rows[0][t + i], _mm512_castps512_ps128(all));
        _mm_store_ps(&of_rows[1][t + i], _mm512_extractf32x4_ps(all, 1));
        _mm_store_ps(&of_rows[2][t + i], _mm512_extractf32x4_ps(all, 2));
        _mm_store_ps(&of_rows[3][t + i], _mm512_extractf32x4_ps(all, 3));
      }
    }
    for (int r = 0; r < rows; r++) memcpy(scores + r * BLOCK, of_rows[r], n * 4);
  }
#endif

  // Scores become weights, times the tokens' gains; see weigh_row.
  void weigh(Place& at, int64_t from, int count, const Partial& partial, const float* gain) const {
    for (int row = 0; row < rows_; row++)
      weigh_row(mask_, at.b, row, from, count, at.scores + row * BLOCK, at.weights + row * BLOCK, at.keep[row], partial, gain);
  }
};

}  // namespace

// The entry point; see headwise_attention.
extern "C" int headwise_heads(const HeadsArguments* arguments, int type) {
  return with_type(type, [&](auto q) {
    using Q = decltype(q);
    in_calls<Q>(*arguments, [](HeadsArguments& part) {
      HeadsAttention<Q>(part).run();
    });
  });
}
