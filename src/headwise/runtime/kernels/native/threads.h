// Calls f(thread) on a number of threads: torch's own, by OpenMP, or new ones, so that a sanitizer can watch for races.
#pragma once

#include <algorithm>
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
