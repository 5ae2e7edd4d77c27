// softmax(scale · Q Kᵀ) V on the CPU over keys and values of heads that are read as they are stored, in trellis codes.
//
// A token's row of codes holds all heads' keys before rotation, and then all values; see TrellisAttention. Where the
// processor adds up products of whole numbers, levels of values are mixed so, and keys scored with queries of 16 bits
// (see int16_scores.h).
#include "int16_scores.h"
#include "trellis.h"

namespace {

template <class Query>
class HeadsAttention : public TrellisAttention<HeadsAttention<Query>, HeadsArguments, Query> {
  using Base = TrellisAttention<HeadsAttention, HeadsArguments, Query>;
  using Base::a_, Base::group_, Base::half_, Base::heads_, Base::rows_, Base::tables_, Base::tiles_;
  using A = Single;
  using Q = Query;
  static constexpr int PIECES = std::is_same_v<Q, float> ? 3 : 2;  // of a whole weight
  static constexpr int MOST_OF_SUMS = 6;                           // rows of a head that are mixed without tiles
  const int64_t D_, V_;                                            // columns of a head's levels
  const int64_t query_;                                            // numbers of a row of queries
  const int64_t key_;  // numbers of a row of keys: what is written of it may end behind it
  // Levels of a head's keys lie in blocks [D_ / CHANNELS, BLOCK, CHANNELS], or where the halves of a rotated key begin
  // within one, in rows [BLOCK, D_]: how far blocks, and tokens, are apart.
  const int64_t block_, token_;
  const bool words_;  // whether keys in codes are scored in words
  const int fours_;   // groups of four rows of a head whose scores are computed side by side

 public:
  explicit HeadsAttention(const HeadsArguments& a)
      : Base(a, a.heads, a.G * a.S > MOST_OF_SUMS * a.heads && may_use_tiles(), a.heads * up(a.D, CHANNELS),
             a.heads * (a.D + a.V), a.heads * a.D),
        D_(up(a.D, CHANNELS)),
        V_(this->value_),
        query_(up(a.D, W)),
        key_(D_ + CHANNELS),
        block_(a.P / 2 % CHANNELS ? CHANNELS : CHANNELS * BLOCK),
        token_(a.P / 2 % CHANNELS ? D_ : CHANNELS),
#if HAS_WORDS
        words_(!std::is_same_v<Q, float> &&
               WordScores::may(a.P / 2, D_, a.heads, a.level_scale, a.level_offset, a.gains)),
#else
        words_(false),
#endif
        fours_(HAS_LANES && !words_ ? (group_ + 3) / 4 : 0) {
  }

  struct Place : Base::Tokens {
    float* fours;    // the queries, rotated back, side by side
    int8_t* levels;  // of keys, head by head, or of one head
    int8_t* values;  // of a head's values, [BLOCK, V_], or quads
#if HAS_WORDS
    std::optional<WordScores> words;
#endif
#if HAS_WHOLE_SUMS
    std::optional<WholeMixer<PIECES>> mixer;
#elif HAS_WORD_MIXER
    std::optional<WordMixer> mixer;  // for queries that are rounded themselves
#endif
#if HAS_MATRIX_TILES
    std::optional<TileMixer<PIECES>> tiles;
#endif
  };
  Place place(Arena& arena) const {
    Place at;
    this->take(at, arena, rows_, rows_ * (query_ + W), key_);
    at.fours = arena.take<float>(heads_ * fours_ * 4 * query_);
    at.values = arena.take<int8_t>(BLOCK * V_);
    at.levels = arena.take<int8_t>(BLOCK * heads_ * D_ + CHANNELS);
#if HAS_MATRIX_TILES
    if (tiles_) at.tiles.emplace(arena, group_);
#endif
#if HAS_WHOLE_SUMS
    if (!tiles_) at.mixer.emplace(arena, group_);
#elif HAS_WORD_MIXER
    if (PIECES == 2) at.mixer.emplace(arena, group_);
#endif
#if HAS_WORDS
    if (words_) at.words.emplace(arena, a_.P / 2, D_, heads_, group_);
#endif
    return at;
  }

  int tile_rows() const { return tiles_ ? std::min(TILE, group_ * PIECES) : 0; }
  double microseconds(int64_t tokens) const {
    return double(tokens) * (heads_ * (D_ + V_) + 2.0 * rows_ * (D_ + V_)) / 50e3;
  }

  void begin(Place& at) const {
    read_query(at);
    std::copy_n(at.query, rows_ * query_, at.turned);
    std::fill_n(at.fours, heads_ * fours_ * 4 * query_, 0.0f);
    std::fill_n(at.keys, KEYS * key_, 0.0f);
#if HAS_WORDS
    if (words_) {
      static_assert(TURN == BLOCK);
      at.words->begin(a_.level_scale, a_.level_offset, a_.gains, a_.turn_cos, a_.turn_sin);
      at.words->read_queries(at.query, query_, a_.P ? a_.cos[a_.frequency[0]] : 1.0f);
    }
#endif
    set_turned(at);
  }

  // Rotates the queries back.
  void turn(Place& at) const {
    // Local copies, which the compiler knows that no store changes.
    const float *cos = at.cos, *sin = at.sin;
    const int64_t pairs = a_.P / 2;
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
    set_turned(at);
  }

  // Scores of a block of tokens. Without words, keys of all heads are decoded at once, and then rotated a few tokens at
  // a time, so that what rotates them is read once.
  void score_codes(int64_t from, int count, const uint8_t* const* token, int64_t end, Place& at) const {
    at.ahead = this->ahead_of(at.b, from + count, end, a_.count + rows_);
    const BlockPlan* plan = at.plans;
    const auto decode_keys = [&](int8_t* levels) {
      for (int64_t d = 0; d < D_; d += CHANNELS, plan++) {
        at.ahead.step();
        decode_block(*plan, tables_, token, count, levels + d / CHANNELS * block_, token_);
      }
    };
#if HAS_WORDS
    if (words_) {
      this->turn_back(from / TURN * TURN, at);
      at.words->read_gains(at.gain);
      for (int64_t head = 0; head < heads_; head++) {
        decode_keys(at.levels);
        at.words->score(head, int(from % TURN), count, at.levels, at.gain, at.scores + head * group_ * BLOCK);
      }
      return;
    }
#endif
    for (int64_t head = 0; head < heads_; head++) decode_keys(at.levels + head * BLOCK * D_);
    this->score_tokens(from, count, at, [&](int64_t head, int t, int n) { coded_keys(at, head, from, t, n); });
  }

  const float* value_gain(const Place& at) const { return at.second_gain; }

  // Scores of tokens without codes.
  void score_wide(int64_t from, int count, const bfloat16* wide, Place& at) const {
    this->score_tokens(from, count, at, [&](int64_t head, int t, int n) {
      for (int i = 0; i < n; i++) {
        const bfloat16* key = wide + (t + i) * this->wide_ + head * a_.D;
        float* to = at.keys + i * key_;
        this->rotate_wide(key, from + t + i, a_.P / 2, to);
        for (int64_t d = a_.P; d < a_.D; d++) to[d] = number(key[d]);
      }
    });
  }

  // Scores of a head's rows with n keys.
  void score_keys(int64_t head, int t, int n, Place& at) const {
    float* scores = at.scores + head * group_ * BLOCK + t;
#if HAS_LANES
    for (int four = 0; four < fours_; four++)
      score_fours(at.fours + (head * fours_ + four) * 4 * query_, at.keys, std::min(4, group_ - four * 4), n,
                  scores + four * 4 * BLOCK);
    if (fours_) return;
#endif
    Ahead none;
    const float* key[KEYS];
    for (int i = 0; i < n; i++) key[i] = at.keys + i * key_;
    score<A>(at.turned + head * group_ * query_, group_, key, n, a_.D, scores, none);
  }

  // Mixtures of a block of tokens; a head's values are decoded just before they are mixed.
  void mix_codes(int count, const uint8_t* const* token, Place& at, const Partial& partial) const {
    Ahead ahead = at.ahead;  // a local copy can be in registers
    const BlockPlan* plan = at.plans + heads_ * (D_ / CHANNELS);
    for (int64_t head = 0; head < heads_; head++) {
#if HAS_WHOLE_SUMS
      for (int64_t d = 0; d < V_; d += CHANNELS, plan++) {
        ahead.step();
        decode_quads<false>(*plan, tables_, token, count, at.values + d * BLOCK, nullptr, 0);
      }
      const int64_t row = head * group_;
      const auto mix = [&](const auto& mixer) {
        mixer.mix(partial.mixture + row * V_, at.weights + row * BLOCK, at.keep + row, at.values, V_);
      };
#if HAS_MATRIX_TILES
      if (tiles_) mix(*at.tiles);
#endif
      if (!tiles_) mix(*at.mixer);
#else
#if HAS_WORD_MIXER
      if (at.mixer) {
        for (int64_t d = 0; d < V_; d += CHANNELS, plan++) {
          ahead.step();
          decode_block(*plan, tables_, token, count, at.values + d * BLOCK, CHANNELS);
        }
        const int64_t row = head * group_;
        at.mixer->mix(partial.mixture + row * V_, at.weights + row * BLOCK, at.keep + row, at.values, V_);
        continue;
      }
#endif
      for (int64_t d = 0; d < V_; d += CHANNELS, plan++) {
        ahead.step();
        decode_block(*plan, tables_, token, count, at.values + d, V_);
      }
      this->mix_values(head, at.values, V_, count, at, partial);
#endif
    }
  }

  void finish(int64_t b, int64_t k, int row, const Partial* partials, int count) const {
    const Shares share(partials, count, row);
    const float sum = share.sum;
    Q* out = this->out_row(b, k, row);
    const int64_t column = heads_ * D_ + row / group_ * V_;
    for (int64_t d = 0; d < a_.V; d++) {
      float mixture = 0;
      for (int i = 0; i < count; i++) mixture += share(i) * partials[i].mixture[row * V_ + d];
      put(out + d, sum == 0 ? 0.0f : mixture / sum * a_.level_scale[column + d] + a_.level_offset[column + d]);
    }
  }

 private:
  // --- queries -----------------------------------------------------------------------------------------------------

  void read_query(Place& at) const {
    std::fill_n(at.query, rows_ * query_, 0.0f);
    const float factor = this->factor();
    for (int row = 0; row < rows_; row++) {
      const Q* from = this->query_row(at.b, at.k, row);
      for (int64_t d = 0; d < a_.D; d++) at.query[row * query_ + d] = number(from[d]) * factor;
    }
  }

  // Lays out the queries that are rotated back: as words, and four numbers of four rows of a head beside each other,
  // [head, fours of rows, query_ / 4, 4, 4].
  void set_turned(Place& at) const {
#if HAS_WORDS
    if (words_) at.words->turn_back(at.turned, query_);
#endif
    if (!fours_) return;
    for (int row = 0; row < rows_; row++) {
      const int r = row % group_;
      float* to = at.fours + (row / group_ * fours_ + r / 4) * 4 * query_ + r % 4 * 4;
      for (int64_t d = 0; d < query_; d += 4) memcpy(to + d * 4, at.turned + row * query_ + d, 16);
    }
  }

  // --- scores ------------------------------------------------------------------------------------------------------

  // A head's keys of tokens t … t + n − 1 of a block, whose levels and gains are there.
  void coded_keys(Place& at, int64_t head, int64_t from, int t, int n) const {
    // Local copies, which the compiler knows that no store changes.
    const int64_t half = a_.P / 2, stride = key_, table = half_, row = token_, D = a_.D;
    const float *cos = a_.turn_cos + (from + t) % TURN * table, *sin = a_.turn_sin + (from + t) % TURN * table;
    const float *gains = at.gain + t, *scale = a_.level_scale + head * D_, *offset = a_.level_offset + head * D_;
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
        store(keys + i * stride + d,
              load(level(d) + i * row) * (load(scale + d, some) * gains[i]) + load(offset + d, some));
    }
  }

#if HAS_LANES
  // Scores of up to four rows with KEYS keys, of which n are there.
  void score_fours(const float* query, const float* keys, int rows, int n, float* scores) const {
    constexpr int TOKENS = 8;
    alignas(64) float of_rows[4][KEYS];
    const int64_t stride = key_, D = query_;
    for (int t = 0; t < n; t += TOKENS) {
      Vector sum[TOKENS];
      UNROLL for (int i = 0; i < TOKENS; i++)
        sum[i] = Vector{};
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
};

}  // namespace

int headwise_heads(const HeadsArguments* arguments, int type) { return run_kernel<HeadsAttention>(*arguments, type); }
