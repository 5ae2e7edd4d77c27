// softmax(scale · Q Kᵀ) V on the CPU over tokens of latent attention that are read as they are stored, in trellis codes.
//
// Scores and mixtures are of levels: a channel's scale is multiplied into the query and out of the result, and a token's
// gain into its scores and weights. A channel's offset adds one number to all scores of a query, which the softmax cancels,
// and itself to the result; values that are stored without codes are divided into levels first. The rotary key needs its
// values, which are rotated by their slot: the key by the slot's place within a few, the query back by where these begin.
#include <cmath>
#include <new>
#include <optional>

#include "stored_tokens.h"
#include "unpack.h"

namespace {

// The wide values are R + P of a token; D is R + P, or P where queries have no content, and V is R.
struct CodedArguments : StoredTokens {
  int64_t has_sums;  // whether the sum of weights, 1 or 0, stands behind each row of the result
};

template <class Q>
class CodedAttention {
  using A = Single;
  const CodedArguments& c_;
  const Arguments& a_;
  const Mask mask_;
  const int rows_;
  const bool tiles_;                        // whether matrix tiles are used
  // Whether scores are computed by tiles too, of numbers rounded to bfloat16 as the queries are.
  static constexpr bool CAN_ROUND = HAS_BFLOAT16_TILES && HAS_LANES && std::is_same_v<Q, bfloat16>;
  const bool rounds_;
  const int groups_, beside_;               // see Attention; where scores are computed by tiles, pairs of groups
  const int64_t content_, half_, columns_;  // columns of a row of levels: the latent's, and the two halves of the rotary key
  const bool scores_levels_;                // whether the latent's levels are scored by tiles
  const int64_t scored_;                    // columns of the latent that are scored as numbers: content_, or 0
  const int64_t D_;                         // of a key: its rotary halves, then its scored content
  const int64_t depth_;                     // D_, or where scores are computed by tiles a multiple of theirs
  static constexpr int PIECES = std::is_same_v<Q, float> ? 3 : 2;  // of a whole weight

 public:
  explicit CodedAttention(const CodedArguments& c)
      : c_(c),
        a_(c.call),
        mask_(a_),
        rows_(int(a_.G * a_.S)),
#if HAS_MATRIX_TILES
        tiles_(rows_ >= 4 && may_use_tiles()),
#else
        tiles_(false),
#endif
        rounds_(CAN_ROUND && tiles_),
        groups_(!HAS_LANES ? 0 : rounds_ ? (rows_ + 15) / 16 * 2 : rows_ < 8 ? rows_ > 4 : rows_ / 8 + (rows_ % 8 > 3)),
        beside_(std::min(rows_, groups_ * 8)),
        content_(up(a_.V, CHANNELS)),
        half_(up(c.P / 2, CHANNELS)),
        columns_(content_ + 2 * half_),
        scores_levels_(tiles_ && a_.D > c.P),
        scored_(a_.D > c.P && !tiles_ ? content_ : 0),
        D_(2 * half_ + scored_),
        depth_(up(D_, 32)) {}

  void run() const {
    int64_t tokens = 0;
    for (int64_t b = 0; b < a_.B; b++) tokens += mask_.range(b).length();
    const double work = double(tokens) * (columns_ + 2.0 * rows_ * (a_.D + content_));
    in_parts(*this, a_.B, 1, tokens, useful_threads(work / 50e3, a_.threads));
  }

  Range range(int64_t b) const { return mask_.range(b); }
  int rows() const { return rows_; }
  int64_t width() const { return content_; }
  int64_t scratch_bytes() const {
    const int64_t rows = padded_rows();
    return up(c_.count * sizeof(BlockPlan), 64) + 2 * up(rows * D_ * 4, 64) + rounded_bytes() + 2 * half_ * 4 + 2 * up(rows * BLOCK * 4, 64) + up(rows * 4, 64) + KEYS * D_ * 4 +
           up(BLOCK * columns_, 64) + quads_bytes() + tiles_bytes() + up(SINKS * content_ * 4, 64) + 2 * BLOCK * 4 + up(copies_bytes(c_), 64) +
           pieces_bytes() + content_query_bytes() + up(rows_ * 4, 64);
  }

  void attend(int64_t b, int64_t, Range tokens, const Partial& partial, char* scratch) const {
    const auto take = [&](int64_t bytes) { return (scratch += up(bytes, 64)) - up(bytes, 64); };
    const int64_t rows = padded_rows();
    Place at;
    at.b = b;
    at.query = (float*)take(rows * D_ * 4);
    at.turned = (float*)take(rows * D_ * 4);
    at.cos = (float*)take(half_ * 4);
    at.sin = (float*)take(half_ * 4);
    at.scores = (float*)take(rows * BLOCK * 4);
    at.weights = (float*)take(rows * BLOCK * 4);
    at.keep = (float*)take(rows * 4);
    at.keys = (float*)take(KEYS * D_ * 4);
    at.levels = (int8_t*)take(BLOCK * columns_);
    at.quads = (int8_t*)take(quads_bytes());
    at.tiles = take(tiles_bytes());
    at.rounded = (bfloat16*)take(rounded_bytes());
    at.wide = (float*)take(SINKS * content_ * 4);
    at.content_gain = (float*)take(BLOCK * 4);
    at.rotary_gain = (float*)take(BLOCK * 4);
    at.plans = (BlockPlan*)take(c_.count * sizeof(BlockPlan));
    for (int64_t i = 0; i < c_.count; i++) new (at.plans + i) BlockPlan(c_.blocks[i]);
    at.copies = (uint8_t*)take(copies_bytes(c_));
    at.content = (float*)take(content_query_bytes());
    at.pieces = (int8_t*)take(pieces_bytes());
    at.one = (float*)take(rows_ * 4);
    std::fill_n(partial.high, rows_, NOTHING);
    std::fill_n(partial.sum, rows_ * W, 0.0f);
    std::fill_n(partial.mixture, rows_ * content_, 0.0f);
    if (!tokens.length()) return;
    read_query(b, at.query);
    if (scores_levels_) read_content(at);
    std::copy_n(at.query, rows * D_, at.turned);
    round_query(at);
    std::fill_n(at.cos, half_, 0.0f), std::fill_n(at.sin, half_, 0.0f);

    const Range wide{c_.first[b], c_.first[b] + SINKS};
#if HAS_MATRIX_TILES
    std::optional<TileSetting> setting;
    if (tiles_) setting.emplace();
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
    float* mixture = partials[0].mixture + row * content_;
    const float first = sum == 0 ? 0.0f : share(0) / sum, one = sum == 0 ? 0.0f : 1.0f;
    for (int64_t d = 0; d < a_.V; d++) mixture[d] *= first;
    for (int i = 1; i < count; i++) {
      const float weight = sum == 0 ? 0.0f : share(i) / sum;
      for (int64_t d = 0; d < a_.V; d++) mixture[d] += weight * partials[i].mixture[row * content_ + d];
    }
    for (int64_t d = 0; d < a_.V; d++) put(out + d, mixture[d] * c_.scale[d] + one * c_.offset[d]);
    if (c_.has_sums) put(out + a_.V, one);
  }

 private:
  // What a thread works on.
  struct Place {
    int64_t b;
    float *query, *turned;     // as they are, and rotated back by `turn` slots
    float *cos, *sin;          // [half_], of those slots
    int64_t turn = -1;         // none yet
    float *scores, *weights;   // [row, BLOCK]
    float* keep;               // [row], what partial results so far are multiplied by
    float* keys;               // [KEYS, D_]
    int8_t* levels;            // the latent's [BLOCK, content_], then [columns / CHANNELS, BLOCK, CHANNELS] of the rotary key
    int8_t* quads;             // the latent's levels, for matrix tiles
    char* tiles;               // memory for them to work in
    bfloat16* rounded;         // queries, then KEYS keys, for scores by tiles
    float* wide;               // [SINKS, content_], values without codes in levels
    float *content_gain, *rotary_gain;  // [BLOCK]
    BlockPlan* plans;          // of the blocks
    uint8_t* copies;           // codes at the end of memory
    float* content;            // [row, content_], what meets levels, padded to whole chunks
    int8_t* pieces;            // the same in whole numbers, in tiles
    float* one;                // [row], what 1 in whole queries stands for
  };

  // Rows whose pieces fit beside each other into a tile.
  static constexpr int TILE_ROWS = 16 / PIECES;
  int64_t content_query_bytes() const { return scores_levels_ ? rows_ * up(content_, CHUNK) * 4 : 0; }
  int64_t pieces_bytes() const {
    return scores_levels_ ? (rows_ + TILE_ROWS - 1) / TILE_ROWS * (up(content_, CHUNK) / CHUNK) * 1024 : 0;
  }
  int64_t quads_bytes() const { return tiles_ ? BLOCK * content_ : 0; }
  int64_t tiles_bytes() const {
#if HAS_MATRIX_TILES
    if (tiles_) return up(mix_tiles_bytes<PIECES>(rows_, content_), 64);
#endif
    return 0;
  }
  int64_t rounded_bytes() const { return rounds_ ? (groups_ * 8 + KEYS) * depth_ * 2 : 0; }
  int64_t padded_rows() const { return groups_ * 8 + rows_ - beside_; }

  // --- queries ---------------------------------------------------------------------------------------------------

  // Where dim d of a row's query is: grouped rows are [rows / 8, D_ / 2, 8, 2], then the others [row, D_].
  int64_t place(int row, int64_t d) const {
    if (row >= beside_) return (groups_ * 8 + row - beside_) * D_ + d;
    return row / 8 * 8 * D_ + d / 2 * 16 + row % 8 * 2 + d % 2;
  }

  void read_query(int64_t b, float* query) const {
    std::fill_n(query, padded_rows() * D_, 0.0f);
    const float factor = float(a_.scale * LOG2E);
    for (int row = 0; row < rows_; row++) {
      const Q* from = (const Q*)a_.query + b * a_.query_stride[0] + row / a_.S * a_.query_stride[1] +
                      row % a_.S * a_.query_stride[2];
      if (scored_) {
        for (int64_t d = 0; d < a_.V; d++) query[place(row, 2 * half_ + d)] = number(from[d]) * factor * c_.scale[d];
      }
      if (a_.D > c_.P) from += a_.V;
      for (int64_t d = 0; d < c_.P / 2; d++) {
        query[place(row, d)] = number(from[d]) * factor;
        query[place(row, half_ + d)] = number(from[c_.P / 2 + d]) * factor;
      }
    }
  }

  // What meets the latent's levels, and its whole numbers in tiles: [rows / TILE_ROWS, chunk, four channels of 16, piece of a
  // row, 4].
  void read_content(Place& at) const {
#if HAS_MATRIX_TILES
    const int64_t padded = up(content_, CHUNK), chunks = padded / CHUNK;
    const float factor = float(a_.scale * LOG2E);
    std::fill_n(at.content, rows_ * padded, 0.0f);
    std::fill_n(at.pieces, pieces_bytes(), int8_t(0));
    for (int row = 0; row < rows_; row++) {
      const Q* from = (const Q*)a_.query + at.b * a_.query_stride[0] + row / a_.S * a_.query_stride[1] +
                      row % a_.S * a_.query_stride[2];
      float* content = at.content + row * padded;
      for (int64_t d = 0; d < a_.V; d++) content[d] = number(from[d]) * factor * c_.scale[d];
      int8_t* pieces = at.levels;  // which are decoded later
      at.one[row] = signed_pieces<PIECES>(content, padded, pieces, padded);
      for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int p = 0; p < PIECES; p++)
          for (int four = 0; four < 16; four++)
            memcpy(at.pieces + ((row / TILE_ROWS * chunks + chunk) * 16 + four) * 64 + (p * TILE_ROWS + row % TILE_ROWS) * 4,
                   pieces + p * padded + chunk * CHUNK + four * 4, 4);
    }
#endif
  }

  // Rotates the queries back by `slot`.
  void turn_back(int64_t slot, Place& at) const {
    if (!c_.P || at.turn == slot) return;
    at.turn = slot;
    // Local copies, which the compiler knows that no store changes.
    const float *query = at.query, *all_cos = c_.cos + slot * c_.frequencies, *all_sin = c_.sin + slot * c_.frequencies;
    const int64_t *frequency = c_.frequency, half = half_, pairs = c_.P / 2;
    float *turned = at.turned, *cos = at.cos, *sin = at.sin;
    for (int64_t d = 0; d < pairs; d++) cos[d] = all_cos[frequency[d]], sin[d] = all_sin[frequency[d]];
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
    round_query(at);
  }

  void round_query(Place& at) const {
#if HAS_BFLOAT16_TILES
    if constexpr (CAN_ROUND)
      if (rounds_) {
        if (depth_ > D_) std::fill_n(at.rounded, groups_ * 8 * depth_, bfloat16{});
        round_groups(at.turned, groups_ / 2, D_, depth_, at.rounded);
      }
#endif
  }

  // --- tokens ----------------------------------------------------------------------------------------------------

  void attend_codes(Range tokens, Place& at, const Partial& partial) const {
    for (int64_t from = tokens.from, to; from < tokens.to; from = to) {
      to = std::min(tokens.to, (from / BLOCK + 1) * BLOCK);
      const int count = int(to - from);
      decode(at, from, count);
      score_tokens(at, from, count, [&](int t, int n) { coded_keys(at, from, t, n); });
      if (scores_levels_) score_levels(at, count);
      weigh(at, from, count, partial, at.content_gain);
#if HAS_MATRIX_TILES
      if (tiles_) {
        mix_tiles<PIECES>(partial.mixture, rows_, at.weights, at.keep, at.quads, content_, at.tiles);
        continue;
      }
#endif
      const int8_t* value[BLOCK];
      for (int t = 0; t < count; t++) value[t] = at.levels + t * content_;
      Ahead none(at.levels, 0, 0, 0, 0);
      mix<A>(partial.mixture, rows_, Weights<float>{at.weights, BLOCK, 1}, at.keep, value, count, content_, none);
    }
  }

  // The levels and gains of a block of tokens.
  void decode(Place& at, int64_t from, int count) const {
    const uint8_t* row[BLOCK + 3];
    find_tokens(c_, at.b, from, count, at.copies, row, at.content_gain, at.rotary_gain);
    for (int64_t i = 0; i < c_.count; i++) {
      const BlockPlan& block = at.plans[i];
#if HAS_MATRIX_TILES
      if (tiles_ && block.column < content_) {
        int8_t *quads = at.quads + block.column * BLOCK, *levels = at.levels + block.column;
        if (scores_levels_)
          decode_quads<true>(block, c_.tables, row, count, quads, levels, content_);
        else
          decode_quads<false>(block, c_.tables, row, count, quads, levels, content_);
        continue;
      }
#endif
      if (block.column < content_)
        decode_block(block, c_.tables, row, count, at.levels + block.column, content_);
      else
        decode_block(block, c_.tables, row, count, at.levels + block.column * BLOCK, CHANNELS);
    }
  }

  // Keys of tokens t … t + n − 1 of a block, whose levels and gains are there.
  void coded_keys(Place& at, int64_t from, int t, int n) const {
    // Local copies, which the compiler knows that no store changes.
    const int64_t half = half_, stride = D_;
    const float *cos = c_.turn_cos + (from + t) % TURN * half, *sin = c_.turn_sin + (from + t) % TURN * half;
    const float* gains = at.rotary_gain + t;
    const int8_t* levels = at.levels + content_ * BLOCK + t * CHANNELS;
    float* keys = at.keys;
    for (int64_t d = 0; d < half; d += W) {
      const float *scale = c_.scale + content_ + d, *offset = c_.offset + content_ + d;
      const Vector scale1 = load(scale), scale2 = load(scale + half), offset1 = load(offset), offset2 = load(offset + half);
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
      const Vector gain = all(at.content_gain[t + i]);
      for (int64_t d = 0; d < scored_; d += W)
        store(at.keys + i * D_ + 2 * half_ + d, load(at.levels + (t + i) * content_ + d) * gain);
    }
  }

  // Tokens without codes.
  void attend_wide(Range tokens, Place& at, const Partial& partial) const {
    if (!tokens.length()) return;
    const int64_t width = a_.V + c_.P;
    const int count = int(tokens.length());
    const bfloat16* wide = (const bfloat16*)a_.value + (at.b * SINKS + tokens.from - c_.first[at.b]) * width;
    const float* value[SINKS];
    for (int t = 0; t < count; t++) {
      value[t] = at.wide + t * content_;
      for (int64_t d = 0; d < content_; d++)
        at.wide[t * content_ + d] = d < a_.V ? (number(wide[t * width + d]) - c_.offset[d]) / c_.scale[d] : 0.0f;
    }
    score_tokens(at, tokens.from, count, [&](int t, int n) {
      for (int i = 0; i < n; i++) {
        float* key = at.keys + i * D_;
        const int64_t turn = (tokens.from + t + i) % TURN * half_, half = c_.P / 2;
        const bfloat16* from = wide + (t + i) * width + a_.V;
        std::fill_n(key, 2 * half_, 0.0f);
        for (int64_t d = 0; d < half; d++) {
          const float c = c_.turn_cos[turn + d], s = c_.turn_sin[turn + d];
          key[d] = number(from[d]) * c - number(from[half + d]) * s;
          key[half_ + d] = number(from[half + d]) * c + number(from[d]) * s;
        }
        std::copy_n(value[t + i], scored_, key + 2 * half_);
      }
    });
    if (scores_levels_) score_content(at, value, count);
    weigh(at, tokens.from, count, partial, nullptr);
    Ahead none(at.wide, 0, 0, 0, 0);
    mix<A>(partial.mixture, rows_, Weights<float>{at.weights, BLOCK, 1}, at.keep, value, count, content_, none);
  }

  // --- scores and weights ----------------------------------------------------------------------------------------

  // Scores of all rows with a block's tokens; read(t, n) computes the keys of n of them.
  template <class F>
  void score_tokens(Place& at, int64_t from, int count, F read) const {
    for (int t = 0, n; t < count; t += n) {
      n = int(std::min<int64_t>(count - t, KEYS - (from + t) % KEYS));
      turn_back((from + t) / TURN * TURN, at);
      read(t, n);
      const float* key[KEYS];
      for (int i = 0; i < KEYS; i++) key[i] = at.keys + std::min(i, n - 1) * D_;
      Ahead none(at.keys, 0, 0, 0, 0);
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
          continue;
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
  }

  // Adds the latents' part of the scores of a block of tokens, whose levels are there.
  void score_levels(Place& at, int count) const {
#if HAS_MATRIX_TILES
    const int64_t chunks = up(content_, CHUNK) / CHUNK;
    alignas(64) int32_t products[256];
    for (int first = 0; first < rows_; first += TILE_ROWS)
      for (int t = 0; t < count; t += 16) {
        const int8_t *levels = at.levels + t * content_, *pieces = at.pieces + first / TILE_ROWS * chunks * 1024;
        asm volatile("" : : : "memory");
        _tile_zero(0);
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
          _tile_loadd(1, levels + chunk * CHUNK, content_);
          _tile_loadd(2, pieces + chunk * 1024, 64);
          _tile_dpbssd(0, 1, 2);
        }
        _tile_stored(0, products, 64);
        asm volatile("" : : : "memory");
        __m512i of_token[16], of_piece[16];
        UNROLL for (int i = 0; i < 16; i++) of_token[i] = _mm512_load_si512(products + i * 16);
        transpose(of_token, of_piece);
        UNROLL for (int r = 0; r < TILE_ROWS; r++) {
          if (first + r >= rows_) break;
          Vector product = (Vector)_mm512_cvtepi32_ps(of_piece[r]);
          UNROLL for (int p = 1; p < PIECES; p++)
            product = product * 256.0f + (Vector)_mm512_cvtepi32_ps(of_piece[p * TILE_ROWS + r]);
          float* scores = at.scores + (first + r) * BLOCK + t;
          store(scores, load(scores) + product * at.one[first + r] * load(at.content_gain + t));
        }
      }
#endif
  }

  // Adds that of `count` tokens without codes.
  void score_content(Place& at, const float* const* value, int count) const {
    Ahead none(at.wide, 0, 0, 0, 0);
    float* scores = at.weights;  // which are computed later
    const int64_t padded = up(content_, CHUNK);
    for (int row = 0; row < rows_; row++) {
      score<A>(at.content + row * padded, 1, value, count, content_, scores, none);
      for (int t = 0; t < count; t++) at.scores[row * BLOCK + t] += scores[t];
    }
  }

  // Scores become weights, times the tokens' gains; see weigh_row.
  void weigh(Place& at, int64_t from, int count, const Partial& partial, const float* gain) const {
    for (int row = 0; row < rows_; row++)
      weigh_row(mask_, at.b, row, from, count, at.scores + row * BLOCK, at.weights + row * BLOCK, at.keep[row], partial, gain);
  }
};

}  // namespace

// The entry point; see headwise_attention.
extern "C" int headwise_coded(const CodedArguments* arguments, int type) {
  return with_type(type, [&](auto q) {
    using Q = decltype(q);
    in_calls<Q>(*arguments, [](CodedArguments& part) {
      CodedAttention<Q>(part).run();
    });
  });
}
