// How far apart an engine's codes of keys lie after each of several moves of one or two channels.
#include "../processor.h"

namespace {

INLINE Vector smaller(Vector a, Vector b) { return a < b ? a : b; }

// The steps of W tokens' block from `from` on: the range of its numbers, or the largest size.
template <bool RANGE>
INLINE Vector steps_of(const MovedArguments& a, const float* keys, const float* moved, int64_t from, int count) {
  Vector most = all(RANGE ? NOTHING : 0.0f), least = all(-NOTHING);
  const Vector first = load(moved, count), second = a.channels > 1 ? load(moved + a.T, count) : Vector{};
  const float *first_row = a.rows, *second_row = a.channels > 1 ? a.rows + a.D : a.rows;
  for (int64_t d = from; d < from + a.block; d++) {
    const Vector x = load(keys + d * a.T, count) + first * first_row[d] + second * second_row[d];
    if constexpr (RANGE)
      most = larger(most, x), least = smaller(least, x);
    else
      most = larger(most, larger(x, -x));
  }
  return RANGE ? most - least : most;
}

template <bool RANGE>
void steps_of_moves(const MovedArguments& a, int64_t unit) {
  const float* keys = a.keys + unit % a.K * a.D * a.T;
  const float* moved = a.moved + unit * a.channels * a.T;
  for (int64_t b = 0; b < a.D / a.block; b++) {
    Vector sum{};
    for (int64_t t = 0; t < a.T; t += W) {
      const int count = int(std::min<int64_t>(W, a.T - t));
      const Vector step = steps_of<RANGE>(a, keys + t, moved + t, b * a.block, count);
      sum += step * step;
    }
    float total = 0;
    for (int i = 0; i < W; i++) total += sum[i];
    a.out[unit * (a.D / a.block) + b] = total / float(a.T);
  }
}

}  // namespace

int headwise_moved(const MovedArguments* arguments, int) {
  const MovedArguments& a = *arguments;
  const int64_t units = a.moves * a.K;
  const int threads = useful_threads(double(units) * a.D * a.T * 0.0001, a.threads);
  in_threads(threads, [&](int thread) {
    for (int64_t i = units * thread / threads; i < units * (thread + 1) / threads; i++)
      a.range ? steps_of_moves<true>(a, i) : steps_of_moves<false>(a, i);
  });
  return 0;
}
