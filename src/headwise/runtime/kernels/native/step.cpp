// A layer of a decoder, for a few new tokens: norm, queries, keys and values, rotation, attention, and the MLP.
//
// Between two products a model does a dozen small operations on a few thousand numbers. Called one by one from Python,
// they take longer than the products. Numbers are rounded to the model's type wherever its own operations round them.
#include "attend.h"
#include "linear.h"

namespace {

// x rounded to a type.
template <class T>
INLINE float rounded(float x) {
  T result;
  put(&result, x);
  return number(result);
}

void check(int status) {
  if (status == NO_MEMORY) throw std::bad_alloc();
}

template <class T>
class Step {
  const StepArguments& a_;
  const int type_;
  const int64_t rows_, H_;

  struct Memory {
    T *normed, *query, *key, *value, *mixed, *projected, *gate, *up;
  };

 public:
  Step(const StepArguments& a, int type) : a_(a), type_(type), rows_(a.B * a.S), H_(a.K * a.G) {}

  void run() const {
    static thread_local ScratchMemory scratch;
    Arena counted;
    lay_out(counted);
    Arena arena(scratch.at_least(counted.size()));
    Memory at = lay_out(arena);
    if (a_.query) at.query = (T*)a_.query;
    if (a_.out) at.mixed = (T*)a_.out;
    if (a_.projects) project(at);
    if (a_.attends) attend(at);
    if (a_.finishes) finish(at);
  }

 private:
  Memory lay_out(Arena& arena) const {
    const auto take = [&](int64_t width) { return arena.take<T>(rows_ * width); };
    return {take(a_.hidden), take(H_ * a_.D), take(a_.K * a_.D), take(a_.K * a_.V),
            take(H_ * a_.V), take(a_.hidden), take(a_.inner),    take(a_.inner)};
  }

  void project(const Memory& at) const {
    norm((const T*)a_.x, a_.norm, rows_, a_.hidden, at.normed);
    const LinearArguments products[] = {product(a_.q, at.normed, a_.hidden, at.query, H_ * a_.D),
                                        product(a_.k, at.normed, a_.hidden, at.key, a_.K * a_.D),
                                        product(a_.v, at.normed, a_.hidden, at.value, a_.K * a_.V)};
    check(multiply_all(products, 3, type_));
    if (a_.q_norm.weight) norm(at.query, a_.q_norm, rows_ * H_, a_.D, at.query);
    if (a_.k_norm.weight) norm(at.key, a_.k_norm, rows_ * a_.K, a_.D, at.key);
    const int64_t *key = a_.new_key_stride, *value = a_.new_value_stride;
    for (int64_t b = 0; b < a_.B; b++)
      for (int64_t s = 0; s < a_.S; s++) {
        const int64_t row = b * a_.S + s, angle = b * a_.position_stride + s * a_.D;
        if (a_.cos) {
          for (int64_t h = 0; h < H_; h++) rotate(at.query + (row * H_ + h) * a_.D, angle);
          for (int64_t k = 0; k < a_.K; k++) rotate(at.key + (row * a_.K + k) * a_.D, angle);
        }
        for (int64_t k = 0; k < a_.K; k++) {
          std::copy_n(at.key + (row * a_.K + k) * a_.D, a_.D, (T*)a_.new_key + b * key[0] + k * key[1] + s * key[2]);
          std::copy_n(at.value + (row * a_.K + k) * a_.V, a_.V,
                      (T*)a_.new_value + b * value[0] + k * value[1] + s * value[2]);
        }
      }
  }

  void attend(const Memory& at) const {
    FusedArguments call = a_;
    call.query = at.query, call.out = at.mixed;
    set(call.query_stride, a_.D), set(call.out_stride, a_.V);
    check(headwise_attention(&call, type_));
  }
  // The strides of [B, S, H, width] as [B, H, S, width].
  void set(int64_t* stride, int64_t width) const {
    stride[0] = a_.S * H_ * width, stride[1] = width, stride[2] = H_ * width;
  }

  void finish(const Memory& at) const {
    const T* attended = at.mixed;
    if (a_.o.weight) {
      const LinearArguments out = product(a_.o, at.mixed, H_ * a_.V, at.projected, a_.hidden);
      check(multiply_all(&out, 1, type_));
      attended = at.projected;
    }
    add((const T*)a_.x, attended);
    norm((const T*)a_.y, a_.mlp_norm, rows_, a_.hidden, at.normed);
    const LinearArguments inner[] = {product(a_.gate, at.normed, a_.hidden, at.gate, a_.inner),
                                     product(a_.up, at.normed, a_.hidden, at.up, a_.inner)};
    check(multiply_all(inner, 2, type_));
    gate(at.gate, at.up);
    const LinearArguments down = product(a_.down, at.gate, a_.inner, at.projected, a_.hidden);
    check(multiply_all(&down, 1, type_));
    add((const T*)a_.y, at.projected);
  }

  LinearArguments product(const ProjectionArguments& of, const T* x, int64_t inputs, T* y, int64_t outputs) const {
    return {x, of.weight, of.bias, y, rows_, inputs, outputs, inputs, inputs, a_.threads};
  }

  // y = a + b.
  void add(const T* a, const T* b) const {
    for (int64_t i = 0; i < rows_ * a_.hidden; i++) put((T*)a_.y + i, number(a[i]) + number(b[i]));
  }

  // RMSNorm of rows, which `to` may be.
  static void norm(const T* x, const NormArguments& of, int64_t rows, int64_t width, T* to) {
    const T* weight = (const T*)of.weight;
    const int64_t whole = width / W * W;
    for (int64_t row = 0; row < rows; row++, x += width, to += width) {
      Vector squares{};
      for (int64_t i = 0; i < whole; i += W) squares += load(x + i) * load(x + i);
      float square = sum(squares);
      for (int64_t i = whole; i < width; i++) square += number(x[i]) * number(x[i]);
      const float factor = 1 / std::sqrt(square / float(width) + float(of.eps));
      for (int64_t i = 0; i < width; i++) put(to + i, number(weight[i]) * rounded<T>(number(x[i]) * factor));
    }
  }

  // Rotates a head by a token's position; the two dims of a pair are half a head apart.
  void rotate(T* head, int64_t angle) const {
    const T *cos = (const T*)a_.cos + angle, *sin = (const T*)a_.sin + angle;
    const int64_t half = a_.D / 2;
    for (int64_t i = 0; i < half; i++) {
      const float x = number(head[i]), y = number(head[half + i]);
      put(head + i, rounded<T>(x * number(cos[i])) - rounded<T>(y * number(sin[i])));
      put(head + half + i, rounded<T>(y * number(cos[half + i])) + rounded<T>(x * number(sin[half + i])));
    }
  }

  // gate = SiLU(gate) · up.
  void gate(T* gate, const T* up) const {
    for (int64_t i = 0; i < rows_ * a_.inner; i += W) {
      const int count = int(std::min<int64_t>(W, rows_ * a_.inner - i));
      // x / (1 + exp(−x)), with no power above 1.
      const Vector x = load(gate + i, count), below = larger(all(0.0f), -x), size = larger(x, -x);
      float activated[W];
      store(activated, x * power(below) / (power(size) + 1.0f));
      for (int j = 0; j < count; j++) put(gate + i + j, rounded<T>(activated[j]) * number(up[i + j]));
    }
  }
  // exp(−x) for x ≥ 0.
  static Vector power(Vector x) { return power_of_two<false>(x * -float(LOG2E)); }
};

}  // namespace

int headwise_step(const StepArguments* arguments, int type) {
  return with_type(type, [&](auto q) { Step<decltype(q)>(*arguments, type).run(); });
}
