// softmax(scale · Q Kᵀ) V on the CPU over keys and values that are read as they are stored: whole numbers of 1 to 8
// bits with a scale and a zero point.
//
// Those belong to a group of a token's channels, or, for keys, to a channel in a block of tokens. Scores and mixtures
// are of the whole numbers: scales are multiplied into scores and weights, or into the queries of a block, and zero
// points meet the sum of a query's channels and of the weights. The latest tokens may be stored as they are.
#include "integers.h"

namespace {

// A number of float16.
INLINE float number_of_half(uint16_t x) {
  const uint32_t sign = uint32_t(x & 0x8000) << 16, rest = x & 0x7fff;
  float result;
  if (rest >= 0x7c00) {
    const uint32_t bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    memcpy(&result, &bits, 4);
    return result;
  }
  const uint32_t bits = rest << 13;  // with an exponent that is 112 too small
  memcpy(&result, &bits, 4);
  result *= 0x1p112f;
  return sign ? -result : result;
}

// `count` numbers of float16, and zeros.
INLINE Vector of_halves(const uint16_t* at, int count) {
#if (defined(__AVX512F__) || defined(__F16C__)) && defined(__FLT16_MAX__)
  return load((const float16*)at, count);
#else
  float numbers[W] = {};
  for (int i = 0; i < count; i++) numbers[i] = number_of_half(at[i]);
  return load(numbers);
#endif
}

template <class Query>
class AffineAttention : public AttentionKernel<AffineAttention<Query>, AffineArguments, Query> {
  using Base = AttentionKernel<AffineAttention, AffineArguments, Query>;
  using Base::a_, Base::mask_, Base::rows_;
  using A = Single;
  using Q = Query;
  static constexpr int PIECES = std::is_same_v<Q, float> ? 3 : 2;  // of a whole weight, and of a whole query
  static constexpr int TILE_ROWS = 16 / PIECES;                    // rows whose pieces fit into a tile
  const RowFormat &keys_, &values_;
  const bool tiles_;          // whether matrix tiles are used
  const int64_t key_groups_;  // groups of keys that are scored: one where scales belong to blocks
  const int64_t key_width_;   // channels of a group of keys, and padded to whole vectors
  const int64_t key_padded_;
  const int64_t value_width_, value_padded_;
  const int64_t key_row_, value_row_;  // numbers of an unpacked row
  // Whether numbers of 4 bits are unpacked after their rows are transposed.
  const bool fours_of_keys_, fours_of_values_;

 public:
  explicit AffineAttention(const AffineArguments& a)
      : Base(a),
        keys_(a.key_rows),
        values_(a.value_rows),
        tiles_(may_use_tiles()),
        key_groups_(std::max<int64_t>(1, keys_.groups)),
        key_width_(a.D / key_groups_),
        key_padded_(up(key_width_, W)),
        value_width_(a.V / values_.groups),
        value_padded_(up(value_width_, 16)),
        key_row_(up(a.D, CHUNK)),
        value_row_(up(a.V, CHUNK)),
        fours_of_keys_(tiles_ && keys_.bits == 4 && a.D % CHUNK == 0),
        fours_of_values_(tiles_ && values_.bits == 4 && a.V % CHUNK == 0 && value_width_ % 32 == 0) {}

  struct Place : Base::Unit {
    float* query;                      // [row, D], padded to vectors
    float* grouped;                    // [group, row, channels of the group], padded: what meets the whole numbers
    float *sums, *added;               // [group, row]: sums of channels; what is added to a row's scores of a block
    float* one;                        // [group, row], what 1 in whole queries stands for
    float* of_block;                   // scales of a block of keys, then zero points
    float *weights, *scaled;           // [row, BLOCK]
    float *key_scales, *value_scales;  // [group, BLOCK] scales, then zero points
    int8_t *keys, *values;             // unpacked: rows of [BLOCK, channels], or for matrix tiles
    float* late;                       // [BLOCK, channels of a group], values that are stored as they are
    int8_t* pieces;                    // whole queries for matrix tiles
    float* spread;                     // [row, channels], a group's query between zeros
#if HAS_MATRIX_TILES
    std::optional<TileMixer<PIECES>> mixer;
    int32_t* products;
#endif
  };
  Place place(Arena& arena) const {
    const int64_t rows = key_groups_ * rows_;
    Place at;
    at.take(arena, rows_);
    at.query = arena.take<float>(rows_ * up(a_.D, W));
    at.grouped = arena.take<float>(rows * key_padded_);
    at.sums = arena.take<float>(rows), at.added = arena.take<float>(rows), at.one = arena.take<float>(rows);
    at.of_block = arena.take<float>(2 * up(a_.D, W));
    at.weights = arena.take<float>(rows_ * BLOCK), at.scaled = arena.take<float>(rows_ * BLOCK);
    at.key_scales = arena.take<float>(2 * keys_.groups * BLOCK);
    at.value_scales = arena.take<float>(2 * values_.groups * BLOCK);
    at.keys = arena.take<int8_t>(BLOCK * key_row_), at.values = arena.take<int8_t>(BLOCK * value_row_);
    at.late = arena.take<float>(BLOCK * value_width_);
    at.pieces = arena.take<int8_t>(pieces_bytes());
    at.spread = arena.take<float>(tiles_ ? rows_ * key_row_ : 0);
#if HAS_MATRIX_TILES
    if (tiles_) at.mixer.emplace(arena, rows_), at.products = arena.take<int32_t>(4 * 256);
#endif
    return at;
  }

  // Of each group a mixture of whole numbers, and one of zero points.
  int64_t width() const { return values_.groups * (value_padded_ + 1); }
  double microseconds(int64_t tokens) const { return double(tokens) * (a_.D + a_.V) * (2 + rows_) / 100e3; }

  void attend(Range tokens, Place& at, const Partial& partial) const {
    std::fill_n(at.pieces, pieces_bytes(), int8_t(0));
    read_query(at);
    attend_codes(tokens.cut({0, a_.coded}), at, partial);
    attend_late(tokens.cut({a_.coded, a_.T}), at, partial);
  }

  void finish(int64_t b, int64_t k, int row, const Partial* partials, int count) const {
    const Shares share(partials, count, row);
    const float sum = share.sum;
    Q* out = this->out_row(b, k, row);
    for (int64_t g = 0; g < values_.groups; g++) {
      float zero = 0;
      for (int i = 0; i < count; i++) zero += share(i) * *zero_of(partials[i], g, row);
      for (int64_t d = 0; d < value_width_; d++) {
        float mixture = zero;
        const int64_t column = row * value_padded_ + column_of(d);
        for (int i = 0; i < count; i++) mixture += share(i) * mixture_of(partials[i], g)[column];
        put(out + g * value_width_ + d, sum == 0 ? 0.0f : mixture / sum);
      }
    }
  }

 private:
  float* mixture_of(const Partial& partial, int64_t group) const {
    return partial.mixture + group * rows_ * value_padded_;
  }
  float* zero_of(const Partial& partial, int64_t group, int row) const {
    return partial.mixture + values_.groups * rows_ * value_padded_ + group * rows_ + row;
  }

  // Where a channel of a group of values is in the mixture.
  int64_t column_of(int64_t channel) const {
#if HAS_MATRIX_TILES
    if (fours_of_values_) return column_of_four(channel);
#endif
    return channel;
  }

  // --- queries ---------------------------------------------------------------------------------------------------

  void read_query(Place& at) const {
    const int64_t stride = up(a_.D, W);
    const float factor = this->factor();
    std::fill_n(at.query, rows_ * stride, 0.0f);
    std::fill_n(at.grouped, key_groups_ * rows_ * key_padded_, 0.0f);
    for (int row = 0; row < rows_; row++) {
      const Q* from = this->query_row(at.b, at.k, row);
      float* query = at.query + row * stride;
      for (int64_t d = 0; d < a_.D; d++) query[d] = number(from[d]) * factor;
      for (int64_t g = 0; g < key_groups_; g++) {
        const float* of_group = query + g * key_width_;
        std::copy_n(of_group, key_width_, at.grouped + (g * rows_ + row) * key_padded_);
        float sum = 0;
        for (int64_t d = 0; d < key_width_; d++) sum += of_group[d];
        at.sums[g * rows_ + row] = sum;
      }
    }
    if (keys_.groups) split_query(at);
  }

  // Multiplies the queries by the scales of a block of keys.
  void scale_query(Place& at, int64_t block) const {
    const uint16_t* from = a_.block_scale + at.b * a_.block_scale_stride[0] + at.k * a_.block_scale_stride[1] +
                           block * a_.block_scale_stride[2];
    float *scales = at.of_block, *zeros = scales + key_padded_;
    for (int64_t d = 0; d < a_.D; d += W) {
      const int count = int(std::min<int64_t>(W, a_.D - d));
      const Vector scale = of_halves(from + d, count);
      store(scales + d, scale);
      // A scale that is no number says that the channel holds none.
      store(zeros + d, of_halves(from + a_.D + d, count) + scale * 0.0f);
    }
    for (int row = 0; row < rows_; row++) {
      const float* query = at.query + row * key_padded_;
      float* scaled = at.grouped + row * key_padded_;
      Vector added{};
      for (int64_t d = 0; d < a_.D; d += W) {
        store(scaled + d, load(query + d) * load(scales + d));
        added += load(query + d) * load(zeros + d);
      }
      at.added[row] = ::sum(added);
    }
    split_query(at);
  }

  // Whole queries in pieces, for matrix tiles: of each group, and tile of rows, and chunk of channels that it is in, a
  // tile.
  void split_query(Place& at) const {
#if HAS_MATRIX_TILES
    if (!tiles_) return;
    for (int64_t g = 0; g < key_groups_; g++) {
      const int64_t first = g * key_width_ / CHUNK, chunks = chunks_of(g), before = g * key_width_ - first * CHUNK;
      for (int row = 0; row < rows_; row++) {
        const float* query = at.grouped + (g * rows_ + row) * key_padded_;
        if (before || key_width_ % CHUNK) {
          std::fill_n(at.spread, chunks * CHUNK, 0.0f);
          std::copy_n(query, key_width_, at.spread + before);
          query = at.spread;
        }
        alignas(64) int8_t pieces[PIECES * 1024];
        int8_t* to = chunks * CHUNK <= 1024 ? pieces : at.keys;
        at.one[g * rows_ + row] = signed_pieces<PIECES>(query, chunks * CHUNK, to, chunks * CHUNK);
        for (int64_t chunk = 0; chunk < chunks; chunk++)
          for (int p = 0; p < PIECES; p++) {
            const __m512i numbers = _mm512_loadu_si512(to + (p * chunks + chunk) * CHUNK);
            _mm512_store_si512(tile_of(at, g, row / TILE_ROWS, chunk) + (row % TILE_ROWS * PIECES + p) * CHUNK,
                               fours_of_keys_ ? in_order_of_fours(numbers) : numbers);
          }
      }
    }
#endif
  }

  int64_t tiles_of_rows() const { return (rows_ + TILE_ROWS - 1) / TILE_ROWS; }
  int64_t chunks_of(int64_t group) const {
    return ((group + 1) * key_width_ + CHUNK - 1) / CHUNK - group * key_width_ / CHUNK;
  }
  int64_t most_chunks() const { return (key_width_ + CHUNK - 1) / CHUNK + (key_width_ % CHUNK && key_groups_ > 1); }
  int64_t pieces_bytes() const { return tiles_ ? key_groups_ * tiles_of_rows() * most_chunks() * 1024 : 0; }
  int8_t* tile_of(const Place& at, int64_t group, int64_t tile, int64_t chunk) const {
    return at.pieces + ((group * tiles_of_rows() + tile) * most_chunks() + chunk) * 1024;
  }

  // --- tokens ----------------------------------------------------------------------------------------------------

  void attend_codes(Range tokens, Place& at, const Partial& partial) const {
#if HAS_MATRIX_TILES
    const Unpacker keys(int(keys_.bits), a_.D, false), values(int(values_.bits), a_.V, true);
#endif
    const TileSetting setting(tiles_ ? std::min(TILE, rows_ * PIECES) : 0);
    const RowUnpacker key_unpacker(int(keys_.bits)), value_unpacker(int(values_.bits));
    const uint8_t* key = (const uint8_t*)a_.key + at.b * a_.key_stride[0] + at.k * a_.key_stride[1];
    const uint8_t* value = (const uint8_t*)a_.value + at.b * a_.value_stride[0] + at.k * a_.value_stride[1];
    int64_t block_of_query = -1;
    // Calls scored(t, n) for neighbouring tokens of a block of keys, whose scales the queries then have.
    const auto score = [&](int64_t from, int count, auto scored) {
      for (int t = 0, n; t < count; t += n) {
        n = count - t;
        if (a_.block_scale) {
          const int64_t block = (from + t) / a_.block;
          if (block != block_of_query) scale_query(at, block_of_query = block);
          n = int(std::min<int64_t>(n, (block + 1) * a_.block - from - t));
        }
        scored(t, n);
      }
    };
    for (int64_t from = tokens.from, to; from < tokens.to; from = to) {
      to = std::min(tokens.to, (from / BLOCK + 1) * BLOCK);
      // Several whole blocks of keys, or the rest of one.
      if (a_.block_scale && a_.block < BLOCK && from % a_.block) to = std::min(to, (from / a_.block + 1) * a_.block);
      const int count = int(to - from);
      // The next block's values are prefetched while this one's keys are read, and its keys while values are: into the
      // second cache, as fewer reads can be under way into the first.
      const int64_t next = std::min<int64_t>(BLOCK, tokens.to - to);
      Ahead values_ahead(value + to * a_.value_stride[2], a_.value_stride[2], next, value_bytes(), steps_of_keys(count),
                         0);
      Ahead keys_ahead(key + to * a_.key_stride[2], a_.key_stride[2], next, key_bytes(), steps_of_values(count), 0);
      at.ahead = values_ahead;
      const uint8_t *key_rows = key + from * a_.key_stride[2], *value_rows = value + from * a_.value_stride[2];
      read_scales(keys_, key_rows, a_.key_stride[2], count, at.key_scales);
      read_scales(values_, value_rows, a_.value_stride[2], count, at.value_scales);
#if HAS_MATRIX_TILES
      if (tiles_) {
        unpack_columns(keys, key_rows, count, at);
        score(from, count, [&](int t, int n) { score_columns(at, t, n); });
        this->template weigh<false>(at, from, count, partial, nullptr);
        at.ahead = keys_ahead;
        unpack_quads(values, value_rows, count, at);
        mix_codes(at, count, partial);
        continue;
      }
#endif
      const int64_t behind = a_.coded - 1 - from;  // rows that follow the first one
      key_unpacker.unpack(key_rows, a_.key_stride[2], count, a_.D, behind * a_.key_stride[2] + key_bytes(), at.keys,
                          key_row_);
      value_unpacker.unpack(value_rows, a_.value_stride[2], count, a_.V, behind * a_.value_stride[2] + value_bytes(),
                            at.values, value_row_);
      score(from, count, [&](int t, int n) { score_rows(at, t, n); });
      this->template weigh<false>(at, from, count, partial, nullptr);
      mix_codes(at, count, partial);
    }
  }
  // Bytes of a row.
  int64_t key_bytes() const { return keys_.codes + 4 * keys_.groups; }
  int64_t value_bytes() const { return values_.codes + 4 * values_.groups; }
  int64_t steps_of_keys(int count) const {
    const int64_t scored = a_.block_scale ? (count + a_.block - 1) / a_.block : key_groups_;
    return (count + 15) / 16 * (key_row_ / CHUNK) + rows_ * (1 + scored);
  }
  int64_t steps_of_values(int count) const { return (count + 3) / 4 * (value_row_ / CHUNK); }
  // Scales and zero points of a block's tokens, [group, BLOCK] each; zero points are those of numbers that lost 128.
  static void read_scales(const RowFormat& rows, const uint8_t* row, int64_t stride, int count, float* scales) {
    const float lost = rows.bits == 8 ? 128.0f : 0.0f;
    float* zeros = scales + rows.groups * BLOCK;
#if HAS_BYTE_TABLES && defined(__AVX512F__)
    const __m512i places = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                              _mm512_set1_epi32(int(stride)));
    for (int t = 0; t < BLOCK; t += 16) {
      const __mmask16 are = t + 16 <= count ? 0xffff : t < count ? (1 << (count - t)) - 1 : 0;
      const uint8_t* at = row + t * stride + rows.codes;
      // Two halves at a time: the scales of two groups, or a scale and a zero point, or two zero points.
      for (int64_t half = 0; half < 2 * rows.groups; half += 2) {
        const __m512i both = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), are, places, at + 2 * half, 1);
        store(scales + half * BLOCK + t, (Vector)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(both)));
        store(scales + (half + 1) * BLOCK + t,
              (Vector)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16))));
      }
    }
#elif defined(__AVX2__) && defined(__F16C__) && !defined(__AVX512F__)
    for (int64_t half = 0; half < 2 * rows.groups; half += 2) {  // two at a time, as above
      const uint8_t* at = row + rows.codes + 2 * half;
      const auto both = [&](int t) {
        int32_t words[4];
        for (int i = 0; i < 4; i++) memcpy(words + i, at + std::min(t + i, count - 1) * stride, 4);
        return _mm_setr_epi32(words[0], words[1], words[2], words[3]);
      };
      const __m128i mask = _mm_set1_epi32(0xffff);
      for (int t = 0; t < BLOCK; t += W) {
        const __m128i a = both(t), b = both(t + 4);
        const __m128i first = _mm_packus_epi32(_mm_and_si128(a, mask), _mm_and_si128(b, mask));
        const __m128i second = _mm_packus_epi32(_mm_srli_epi32(a, 16), _mm_srli_epi32(b, 16));
        store(scales + half * BLOCK + t, (Vector)_mm256_cvtph_ps(first));
        store(scales + (half + 1) * BLOCK + t, (Vector)_mm256_cvtph_ps(second));
      }
    }
#else
    for (int64_t half = 0; half < 2 * rows.groups; half++) {
      const uint8_t* at = row + rows.codes + 2 * half;
      for (int t = 0; t < BLOCK; t += W) {
        uint16_t bits[W] = {};
        for (int i = 0; i < W && t + i < count; i++) memcpy(bits + i, at + (t + i) * stride, 2);
        store(scales + half * BLOCK + t, of_halves(bits, W));
      }
    }
#endif
    // A scale that is no number says that its group holds none.
    for (int64_t i = 0; i < rows.groups * BLOCK; i += W) {
      const Vector scale = load(scales + i);
      store(zeros + i, load(zeros + i) + scale * 0.0f + scale * lost);
    }
  }

  // --- scores ----------------------------------------------------------------------------------------------------

  // Scores of all rows with unpacked keys t … t + n − 1.
  void score_rows(Place& at, int t, int n) const {
    Ahead none;
    const int8_t* key[BLOCK];
    for (int64_t g = 0; g < key_groups_; g++) {
      for (int i = 0; i < n; i++) key[i] = at.keys + (t + i) * key_row_ + g * key_width_;
      score<A>(at.grouped + g * rows_ * key_padded_, rows_, key, n, key_width_, at.scaled, none);
      // Local copies, which the compiler knows that no store changes.
      const float *scale = at.key_scales + g * BLOCK + t, *zero = scale + keys_.groups * BLOCK;
      const bool has_groups = keys_.groups, is_first = g == 0;
      for (int row = 0; row < rows_; row++) {
        const float *product = at.scaled + row * BLOCK, sum = has_groups ? at.sums[g * rows_ + row] : at.added[row];
        float* score = at.scores + row * BLOCK + t;
        const auto add = [=](int i, auto read) __attribute__((always_inline)) {
          if (!has_groups) return read(product + i) + sum;
          const auto scaled = read(product + i) * read(scale + i) + read(zero + i) * sum;
          return is_first ? scaled : read(score + i) + scaled;
        };
        int i = 0;
        for (; i + W <= n; i += W) store(score + i, add(i, [](const float* x) { return load(x); }));
        for (; i < n; i++) score[i] = add(i, [](const float* x) { return *x; });
      }
    }
  }

#if HAS_MATRIX_TILES
  // Keys as tiles of columns: [16 tokens, chunk, four channels of 16, token, 4].
  void unpack_columns(const Unpacker& unpacker, const uint8_t* row, int count, Place& at) const {
    const int64_t chunks = key_row_ / CHUNK;
    int8_t* to = at.keys;
    for (int t = 0; t < count; t += 16) {
      for (int64_t chunk = 0; chunk < chunks; chunk++) {
        at.ahead.step();
        if (fours_of_keys_) {
          const uint8_t* rows[16];
          UNROLL for (int i = 0; i < 16; i++)
            rows[i] = row + std::min(t + i, count - 1) * a_.key_stride[2] + chunk * CHUNK / 2;
          transpose_fours(rows, to + (t * chunks + chunk * 16) * 64);
          continue;
        }
        __m512i rows[16], columns[16];
        UNROLL for (int i = 0; i < 16; i++)
          rows[i] = unpacker.read(row + std::min(t + i, count - 1) * a_.key_stride[2], chunk);
        transpose(rows, columns);
        UNROLL for (int i = 0; i < 16; i++)
          _mm512_store_si512(to + (t * chunks + chunk * 16 + i) * 64, columns[i]);
      }
    }
  }

  // Scores of all rows with keys t … t + n − 1 in tiles; t is a multiple of sixteen.
  void score_columns(Place& at, int t, int n) const {
    const int64_t chunks = key_row_ / CHUNK;
    int32_t* products = at.products;
    for (int tile = 0; tile < tiles_of_rows(); tile++)
      for (int64_t g = 0; g < key_groups_; g++) {
        const int8_t* keys = at.keys + (t / 16 * chunks + g * key_width_ / CHUNK) * 1024;
        multiply_columns(tile_of(at, g, tile, 0), keys, chunks_of(g), chunks * 1024, n, products);
        const int last = std::min(rows_, (tile + 1) * TILE_ROWS);
        for (int row = tile * TILE_ROWS; row < last; row++) add_products(at, g, row, t, n, products);
      }
  }

  // products[sixteen tokens, piece of a row, token] of a tile of pieces and the keys of up to 64 tokens, `stride` bytes
  // apart for sixteen.
  static void multiply_columns(const int8_t* pieces, const int8_t* keys, int64_t chunks, int64_t stride, int count,
                               int32_t* products) {
    asm volatile("" : : : "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t chunk = 0; chunk < chunks; chunk++, keys += 1024) {
      _tile_loadd(4, pieces + chunk * 1024, CHUNK);
      _tile_loadd(5, keys, 64);
      _tile_dpbssd(0, 4, 5);
      if (count > 16) {
        _tile_loadd(6, keys + stride, 64);
        _tile_dpbssd(1, 4, 6);
      }
      if (count > 32) {
        _tile_loadd(7, keys + 2 * stride, 64);
        _tile_dpbssd(2, 4, 7);
      }
      if (count > 48) {
        _tile_loadd(5, keys + 3 * stride, 64);
        _tile_dpbssd(3, 4, 5);
      }
    }
    _tile_stored(0, products, 64);
    if (count > 16) _tile_stored(1, products + 256, 64);
    if (count > 32) _tile_stored(2, products + 512, 64);
    if (count > 48) _tile_stored(3, products + 768, 64);
    asm volatile("" : : : "memory");
  }

  void add_products(Place& at, int64_t g, int row, int first, int count, const int32_t* products) const {
    at.ahead.step();
    const Vector one = all(at.one[g * rows_ + row]);
    const float* scale = at.key_scales + g * BLOCK + first;
    const float* zero = at.key_scales + (keys_.groups + g) * BLOCK + first;
    float* scores = at.scores + row * BLOCK + first;
    for (int t = 0; t < count; t += 16) {
      const int32_t* piece = products + t * 16 + row % TILE_ROWS * PIECES * 16;
      Vector product = (Vector)_mm512_cvtepi32_ps(_mm512_load_si512(piece));
      UNROLL for (int p = 1; p < PIECES; p++)
        product = product * 256.0f + (Vector)_mm512_cvtepi32_ps(_mm512_load_si512(piece + p * 16));
      product *= one;
      if (!keys_.groups)
        store(scores + t, product + at.added[row]);
      else {
        product = product * load(scale + t) + load(zero + t) * at.sums[g * rows_ + row];
        store(scores + t, g ? load(scores + t) + product : product);
      }
    }
  }

  // Values in quads: [channels / 16, BLOCK / 4, 16, 4].
  void unpack_quads(const Unpacker& unpacker, const uint8_t* row, int count, Place& at) const {
    int8_t* to = at.values;
    Ahead ahead = at.ahead;  // a local copy can be in registers
    for (int t = 0; t < count; t += 4)
      for (int64_t chunk = 0; chunk < value_row_ / CHUNK; chunk++) {
        ahead.step();
        if (fours_of_values_) {
          const uint8_t* rows[4];
          UNROLL for (int i = 0; i < 4; i++)
            rows[i] = row + std::min(t + i, count - 1) * a_.value_stride[2] + chunk * CHUNK / 2;
          int8_t* quads = to + chunk * 4 * QUADS + t * TILE;
          weave_fours(rows, quads, quads + QUADS);
          UNROLL for (int i = 0; i < 4; i++)
            rows[i] += 16;
          weave_fours(rows, quads + 2 * QUADS, quads + 3 * QUADS);
          continue;
        }
        __m512i rows[4], quads[4];
        UNROLL for (int i = 0; i < 4; i++)
          rows[i] = unpacker.read(row + std::min(t + i, count - 1) * a_.value_stride[2], chunk);
        weave(rows, quads);
        UNROLL for (int j = 0; j < 4; j++)
          _mm512_store_si512(to + (chunk * 4 + j) * QUADS + t * TILE, quads[j]);
      }
  }
#endif

  // --- mixtures ----------------------------------------------------------------------------------------------------

  // Adds a block's values, in codes, to the mixtures.
  void mix_codes(Place& at, int count, const Partial& partial) const {
    for (int64_t g = 0; g < values_.groups; g++) {
      const float *scales = at.value_scales + g * BLOCK, *zeros = scales + values_.groups * BLOCK;
      for (int row = 0; row < rows_; row++) {
        Vector of_zeros{};
        for (int t = 0; t < BLOCK; t += W) {
          // What a row does not see may be no number.
          const Vector weight = load(at.weights + row * BLOCK + t);
          const Whole is_seen = weight != 0.0f;
          of_zeros += weight * (Vector)((Whole)load(zeros + t) & is_seen);
          store(at.scaled + row * BLOCK + t, weight * (Vector)((Whole)load(scales + t) & is_seen));
        }
        float* zero = zero_of(partial, g, row);
        *zero = *zero * at.keep[row] + ::sum(of_zeros);
      }
      float* mixture = mixture_of(partial, g);
#if HAS_MATRIX_TILES
      if (tiles_) {
        at.mixer->mix(mixture, at.scaled, at.keep, at.values + g * value_width_ * BLOCK, value_padded_);
        continue;
      }
#endif
      const int8_t* value[BLOCK];
      for (int t = 0; t < count; t++) value[t] = at.values + t * value_row_ + g * value_width_;
      mix_rows(at, mixture, at.scaled, value, count);
    }
  }

  template <class T>
  void mix_rows(Place& at, float* mixture, const float* weights, const T* const* value, int count) const {
    Ahead none;
    // Rows of a mixture are padded to sixteen columns, which may be more than vectors need.
    if (value_padded_ == up(value_width_, W))
      return mix<A>(mixture, rows_, Weights<float>{weights, BLOCK, 1}, at.keep, value, count, value_width_, none);
    for (int row = 0; row < rows_; row++)
      mix<A>(mixture + row * value_padded_, 1, Weights<float>{weights + row * BLOCK, BLOCK, 1}, at.keep + row, value,
             count, value_width_, none);
  }

  // Tokens that are stored as they are.
  void attend_late(Range tokens, Place& at, const Partial& partial) const {
    const Q* keys = (const Q*)a_.late_key + at.b * a_.late_key_stride[0] + at.k * a_.late_key_stride[1];
    const Q* values = (const Q*)a_.late_value + at.b * a_.late_value_stride[0] + at.k * a_.late_value_stride[1];
    Ahead none;
    at.ahead = none;
    for (int64_t next = tokens.from; next < tokens.to;) {
      int32_t token[BLOCK];
      const int count = this->gather(at.b, at.k, tokens.to, BLOCK, next, token);  // others may hold no numbers
      if (!count) break;
      const Q *key[BLOCK], *value[BLOCK];
      for (int t = 0; t < count; t++) {
        key[t] = keys + (token[t] - a_.coded) * a_.late_key_stride[2];
        value[t] = values + (token[t] - a_.coded) * a_.late_value_stride[2];
      }
      score<A>(at.query, rows_, key, count, a_.D, at.scores, none);
      this->weigh(at, token, count, true, partial, nullptr);
      for (int64_t g = 0; g < values_.groups; g++) {
        for (int row = 0; row < rows_; row++) *zero_of(partial, g, row) *= at.keep[row];
        const float* of_group[BLOCK];
        for (int t = 0; t < count; t++) {
          float* to = at.late + t * value_width_;
          for (int64_t d = 0; d < value_width_; d++) to[column_of(d)] = number(value[t][g * value_width_ + d]);
          of_group[t] = to;
        }
        mix_rows(at, mixture_of(partial, g), at.weights, of_group, count);
      }
    }
  }
};

}  // namespace

int headwise_affine(const AffineArguments* arguments, int type) {
  return run_kernel<AffineAttention>(*arguments, type);
}
