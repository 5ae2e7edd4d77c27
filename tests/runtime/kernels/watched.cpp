// Computes attention of several shapes on four threads, with a sanitizer watching, and compares with plain loops.
#include <cstdio>
#include <random>
#include <vector>

#include "attention.cpp"

int main() {
  // Beside a score that is NaN others may lie above the highest one: any weight will do, but no undefined behaviour.
  for (const float score : {140.0f, 3e38f, INFINITY, -INFINITY, NAN}) {
    const volatile Vector weights = power_of_two<false>(all(score));
    (void)weights;
  }
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  double worst = 0;
  const int64_t problems[][7] = {{1, 1, 1, 1, 3000, 64, 64}, {2, 2, 4, 1, 700, 128, 128}, {1, 1, 40, 1, 500, 96, 32},
                                 {3, 1, 3, 2, 333, 40, 24},  {1, 3, 2, 1, 1, 16, 16},     {2, 1, 16, 1, 200, 576, 512},
                                 {1, 2, 7, 1, 131, 20, 19},  {1, 1, 2, 1, 77, 33, 35}};
  for (const auto& [B, K, G, S, T, D, V] : problems)
    for (const int type : {0, 1}) {
      const auto draw = [&](int64_t n) {
        std::vector<float> made(n);
        for (float& x : made) {
          x = normal(random);
          bfloat16 rounded;
          put(&rounded, x);
          x = number(rounded);
        }
        return made;
      };
      const auto stored = [&](const std::vector<float>& from) {
        std::vector<char> made(from.size() * (type ? 2 : 4));
        for (size_t i = 0; i < from.size(); i++)
          if (type)
            put((bfloat16*)made.data() + i, from[i]);
          else
            put((float*)made.data() + i, from[i]);
        return made;
      };
      const std::vector<float> query = draw(B * K * G * S * D), key = draw(B * K * T * D), value = draw(B * K * T * V);
      const std::vector<char> q = stored(query), k = stored(key), v = stored(value);
      std::vector<char> out(B * K * G * S * V * (type ? 2 : 4));
      std::vector<uint8_t> mask(B * T);
      for (uint8_t& x : mask) x = random() % 4 > 0;
      FusedArguments a = {};
      a.query = q.data(), a.key = k.data(), a.value = v.data(), a.out = out.data(), a.mask = mask.data();
      a.B = B, a.K = K, a.G = G, a.S = S, a.T = T, a.D = D, a.V = V;
      const auto dense = [](int64_t* stride, int64_t heads, int64_t tokens, int64_t width) {
        stride[0] = heads * tokens * width, stride[1] = tokens * width, stride[2] = width;
      };
      dense(a.query_stride, K * G, S, D), dense(a.out_stride, K * G, S, V);
      dense(a.key_stride, K, T, D), dense(a.value_stride, K, T, V);
      a.mask_stride[0] = T, a.mask_stride[3] = 1;
      a.causal = 1, a.threads = 4, a.scale = 0.1;
      headwise_attention(&a, type);
      for (int64_t row = 0; row < B * K * G * S; row++) {
        const int64_t b = row / (K * G * S), unit = row / (G * S);
        std::vector<double> made(V);
        double total = 0;
        for (int64_t t = 0; t < T - S + row % S + 1; t++) {
          if (!mask[b * T + t]) continue;
          double score = 0;
          for (int64_t d = 0; d < D; d++) score += double(query[row * D + d]) * key[(unit * T + t) * D + d];
          const double weight = std::exp(0.1 * score);
          total += weight;
          for (int64_t d = 0; d < V; d++) made[d] += weight * value[(unit * T + t) * V + d];
        }
        for (int64_t d = 0; d < V; d++) {
          const double got = type ? number(((bfloat16*)out.data())[row * V + d]) : ((float*)out.data())[row * V + d];
          worst = std::max(worst, std::abs(got - (total ? made[d] / total : 0)) / (type ? 1e-2 : 1e-5));
        }
      }
    }
  puts(worst < 1 ? "no differences" : "differences");
}
