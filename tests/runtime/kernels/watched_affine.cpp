// Attends to keys and values in integer codes, of several shapes, on four threads, with a sanitizer watching, and
// compares with plain loops.
#include <cstdio>
#include <random>
#include <vector>

#include "codes/affine.cpp"

namespace {

std::mt19937 draw_from(1);

// Rows of codes of one tensor, and what they stand for.
struct Rows {
  int64_t width, bits, groups, bytes;
  std::vector<uint8_t> bits_of;
  std::vector<double> values;

  Rows(int64_t tokens, int64_t width, int64_t bits, int64_t groups)
      : width(width),
        bits(bits),
        groups(groups),
        bytes((width * bits + 7) / 8 + 4 * groups),
        bits_of(tokens * bytes),
        values(tokens * width) {
    const int64_t codes = bytes - 4 * groups;
    for (int64_t t = 0; t < tokens; t++) {
      uint8_t* row = bits_of.data() + t * bytes;
      for (int64_t i = 0; i < codes; i++) row[i] = draw_from();
      for (int64_t half = 0; half < 2 * groups; half++) {
        const uint16_t number = 0x2c00 + draw_from() % 0x400;  // from 1/16 to 1/8
        memcpy(row + codes + 2 * half, &number, 2);
      }
      for (int64_t d = 0; d < width; d++) {
        int code = 0;
        for (int64_t i = 0; i < bits; i++) code |= (row[(d * bits + i) / 8] >> (d * bits + i) % 8 & 1) << i;
        values[t * width + d] = code;
        if (!groups) continue;
        uint16_t scale, zero;
        memcpy(&scale, row + codes + 2 * (d / (width / groups)), 2);
        memcpy(&zero, row + codes + 2 * (groups + d / (width / groups)), 2);
        values[t * width + d] = double(number_of_half(scale)) * code + number_of_half(zero);
      }
    }
  }
};

}  // namespace

int main() {
  std::normal_distribution<float> normal;
  double worst = 0;
  // sequences, key-value heads, rows of each, new tokens, coded tokens, late ones, D, V, bits, groups of keys, of
  // values, block
  const int64_t problems[][12] = {{1, 2, 3, 1, 700, 0, 64, 64, 4, 1, 1, 0}, {2, 1, 4, 2, 130, 0, 128, 128, 4, 2, 4, 0},
                                  {1, 3, 1, 1, 64, 9, 20, 33, 3, 0, 1, 32}, {1, 1, 6, 8, 320, 70, 64, 128, 4, 0, 2, 64},
                                  {2, 2, 1, 1, 65, 0, 96, 48, 8, 3, 3, 0},  {1, 1, 2, 1, 1, 0, 16, 1, 2, 1, 1, 0},
                                  {1, 1, 2, 3, 0, 5, 32, 16, 2, 0, 1, 16},  {1, 1, 9, 1, 90, 0, 64, 64, 3, 4, 1, 0}};
  for (const auto& [B, K, G, S, N, L, D, V, bits, key_groups, value_groups, block] : problems)
    for (const int type : {0, 1}) {
      const int64_t T = N + L, blocks = block ? N / block : 0;
      Rows keys(B * K * N, D, bits, key_groups), values(B * K * N, V, bits, value_groups);
      std::vector<uint16_t> scales(B * K * blocks * 2 * D);
      for (uint16_t& x : scales) x = 0x2c00 + draw_from() % 0x400;
      for (int64_t i = 0; block && i < B * K * N * D; i++) {
        const uint16_t* of_block = scales.data() + i / D / block * 2 * D;
        keys.values[i] = keys.values[i] * number_of_half(of_block[i % D]) + number_of_half(of_block[D + i % D]);
      }
      const auto stored = [&](std::vector<float>& numbers) {
        std::vector<char> made(numbers.size() * (type ? 2 : 4));
        for (size_t i = 0; i < numbers.size(); i++) {
          bfloat16 rounded;
          put(&rounded, normal(draw_from));
          numbers[i] = number(rounded);
          memcpy(made.data() + i * (type ? 2 : 4), type ? (void*)&rounded : (void*)&numbers[i], type ? 2 : 4);
        }
        return made;
      };
      std::vector<float> query(B * K * G * S * D), late_key(B * K * L * D), late_value(B * K * L * V);
      const std::vector<char> q = stored(query), late_k = stored(late_key), late_v = stored(late_value);
      std::vector<char> out(B * K * G * S * V * (type ? 2 : 4));
      std::vector<uint8_t> mask(B * T);
      for (uint8_t& x : mask) x = draw_from() % 4 > 0;

      AffineArguments c = {};
      Arguments& a = c;
      a.query = q.data(), a.key = keys.bits_of.data(), a.value = values.bits_of.data(), a.out = out.data(),
      a.mask = mask.data();
      a.B = B, a.K = K, a.G = G, a.S = S, a.T = T, a.D = D, a.V = V;
      const auto dense = [](int64_t* stride, int64_t heads, int64_t tokens, int64_t width) {
        stride[0] = heads * tokens * width, stride[1] = tokens * width, stride[2] = width;
      };
      dense(a.query_stride, K * G, S, D), dense(a.out_stride, K * G, S, V);
      dense(a.key_stride, K, N, keys.bytes), dense(a.value_stride, K, N, values.bytes);
      dense(c.late_key_stride, K, L, D), dense(c.late_value_stride, K, L, V),
          dense(c.block_scale_stride, K, blocks, 2 * D);
      a.mask_stride[0] = T, a.mask_stride[3] = 1;
      a.causal = 1, a.threads = 4, a.scale = 0.1;
      c.key_rows = {bits, D / std::max<int64_t>(1, key_groups), key_groups, (D * bits + 7) / 8};
      c.value_rows = {bits, V / value_groups, value_groups, (V * bits + 7) / 8};
      c.coded = N, c.block = block, c.block_scale = block ? scales.data() : nullptr;
      c.late_key = late_k.data(), c.late_value = late_v.data();
      headwise_affine(&c, type);

      for (int64_t row = 0; row < B * K * G * S; row++) {
        const int64_t b = row / (K * G * S), unit = row / (G * S);
        std::vector<double> made(V);
        double total = 0;
        for (int64_t t = 0; t < T - S + row % S + 1; t++) {
          if (!mask[b * T + t]) continue;
          const auto key = [&](int64_t d) {
            return t < N ? keys.values[(unit * N + t) * D + d] : late_key[(unit * L + t - N) * D + d];
          };
          double score = 0;
          for (int64_t d = 0; d < D; d++) score += double(query[row * D + d]) * key(d);
          const double weight = std::exp(0.1 * score);
          total += weight;
          for (int64_t d = 0; d < V; d++)
            made[d] +=
                weight * (t < N ? values.values[(unit * N + t) * V + d] : late_value[(unit * L + t - N) * V + d]);
        }
        for (int64_t d = 0; d < V; d++) {
          const double got = type ? number(((bfloat16*)out.data())[row * V + d]) : ((float*)out.data())[row * V + d];
          const double expected = total ? made[d] / total : 0;
          worst = std::max(worst, std::abs(got - expected) / (1 + std::abs(expected)) / (type ? 1e-2 : 1e-5));
        }
      }
    }
  puts(worst < 1 ? "no differences" : "differences");
}
