// What the kernels of attention share: which tokens a row sees, the memory that a thread works in, the softmax, and how
// the tokens of a call are shared out among threads.
#pragma once

#include <array>
#include <cmath>
#include <cstdlib>
#include <new>
#include <optional>

#include "products.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define HAS_REDZONES 1  // bytes between pieces of memory, which AddressSanitizer reports if they are touched
#else
#define HAS_REDZONES 0
#endif

namespace {

// --- which tokens a row sees ---------------------------------------------------------------------------------------

struct Range {
  int64_t from, to;
  int64_t length() const { return std::max<int64_t>(0, to - from); }
  Range cut(Range other) const { return {std::max(from, other.from), std::min(to, other.to)}; }
};

// Which tokens the rows of one call see.
class Mask {
  const Arguments& a_;

 public:
  explicit Mask(const Arguments& a) : a_(a) {}

  // Tokens that any row of a sequence may see.
  Range range(int64_t b) const {
    Range all{seen(b, 0).from, seen(b, a_.S - 1).to};
    if (shares_mask()) {
      const uint8_t* mask = a_.mask + b * a_.mask_stride[0];
      while (all.from < all.to && !mask[all.from * a_.mask_stride[3]]) all.from++;
      while (all.from < all.to && !mask[(all.to - 1) * a_.mask_stride[3]]) all.to--;
    }
    return all;
  }

  // Whether any row of a unit sees a token.
  bool is_seen(int64_t b, int64_t k, int64_t t) const {
    const int64_t* stride = a_.mask_stride;
    const uint8_t* mask = a_.mask + b * stride[0] + t * stride[3];
    if (shares_mask()) return *mask;
    for (int64_t s = 0; s < a_.S; s++) {
      const Range sees = seen(b, s);
      if (t < sees.from || t >= sees.to) continue;
      for (int64_t g = 0; g < (stride[1] ? a_.G : 1); g++)
        if (mask[(k * a_.G + g) * stride[1] + s * stride[2]]) return true;
    }
    return false;
  }

  // Sets one row's scores with tokens that it does not see to −∞. Where `is_gathered`, all are tokens that some row
  // sees.
  void hide_in_row(int64_t b, int64_t k, int row, const int32_t* token, int count, float* scores,
                   bool is_gathered) const {
    const Range sees = seen(b, row % a_.S);
    if (token[0] < sees.from || token[count - 1] >= sees.to)
      for (int t = 0; t < count; t++)
        if (token[t] < sees.from || token[t] >= sees.to) scores[t] = NOTHING;
    if (!a_.mask || (is_gathered && shares_mask())) return;
    const uint8_t* mask = mask_of(b, k, row);
    if (is_dense(token, count)) {
      mask += token[0];
      for (int t = 0; t < count; t++) scores[t] = mask[t] ? scores[t] : NOTHING;
    } else {
      for (int t = 0; t < count; t++)
        if (!mask[token[t] * a_.mask_stride[3]]) scores[t] = NOTHING;
    }
  }

#if HAS_LANES
  // Sets a group's scores with tokens that its rows do not see to −∞.
  void hide_in_group(int64_t b, int64_t k, int group, const int32_t* token, int count, float* scores) const {
    const auto leave = [&](int pair, __mmask16 seen) {
      store(scores + pair * W, chosen(seen, all(NOTHING), load(scores + pair * W)));
    };
    const int pairs = (count + 1) / 2;
    if (token[0] < seen(b, a_.S - 1).from || token[count - 1] >= seen(b, 0).to) {
      alignas(64) int32_t from[W], to[W];
      for (int lane = 0; lane < W; lane++) {
        const Range sees = seen(b, (group * SIDE + lane / 2) % a_.S);
        from[lane] = int32_t(sees.from), to[lane] = int32_t(sees.to);
      }
      for (int p = 0; p < pairs; p++) {
        int64_t both;
        memcpy(&both, token + 2 * p, 8);
        const __m512i tokens = _mm512_set1_epi64(both);
        leave(p, _mm512_cmpge_epi32_mask(tokens, _mm512_load_si512(from)) &
                     _mm512_cmplt_epi32_mask(tokens, _mm512_load_si512(to)));
      }
    }
    if (a_.mask && !shares_mask()) {
      alignas(64) uint64_t sees[SIDE];  // a bit for each of the block's tokens
      for (int r = 0; r < SIDE; r++) sees[r] = bits_of_mask(b, k, group * SIDE + r, token, count);
      const __m512i rows = _mm512_load_si512(sees);
      const __m512i first = _mm512_shuffle_epi32(rows, _MM_PERM_CCAA), last = _mm512_shuffle_epi32(rows, _MM_PERM_DDBB);
      for (int p = 0; p < pairs; p++) {
        const __m512i bit = _mm512_set1_epi64(int64_t((1ull | 2ull << 32) << (2 * p % 32)));
        leave(p, _mm512_test_epi32_mask(p < 16 ? first : last, bit));
      }
    }
    if (count % 2) leave(count / 2, 0x5555);
  }
#endif

 private:
  // Tokens that new token s of a sequence may see, by its length, the causal rule and the window.
  Range seen(int64_t b, int64_t s) const {
    const int64_t length = a_.lengths ? a_.lengths[b] : a_.T;
    const int64_t to = a_.causal ? length - a_.behind - a_.S + s + 1 : length;
    return {a_.window ? std::max<int64_t>(0, to - a_.window) : 0, std::max<int64_t>(0, to)};
  }

  // Whether all rows of a sequence share one mask; the tokens it hides are then left out of the blocks.
  bool shares_mask() const { return a_.mask && !a_.mask_stride[1] && !a_.mask_stride[2]; }

  const uint8_t* mask_of(int64_t b, int64_t k, int row) const {
    return a_.mask + b * a_.mask_stride[0] + (k * a_.G + row / a_.S) * a_.mask_stride[1] +
           row % a_.S * a_.mask_stride[2];
  }
  // Whether the mask of the block's tokens lies side by side in memory.
  bool is_dense(const int32_t* token, int count) const {
    return a_.mask_stride[3] == 1 && token[count - 1] - token[0] == count - 1;
  }

#if HAS_LANES
  // The block's tokens that a row's mask shows, one bit each.
  uint64_t bits_of_mask(int64_t b, int64_t k, int row, const int32_t* token, int count) const {
    if (row >= a_.G * a_.S) return 0;
    const uint8_t* mask = mask_of(b, k, row);
    if (is_dense(token, count)) {
      const __m512i bytes = _mm512_maskz_loadu_epi8(~0ull >> (64 - count), mask + token[0]);
      return _mm512_test_epi8_mask(bytes, bytes);
    }
    uint64_t bits = 0;
    for (int t = 0; t < count; t++) bits |= uint64_t(mask[token[t] * a_.mask_stride[3]] != 0) << t;
    return bits;
  }
#endif
};

// --- memory --------------------------------------------------------------------------------------------------------

constexpr int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Memory that is taken piece by piece; without a base it is only counted. So what a thread works in is laid out by one
// function, which first counts and then, over memory of that size, takes.
class Arena {
 public:
  explicit Arena(char* base = nullptr) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    char* at = base_ ? base_ + size_ : nullptr;
    size_ += up(count * int64_t(sizeof(T)), 64);
#if HAS_REDZONES
    if (base_) __asan_poison_memory_region(base_ + size_, 64);
    size_ += 64;
#endif
    return (T*)at;
  }
  int64_t size() const { return size_; }

 private:
  char* base_;
  int64_t size_ = 0;
};

// Memory to work in, which grows when needed and is kept for the next call.
class ScratchMemory {
 public:
  ~ScratchMemory() { free(at_); }
  char* at_least(size_t bytes) {
    if (bytes > size_) {
      free(at_);
      size_ = (bytes + 4095) / 4096 * 4096;
      at_ = (char*)aligned_alloc(64, size_);
      if (!at_) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
#if HAS_REDZONES
    __asan_unpoison_memory_region(at_, size_);  // another call had other pieces
#endif
    return at_;
  }

 private:
  char* at_ = nullptr;
  size_t size_ = 0;
};

// --- softmax -------------------------------------------------------------------------------------------------------

constexpr double LOG2E = 1.4426950408889634;

// A thread's partial result for a unit: for each row the values summed with weights 2^(score − high), the highest score
// `high` and the sum of the weights. The sum is kept in W lanes, and scores are exponents of two.
struct Partial {
  float *mixture, *high, *sum;
  Partial(Arena& arena, int64_t rows, int64_t width)
      : mixture(arena.take<float>(rows * width)), high(arena.take<float>(rows)), sum(arena.take<float>(rows * W)) {}
};

// The share of each partial result in a row's whole: what its mixture and its sum are multiplied by before all are
// added. Without a token that the row sees, all shares and the sum of weights are 0.
struct Shares {
  const Partial* partials;
  int row;
  float high = NOTHING, sum = 0;
  Shares(const Partial* partials, int count, int row) : partials(partials), row(row) {
    for (int i = 0; i < count; i++) high = std::max(high, partials[i].high[row]);
    for (int i = 0; i < count; i++) sum += (*this)(i) * ::sum(load(partials[i].sum + row * W));
  }
  float operator()(int i) const {
    return partials[i].high[row] == NOTHING ? 0.0f : std::exp2(partials[i].high[row] - high);
  }
};

// Scores of a row's tokens, [to] with NOTHING behind the last one, times `scale` become weights, times the tokens'
// gains where there are any, and enter the row's partial result. Returns the factor of what was summed before. Unless
// `FUSES`, what was summed before is rounded before the first weights are added.
template <bool FUSES, class Weight>
INLINE float weigh_scores(const float* scores, int to, float scale, Weight* weights, const Partial& partial, int row,
                          const float* gain) {
  Vector top = load(scores);
  for (int t = W; t < to; t += W) top = larger(top, load(scores + t));
  top *= scale;
  float keep = 1;
  if (exceeds(top, partial.high[row])) {
    const float high = largest(top);
    keep = std::exp2(partial.high[row] - high);
    partial.high[row] = high;
  }
  const float base = partial.high[row] == NOTHING ? 0.0f : partial.high[row];  // nothing seen yet: all weights are 0
  Vector sums_of = load(partial.sum + row * W) * keep;
  if constexpr (!FUSES) asm("" : "+m"(sums_of));
  for (int t = 0; t < to; t += W) {
    const Vector block = power_of_two<!std::is_same_v<Weight, float>>(load(scores + t) * scale - base);
    sums_of += block;
    store(weights + t, gain ? block * load(gain + t) : block);
  }
  store(partial.sum + row * W, sums_of);
  return keep;
}

// --- kernels -------------------------------------------------------------------------------------------------------

// A unit is one key–value head of one sequence; its rows are the new tokens of all query heads that read it. The tokens
// of all units are laid end to end and cut into equal parts, one a thread, so that one long sequence uses every core
// and a batch of unequal lengths costs the sum of its lengths. Where several threads share a unit, their partial
// results are combined at the end.
//
// A Kernel has Place, a Unit and what else a thread works on; place(arena), which lays it out; microseconds(tokens), of
// work; width(), numbers of a row of a partial result; attend(tokens, place, partial), for tokens of one unit; and
// finish(b, k, row, partials, count), which writes one row of the output.
template <class Kernel, class Call, class Query>
class AttentionKernel {
 protected:
  using Q = Query;  // of queries and output
  const Call& a_;
  const Mask mask_;
  const int rows_;  // of a unit

  // What every thread works on.
  struct Unit {
    int64_t b, k;
    float* scores;  // [row, BLOCK]
    float* keep;    // [row], what partial results so far are multiplied by
    Ahead ahead;    // what is prefetched
    void take(Arena& arena, int64_t rows) { scores = arena.take<float>(rows * BLOCK), keep = arena.take<float>(rows); }
  };

 public:
  explicit AttentionKernel(const Call& a) : a_(a), mask_(a), rows_(int(a.G * a.S)) {}

  // One unit, all of it by the calling thread.
  void run_unit(int64_t b, int64_t k) const {
    Arena arena(own_memory().at_least(bytes(1)));
    Memory memory = lay_out(arena, 1);
    attend_unit(b, k, mask_.range(b), memory.partials[0], memory.place);
    finish_unit(b, k, &memory.partials[0], 1);
  }

  // All units, their tokens shared out among the threads.
  void run() const {
    int64_t tokens = 0;
    for (int64_t b = 0; b < a_.B; b++) tokens += mask_.range(b).length() * a_.K;
    const int threads = useful_threads(kernel().microseconds(tokens), a_.threads);
    const int64_t each = bytes(threads);
    char* scratch = own_memory().at_least(threads * each);
    const auto share = [&](int thread) { return Range{tokens * thread / threads, tokens * (thread + 1) / threads}; };
    in_threads(threads, [&](int thread) {
      each_unit([&](int64_t b, int64_t k, Range unit) {
        const Range mine = unit.cut(share(thread));
        if (unit.length() ? !mine.length() : thread != 0) return;
        const bool is_whole = mine.length() == unit.length();
        const int64_t start = mask_.range(b).from - unit.from;
        Arena arena(scratch + thread * each);
        Memory memory = lay_out(arena, threads);
        const Partial& partial = memory.partials[is_whole ? 0 : mine.from > unit.from ? 1 : 2];
        attend_unit(b, k, {mine.from + start, mine.to + start}, partial, memory.place);
        if (is_whole) finish_unit(b, k, &partial, 1);
      });
    });
    if (threads == 1) return;
    // N units cut among T threads leave at most min(T + N - 1, 2T - 2) partial results; a core combines some 4 values
    // in a nanosecond.
    const int64_t partial_results = std::min<int64_t>(threads + a_.B * a_.K - 1, 2 * (threads - 1));
    const int finishing = useful_threads(double(partial_results) * rows_ * kernel().width() / 4e3, threads);
    in_threads(finishing, [&](int thread) {
      Arena own(scratch + thread * each);
      Partial* partials = lay_out(own, threads).shared;
      int64_t number = 0;
      each_unit([&](int64_t b, int64_t k, Range unit) {
        int count = 0;
        for (int other = 0; other < threads; other++) {
          const Range theirs = unit.cut(share(other));
          if (!theirs.length() || theirs.length() == unit.length()) continue;
          Arena arena(scratch + other * each);
          partials[count++] = partials_in(arena)[theirs.from > unit.from ? 1 : 2];
        }
        for (int row = 0; row < rows_ && count; row++)
          if (number++ % finishing == thread) kernel().finish(b, k, row, partials, count);
      });
    });
  }

 protected:
  const Kernel& kernel() const { return static_cast<const Kernel&>(*this); }

  const Q* query_row(int64_t b, int64_t k, int row) const {
    return (const Q*)a_.query + b * a_.query_stride[0] + (k * a_.G + row / a_.S) * a_.query_stride[1] +
           row % a_.S * a_.query_stride[2];
  }
  Q* out_row(int64_t b, int64_t k, int row) const {
    return (Q*)a_.out + b * a_.out_stride[0] + (k * a_.G + row / a_.S) * a_.out_stride[1] +
           row % a_.S * a_.out_stride[2];
  }
  // What queries are multiplied by, so that scores are exponents of two.
  float factor() const { return float(a_.scale * LOG2E); }

  // Gathers up to `most` tokens that some row sees, from `next` on, and moves `next` behind them; returns their number.
  int gather(int64_t b, int64_t k, int64_t to, int most, int64_t& next, int32_t* token) const {
    int count = 0;
    if (!a_.mask) {
      count = int(std::min<int64_t>(most, to - next));
      for (int t = 0; t < count; t++) token[t] = int32_t(next + t);
      next += count;
      return count;
    }
    for (; count < most && next < to; next++)
      if (mask_.is_seen(b, k, next)) token[count++] = int32_t(next);
    return count;
  }

  // Scores of all rows with a block of tokens become weights; see weigh_scores.
  template <bool FUSES = true, class Place>
  void weigh(Place& at, const int32_t* token, int count, bool is_gathered, const Partial& partial,
             const float* gain) const {
    for (int row = 0; row < rows_; row++) {
      at.ahead.step();
      float* scores = at.scores + row * BLOCK;
      mask_.hide_in_row(at.b, at.k, row, token, count, scores, is_gathered);
      std::fill(scores + count, scores + BLOCK, NOTHING);
      at.keep[row] = weigh_scores<FUSES>(scores, BLOCK, 1.0f, at.weights + row * BLOCK, partial, row, gain);
    }
  }
  // The same of neighbouring tokens.
  template <bool FUSES = true, class Place>
  void weigh(Place& at, int64_t from, int count, const Partial& partial, const float* gain) const {
    int32_t token[BLOCK];
    for (int t = 0; t < count; t++) token[t] = int32_t(from + t);
    weigh<FUSES>(at, token, count, false, partial, gain);
  }

  // A row's mixture over its sum of weights, of the partial results of several threads, in the place of the first
  // one's; zeros without a token that the row sees.
  float* mean(int row, const Shares& share, int count) const {
    const int64_t width = kernel().width();
    float* mixture = share.partials[0].mixture + row * width;
    const float first = share.sum == 0 ? 0.0f : share(0) / share.sum;
    for (int64_t d = 0; d < a_.V; d++) mixture[d] *= first;
    for (int i = 1; i < count; i++) {
      const float weight = share.sum == 0 ? 0.0f : share(i) / share.sum;
      for (int64_t d = 0; d < a_.V; d++) mixture[d] += weight * share.partials[i].mixture[row * width + d];
    }
    return mixture;
  }

 private:
  // A thread's memory: partial results for a unit that no other thread shares, for its first unit and for its last one,
  // then a list of partial results to combine, then what it works on.
  struct Memory {
    std::array<Partial, 3> partials;
    Partial* shared;
    typename Kernel::Place place;
  };

  std::array<Partial, 3> partials_in(Arena& arena) const {
    const auto one = [&] { return Partial(arena, rows_, kernel().width()); };
    return {one(), one(), one()};
  }
  Memory lay_out(Arena& arena, int threads) const {
    return {partials_in(arena), arena.take<Partial>(threads), kernel().place(arena)};
  }
  int64_t bytes(int threads) const {
    Arena arena;
    lay_out(arena, threads);
    return up(arena.size(), 4096);
  }
  static ScratchMemory& own_memory() {
    static thread_local ScratchMemory memory;
    return memory;
  }

  // f(b, k, range) for each unit, where `range` is its tokens' place among those of all units.
  template <class F>
  void each_unit(F f) const {
    int64_t at = 0;
    for (int64_t b = 0; b < a_.B; b++)
      for (int64_t k = 0; k < a_.K; k++) {
        const int64_t length = mask_.range(b).length();
        f(b, k, Range{at, at + length});
        at += length;
      }
  }

  template <class Place>
  void attend_unit(int64_t b, int64_t k, Range tokens, const Partial& partial, Place& place) const {
    std::fill_n(partial.high, rows_, NOTHING);
    std::fill_n(partial.sum, rows_ * W, 0.0f);
    std::fill_n(partial.mixture, rows_ * kernel().width(), 0.0f);
    if (!tokens.length()) return;
    place.b = b, place.k = k;
    kernel().attend(tokens, place, partial);
  }
  void finish_unit(int64_t b, int64_t k, const Partial* partials, int count) const {
    for (int row = 0; row < rows_; row++) kernel().finish(b, k, row, partials, count);
  }
};

// Many new tokens are taken some at a time: as many as leave their partial results in the second cache.
template <class Call>
int64_t tokens_at_a_time(const Call& a) {
  return std::max<int64_t>(1, 128 / a.G);
}

// The part of a call with up to tokens_at_a_time new tokens from `from` on.
template <class Q, class Call>
Call part_of(const Call& a, int64_t from) {
  Call part = a;
  part.S = std::min(tokens_at_a_time(a), a.S - from);
  part.query = (const Q*)a.query + from * a.query_stride[2];
  part.out = (Q*)a.out + from * a.out_stride[2];
  if (a.mask) part.mask += from * a.mask_stride[2];
  part.behind = a.S - from - part.S;
  return part;
}

// A kernel's entry point; see with_type.
template <template <class> class Kernel, class Call>
int run_kernel(const Call& a, int type) {
  return with_type(type, [&](auto q) {
    using Q = decltype(q);
    for (int64_t from = 0; from < a.S; from += tokens_at_a_time(a)) {
      const Call part = part_of<Q>(a, from);
      Kernel<Q>(part).run();
    }
  });
}

}  // namespace
