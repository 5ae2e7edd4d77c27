// The tokens of all units laid end to end and cut into equal parts, one a thread; partial results are combined at the end.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>

#include "mask.h"
#include "threads.h"

namespace {

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
    return at_;
  }

 private:
  char* at_ = nullptr;
  size_t size_ = 0;
};

constexpr double LOG2E = 1.4426950408889634;

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// A thread's partial result for a unit: for each row the values summed with weights 2^(score − high), the highest score
// `high` and the sum of the weights. The sum is kept in W lanes, and scores are exponents of two.
struct Partial {
  float *mixture, *high, *sum;
  static int64_t floats(int64_t rows, int64_t V) { return up(rows * V, 16) + up(rows, 16) + up(rows * W, 16); }
  Partial(float* at, int64_t rows, int64_t V) : mixture(at), high(at + up(rows * V, 16)), sum(high + up(rows, 16)) {}
};

// The share of each partial result in a row's whole: what its mixture and its sum are multiplied by before all are added.
// Without a token that the row sees, all shares and the sum of weights are 0.
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

// Attends to all units of a call. `work` has range(b), the tokens of a sequence; rows(); width(), of a row of a partial
// result; scratch_bytes(); attend(b, k, tokens, partial, scratch); and finish(b, k, row, partials, count).
template <class Work>
void in_parts(const Work& work, int64_t B, int64_t K, int64_t tokens, int threads) {
  // A thread's memory: partial results for a unit that no other thread shares, for its first unit and for its last
  // one, then a list of partial results to combine, then scratch memory.
  const int rows = work.rows();
  const int64_t part = up(Partial::floats(rows, work.width()) * sizeof(float), 64);
  const int64_t list = up(threads * sizeof(Partial), 64), each = up(3 * part + list + work.scratch_bytes(), 4096);
  static thread_local ScratchMemory memory;
  char* scratch = memory.at_least(threads * each);
  const auto partial_of = [&](int thread, int which) {
    return Partial((float*)(scratch + thread * each + which * part), rows, work.width());
  };
  const auto share = [&](int thread) { return Range{tokens * thread / threads, tokens * (thread + 1) / threads}; };
  // f(b, k, range) for each unit, where `range` is its tokens' place among those of all units
  const auto each_unit = [&](auto f) {
    int64_t at = 0;
    for (int64_t b = 0; b < B; b++)
      for (int64_t k = 0; k < K; k++) {
        const int64_t length = work.range(b).length();
        f(b, k, Range{at, at + length});
        at += length;
      }
  };

  in_threads(threads, [&](int thread) {
    each_unit([&](int64_t b, int64_t k, Range unit) {
      const Range mine = unit.cut(share(thread));
      if (unit.length() ? !mine.length() : thread != 0) return;
      const bool is_whole = mine.length() == unit.length();
      const Partial partial = partial_of(thread, is_whole ? 0 : mine.from > unit.from ? 1 : 2);
      const int64_t start = work.range(b).from - unit.from;
      work.attend(b, k, {mine.from + start, mine.to + start}, partial, scratch + thread * each + 3 * part + list);
      if (is_whole)
        for (int row = 0; row < rows; row++) work.finish(b, k, row, &partial, 1);
    });
  });
  if (threads == 1) return;
  // N units cut among T threads leave at most min(T + N - 1, 2T - 2) partial results; a core combines some 4 values in
  // a nanosecond.
  const int64_t partial_results = std::min<int64_t>(threads + B * K - 1, 2 * (threads - 1));
  const int finishing = useful_threads(double(partial_results) * rows * work.width() / 4e3, threads);
  in_threads(finishing, [&](int thread) {
    Partial* partials = (Partial*)(scratch + thread * each + 3 * part);
    int64_t number = 0;
    each_unit([&](int64_t b, int64_t k, Range unit) {
      int count = 0;
      for (int other = 0; other < threads; other++) {
        const Range theirs = unit.cut(share(other));
        if (theirs.length() && theirs.length() < unit.length())
          partials[count++] = partial_of(other, theirs.from > unit.from ? 1 : 2);
      }
      for (int row = 0; row < rows && count; row++)
        if (number++ % finishing == thread) work.finish(b, k, row, partials, count);
    });
  });
}

}  // namespace
