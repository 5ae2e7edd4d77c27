// Calls f(thread) on a number of threads: torch's own, by OpenMP, or new ones, so that a sanitizer can watch for races.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>

#if defined(FRESH_THREADS)
#include <thread>
#include <vector>
#else
#include <omp.h>
#endif

namespace {

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

// How many threads the work is enough for, where each takes `least` microseconds of it: more would wait for each other.
inline int threads_of(double microseconds, double least, int64_t most) {
  return int(std::max<int64_t>(1, std::min<int64_t>(most, int64_t(microseconds / least) + 1)));
}

// Whether threads sleep while they wait, so that the operating system has to wake them.
inline bool threads_sleep() {
  static const bool sleep = [] {
    const char* policy = std::getenv("OMP_WAIT_POLICY");
    return policy && (policy[0] == 'P' || policy[0] == 'p') && !std::getenv("GOMP_SPINCOUNT");
  }();
  return sleep;
}

// Threads for work whose results depend on how it is shared out: the same number in every process.
inline int sharing_threads(double microseconds, int64_t most) {
  return threads_of(microseconds, threads_sleep() ? 60 : 3, most);
}

// Twice the microseconds that another thread takes to join in and to be waited for, measured once: between 2 and 100,
// by the machine and by whether it sleeps.
inline double worth_a_thread() {
#if defined(FRESH_THREADS)
  return 3;
#else
  static const double microseconds = [] {
    using Clock = std::chrono::steady_clock;
    const auto since = [](Clock::time_point start) {
      return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
    };
    double took[15];
    for (double& each : took) {
      for (const auto start = Clock::now(); since(start) < 30;) {  // as between the layers of a model
      }
      const auto start = Clock::now();
      in_threads(2, [](int) {});
      each = since(start);
    }
    std::nth_element(took, took + 7, took + 15);
    return std::max(3., 2 * took[7]);
  }();
  return microseconds;
#endif
}

// Threads for work whose results do not depend on how it is shared out.
inline int useful_threads(double microseconds, int64_t most) {
  return most > 1 && microseconds > 3 ? threads_of(microseconds, worth_a_thread(), most) : 1;
}

}  // namespace
