// y = x Wᵀ + b for a few rows x: each weight is read once, in the order it lies in memory.
//
// Matrix libraries cut a product into tiles for the caches. With few rows no weight is used twice, and the product
// takes as long as reading the weights: memory must never wait.
#include "linear.h"

#include <new>
#include <vector>

#include "products.h"

namespace {

// Outputs that are computed together: several weight rows share each load of x.
constexpr int together(int rows) { return rows <= 4 ? (W == 16 ? 4 : 2) : 2; }

template <class A, class T>
class Product {
  const LinearArguments& a_;
  const typename A::Query* x_;
  const int64_t whole_;  // inputs that fill whole vectors

 public:
  Product(const LinearArguments& a, const typename A::Query* x) : a_(a), x_(x), whole_(a.inputs / A::DIMS * A::DIMS) {}

  // One thread's share of the outputs.
  void share(int thread, int threads) const {
    const int64_t from = a_.outputs * thread / threads, to = a_.outputs * (thread + 1) / threads;
    with_constant<MOST_ROWS>(int(a_.rows), [&](auto ROWS) { outputs<ROWS()>(from, to); });
  }

 private:
  template <int ROWS>
  void outputs(int64_t from, int64_t to) const {
    constexpr int MANY = together(ROWS);
    int64_t o = from;
    for (; o + MANY <= to; o += MANY) some<ROWS, MANY>(o);
    for (; o < to; o++) some<ROWS, 1>(o);
  }

  template <int ROWS, int MANY>
  void some(int64_t o) const {
    const T* weight = (const T*)a_.weight + o * a_.weight_stride;
    const int64_t stride = a_.weight_stride, ahead = MANY * stride * int64_t(sizeof(T));
    // Independent sums, so that no addition waits for the one before.
    constexpr int CHAINS = ROWS * MANY >= 8 ? 1 : ROWS * MANY >= 4 ? 2 : 4;
    Vector acc[CHAINS][ROWS][MANY];
    UNROLL for (int c = 0; c < CHAINS; c++) UNROLL
      for (int r = 0; r < ROWS; r++) UNROLL
        for (int m = 0; m < MANY; m++) acc[c][r][m] = Vector{};
    const auto step = [&](int64_t i, int c) __attribute__((always_inline)) {
      typename A::Operand w[MANY];
      UNROLL for (int m = 0; m < MANY; m++) {
        w[m] = A::load(weight + m * stride + i);
        __builtin_prefetch((const char*)(weight + m * stride + i) + ahead, 0, 2);
      }
      UNROLL for (int r = 0; r < ROWS; r++) {
        typename A::Operand x = A::load(x_ + r * a_.x_stride + i);
        if constexpr (MANY > 1) IN_REGISTER(x);
        UNROLL for (int m = 0; m < MANY; m++)
          A::add(acc[c][r][m], x, w[m]);
      }
    };
    int64_t i = 0;
    for (; i + CHAINS * A::DIMS <= whole_; i += CHAINS * A::DIMS) UNROLL
      for (int c = 0; c < CHAINS; c++) step(i + c * A::DIMS, c);
    for (; i < whole_; i += A::DIMS) step(i, 0);
    for (int r = 0; r < ROWS; r++)
      for (int m = 0; m < MANY; m++) {
        Vector all_of = acc[0][r][m];
        UNROLL for (int c = 1; c < CHAINS; c++)
          all_of += acc[c][r][m];
        float y = sum(all_of);
        for (int64_t rest = whole_; rest < a_.inputs; rest++)
          y += number(x_[r * a_.x_stride + rest]) * number(weight[m * stride + rest]);
        if (a_.bias) y += number(((const T*)a_.bias)[o + m]);
        put((T*)a_.y + r * a_.y_stride + o + m, y);
      }
  }
};

// `x` of each product is where `A` reads its rows.
template <class A, class T>
void multiply(const LinearArguments* products, int count) {
  double bytes = 0;
  for (int i = 0; i < count; i++) bytes += double(products[i].inputs) * products[i].outputs * sizeof(T);
  const int threads = useful_threads(bytes / 40e3, products->threads);
  in_threads(threads, [&](int thread) {
    for (int i = 0; i < count; i++)
      Product<A, T>(products[i], (const typename A::Query*)products[i].x).share(thread, threads);
  });
}

template <class T>
void multiply(const LinearArguments* products, int count) {
#if HAS_PAIRS
  if constexpr (std::is_same_v<T, bfloat16>) return multiply<Paired, T>(products, count);
#endif
  if constexpr (std::is_same_v<T, float>) {
    multiply<Single, T>(products, count);
  } else {
    std::vector<LinearArguments> widened(products, products + count);
    std::vector<std::vector<float>> xs(count);
    for (int p = 0; p < count; p++) {
      LinearArguments& a = widened[p];
      const T* x = (const T*)a.x;
      if (p && x == products[p - 1].x) {
        a.x = widened[p - 1].x;
      } else {
        xs[p].resize(a.rows * a.inputs);
        for (int64_t r = 0; r < a.rows; r++)
          for (int64_t i = 0; i < a.inputs; i++) xs[p][r * a.inputs + i] = number(x[r * a.x_stride + i]);
        a.x = xs[p].data();
      }
      a.x_stride = a.inputs;
    }
    multiply<Single, T>(widened.data(), count);
  }
}

}  // namespace

int multiply_all(const LinearArguments* products, int count, int type) {
  return with_type(type, [&](auto q) { multiply<decltype(q)>(products, count); });
}

int headwise_linear(const LinearArguments* arguments, int type) { return multiply_all(arguments, 1, type); }
