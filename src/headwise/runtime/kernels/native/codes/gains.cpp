// The gains of a token's codes: of a few neighbouring ones, that of the least expected error.
#include "unfused.h"

#include <cmath>

#include "../threads.h"
#include "../vectors.h"

namespace {

struct GainsArguments {
  const float* values;           // [rows, width]
  const float *offset, *scale;   // [width]
  const float *noise, *reach;    // [width], of the bits of each channel
  const float* gains;            // [NUMBERS], of each number
  const int64_t* parts;          // [count], the widths of the parts with a gain of their own
  uint8_t* starts;               // [rows], the numbers of a token's gains, four bits each
  float *normal, *of_channel;    // [rows, width], values over scale and gain, and the gain
  int64_t rows, width, count, tried, zero;  // `zero` is the number of the gain 1
  int64_t threads;
  double step;                   // between neighbouring gains, as a factor
};

constexpr int NUMBERS = 16;

// The number of the gain of one part. `normal` has its values over their scales, and all pointers those of its channels.
int best_number(const GainsArguments& a, const float* normal, const float* scale, const float* noise, const float* reach,
                int64_t width) {
  float squares = 0;
  for (int64_t i = 0; i < width; i++) squares += normal[i] * normal[i];
  const float square = std::min(std::max(1e-12f, squares / width), 1e12f);  // in this order NaN becomes the least
  const int middle = int(std::nearbyint(std::log(square) / (2 * std::log(a.step)))) + int(a.zero);
  float gain[NUMBERS] = {}, cost[NUMBERS] = {};
  int number[NUMBERS];
  for (int k = 0; k < a.tried; k++)
    number[k] = std::max(0, std::min(NUMBERS - 1, middle + k)), gain[k] = a.gains[number[k]];
  for (int k = 0; k < a.tried; k += W) {
    const Vector some = load(gain + k);
    Vector error = load(cost + k);
    for (int64_t i = 0; i < width; i++) {
      const Vector excess = larger(std::fabs(normal[i]) - reach[i] * some, Vector{});
      error += (noise[i] * (some * some) + excess * excess) * (scale[i] * scale[i]);
    }
    store(cost + k, error);
  }
  int best = 0;
  for (int k = 1; k < a.tried; k++)
    if (cost[k] < cost[best]) best = k;
  return number[best];
}

void choose(const GainsArguments& a, int64_t row) {
  float* normal = a.normal + row * a.width;
  for (int64_t i = 0; i < a.width; i++) normal[i] = (a.values[row * a.width + i] - a.offset[i]) / a.scale[i];
  int start = 0;
  int64_t from = 0;
  for (int64_t part = 0; part < a.count; from += a.parts[part++]) {
    const int number = best_number(a, normal + from, a.scale + from, a.noise + from, a.reach + from, a.parts[part]);
    start |= number << 4 * part;
    for (int64_t i = from; i < from + a.parts[part]; i++) {
      a.of_channel[row * a.width + i] = a.gains[number];
      normal[i] /= a.gains[number];
    }
  }
  a.starts[row] = uint8_t(start);
}

}  // namespace

// The entry point.
extern "C" void headwise_gains(const GainsArguments* arguments) {
  const GainsArguments& a = *arguments;
  const int threads = useful_threads(double(a.rows) * a.width * 0.005, a.threads);
  in_threads(threads, [&](int thread) {
    for (int64_t row = a.rows * thread / threads; row < a.rows * (thread + 1) / threads; row++) choose(a, row);
  });
}
