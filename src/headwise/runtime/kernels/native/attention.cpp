// softmax(scale · Q Kᵀ) V on the CPU: one pass over keys and values, a block of tokens at a time.
//
// A unit is one key–value head of one sequence; its rows are the new tokens of all query heads that read it. For a few
// new tokens, the tokens of all units are laid end to end and cut into equal parts, one a thread, so that one long
// sequence uses every core and a batch of unequal lengths costs the sum of its lengths. Where several threads share a
// unit, their partial results are combined at the end. A prompt has enough units for each thread to take whole ones.
#include <atomic>
#include <cmath>
#include <new>

#include "parts.h"

namespace {

// One call. A: arithmetic; T: type of stored keys and values; Q: type of queries and output.
template <class A, class T, class Q>
class Attention {
  static constexpr bool WHOLE = std::is_same_v<typename A::Query, float>;
  // Whether stored keys can be broadcast without conversion.
  static constexpr bool HAS_SIDES = HAS_LANES && std::is_same_v<typename A::Query, T>;
  const Arguments& a_;
  const Mask mask_;
  const int rows_;
  const int groups_, beside_;  // groups of eight rows that share vectors, and how many rows (the first) they hold
  const int64_t D_, V_;        // padded
  const int most_;  // tokens in a block

 public:
  explicit Attention(const Arguments& a)
      : a_(a),
        mask_(a),
        rows_(int(a.G * a.S)),
        groups_(groups()),
        beside_(std::min(rows_, groups_ * 8)),
        D_(up(a.D, A::DIMS)),
        V_(up(a.V, A::TOKENS * W)),
        most_(tokens_in_a_block()) {}

  // One unit, all of it by the calling thread.
  void run_unit(int64_t b, int64_t k) const {
    static thread_local ScratchMemory memory;
    char* scratch = memory.at_least(up(Partial::floats(rows_, V_) * sizeof(float), 64) + scratch_bytes());
    const Partial partial((float*)scratch, rows_, V_);
    attend(b, k, mask_.range(b), partial, scratch + up(Partial::floats(rows_, V_) * sizeof(float), 64));
    for (int row = 0; row < rows_; row++) finish(b, k, row, &partial, 1);
  }

  // All units, their tokens shared out among the threads.
  void run() const {
    int64_t tokens = 0;
    for (int64_t b = 0; b < a_.B; b++) tokens += mask_.range(b).length() * a_.K;
    in_parts(*this, a_.B, a_.K, tokens, threads_for(tokens));
  }

  Range range(int64_t b) const { return mask_.range(b); }
  int rows() const { return rows_; }
  int64_t width() const { return V_; }

 private:
  template <class Work>
  friend void in_parts(const Work&, int64_t, int64_t, int64_t, int);

  int threads_for(int64_t tokens) const {
    const double bytes = double(tokens) * (a_.D + a_.V) * sizeof(T), flops = 2.0 * tokens * rows_ * (a_.D + a_.V);
    return useful_threads(bytes / 40e3 + flops / 100e3, a_.threads);
  }

  // With few rows a block takes little time: it is small enough to lie in the first cache while the next one arrives.
  int tokens_in_a_block() const {
    if (groups_ || rows_ >= 8) return BLOCK;
    const int64_t fitting = 8192 / (std::max(a_.D, a_.V) * int64_t(sizeof(T)));
    return int(std::clamp<int64_t>(fitting, 16, BLOCK)) / 16 * 16;
  }

  // Groups of eight rows: up to four rows alone, or three left over, would leave most lanes empty and go one by one.
  int groups() const {
    if (!HAS_SIDES || a_.D % (8 / sizeof(typename A::Query))) return 0;
    return rows_ < 8 ? rows_ > 4 : rows_ / 8 + (rows_ % 8 > 3);
  }
  int64_t padded_rows() const { return groups_ * 8 + rows_ - beside_; }
  int64_t scratch_bytes() const {
    const int64_t rows = padded_rows();
    return up(rows * D_ * sizeof(typename A::Query), 64) + up(rows * BLOCK * sizeof(float), 64) +
           up(rows * BLOCK * sizeof(typename A::Weight), 64) + up(rows * sizeof(float), 64) + 2 * groups_ * 16 * sizeof(float);
  }

  // A unit's rows attend to some of its tokens; `scratch` holds scratch_bytes().
  void attend(int64_t b, int64_t k, Range tokens, const Partial& partial, char* scratch) const {
    const auto take = [&](int64_t bytes) { return (scratch += up(bytes, 64)) - up(bytes, 64); };
    const int64_t rows = padded_rows();
    auto* query = (typename A::Query*)take(rows * D_ * sizeof(typename A::Query));
    float* scores = (float*)take(rows * BLOCK * sizeof(float));
    // [token, row] where rows share vectors, else [row, token].
    auto* weights = (typename A::Weight*)take(rows * BLOCK * sizeof(typename A::Weight));
    const Weights<typename A::Weight> all_weights{weights, groups_ ? A::TOKENS : BLOCK, groups_ ? rows : 1};
    float* keep = (float*)take(rows * sizeof(float));
    float* highs = (float*)take(groups_ * 16 * sizeof(float));
    float* sums = (float*)take(groups_ * 16 * sizeof(float));
    std::fill_n(partial.high, rows_, NOTHING);
    std::fill_n(partial.sum, rows_ * W, 0.0f);
    std::fill_n(partial.mixture, rows_ * V_, 0.0f);
    std::fill_n(highs, groups_ * 16, NOTHING);
    std::fill_n(sums, groups_ * 16, 0.0f);
    read_query(b, k, query);

    const T* keys = (const T*)a_.key + b * a_.key_stride[0] + k * a_.key_stride[1];
    const T* values = (const T*)a_.value + b * a_.value_stride[0] + k * a_.value_stride[1];
    const bool apart = (const void*)values != (const void*)keys;  // else values are the keys' first columns
    int32_t token[BLOCK + 1];
    const T *key[BLOCK], *value[BLOCK + 1];
    for (int64_t next = tokens.from;;) {
      const int count = gather(b, k, tokens.to, next, token);
      if (!count) break;
      find(keys, a_.key_stride[2], token, count, key);
      find(values, a_.value_stride[2], token, count, value);
      value[count] = value[count - 1];  // the other half of a pair; its weight is 0
      token[count] = token[count - 1];

      // Prefetch: this block's values while its scores and weights are computed, the next block's keys while its values
      // are summed. Where a mask leaves tokens out, the place of the next keys is a guess.
      const int others = rows_ - beside_;
      Ahead ahead(value[0], a_.value_stride[2] * sizeof(T), count, apart ? a_.V * sizeof(T) : 0,
                  others + steps_of_scores(others, count) + groups_ + steps_beside(count));
      Ahead keys_ahead(keys + next * a_.key_stride[2], a_.key_stride[2] * sizeof(T),
                       int(std::min<int64_t>(most_, tokens.to - next)), a_.D * sizeof(T),
                       steps_of_mixture<A>(rows_, count, a_.V));
#if HAS_LANES
      if constexpr (HAS_SIDES) score_side_by_side<A>(query, groups_, key, count, a_.D, scores, ahead);
#endif
      score<A>(query + groups_ * 8 * D_, others, key, count, a_.D, scores + groups_ * 8 * BLOCK, ahead);
#if HAS_LANES
      if constexpr (HAS_SIDES)
        for (int group = 0; group < groups_; group++) {
          ahead.step();
          float* of_group = scores + group * 8 * BLOCK;
          mask_.hide_in_group(b, k, group, token, count, of_group);
          weigh_group(of_group, count, score_scale(), highs + group * 16, sums + group * 16, weights + group * 8 * A::TOKENS,
                      rows, keep + group * 8);
        }
#endif
      for (int row = beside_; row < rows_; row++) {
        ahead.step();
        float* of_row = scores + (groups_ * 8 + row - beside_) * BLOCK;
        if (!groups_) {
          weigh(b, k, row, token, count, of_row, weights + row * BLOCK, partial, keep);
          continue;
        }
        typename A::Weight row_weights[BLOCK];
        weigh(b, k, row, token, count, of_row, row_weights, partial, keep);
        for (int t = 0; t < most_; t += A::TOKENS)
          std::copy_n(row_weights + t, A::TOKENS, weights + t * rows + row * A::TOKENS);
      }
      mix<A>(partial.mixture, rows_, all_weights, keep, value, count, a_.V, keys_ahead);
    }
    for (int row = 0; row < beside_; row++) {
      partial.high[row] = highs[2 * row];
      partial.sum[row * W] = sums[2 * row] + sums[2 * row + 1];
    }
  }

  int64_t steps_beside(int count) const {
#if HAS_LANES
    if constexpr (HAS_SIDES) return steps_of_groups<A>(groups_, count, a_.D);
#endif
    return 0;
  }
  // What scores are multiplied by: bfloat16 products are scaled afterwards, in float the query is scaled beforehand.
  float score_scale() const { return WHOLE ? 1.0f : float(a_.scale * LOG2E); }

  // Gathers a block of tokens that some row sees, from `next` on, and moves `next` behind them; returns their number.
  int gather(int64_t b, int64_t k, int64_t to, int64_t& next, int32_t* token) const {
    int count = 0;
    if (!a_.mask) {
      count = int(std::min<int64_t>(most_, to - next));
      for (int t = 0; t < count; t++) token[t] = int32_t(next + t);
      next += count;
      return count;
    }
    for (; count < most_ && next < to; next++)
      if (mask_.is_seen(b, k, next)) token[count++] = int32_t(next);
    return count;
  }

  // Pointers to the keys, or values, of the block's tokens.
  static void find(const T* first, int64_t stride, const int32_t* token, int count, const T** pointer) {
    if (token[count - 1] - token[0] == count - 1) {
      first += token[0] * stride;
      for (int t = 0; t < count; t++, first += stride) pointer[t] = first;
    } else {
      for (int t = 0; t < count; t++) pointer[t] = first + token[t] * stride;
    }
  }

  const Q* query_row(int64_t b, int64_t k, int row) const {
    return (const Q*)a_.query + b * a_.query_stride[0] + (k * a_.G + row / a_.S) * a_.query_stride[1] +
           row % a_.S * a_.query_stride[2];
  }
  // Copies the queries: grouped rows as [rows / 8, D / n, 8, n], where n numbers take 8 bytes; then the others as
  // [row, D_].
  void read_query(int64_t b, int64_t k, typename A::Query* query) const {
    constexpr int n = 8 / sizeof(typename A::Query);
    std::fill_n(query, padded_rows() * D_, typename A::Query{});
    for (int row = 0; row < rows_; row++) {
      const Q* from = query_row(b, k, row);
      typename A::Query* to = query + (groups_ * 8 + row - beside_) * D_;
      int64_t step = n;
      if (row < beside_) to = query + row / 8 * 8 * a_.D + row % 8 * n, step = 8 * n;
      for (int64_t d = 0; d < a_.D; d++) {
        if constexpr (WHOLE)
          to[d / n * step + d % n] = number(from[d]) * float(a_.scale * LOG2E);
        else
          to[d / n * step + d % n] = from[d];
      }
    }
  }

  // One row's scores become weights; keep[row] is what its partial result so far is multiplied by.
  void weigh(int64_t b, int64_t k, int row, const int32_t* token, int count, float* scores,
             typename A::Weight* weights, const Partial& partial, float* keep) const {
    if (a_.key_scale) {
      const float* scale = a_.key_scale + b * a_.key_scale_stride[0] + k * a_.key_scale_stride[1];
      for (int t = 0; t < count; t++) scores[t] *= scale[token[t] * a_.key_scale_stride[2]];
    }
    mask_.hide_in_row(b, k, row, token, count, scores);
    std::fill(scores + count, scores + most_, NOTHING);

    const float scale = score_scale();
    Vector top = load(scores);
    for (int t = W; t < most_; t += W) top = larger(top, load(scores + t));
    top *= scale;
    keep[row] = 1;
    if (exceeds(top, partial.high[row])) {
      const float high = largest(top);
      keep[row] = std::exp2(partial.high[row] - high);
      partial.high[row] = high;
    }
    const float base = partial.high[row] == NOTHING ? 0.0f : partial.high[row];  // nothing seen yet: all weights are 0
    Vector sums_of = load(partial.sum + row * W) * keep[row];
    for (int t = 0; t < most_; t += W) {
      const Vector block = power_of_two<!WHOLE>(load(scores + t) * scale - base);
      sums_of += block;
#if HAS_PAIRS
      if constexpr (!WHOLE) {
        _mm256_storeu_si256((__m256i*)(weights + t), (__m256i)_mm512_cvtneps_pbh((__m512)block));
        continue;
      }
#endif
      if constexpr (WHOLE) store(weights + t, block);
    }
    store(partial.sum + row * W, sums_of);
    if constexpr (WHOLE)
      if (a_.value_scale) {
        const float* scales = a_.value_scale + b * a_.value_scale_stride[0] + k * a_.value_scale_stride[1];
        for (int t = 0; t < count; t++) weights[t] *= scales[token[t] * a_.value_scale_stride[2]];
      }
  }

  // Writes one row of the output from the partial results of one or several threads; a row that saw nothing gives zeros.
  void finish(int64_t b, int64_t k, int row, const Partial* partials, int count) const {
    const Shares share(partials, count, row);
    const float sum = share.sum;
    Q* out = (Q*)a_.out + b * a_.out_stride[0] + (k * a_.G + row / a_.S) * a_.out_stride[1] +
             row % a_.S * a_.out_stride[2];
    float* mixture = partials[0].mixture + row * V_;
    const float first = sum == 0 ? 0.0f : share(0) / sum;
    for (int64_t d = 0; d < a_.V; d++) mixture[d] *= first;
    for (int i = 1; i < count; i++) {
      const float weight = sum == 0 ? 0.0f : share(i) / sum;
      for (int64_t d = 0; d < a_.V; d++) mixture[d] += weight * partials[i].mixture[row * V_ + d];
    }
    for (int64_t d = 0; d < a_.V; d++) put(out + d, mixture[d]);
  }
};

// Calls f with an Attention of the arithmetic that suits the call.
template <class T, class Q, class F>
void with_attention(const Arguments& a, F f) {
#if HAS_PAIRS
  if constexpr (std::is_same_v<T, bfloat16> && std::is_same_v<Q, bfloat16>)
    // Multiplied by a negative scale, the largest score would become the smallest.
    if (a.scale > 0) return f(Attention<Paired, T, Q>(a));
#endif
  f(Attention<Single, T, Q>(a));
}

// Many new tokens are taken some at a time: as many as leave their partial results in the second cache.
constexpr int64_t MOST_ROWS = 128;

template <class T, class Q>
void compute(const Arguments& a) {
  const int64_t most = std::max<int64_t>(1, MOST_ROWS / a.G), parts = (a.S + most - 1) / most, heads = a.B * a.K;
  const auto part_of = [&](int64_t number) {
    const int64_t from = number * most;
    Arguments part = a;
    part.S = std::min(most, a.S - from);
    part.query = (const Q*)a.query + from * a.query_stride[2];
    part.out = (Q*)a.out + from * a.out_stride[2];
    if (a.mask) part.mask = a.mask + from * a.mask_stride[2];
    if (a.causal) part.T = a.T - (a.S - from - part.S);  // tokens after this part's last one are hidden from it
    return part;
  };
  if (parts == 1 || parts * heads < 4 * a.threads) {
    for (int64_t number = 0; number < parts; number++)
      with_attention<T, Q>(part_of(number), [](const auto& attention) { attention.run(); });
    return;
  }
  // There are enough units for every thread to take one after another, the longest first, without waiting.
  std::atomic<int64_t> next(0);
  std::atomic<bool> failed(false);
  in_threads(int(a.threads), [&](int) {
    for (int64_t unit; (unit = next++) < parts * heads && !failed;) try {
        const Arguments part = part_of(parts - 1 - unit / heads);
        const int64_t head = unit % heads;
        with_attention<T, Q>(part, [&](const auto& attention) { attention.run_unit(head / a.K, head % a.K); });
      } catch (const std::bad_alloc&) {
        failed = true;
      }
  });
  if (failed) throw std::bad_alloc();
}

template <class Q>
void compute(const Arguments& a, bool is_int8) {
  is_int8 ? compute<int8_t, Q>(a) : compute<Q, Q>(a);
}

}  // namespace

// The entry point. Returns 0, or 1 without memory, or 2 for a type that this compiler lacks. `type` is that of queries and
// output: 0 float32, 1 bfloat16, 2 float16; keys and values are of the same type, or int8.
extern "C" int headwise_attention(const Arguments* arguments, int type, int is_int8) {
  return with_type(type, [&](auto q) { compute<decltype(q)>(*arguments, is_int8); });
}

// Whether the processor multiplies pairs of bfloat16; otherwise they are widened first, which saves bytes and no time.
extern "C" int headwise_has_pairs() { return HAS_PAIRS; }

// Whether this compiler knows float16.
extern "C" int headwise_has_half() {
#if defined(__FLT16_MAX__)
  return 1;
#else
  return 0;
#endif
}
