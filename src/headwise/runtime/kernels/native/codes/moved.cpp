// How far apart an engine's codes of keys lie after each of several moves of one or two channels.
#include <numeric>
#include <vector>

#include "../processor.h"

namespace {

// Channels of a block to which every move adds the same. Of their numbers only the largest and the smallest count,
// whatever the move, and of a Hadamard matrix a block has four such classes.
struct Class {
  int64_t from, to;  // in `Blocks::channels`
};

struct Blocks {
  std::vector<int64_t> channels;  // all of them, those of a class side by side
  std::vector<Class> classes;
  std::vector<int64_t> ends;  // of each block's classes
  std::vector<float> adds;    // [classes, moves, 2], the multiples of the first and of the last moved channel

  explicit Blocks(const MovedArguments& a) : channels(a.D) {
    const float *first = a.rows, *last = a.rows + (a.channels - 1) * a.D;
    const auto row = [=](int64_t d) { return std::make_pair(first[d], last[d]); };
    std::iota(channels.begin(), channels.end(), 0);
    for (int64_t from = 0; from < a.D; from += a.block) {
      const auto begin = channels.begin() + from;
      std::sort(begin, begin + a.block, [&](int64_t c, int64_t d) { return row(c) < row(d); });
      for (int64_t i = from; i < from + a.block; i++)
        if (i > from && row(channels[i]) == row(channels[i - 1]))
          classes.back().to++;
        else
          classes.push_back({i, i + 1});
      ends.push_back(int64_t(classes.size()));
    }
    for (const Class& one : classes)
      for (int64_t move = 0; move < a.moves; move++)
        for (int64_t j = 0; j < 2; j++) {
          float sum = 0;
          for (int64_t i = 0; i < a.channels && j < a.channels; i++)
            sum += a.rows[i * a.D + channels[one.from]] * a.steps[(move * a.channels + i) * a.channels + j];
          adds.push_back(sum);
        }
  }
};

// The sums over tokens of the squares of a block's steps, [moves, W]. A step is the range of the block's numbers, or
// their largest size. `room` holds [classes of the block, 2, W].
void add_steps(const MovedArguments& a, const Blocks& blocks, int64_t k, int64_t b, float* sums, float* room) {
  const float *keys = a.keys + k * a.D * a.T, *first = a.pairs + k * a.channels * a.T;
  const float* last = first + (a.channels - 1) * a.T;
  const int64_t begin = b ? blocks.ends[b - 1] : 0, end = blocks.ends[b];
  for (int64_t t = 0; t < a.T; t += W) {
    const int count = int(std::min<int64_t>(W, a.T - t));
    for (int64_t c = begin; c < end; c++) {
      Vector most = all(NOTHING), least = all(NOTHING);  // of its negatives
      for (int64_t i = blocks.classes[c].from; i < blocks.classes[c].to; i++) {
        const Vector x = load(keys + blocks.channels[i] * a.T + t, count);
        most = larger(most, x), least = larger(least, -x);
      }
      store(room + (c - begin) * 2 * W, most), store(room + ((c - begin) * 2 + 1) * W, least);
    }
    const Vector x = load(first + t, count), y = load(last + t, count);
    for (int64_t move = 0; move < a.moves; move++) {
      Vector most = all(NOTHING), least = all(NOTHING);
      for (int64_t c = begin; c < end; c++) {
        const float* adds = blocks.adds.data() + (c * a.moves + move) * 2;
        const Vector added = x * adds[0] + y * adds[1];
        most = larger(most, load(room + (c - begin) * 2 * W) + added);
        least = larger(least, load(room + ((c - begin) * 2 + 1) * W) - added);
      }
      const Vector step = a.range ? most + least : larger(most, least);
      store(sums + move * W, load(sums + move * W) + step * step);
    }
  }
}

}  // namespace

int headwise_moved(const MovedArguments* arguments, int) try {
  const MovedArguments& a = *arguments;
  const Blocks blocks(a);
  const int64_t count = a.D / a.block, units = a.K * count;
  const int threads = useful_threads(double(a.K) * (a.D + a.moves) * a.T * 0.0002, a.threads);
  const int64_t room = a.block * 2 * W;
  std::vector<float> places(threads * (room + a.moves * W));
  in_threads(threads, [&](int thread) {
    float *own = places.data() + thread * (room + a.moves * W), *sums = own + room;
    for (int64_t i = units * thread / threads; i < units * (thread + 1) / threads; i++) {
      std::fill_n(sums, a.moves * W, 0.0f);
      add_steps(a, blocks, i / count, i % count, sums, own);
      for (int64_t move = 0; move < a.moves; move++)
        a.out[move * units + i] = std::accumulate(sums + move * W, sums + (move + 1) * W, 0.0f) / float(a.T);
    }
  });
  return 0;
} catch (const std::bad_alloc&) {
  return NO_MEMORY;
}
