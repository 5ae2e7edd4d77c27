// Trellis codes: the path of least error through windows of eight bits, by Viterbi's algorithm.
//
// A code of b bits is appended to the stream of a row's codes, and the last eight bits of the stream, its window, say
// which level of a table of 256 it stands for. So a value's level depends on the codes before it too, and the codes of a
// row are chosen together.
#include <cstring>
#include <new>
#include <vector>

#include "threads.h"

namespace {

struct TrellisArguments {
  const float *values, *gains;  // [rows, width]; [rows, width] factors of a value's error, or null
  const float* weights;         // [width], of squared errors
  const uint8_t* bits;          // [width], 1 to 8
  const float* tables;          // [9, 256], the levels of codes of 0 to 8 bits
  const uint8_t* starts;        // [rows], the byte of the stream before a row's codes
  uint8_t* codes;               // [rows, stride], or null; zero at first
  float* levels;                // [rows, width], or null
  int64_t rows, width, stride;
  int64_t threads;
};

constexpr int WINDOWS = 256;

// One code of K bits: the least cost of every window, and for every state the bits it drops on the way there.
template <int K>
void step(float* cost, uint8_t* dropped, const float* table, float value, float weight) {
  constexpr int STATES = WINDOWS >> K, BRANCHES = 1 << K;
  float least[STATES];
  int32_t from[STATES];
  for (int s = 0; s < STATES; s++) least[s] = cost[s], from[s] = 0;
  for (int h = 1; h < BRANCHES; h++)
    for (int s = 0; s < STATES; s++) {
      const float other = cost[h * STATES + s];
      const bool is_less = other < least[s];
      least[s] = is_less ? other : least[s];
      from[s] = is_less ? h : from[s];
    }
  for (int s = 0; s < STATES; s++) dropped[s] = uint8_t(from[s]);
  for (int s = 0; s < STATES; s++)
    for (int u = 0; u < BRANCHES; u++) {
      const float error = table[s * BRANCHES + u] - value;
      cost[s * BRANCHES + u] = least[s] + weight * error * error;
    }
}

void step_of(int bits, float* cost, uint8_t* dropped, const float* table, float value, float weight) {
  switch (bits) {
    case 1: return step<1>(cost, dropped, table, value, weight);
    case 2: return step<2>(cost, dropped, table, value, weight);
    case 3: return step<3>(cost, dropped, table, value, weight);
    case 4: return step<4>(cost, dropped, table, value, weight);
    case 5: return step<5>(cost, dropped, table, value, weight);
    case 6: return step<6>(cost, dropped, table, value, weight);
    case 7: return step<7>(cost, dropped, table, value, weight);
    case 8: return step<8>(cost, dropped, table, value, weight);
  }
}

void encode_row(const TrellisArguments& a, int64_t row, std::vector<uint8_t>& dropped, const int64_t* ends) {
  alignas(64) float cost[WINDOWS];
  for (int w = 0; w < WINDOWS; w++) cost[w] = w == a.starts[row] ? 0.f : 1e30f;
  const float* values = a.values + row * a.width;
  for (int64_t i = 0; i < a.width; i++) {
    const float gain = a.gains ? a.gains[row * a.width + i] : 1.f;
    step_of(a.bits[i], cost, &dropped[i * (WINDOWS / 2)], a.tables + a.bits[i] * WINDOWS, values[i],
            a.weights[i] * gain * gain);
  }
  int window = 0;
  for (int w = 1; w < WINDOWS; w++)
    if (cost[w] < cost[window]) window = w;
  for (int64_t i = a.width - 1; i >= 0; i--) {
    const int bits = a.bits[i], state = window >> bits;
    if (a.levels) a.levels[row * a.width + i] = a.tables[bits * WINDOWS + window];
    if (a.codes) {
      const int code = window & ((1 << bits) - 1);
      const int64_t end = ends[i];  // the highest bit of a byte comes first
      uint8_t* byte = a.codes + row * a.stride + (end - 1) / 8;
      const int shift = 7 - (end - 1) % 8;
      byte[0] |= uint8_t(code << shift);
      if (bits > 8 - shift) byte[-1] |= uint8_t(code >> (8 - shift));
    }
    window = dropped[i * (WINDOWS / 2) + state] << (8 - bits) | state;
  }
}

void encode(const TrellisArguments& a) {
  std::vector<int64_t> ends(a.width);
  int64_t end = 0;
  for (int64_t i = 0; i < a.width; i++) ends[i] = end += a.bits[i];
  const int threads = useful_threads(double(a.rows) * a.width * 0.05, a.threads);
  in_threads(threads, [&](int thread) {
    std::vector<uint8_t> dropped(a.width * (WINDOWS / 2));
    for (int64_t row = a.rows * thread / threads; row < a.rows * (thread + 1) / threads; row++)
      encode_row(a, row, dropped, ends.data());
  });
}

}  // namespace

// The entry point: 0, or 1 where there is no memory.
extern "C" int headwise_trellis(const TrellisArguments* arguments) try {
  encode(*arguments);
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}
