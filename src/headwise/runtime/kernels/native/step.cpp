// A layer of a decoder, for a few new tokens: norm, queries, keys and values, rotation, attention, and the MLP.
//
// Between two products a model does a dozen small operations on a few thousand numbers. Called one by one from Python,
// they take longer than the products. Numbers are rounded to the model's type wherever its own operations round them.
#include <vector>

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
  const int64_t key_, value_;  // numbers of a row of projected keys, or a latent and its rotary key, and of values

  struct Memory {
    T *normed, *query, *key, *value, *absorbed, *latent, *mixed, *projected, *gate, *up;
    float* values;  // that are coded
  };

 public:
  Step(const StepArguments& a, int type)
      : a_(a),
        type_(type),
        rows_(a.B * a.S),
        H_(a.K * a.G),
        key_(a.R ? a.R + a.P : a.K * a.D),
        value_(a.R ? 0 : a.K * a.V) {}

  void run() const {
    static thread_local ScratchMemory scratch;
    Arena counted;
    lay_out(counted);
    Arena arena(scratch.at_least(counted.size()));
    const Memory at = lay_out(arena);
    project(at);
    if (a_.coder)
      encode(at);
    else
      append(at);
    if (a_.R)
      attend_to_latents(at);
    else if (a_.heads)
      attend(*a_.heads, headwise_heads, at.query, a_.key, at.mixed);
    else
      attend<FusedArguments>(a_, headwise_attention, at.query, a_.key, at.mixed);
    finish(at);
  }

 private:
  Memory lay_out(Arena& arena) const {
    const auto take = [&](int64_t width) { return arena.take<T>(rows_ * width); };
    const int64_t latent = a_.R ? H_ * (a_.R + a_.P) : 0;
    return {take(a_.hidden),
            take(H_ * a_.D),
            take(key_),
            take(value_),
            take(latent),
            take(latent),
            take(H_ * a_.V),
            take(a_.hidden),
            take(a_.inner),
            take(a_.inner),
            arena.take<float>(a_.coder ? rows_ * (key_ + value_) : 0)};
  }

  void project(const Memory& at) const {
    norm((const T*)a_.x, a_.norm, rows_, a_.hidden, at.normed);
    const LinearArguments products[] = {product(a_.q, at.normed, a_.hidden, at.query, H_ * a_.D),
                                        product(a_.k, at.normed, a_.hidden, at.key, key_),
                                        product(a_.v, at.normed, a_.hidden, at.value, value_)};
    check(multiply_all(products, value_ ? 3 : 2, type_));
    if (a_.q_norm.weight) norm(at.query, a_.q_norm, rows_ * H_, a_.D, at.query);
    if (a_.k_norm.weight) norm(at.key, a_.k_norm, rows_ * a_.K, a_.D, at.key);
    for (int64_t row = 0; row < rows_; row++) {
      for (int64_t h = 0; h < H_; h++) rotate(at.query + (row * H_ + h + 1) * a_.D - a_.P, row);
      for (int64_t k = 0; k < a_.K && !a_.coder; k++) rotate(at.key + row * key_ + k * a_.D + a_.R, row);
    }
  }

  // Rotates a head's dims by a row's position; the two dims of a pair are half of them apart.
  void rotate(T* head, int64_t row) const {
    const int64_t angle = row / a_.S * a_.angle_stride[0] + row % a_.S * a_.angle_stride[1], half = a_.P / 2;
    const T *cos = (const T*)a_.cos + angle, *sin = (const T*)a_.sin + angle;
    const bool is_own = a_.coder || a_.R;  // headwise's layers round the first product, transformers' both
    for (int64_t i = 0; i < half; i++) {
      const float x = number(head[i]), y = number(head[half + i]), c = number(cos[i]), s = number(sin[i]);
      put(head + i, rounded<T>(x * c) - (is_own ? y * s : rounded<T>(y * s)));
      put(head + half + i, rounded<T>(y * c) + (is_own ? x * s : rounded<T>(x * s)));
    }
  }

  // The new tokens' keys and values enter the cache, at its end.
  void append(const Memory& at) const {
    const auto copy = [&](const T* from, const void* cache, const int64_t* stride, int64_t width) {
      for (int64_t i = 0; i < rows_ * a_.K; i++, from += width) {
        const int64_t row = i / a_.K, token = a_.T - a_.S + row % a_.S;
        std::copy_n(from, width, (T*)cache + row / a_.S * stride[0] + i % a_.K * stride[1] + token * stride[2]);
      }
    };
    copy(at.key, a_.key, a_.key_stride, key_ / a_.K), copy(at.value, a_.value, a_.value_stride, value_ / a_.K);
  }

  // Their codes do.
  void encode(const Memory& at) const {
    const int64_t width = key_ + value_;
    int64_t slots[MOST_ROWS];
    for (int64_t row = 0; row < rows_; row++) {
      slots[row] = row / a_.S * a_.T + a_.T - a_.S + row % a_.S;
      for (int64_t i = 0; i < key_; i++) at.values[row * width + i] = number(at.key[row * key_ + i]);
      for (int64_t i = 0; i < value_; i++) at.values[row * width + key_ + i] = number(at.value[row * value_ + i]);
    }
    CoderArguments call = *a_.coder;
    call.values = at.values, call.slots = slots, call.rows = rows_;
    call.codes = (uint8_t*)a_.key, call.page = a_.T;
    call.page_stride = a_.key_stride[0], call.token_stride = a_.key_stride[2];
    call.threads = std::min(rows_, a_.threads);
    check(headwise_code(&call, FLOAT32));
  }

  template <class Call>
  void attend(const Call& prepared, int (*kernel)(const Call*, int), const T* query, const void* key, T* out) const {
    Call call = prepared;
    const auto set = [&](int64_t* stride, int64_t width) {  // of [B, S, H, width] as [B, H, S, width]
      stride[0] = a_.S * H_ * width, stride[1] = width, stride[2] = H_ * width;
    };
    call.query = query, call.out = out, call.key = key, call.mask = a_.mask;
    set(call.query_stride, call.D), set(call.out_stride, call.V);
    std::copy_n(a_.key_stride, 3, call.key_stride), std::copy_n(a_.mask_stride, 4, call.mask_stride);
    call.B = a_.B, call.S = a_.S, call.T = a_.T;
    call.causal = a_.causal, call.scale = a_.scale, call.threads = a_.threads;
    check(kernel(&call, type_));
  }

  // Queries are multiplied with the decoder of their head's keys, and mixed latents with that of its values.
  void attend_to_latents(const Memory& at) const {
    const int64_t R = a_.R, P = a_.P, N = a_.D - P, V = a_.V, width = N ? R + P : P;
    const auto decoder = [&](int64_t h) { return (const T*)a_.decoder + h * (N + V) * R; };
    const int threads = useful_threads(double(H_) * N * R * sizeof(T) / 40e3, a_.threads);
    in_threads(threads, [&](int thread) {
      for (int64_t h = H_ * thread / threads; h < H_ * (thread + 1) / threads; h++)
        for (int64_t row = 0; row < rows_; row++) {
          const T* query = at.query + (row * H_ + h) * a_.D;
          T* to = at.absorbed + (row * H_ + h) * width;
          if (N) transposed(query, decoder(h), N, R, to);
          std::copy_n(query + N, P, to + width - P);
        }
    });
    if (a_.latents) {
      attend(*a_.latents, headwise_coded, at.absorbed, a_.key, at.latent);
    } else {  // a row of the cache is a key, and its beginning the value
      FusedArguments call = a_;
      call.K = 1, call.G = H_, call.D = width, call.V = R, call.value = a_.key;
      std::copy_n(a_.key_stride, 3, call.value_stride);
      attend(call, headwise_attention, at.absorbed, (const T*)a_.key + (N ? 0 : R), at.latent);
    }
    std::vector<LinearArguments> values(H_);
    for (int64_t h = 0; h < H_; h++)
      values[h] = {at.latent + h * R, decoder(h) + N * R, nullptr, at.mixed + h * V, rows_, R, V, H_ * R, R, H_ * V,
                   a_.threads};
    check(multiply_all(values.data(), int(H_), type_));
  }

  // to = xᵀ weight, of x [inputs] and weight [inputs, outputs].
  static void transposed(const T* x, const T* weight, int64_t inputs, int64_t outputs, T* to) {
    constexpr int MOST = 8;
    for (int64_t o = 0; o < outputs; o += MOST * W) {
      const int64_t left = std::min<int64_t>(MOST * W, outputs - o);
      in_blocks<MOST>(int((left + W - 1) / W), [&](int first, auto COUNT) {
        Vector acc[COUNT()] = {};
        const int64_t from = o + first * W;
        const int last = int(std::min<int64_t>(W, outputs - from - (COUNT() - 1) * W));
        for (int64_t i = 0; i < inputs; i++) {
          const T* row = weight + i * outputs + from;
          const Vector factor = all(number(x[i]));
          UNROLL for (int c = 0; c + 1 < COUNT(); c++)
            acc[c] += load(row + c * W) * factor;
          acc[COUNT() - 1] += load(row + (COUNT() - 1) * W, last) * factor;
        }
        float sums_of[COUNT() * W];
        UNROLL for (int c = 0; c < COUNT(); c++)
          store(sums_of + c * W, acc[c]);
        for (int64_t i = 0; i < (COUNT() - 1) * W + last; i++) put(to + from + i, sums_of[i]);
      });
    }
  }

  void finish(const Memory& at) const {
    const LinearArguments out = product(a_.o, at.mixed, H_ * a_.V, at.projected, a_.hidden);
    check(multiply_all(&out, 1, type_));
    add((const T*)a_.x, at.projected);
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
    return {x, of.weight, of.bias, y, rows_, inputs, outputs, inputs, inputs, outputs, a_.threads};
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
