// softmax(scale · Q Kᵀ) V on the CPU over tokens of latent attention that are read as they are stored, in trellis
// codes.
//
// A channel's offset adds one number to all scores of a query, which the softmax cancels. Rotary keys are scored in
// words (see int16_scores.h) with queries that are rounded themselves, where matrix tiles score and mix the latent;
// with AVX2 alone that is done in words too, by itself, as the latent has a gain of its own. Otherwise see
// TrellisAttention.
#include "int16_scores.h"
#include "trellis.h"

namespace {

template <class Query>
class CodedAttention : public TrellisAttention<CodedAttention<Query>, CodedArguments, Query> {
  using Base = TrellisAttention<CodedAttention, CodedArguments, Query>;
  using Base::a_, Base::half_, Base::rows_, Base::tables_, Base::tiles_;
  using A = Single;
  using Q = Query;
  // Whether scores are computed by tiles too, of numbers rounded to bfloat16 as the queries are.
  static constexpr bool CAN_ROUND = HAS_BFLOAT16_TILES && HAS_LANES && std::is_same_v<Q, bfloat16>;
  static constexpr int PIECES = std::is_same_v<Q, float> ? 3 : 2;  // of a whole weight
  static constexpr int TILE_ROWS = 16 / PIECES;  // rows whose pieces fit beside each other into a tile
  // Columns of a row of levels are the latent's, and then the two halves of the rotary key.
  const int64_t content_;
  const bool scores_levels_;  // whether the latent's levels are scored by tiles
  const int64_t scored_;      // columns of the latent that are scored as numbers: content_, or 0
  const bool words_;          // whether tokens in codes are scored in words, and without tiles mixed so
  const bool rounds_;
  const int groups_, beside_;  // see Attention; where scores are computed by tiles, pairs of groups
  const int64_t D_;            // of a key: its rotary halves, then its scored content
  const int64_t depth_;        // D_, or where scores are computed by tiles a multiple of theirs
  const int64_t chunks_;       // of the latent's levels in a tile's rows

 public:
  explicit CodedAttention(const CodedArguments& a)
      : Base(a, 1, a.G * a.S >= 4 && may_use_tiles(), 0, a.V + a.P, 0),
        content_(this->value_),
        scores_levels_(tiles_ && a.D > a.P),
        scored_(a.D > a.P && !tiles_ ? content_ : 0),
        words_(may_use_words()),
        rounds_(CAN_ROUND && tiles_ && !words_),
        groups_(!HAS_LANES || words_ ? 0
                : rounds_            ? (rows_ + 15) / 16 * 2
                : rows_ < 8          ? rows_ > 4
                                     : rows_ / 8 + (rows_ % 8 > 3)),
        beside_(std::min(rows_, groups_ * 8)),
        D_(2 * half_ + scored_),
        depth_(up(D_, 32)),
        chunks_(up(content_, CHUNK) / CHUNK) {}

  struct Place : Base::Tokens {
    int8_t* levels;     // the latent's [BLOCK, content_], then [columns / CHANNELS, BLOCK, CHANNELS] of the rotary key;
                        // in words, all as the latter
    int8_t* quads;      // the latent's levels, for matrix tiles
    bfloat16* rounded;  // queries, then KEYS keys, for scores by tiles
    float* content;     // [row, content_], what meets levels, padded to whole chunks
    int8_t* pieces;     // the same in whole numbers, in tiles
    float* one;         // [row], what 1 in whole queries stands for
#if HAS_WORDS
    std::optional<WordScores> rotary;
#endif
#if HAS_MATRIX_TILES
    std::optional<TileMixer<PIECES>> mixer;
#elif HAS_WORD_MIXER
    std::optional<WordScores> latent;
    std::optional<WordMixer> mixer;
    float *ones, *zeros;  // [content_], the scales and offsets of a latent's levels, which are the query's
#endif
  };
  // Rows of queries are grouped ones [rows / 8, D_ / 2, 8, 2], then the others [row, D_].
  Place place(Arena& arena) const {
    const int64_t rows = padded_rows();
    Place at;
    this->take(at, arena, rows, rows * D_, D_);
    at.levels = arena.take<int8_t>(BLOCK * (content_ + 2 * half_));
    at.quads = arena.take<int8_t>(tiles_ ? BLOCK * content_ : 0);
    at.rounded = arena.take<bfloat16>(rounds_ ? (groups_ * 8 + KEYS) * depth_ : 0);
    at.content = arena.take<float>(scores_levels_ ? rows_ * chunks_ * CHUNK : 0);
    at.pieces = arena.take<int8_t>(pieces_bytes());
    at.one = arena.take<float>(rows_);
#if HAS_WORDS
    if (words_) at.rotary.emplace(arena, half_, 2 * half_, 1, rows_);
#endif
#if HAS_MATRIX_TILES
    if (tiles_) at.mixer.emplace(arena, rows_);
#elif HAS_WORD_MIXER
    if (words_) {
      at.latent.emplace(arena, 0, scored_, 1, rows_);
      at.mixer.emplace(arena, rows_);
      at.ones = arena.take<float>(scored_), at.zeros = arena.take<float>(scored_);
    }
#endif
    return at;
  }

  int tile_rows() const { return tiles_ ? TILE : 0; }
  double microseconds(int64_t tokens) const {
    return double(tokens) * (content_ + 2 * half_ + 2.0 * rows_ * (a_.D + content_)) / 50e3;
  }

  void begin(Place& at) const {
    read_query(at);
    if (scores_levels_) read_content(at);
    std::copy_n(at.query, padded_rows() * D_, at.turned);
#if HAS_WORDS
    if (words_) {
      static_assert(TURN == BLOCK);
      at.rotary->begin(a_.level_scale + content_, a_.level_offset + content_, a_.gains, a_.turn_cos, a_.turn_sin);
      at.rotary->read_queries(at.query, D_, a_.P ? a_.cos[a_.frequency[0]] : 1.0f);
    }
#endif
#if HAS_WORD_MIXER
    if (words_) {
      std::fill_n(at.ones, scored_, 1.0f), std::fill_n(at.zeros, scored_, 0.0f);
      at.latent->begin(at.ones, at.zeros, a_.gains, nullptr, nullptr);
      at.latent->read_queries(at.query + 2 * half_, D_, 1.0f);
      at.latent->turn_back(at.query + 2 * half_, D_);
    }
#endif
    set_turned(at);
  }

  // Rotates the queries back.
  void turn(Place& at) const {
    // Local copies, which the compiler knows that no store changes.
    const float *query = at.query, *cos = at.cos, *sin = at.sin;
    const int64_t half = half_;
    float* turned = at.turned;
#if HAS_LANES
    for (int group = 0; group < groups_; group++)
      for (int64_t d = 0; d < half; d += 2) {
        int64_t both[2];
        memcpy(both, cos + d, 8), memcpy(both + 1, sin + d, 8);
        const Vector c = (Vector)_mm512_set1_epi64(both[0]), s = (Vector)_mm512_set1_epi64(both[1]);
        const int64_t first = group * 8 * D_ + d * 8, second = first + half * 8;
        const Vector x = load(query + first), y = load(query + second);
        store(turned + first, x * c + y * s);
        store(turned + second, y * c - x * s);
      }
#endif
    for (int row = beside_; row < rows_; row++)
      for (int64_t d = 0; d < half; d += W) {
        const int64_t first = place(row, d), second = first + half;
        const Vector x = load(query + first), y = load(query + second), c = load(cos + d), s = load(sin + d);
        store(turned + first, x * c + y * s);
        store(turned + second, y * c - x * s);
      }
    set_turned(at);
  }

  // Scores of a block of tokens in codes, all of whose levels are decoded.
  void score_codes(int64_t from, int count, const uint8_t* const* token, int64_t end, Place& at) const {
    at.ahead = this->ahead_of(at.b, from + count, end, a_.count + rows_);
    decode(count, token, at);
#if HAS_WORDS
    if (words_)
      score_words(from, count, at);
    else
#endif
      this->score_tokens(from, count, at, [&](int64_t, int t, int n) { coded_keys(at, from, t, n); });
    if (scores_levels_) score_levels(at, count);
  }
  const float* value_gain(const Place& at) const { return at.gain; }

  // Scores of tokens without codes.
  void score_wide(int64_t from, int count, const bfloat16* wide, Place& at) const {
    this->score_tokens(from, count, at, [&](int64_t, int t, int n) {
      for (int i = 0; i < n; i++) {
        float* key = at.keys + i * D_;
        std::fill_n(key, 2 * half_, 0.0f);
        this->rotate_wide(wide + (t + i) * this->wide_ + a_.V, from + t + i, half_, key);
        std::copy_n(at.wide + (t + i) * content_, scored_, key + 2 * half_);
      }
    });
    if (scores_levels_) score_content(at, count);
  }

  // Scores of all rows with n keys.
  void score_keys(int64_t, int t, int n, Place& at) const {
    const float* key[KEYS];
    for (int i = 0; i < KEYS; i++) key[i] = at.keys + std::min(i, n - 1) * D_;
    Ahead none;
#if HAS_BFLOAT16_TILES
    if constexpr (CAN_ROUND)
      if (rounds_) {
        alignas(64) float scores[KEYS * TILE];
        bfloat16* keys = at.rounded + groups_ * 8 * depth_;
        float* to = at.scores + t;
        round_rows(at.keys, n, D_, depth_, keys);
        for (int first = 0; first < rows_; first += TILE) {
          score_tiles(keys, at.rounded + first * depth_, depth_, scores);
          for (int row = first; row < std::min(first + TILE, rows_); row++)
            for (int i = 0; i < n; i++) to[row * BLOCK + i] = scores[i * TILE + row - first];
        }
        return;
      }
#endif
#if HAS_LANES
    if (groups_) {
      alignas(64) float scores[KEYS * 8];
      for (int group = 0; group < groups_; group++) {
        score_groups<A, 1>(at.turned + group * 8 * D_, key, int(up(n, SCORED)), D_, scores, none);
        for (int row = 0; row < std::min(8, rows_ - group * 8); row++)
          for (int i = 0; i < n; i++)
            at.scores[(group * 8 + row) * BLOCK + t + i] = scores[i / 2 * 16 + row * 2 + i % 2];
      }
    }
#endif
    score<A>(at.turned + groups_ * 8 * D_, rows_ - beside_, key, n, D_, at.scores + beside_ * BLOCK + t, none);
  }

  void mix_codes(int count, const uint8_t* const*, Place& at, const Partial& partial) const {
#if HAS_MATRIX_TILES
    if (tiles_) return at.mixer->mix(partial.mixture, at.weights, at.keep, at.quads, content_);
#elif HAS_WORD_MIXER
    if (words_) return at.mixer->mix(partial.mixture, at.weights, at.keep, at.levels, content_);
#endif
    this->mix_values(0, at.levels, content_, count, at, partial);
  }

  void finish(int64_t b, int64_t k, int row, const Partial* partials, int count) const {
    const Shares share(partials, count, row);
    const float *mixture = this->mean(row, share, count), one = share.sum == 0 ? 0.0f : 1.0f;
    Q* out = this->out_row(b, k, row);
    for (int64_t d = 0; d < a_.V; d++) put(out + d, mixture[d] * a_.level_scale[d] + one * a_.level_offset[d]);
    if (a_.has_sums) put(out + a_.V, one);
  }

 private:
  // Queries that are rounded themselves, of a code whose numbers words hold.
  bool may_use_words() const {
#if HAS_WORDS
    const float *scale = a_.level_scale + content_, *offset = a_.level_offset + content_;
    return !std::is_same_v<Q, float> && (HAS_WORD_MIXER || tiles_) && scored_ <= WordScores::MOST_COLUMNS &&
           WordScores::may(half_, 2 * half_, 1, scale, offset, a_.gains);
#else
    return false;
#endif
  }
  int64_t pieces_bytes() const { return scores_levels_ ? (rows_ + TILE_ROWS - 1) / TILE_ROWS * chunks_ * 1024 : 0; }
  int64_t padded_rows() const { return groups_ * 8 + rows_ - beside_; }

  // --- queries -----------------------------------------------------------------------------------------------------

  // Where dim d of a row's query is.
  int64_t place(int row, int64_t d) const {
    if (row >= beside_) return (groups_ * 8 + row - beside_) * D_ + d;
    return row / 8 * 8 * D_ + d / 2 * 16 + row % 8 * 2 + d % 2;
  }

  void read_query(Place& at) const {
    std::fill_n(at.query, padded_rows() * D_, 0.0f);
    const float factor = this->factor();
    for (int row = 0; row < rows_; row++) {
      const Q* from = this->query_row(at.b, at.k, row);
      if (scored_) {
        for (int64_t d = 0; d < a_.V; d++)
          at.query[place(row, 2 * half_ + d)] = number(from[d]) * factor * a_.level_scale[d];
      }
      if (a_.D > a_.P) from += a_.V;
      for (int64_t d = 0; d < a_.P / 2; d++) {
        at.query[place(row, d)] = number(from[d]) * factor;
        at.query[place(row, half_ + d)] = number(from[a_.P / 2 + d]) * factor;
      }
    }
  }

  // What meets the latent's levels, and its whole numbers in tiles: [rows / TILE_ROWS, chunk, four channels of 16,
  // piece of a row, 4].
  void read_content(Place& at) const {
#if HAS_MATRIX_TILES
    const int64_t padded = chunks_ * CHUNK, chunks = chunks_;
    const float factor = this->factor();
    std::fill_n(at.content, rows_ * padded, 0.0f);
    std::fill_n(at.pieces, pieces_bytes(), int8_t(0));
    for (int row = 0; row < rows_; row++) {
      const Q* from = this->query_row(at.b, at.k, row);
      float* content = at.content + row * padded;
      for (int64_t d = 0; d < a_.V; d++) content[d] = number(from[d]) * factor * a_.level_scale[d];
      int8_t* pieces = at.levels;  // which are decoded later
      at.one[row] = signed_pieces<PIECES>(content, padded, pieces, padded);
      for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int p = 0; p < PIECES; p++)
          for (int four = 0; four < 16; four++)
            memcpy(at.pieces + ((row / TILE_ROWS * chunks + chunk) * 16 + four) * 64 +
                       (p * TILE_ROWS + row % TILE_ROWS) * 4,
                   pieces + p * padded + chunk * CHUNK + four * 4, 4);
    }
#endif
  }

  // Rounds the queries that are rotated back, to words or for tiles.
  void set_turned(Place& at) const {
#if HAS_WORDS
    if (words_) at.rotary->turn_back(at.turned, D_);
#endif
#if HAS_BFLOAT16_TILES
    if constexpr (CAN_ROUND)
      if (rounds_) {
        if (depth_ > D_) std::fill_n(at.rounded, groups_ * 8 * depth_, bfloat16{});
        round_groups(at.turned, groups_ / 2, D_, depth_, at.rounded);
      }
#endif
  }

  // --- tokens ------------------------------------------------------------------------------------------------------

  // The levels of a block of tokens.
  void decode(int count, const uint8_t* const* row, Place& at) const {
    for (int64_t i = 0; i < a_.count; i++) {
      const BlockPlan& block = at.plans[i];
      at.ahead.step();
#if HAS_MATRIX_TILES
      if (tiles_ && block.column < content_) {
        int8_t *quads = at.quads + block.column * BLOCK, *levels = at.levels + block.column;
        if (scores_levels_)
          decode_quads<true>(block, tables_, row, count, quads, levels, content_);
        else
          decode_quads<false>(block, tables_, row, count, quads, levels, content_);
        continue;
      }
#endif
      if (block.column < content_ && !(words_ && HAS_WORD_MIXER))
        decode_block(block, tables_, row, count, at.levels + block.column, content_);
      else
        decode_block(block, tables_, row, count, at.levels + block.column * BLOCK, CHANNELS);
    }
  }

  // Keys of tokens t … t + n − 1 of a block, whose levels and gains are there.
  void coded_keys(Place& at, int64_t from, int t, int n) const {
    // Local copies, which the compiler knows that no store changes.
    const int64_t half = half_, stride = D_;
    const float *cos = a_.turn_cos + (from + t) % TURN * half, *sin = a_.turn_sin + (from + t) % TURN * half;
    const float* gains = at.second_gain + t;
    const int8_t* levels = at.levels + content_ * BLOCK + t * CHANNELS;
    float* keys = at.keys;
    for (int64_t d = 0; d < half; d += W) {
      const float *scale = a_.level_scale + content_ + d, *offset = a_.level_offset + content_ + d;
      const Vector scale1 = load(scale), scale2 = load(scale + half), offset1 = load(offset),
                   offset2 = load(offset + half);
      const int8_t *level1 = levels + d / CHANNELS * CHANNELS * BLOCK + d % CHANNELS, *level2 = level1 + half * BLOCK;
      for (int i = 0; i < n; i++) {
        const Vector gain = all(gains[i]), c = load(cos + i * half + d), s = load(sin + i * half + d);
        const Vector x = load(level1 + i * CHANNELS) * scale1 * gain + offset1;
        const Vector y = load(level2 + i * CHANNELS) * scale2 * gain + offset2;
        store(keys + i * stride + d, x * c - y * s);
        store(keys + i * stride + half + d, y * c + x * s);
      }
    }
    for (int i = 0; i < n; i++) {
      const Vector gain = all(at.gain[t + i]);
      for (int64_t d = 0; d < scored_; d += W)
        store(at.keys + i * D_ + 2 * half_ + d, load(at.levels + (t + i) * content_ + d) * gain);
    }
  }

#if HAS_WORDS
  // Scores of a block of tokens in words, whose levels are there; of the rotary key alone where tiles are used.
  void score_words(int64_t from, int count, Place& at) const {
    this->turn_back(from / TURN * TURN, at);
    at.rotary->read_gains(at.second_gain);
    at.rotary->score(0, int(from % TURN), count, at.levels + content_ * BLOCK, at.second_gain, at.scores);
#if HAS_WORD_MIXER
    if (!scored_) return;
    float* scores = at.weights;  // which are computed later
    at.latent->read_gains(at.gain);
    at.latent->score(0, 0, count, at.levels, at.gain, scores);
    for (int64_t i = 0; i < rows_ * BLOCK; i += W) store(at.scores + i, load(at.scores + i) + load(scores + i));
#endif
  }
#endif

  // Adds the latents' part of the scores of a block of tokens, whose levels are there.
  void score_levels(Place& at, int count) const {
#if HAS_MATRIX_TILES
    // Sums of four times sixteen tokens, none of which waits for another.
    alignas(64) int32_t products[BLOCK * TILE];
    const int64_t stride = content_;
    for (int first = 0; first < rows_; first += TILE_ROWS) {
      const int8_t *levels = at.levels, *pieces = at.pieces + first / TILE_ROWS * chunks_ * 1024;
      asm volatile("" : : : "memory");
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t chunk = 0; chunk < chunks_; chunk++, levels += CHUNK, pieces += 1024) {
        _tile_loadd(4, pieces, 64);
        _tile_loadd(5, levels, stride);
        _tile_loadd(6, levels + 16 * stride, stride);
        _tile_dpbssd(0, 5, 4);
        _tile_dpbssd(1, 6, 4);
        _tile_loadd(7, levels + 32 * stride, stride);
        _tile_loadd(5, levels + 48 * stride, stride);
        _tile_dpbssd(2, 7, 4);
        _tile_dpbssd(3, 5, 4);
      }
      _tile_stored(0, products, 64);
      _tile_stored(1, products + 256, 64);
      _tile_stored(2, products + 512, 64);
      _tile_stored(3, products + 768, 64);
      asm volatile("" : : : "memory");
      for (int t = 0; t < count; t += 16) {
        __m512i of_token[16], of_piece[16];
        UNROLL for (int i = 0; i < 16; i++)
          of_token[i] = _mm512_load_si512(products + (t + i) * TILE);
        transpose(of_token, of_piece);
        UNROLL for (int r = 0; r < TILE_ROWS; r++) {
          if (first + r >= rows_) break;
          Vector product = (Vector)_mm512_cvtepi32_ps(of_piece[r]);
          UNROLL for (int p = 1; p < PIECES; p++)
            product = product * 256.0f + (Vector)_mm512_cvtepi32_ps(of_piece[p * TILE_ROWS + r]);
          float* scores = at.scores + (first + r) * BLOCK + t;
          store(scores, load(scores) + product * at.one[first + r] * load(at.gain + t));
        }
      }
    }
#endif
  }

  // Adds that of `count` tokens without codes.
  void score_content(Place& at, int count) const {
    Ahead none;
    float* scores = at.weights;  // which are computed later
    const float* value[BLOCK];
    for (int t = 0; t < count; t++) value[t] = at.wide + t * content_;
    for (int row = 0; row < rows_; row++) {
      score<A>(at.content + row * chunks_ * CHUNK, 1, value, count, content_, scores, none);
      for (int t = 0; t < count; t++) at.scores[row * BLOCK + t] += scores[t];
    }
  }
};

}  // namespace

int headwise_coded(const CodedArguments* arguments, int type) { return run_kernel<CodedAttention>(*arguments, type); }
