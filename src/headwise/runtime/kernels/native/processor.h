// The processor: vectors of floats as wide as it has them, in GCC's and clang's own vector types, and its threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "abi.h"

#if defined(FRESH_THREADS)
#include <thread>
#include <vector>
#else
#include <omp.h>
#endif

#if defined(__AVX512F__)
#include <immintrin.h>
#define BYTES 64
#elif defined(__AVX__)
#include <immintrin.h>
#define BYTES 32
#else
#define BYTES 16
#endif

#if defined(__AVX512VBMI__) && defined(__AVX512BW__)
#define HAS_BYTE_TABLES 1  // tables of 256 bytes in registers
#else
#define HAS_BYTE_TABLES 0
#endif

#if HAS_BYTE_TABLES && defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define HAS_WHOLE_SUMS 1  // sums of products of whole numbers of 8 and of 16 bits
#else
#define HAS_WHOLE_SUMS 0
#endif

#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define HAS_WORDS 1  // products of whole numbers of 16 bits, in vectors as wide as those of floats
#else
#define HAS_WORDS 0
#endif

#define INLINE inline __attribute__((always_inline))
// Unrolled early, so that small arrays become registers.
#define UNROLL _Pragma("GCC unroll 32")
// A vector that is used several times is loaded once: GCC would rather load it with every use.
#if defined(__AVX512F__)
#define IN_REGISTER(x) asm("" : "+v"(x))
#else
#define IN_REGISTER(x)
#endif

namespace {

constexpr int W = BYTES / 4;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

typedef float Vector __attribute__((vector_size(BYTES)));
typedef int32_t Whole __attribute__((vector_size(BYTES)));
typedef uint32_t Bits __attribute__((vector_size(BYTES)));
typedef uint16_t Halves __attribute__((vector_size(BYTES / 2)));
typedef int8_t Bytes __attribute__((vector_size(BYTES / 4)));
typedef float LooseVector __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef uint16_t LooseHalves __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));
typedef int8_t LooseBytes __attribute__((vector_size(BYTES / 4), aligned(1), may_alias));

struct bfloat16 {
  uint16_t bits;
};

INLINE Vector all(float x) { return x - Vector{}; }
INLINE Vector load(const float* at) { return *(const LooseVector*)at; }
INLINE Vector load(const bfloat16* at) {
  const Halves bits = *(const LooseHalves*)at;
  return (Vector)(__builtin_convertvector(bits, Bits) << 16);
}
INLINE Vector from_bytes(Bytes numbers) {
#if defined(__AVX512F__)
  return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)numbers));
#elif defined(__AVX2__)
  return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)numbers)));
#else
  return __builtin_convertvector(__builtin_convertvector(numbers, Whole),
                                 Vector);  // at once, GCC takes them one by one
#endif
}
INLINE Vector load(const int8_t* at) {
  const Bytes numbers = *(const LooseBytes*)at;
  return from_bytes(numbers);
}
INLINE void store(float* at, Vector x) { *(LooseVector*)at = x; }

INLINE float number(float x) { return x; }
INLINE float number(int8_t x) { return x; }
INLINE float number(bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}
INLINE void put(float* at, float x) { *at = x; }
INLINE void put(bfloat16* at, float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000)
    at->bits = uint16_t(bits >> 16 | 64);  // NaN stays NaN
  else
    at->bits = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Half precision, where the compiler has it.
#if defined(__FLT16_MAX__)
typedef _Float16 float16;
#if defined(__AVX512F__)
INLINE Vector load(const float16* at) { return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }
#elif defined(__F16C__)
INLINE Vector load(const float16* at) { return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)); }
#else
INLINE Vector load(const float16* at) {
  Vector result;
  for (int i = 0; i < W; i++) result[i] = (float)at[i];
  return result;
}
#endif
INLINE float number(float16 x) { return (float)x; }
INLINE void put(float16* at, float x) { *at = (float16)x; }
#endif

// Loads `count` numbers and fills the vector with zeros; memory behind them is not read.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
INLINE Vector load(const float* at, int count) {
  return (Vector)_mm512_maskz_loadu_ps((__mmask16)((1 << count) - 1), at);
}
INLINE Vector load(const int8_t* at, int count) {
  const Bytes numbers = (Bytes)_mm_maskz_loadu_epi8((__mmask16)((1 << count) - 1), at);
  return from_bytes(numbers);
}
template <class T>
INLINE Vector load(const T* at, int count) {
  const __m256i halves = _mm256_maskz_loadu_epi16((__mmask16)((1 << count) - 1), at);
  return load((const T*)&halves);
}
#else
template <class T>
INLINE Vector load(const T* at, int count) {
  if (count == W) return load(at);
  T numbers[W] = {};
  memcpy(numbers, at, count * sizeof(T));
  return load(numbers);
}
#endif

#if defined(__AVX512F__)
INLINE Vector larger(Vector a, Vector b) { return (Vector)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(__AVX__)
INLINE Vector larger(Vector a, Vector b) { return (Vector)_mm256_max_ps((__m256)a, (__m256)b); }
#else
INLINE Vector larger(Vector a, Vector b) {
  const Whole is_a = a > b;
  return (Vector)(((Whole)a & is_a) | ((Whole)b & ~is_a));
}
#endif

// Lanes picked from two vectors: lane l of the result is lane PICK(l), where b's lanes follow a's and begin at W.
template <int (*PICK)(int), size_t... L>
INLINE Vector picked(Vector a, Vector b, std::index_sequence<L...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, PICK(L)...);
#else
  return __builtin_shuffle(a, b, Whole{PICK(L)...});
#endif
}
template <int (*PICK)(int)>
INLINE Vector picked(Vector a, Vector b) {
  return picked<PICK>(a, b, std::make_index_sequence<W>());
}

// From each 2 H lanes of a and of b: the first H, or the last H.
template <int H>
constexpr int first_halves(int lane) {
  return lane / (2 * H) * (2 * H) + lane % H + (lane % (2 * H) < H ? 0 : W);
}
template <int H>
constexpr int last_halves(int lane) {
  return first_halves<H>(lane) + H;
}

// The sums of W vectors: lane i of the result is the sum of x[i]'s lanes.
template <int H = W / 2>
INLINE Vector sums(const Vector* x) {
  Vector half[H];
  UNROLL for (int i = 0; i < H; i++)
    half[i] = picked<first_halves<H>>(x[i], x[i + H]) + picked<last_halves<H>>(x[i], x[i + H]);
  if constexpr (H == 1)
    return half[0];
  else
    return sums<H / 2>(half);
}

INLINE float sum(Vector x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float result = 0;
  for (int i = 0; i < W; i++) result += x[i];
  return result;
#endif
}
INLINE float largest(Vector x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float result = x[0];
  for (int i = 1; i < W; i++) result = std::max(result, x[i]);
  return result;
#endif
}

// Whether any lane is above x; NaN is not.
INLINE bool exceeds(Vector lanes, float x) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)lanes, _mm512_set1_ps(x), _CMP_GT_OQ) != 0;
#elif defined(__AVX__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)lanes, _mm256_set1_ps(x), _CMP_GT_OQ)) != 0;
#else
  bool is_more = false;
  for (int i = 0; i < W; i++) is_more |= lanes[i] > x;
  return is_more;
#endif
}

// --- words -------------------------------------------------------------------------------------------------------

#if HAS_WORDS
#if BYTES == 64
typedef __m512i Words;
typedef __m512i_u LooseWords;
#define OF_VECTOR(operation) _mm512_##operation
#else
typedef __m256i Words;
typedef __m256i_u LooseWords;
#define OF_VECTOR(operation) _mm256_##operation
#endif

INLINE Words words_at(const void* at) { return *(const LooseWords*)at; }
INLINE void put_words(void* at, Words x) { *(Words*)at = x; }
// Sixteen bytes, in every sixteen of the vector.
INLINE Words repeated(const void* at) {
  const __m128i sixteen = _mm_load_si128((const __m128i*)at);
#if BYTES == 64
  return _mm512_broadcast_i32x4(sixteen);
#else
  return _mm256_broadcastsi128_si256(sixteen);
#endif
}
// Rounds numbers to words.
INLINE void store_words(int16_t* to, Vector x) {
#if BYTES == 64
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32((__m512)x)));
#else
  const __m256i whole = _mm256_cvtps_epi32((__m256)x);
  _mm_storeu_si128((__m128i*)to, _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1)));
#endif
}
// Adds the products of two neighbouring words to each sum of 32 bits.
INLINE void add_products(Words& sums, Words a, Words b) {
#if BYTES == 64 && defined(__AVX512VNNI__)
  sums = _mm512_dpwssd_epi32(sums, a, b);
#elif BYTES == 32 && defined(__AVXVNNI__)
  sums = _mm256_dpwssd_avx_epi32(sums, a, b);
#else
  sums = OF_VECTOR(add_epi32)(sums, OF_VECTOR(madd_epi16)(a, b));
#endif
}
#endif

// 2^x for x ≤ 0, and 0 below -126: exact to rounding, or when ROUGH within 8e-5, for results that are rounded to
// bfloat16. The polynomials are minimax in relative error on [-1/2, 1/2].
template <bool ROUGH>
INLINE Vector power_of_two(Vector x) {
#if !defined(__AVX512F__)
  const Whole tiny = x < -126.0f;
#endif
  x = larger(all(-200.0f), x);            // in this order NaN stays NaN
  const Vector shift = all(12582912.0f);  // 1.5 · 2²³: adding it rounds to a whole number
  const Vector shifted = x + shift;
  const Vector rest = x - (shifted - shift);
  Vector power;
  if constexpr (ROUGH) {
    power = all(5.51716685e-2f);
    power = power * rest + 2.42611125e-1f;
    power = power * rest + 6.93260968e-1f;
    power = power * rest + 9.99928057e-1f;
  } else {
    power = all(1.32764713e-3f);
    power = power * rest + 9.67554096e-3f;
    power = power * rest + 5.55071309e-2f;
    power = power * rest + 2.40221202e-1f;
    power = power * rest + 6.93146944e-1f;
    power = power * rest + 1.0f;
  }
#if defined(__AVX512F__)
  return (Vector)_mm512_scalef_ps((__m512)power, (__m512)(shifted - shift));
#else
  // Without signs, because sums wrap: of NaN, of what is tiny, and of x > 0, which a row with a NaN may have.
  return (Vector)(((Bits)power + (((Bits)shifted - (Bits)shift) << 23)) & ~(Bits)tiny);
#endif
}

// --- constants ---------------------------------------------------------------------------------------------------

// Calls f(n) with a number from 1 to MOST as a compile-time constant.
template <int MOST, int N = 1, class F>
INLINE void with_constant(int n, F f) {
  if (n == N)
    f(std::integral_constant<int, N>());
  else if constexpr (N < MOST)
    with_constant<MOST, N + 1>(n, f);
}

// --- types -------------------------------------------------------------------------------------------------------

// Calls `work` with a number of the type that a kernel is asked for. Returns what kernels return: 0, or NO_MEMORY, or 2
// for a type that this compiler lacks.
template <class Work>
int with_type(int type, Work work) try {
  switch (type) {
    case FLOAT32: work(float()); return 0;
    case BFLOAT16: work(bfloat16()); return 0;
#if defined(__FLT16_MAX__)
    case FLOAT16: work(float16()); return 0;
#endif
    default: return 2;
  }
} catch (const std::bad_alloc&) {
  return NO_MEMORY;
}

// --- threads ---------------------------------------------------------------------------------------------------

// Calls f(thread) on a number of threads: torch's own, by OpenMP, or new ones, so that a sanitizer can watch for races.
template <class F>
void in_threads(int count, F f) {
  if (count == 1) return f(0);
#if defined(FRESH_THREADS)
  std::vector<std::thread> threads;
  for (int thread = 0; thread < count; thread++) threads.emplace_back([&f, thread] { f(thread); });
  for (std::thread& thread : threads) thread.join();
#else
#pragma omp parallel for num_threads(count) schedule(static, 1)
  for (int thread = 0; thread < count; thread++) f(thread);
#endif
}

// Microseconds of work that another thread is worth. One that waits by spinning begins at once; one that sleeps
// (OMP_WAIT_POLICY=PASSIVE) has to be woken by the operating system, which can take as long as reading two megabytes.
inline double worth_a_thread() {
  static const double microseconds = [] {
    const char* policy = std::getenv("OMP_WAIT_POLICY");
    return policy && (policy[0] == 'P' || policy[0] == 'p') && !std::getenv("GOMP_SPINCOUNT") ? 60 : 3;
  }();
  return microseconds;
}

// How many threads the work is enough for: more would wait for each other.
inline int useful_threads(double microseconds, int64_t most) {
  return int(std::max<int64_t>(1, std::min<int64_t>(most, int64_t(microseconds / worth_a_thread()) + 1)));
}

}  // namespace
