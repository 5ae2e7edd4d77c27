// softmax(scale · Q Kᵀ) V on the CPU: one pass over keys and values, a block of tokens at a time.
//
// For a few new tokens, all units' tokens are shared out among the threads (see AttentionKernel). A prompt has enough
// units for each thread to take whole ones.
#include <atomic>

#include "attend.h"

namespace {

// One call. A: arithmetic; T: type of stored keys and values; Query: type of queries and output.
template <class A, class T, class Query>
class Attention : public AttentionKernel<Attention<A, T, Query>, FusedArguments, Query> {
  using Base = AttentionKernel<Attention, FusedArguments, Query>;
  using Base::a_, Base::mask_, Base::rows_;
  using Q = Query;
  static constexpr bool WHOLE = std::is_same_v<typename A::Query, float>;
  // Whether stored keys can be broadcast without conversion.
  static constexpr bool HAS_SIDES = HAS_LANES && std::is_same_v<typename A::Query, T>;
  const int groups_, beside_;  // groups of eight rows that share vectors, and how many rows (the first) they hold
  const int64_t D_, V_;        // padded
  const int most_;             // tokens in a block

 public:
  explicit Attention(const FusedArguments& a)
      : Base(a),
        groups_(groups()),
        beside_(std::min(rows_, groups_ * 8)),
        D_(up(a.D, A::DIMS)),
        V_(up(a.V, A::TOKENS * W)),
        most_(tokens_in_a_block()) {}

  struct Place : Base::Unit {
    typename A::Query* query;     // see read_query
    typename A::Weight* weights;  // [token, row] where rows share vectors, else [row, token]
    float *highs, *sums;          // of groups, see weigh_group
  };
  Place place(Arena& arena) const {
    const int64_t rows = padded_rows();
    Place at;
    at.query = arena.take<typename A::Query>(rows * D_);
    at.take(arena, rows);
    at.weights = arena.take<typename A::Weight>(rows * BLOCK);
    at.highs = arena.take<float>(groups_ * 16), at.sums = arena.take<float>(groups_ * 16);
    return at;
  }

  int64_t width() const { return V_; }
  double microseconds(int64_t tokens) const {
    const double bytes = double(tokens) * (a_.D + a_.V) * sizeof(T), flops = 2.0 * tokens * rows_ * (a_.D + a_.V);
    return bytes / 40e3 + flops / 100e3;
  }

  // A unit's rows attend to some of its tokens.
  void attend(Range tokens, Place& at, const Partial& partial) const {
    const int64_t rows = padded_rows();
    const Weights<typename A::Weight> all_weights{at.weights, groups_ ? A::TOKENS : BLOCK, groups_ ? rows : 1};
    std::fill_n(at.highs, groups_ * 16, NOTHING);
    std::fill_n(at.sums, groups_ * 16, 0.0f);
    read_query(at);

    const T* keys = (const T*)a_.key + at.b * a_.key_stride[0] + at.k * a_.key_stride[1];
    const T* values = (const T*)a_.value + at.b * a_.value_stride[0] + at.k * a_.value_stride[1];
    const bool apart = (const void*)values != (const void*)keys;  // else values are the keys' first columns
    int32_t token[BLOCK + 1];
    const T *key[BLOCK], *value[BLOCK + 1];
    for (int64_t next = tokens.from;;) {
      const int count = this->gather(at.b, at.k, tokens.to, most_, next, token);
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
      if constexpr (HAS_SIDES) score_side_by_side<A>(at.query, groups_, key, count, a_.D, at.scores, ahead);
#endif
      score<A>(at.query + groups_ * 8 * D_, others, key, count, a_.D, at.scores + groups_ * 8 * BLOCK, ahead);
#if HAS_LANES
      if constexpr (HAS_SIDES)
        for (int group = 0; group < groups_; group++) {
          ahead.step();
          float* of_group = at.scores + group * 8 * BLOCK;
          mask_.hide_in_group(at.b, at.k, group, token, count, of_group);
          weigh_group(of_group, count, score_scale(), at.highs + group * 16, at.sums + group * 16,
                      at.weights + group * 8 * A::TOKENS, rows, at.keep + group * 8);
        }
#endif
      for (int row = beside_; row < rows_; row++) {
        ahead.step();
        float* of_row = at.scores + (groups_ * 8 + row - beside_) * BLOCK;
        if (!groups_) {
          at.keep[row] = weigh_row(at, row, token, count, of_row, at.weights + row * BLOCK, partial);
          continue;
        }
        typename A::Weight row_weights[BLOCK];
        at.keep[row] = weigh_row(at, row, token, count, of_row, row_weights, partial);
        for (int t = 0; t < most_; t += A::TOKENS)
          std::copy_n(row_weights + t, A::TOKENS, at.weights + t * rows + row * A::TOKENS);
      }
      mix<A>(partial.mixture, rows_, all_weights, at.keep, value, count, a_.V, keys_ahead);
    }
    for (int row = 0; row < beside_; row++) {
      partial.high[row] = at.highs[2 * row];
      partial.sum[row * W] = at.sums[2 * row] + at.sums[2 * row + 1];
    }
  }

  void finish(int64_t b, int64_t k, int row, const Partial* partials, int count) const {
    const float* mixture = this->mean(row, Shares(partials, count, row), count);
    Q* out = this->out_row(b, k, row);
    for (int64_t d = 0; d < a_.V; d++) put(out + d, mixture[d]);
  }

 private:
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

  int64_t steps_beside(int count) const {
#if HAS_LANES
    if constexpr (HAS_SIDES) return steps_of_groups<A>(groups_, count, a_.D);
#endif
    return 0;
  }
  // What scores are multiplied by: bfloat16 products are scaled afterwards, in float the query is scaled beforehand.
  float score_scale() const { return WHOLE ? 1.0f : this->factor(); }

  // Pointers to the keys, or values, of the block's tokens.
  static void find(const T* first, int64_t stride, const int32_t* token, int count, const T** pointer) {
    if (token[count - 1] - token[0] == count - 1) {
      first += token[0] * stride;
      for (int t = 0; t < count; t++, first += stride) pointer[t] = first;
    } else {
      for (int t = 0; t < count; t++) pointer[t] = first + token[t] * stride;
    }
  }

  // Copies the queries: grouped rows as [rows / 8, D / n, 8, n], where n numbers take 8 bytes; then the others as
  // [row, D_].
  void read_query(Place& at) const {
    constexpr int n = 8 / sizeof(typename A::Query);
    std::fill_n(at.query, padded_rows() * D_, typename A::Query{});
    for (int row = 0; row < rows_; row++) {
      const Q* from = this->query_row(at.b, at.k, row);
      typename A::Query* to = at.query + (groups_ * 8 + row - beside_) * D_;
      int64_t step = n;
      if (row < beside_) to = at.query + row / 8 * 8 * a_.D + row % 8 * n, step = 8 * n;
      for (int64_t d = 0; d < a_.D; d++) {
        if constexpr (WHOLE)
          to[d / n * step + d % n] = number(from[d]) * this->factor();
        else
          to[d / n * step + d % n] = from[d];
      }
    }
  }

  // One row's scores become weights; returns what its partial result so far is multiplied by.
  float weigh_row(const Place& at, int row, const int32_t* token, int count, float* scores, typename A::Weight* weights,
                  const Partial& partial) const {
    if (a_.key_scale) {
      const float* scale = a_.key_scale + at.b * a_.key_scale_stride[0] + at.k * a_.key_scale_stride[1];
      for (int t = 0; t < count; t++) scores[t] *= scale[token[t] * a_.key_scale_stride[2]];
    }
    mask_.hide_in_row(at.b, at.k, row, token, count, scores, true);
    std::fill(scores + count, scores + most_, NOTHING);
    const float keep = weigh_scores<false>(scores, most_, score_scale(), weights, partial, row, nullptr);
    if constexpr (WHOLE)
      if (a_.value_scale) {
        const float* scales = a_.value_scale + at.b * a_.value_scale_stride[0] + at.k * a_.value_scale_stride[1];
        for (int t = 0; t < count; t++) weights[t] *= scales[token[t] * a_.value_scale_stride[2]];
      }
    return keep;
  }
};

// Calls f with an Attention of the arithmetic that suits the call.
template <class T, class Q, class F>
void with_attention(const FusedArguments& a, F f) {
#if HAS_PAIRS
  if constexpr (std::is_same_v<T, bfloat16> && std::is_same_v<Q, bfloat16>)
    // Multiplied by a negative scale, the largest score would become the smallest.
    if (a.scale > 0) return f(Attention<Paired, T, Q>(a));
#endif
  f(Attention<Single, T, Q>(a));
}

template <class T, class Q>
void compute(const FusedArguments& a) {
  const int64_t most = tokens_at_a_time(a), parts = (a.S + most - 1) / most, heads = a.B * a.K;
  if (parts == 1 || parts * heads < 4 * a.threads) {
    for (int64_t number = 0; number < parts; number++)
      with_attention<T, Q>(part_of<Q>(a, number * most), [](const auto& attention) { attention.run(); });
    return;
  }
  // There are enough units for every thread to take one after another, the longest first, without waiting.
  std::atomic<int64_t> next(0);
  std::atomic<bool> failed(false);
  in_threads(int(a.threads), [&](int) {
    for (int64_t unit; (unit = next++) < parts * heads && !failed;) try {
        const FusedArguments part = part_of<Q>(a, (parts - 1 - unit / heads) * most);
        const int64_t head = unit % heads;
        with_attention<T, Q>(part, [&](const auto& attention) { attention.run_unit(head / a.K, head % a.K); });
      } catch (const std::bad_alloc&) {
        failed = true;
      }
  });
  if (failed) throw std::bad_alloc();
}

}  // namespace

// The entry point, as all are: see with_type for `type`, that of queries and output, and for what is returned.
int headwise_attention(const FusedArguments* arguments, int type) {
  return with_type(type, [&](auto q) {
    using Q = decltype(q);
    arguments->key_scale ? compute<int8_t, Q>(*arguments) : compute<Q, Q>(*arguments);
  });
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
