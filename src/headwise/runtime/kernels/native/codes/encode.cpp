// What codes the values of new tokens: the gains of each, its trellis codes, and both at once into a cache.
//
// Products and sums are not rounded as one, so that codes do not depend on where GCC fuses them. (Clang's
// -ffp-contract=fast may overrule its pragma.)
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include <cmath>
#include <vector>

#include "../processor.h"

namespace {

// --- gains ---------------------------------------------------------------------------------------------------------

constexpr int NUMBERS = 16;

// The number of the gain of one part: of a few neighbouring ones, that of the least expected error. `normal` has its
// values over their scales, and all pointers those of its channels.
int best_number(const GainsArguments& a, const float* normal, const float* scale, const float* noise,
                const float* reach, int64_t width) {
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

// --- trellis codes ---------------------------------------------------------------------------------------------------

// The path of least error through windows of eight bits, by Viterbi's algorithm. A code of b bits is appended to the
// stream of a row's codes, and the last eight bits of the stream, its window, say which level of a table of 256 it
// stands for. So a value's level depends on the codes before it too, and the codes of a row are chosen together.

constexpr int WINDOWS = 256;

// For each lane the least of COUNT costs, STRIDE apart, and which it is; the first of equal ones.
struct Least {
  Vector cost;
  Whole from;
};
template <int FIRST, int COUNT, int STRIDE>
INLINE Least least_of(const float* cost) {
#if defined(__AVX512F__)
  // The bits of which it is are set one by one where the later half has the least: one instruction each.
  if constexpr (COUNT == 1) {
    return {load(cost + FIRST * STRIDE), Whole{}};
  } else {
    const Least a = least_of<FIRST, COUNT / 2, STRIDE>(cost), b = least_of<FIRST + COUNT / 2, COUNT / 2, STRIDE>(cost);
    const __mmask16 is_less = _mm512_cmp_ps_mask((__m512)b.cost, (__m512)a.cost, _CMP_LT_OQ);
    return {(Vector)_mm512_mask_mov_ps((__m512)a.cost, is_less, (__m512)b.cost),
            (Whole)_mm512_mask_or_epi32((__m512i)a.from, is_less, (__m512i)b.from, _mm512_set1_epi32(COUNT / 2))};
  }
#else
  if constexpr (COUNT == 1) {
    return {load(cost + FIRST * STRIDE), Whole{} + FIRST};
  } else {
    const Least a = least_of<FIRST, COUNT / 2, STRIDE>(cost), b = least_of<FIRST + COUNT / 2, COUNT / 2, STRIDE>(cost);
    const Whole is_less = b.cost < a.cost;
    return {is_less ? b.cost : a.cost, is_less ? b.from : a.from};
  }
#endif
}

template <size_t... L>
INLINE Whole lane_numbers(std::index_sequence<L...>) {
  return Whole{int32_t(L)...};
}

template <int BY>
constexpr int lane_behind(int lane) {
  return (lane + BY) % W;
}

// The least of the lanes that lie STATES apart, in the first STATES lanes; of equal ones that of the lowest branch.
template <int BY, int STATES>
INLINE Least least_of_lanes(Least a) {
  if constexpr (BY < STATES) {
    return a;
  } else {
    const Vector cost = picked<lane_behind<BY>>(a.cost, a.cost);
    const Whole from = (Whole)picked<lane_behind<BY>>((Vector)a.from, (Vector)a.from);
    const Whole is_less = (cost < a.cost) | ((cost == a.cost) & (from < a.from));
    return least_of_lanes<BY / 2, STATES>({is_less ? cost : a.cost, is_less ? from : a.from});
  }
}

// Lane `lane` of a vector of windows comes from this lane of its states.
template <int OFFSET, int BRANCHES>
constexpr int state_of(int lane) {
  return OFFSET + lane / BRANCHES;
}

// The costs of the windows of vector I and those behind it, from the least costs of their states.
template <int K, int I = 0>
INLINE void extend(const float* least, float* cost, const float* table, float value, float weight) {
  if constexpr (I < WINDOWS / W) {
    constexpr int BRANCHES = 1 << K, STATE = I * W / BRANCHES;
    const Vector error = load(table + I * W) - value;
    Vector before;
    if constexpr (BRANCHES >= W) {
      before = all(least[STATE]);
    } else {
      const Vector states = load(least + STATE / W * W);
      before = picked<state_of<STATE % W, BRANCHES>>(states, states);
    }
    store(cost + I * W, before + error * error * weight);
    extend<K, I + 1>(least, cost, table, value, weight);
  }
}

// One code of K bits: the least cost of every window, and for every state the bits it drops on the way there.
template <int K>
void step(float* cost, uint8_t* dropped, const float* table, float value, float weight) {
  constexpr int STATES = WINDOWS >> K;
  alignas(64) float least[STATES < W ? W : STATES];
  if constexpr (STATES >= W) {
    for (int s = 0; s < STATES; s += W) {
      const Least best = least_of<0, 1 << K, STATES>(cost + s);
      store(least + s, best.cost);
      const Bytes from = __builtin_convertvector(best.from, Bytes);
      memcpy(dropped + s, &from, W);
    }
  } else {
    // A vector holds several branches of each state.
    Least best = least_of<0, WINDOWS / W, W>(cost);
    best.from = best.from * (W / STATES) + lane_numbers(std::make_index_sequence<W>()) / STATES;
    best = least_of_lanes<W / 2, STATES>(best);
    store(least, best.cost);
    const Bytes from = __builtin_convertvector(best.from, Bytes);
    memcpy(dropped, &from, W);
  }
  extend<K>(least, cost, table, value, weight);
}

// Where a channel's code ends in a row's stream, and where the bits that its states drop are kept.
struct Place {
  int64_t end, dropped;
};

// Those of all channels, and where what is dropped ends.
std::vector<Place> places_of(const uint8_t* bits, int64_t width) {
  std::vector<Place> places(width + 1);
  int64_t end = 0;
  for (int64_t i = 0; i < width; i++) {
    places[i].end = end += bits[i];
    places[i + 1].dropped = places[i].dropped + (WINDOWS >> bits[i]);
  }
  return places;
}

void encode_row(const EncoderArguments& a, int64_t row, uint8_t* dropped, const Place* places) {
  alignas(64) float cost[WINDOWS];
  for (int w = 0; w < WINDOWS; w++) cost[w] = w == a.starts[row] ? 0.f : 1e30f;
  const float* values = a.values + row * a.width;
  for (int64_t i = 0; i < a.width; i++) {
    const float gain = a.gains ? a.gains[row * a.width + i] : 1.f;
    with_constant<8>(a.bits[i], [&](auto BITS) {
      step<BITS()>(cost, dropped + places[i].dropped, a.tables + BITS() * WINDOWS, values[i],
                   a.weights[i] * (gain * gain));
    });
  }
  int window = 0;
  for (int w = 1; w < WINDOWS; w++)
    if (cost[w] < cost[window]) window = w;
  for (int64_t i = a.width - 1; i >= 0; i--) {
    const int bits = a.bits[i], state = window >> bits;
    a.levels[row * a.width + i] = a.tables[bits * WINDOWS + window];
    if (a.codes) {
      const int code = window & ((1 << bits) - 1);
      const int64_t end = places[i].end;  // the highest bit of a byte comes first
      uint8_t* byte = a.codes + row * a.stride + (end - 1) / 8;
      const int shift = 7 - (end - 1) % 8;
      byte[0] |= uint8_t(code << shift);
      if (bits > 8 - shift) byte[-1] |= uint8_t(code >> (8 - shift));
    }
    window = dropped[places[i].dropped + state] << (8 - bits) | state;
  }
}

}  // namespace

int headwise_gains(const GainsArguments* arguments, int) {
  const GainsArguments& a = *arguments;
  const int threads = useful_threads(double(a.rows) * a.width * 0.005, a.threads);
  in_threads(threads, [&](int thread) {
    for (int64_t row = a.rows * thread / threads; row < a.rows * (thread + 1) / threads; row++) choose(a, row);
  });
  return 0;
}

int headwise_trellis(const EncoderArguments* arguments, int) try {
  const EncoderArguments& a = *arguments;
  const int threads = useful_threads(double(a.rows) * a.width * 0.05, a.threads);
  const std::vector<Place> places = places_of(a.bits, a.width);
  const int64_t of_thread = places[a.width].dropped + W;  // whole vectors are stored
  std::vector<uint8_t> dropped(threads * of_thread);
  in_threads(threads, [&](int thread) {
    for (int64_t row = a.rows * thread / threads; row < a.rows * (thread + 1) / threads; row++)
      encode_row(a, row, &dropped[thread * of_thread], places.data());
  });
  return 0;
} catch (const std::bad_alloc&) {
  return NO_MEMORY;
}

int headwise_code(const CoderArguments* arguments, int) try {
  const CoderArguments& a = *arguments;
  const int threads = useful_threads(double(a.rows) * a.width * 0.05, a.threads);
  const std::vector<Place> places = places_of(a.bits, a.width);
  const int64_t of_thread = places[a.width].dropped + W;
  std::vector<uint8_t> dropped(threads * of_thread);
  std::vector<float> weights(a.width), numbers(threads * 3 * a.width);
  for (int64_t i = 0; i < a.width; i++) weights[i] = a.scale[i] * a.scale[i];
  in_threads(threads, [&](int thread) {
    uint8_t start;
    GainsArguments own = a;
    EncoderArguments path{};
    own.normal = &numbers[thread * 3 * a.width], own.of_channel = own.normal + a.width, own.starts = &start;
    path.values = own.normal, path.gains = own.of_channel, path.levels = own.of_channel + a.width;
    path.weights = weights.data(), path.bits = a.bits, path.tables = a.tables, path.starts = &start;
    path.width = a.width;
    for (int64_t row = a.rows * thread / threads; row < a.rows * (thread + 1) / threads; row++) {
      const int64_t slot = a.slots[row];
      if (slot < 0) continue;
      uint8_t* codes = a.codes + slot / a.page * a.page_stride + slot % a.page * a.token_stride;
      own.values = a.values + row * a.width;
      choose(own, 0);
      memset(codes, 0, a.bytes);
      codes[0] = start, path.codes = codes + 1;
      encode_row(path, 0, &dropped[thread * of_thread], places.data());
    }
  });
  return 0;
} catch (const std::bad_alloc&) {
  return NO_MEMORY;
}
