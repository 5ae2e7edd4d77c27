// Attends to coded latents of several shapes on four threads, with a sanitizer watching, and compares with plain loops.
#include <cstdio>
#include <random>
#include <vector>

#include "codes/coded.cpp"

int main() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  double worst = 0;
  constexpr int FREQUENCIES = 8;
  // sequences, heads, new tokens, tokens, R, P, whether queries have content
  const int64_t problems[][7] = {{1, 9, 1, 900, 31, 32, 0}, {2, 3, 2, 130, 16, 0, 1}, {3, 5, 1, 70, 20, 36, 1},
                                 {1, 1, 1, 1, 1, 2, 1},     {2, 9, 8, 65, 33, 6, 1},  {1, 4, 1, 5, 64, 64, 0}};
  for (const auto& [B, H, S, T, R, P, has_content] : problems)
    for (const int type : {0, 1}) {
      const int64_t half = up(P / 2, CHANNELS), content = up(R, CHANNELS), columns = content + 2 * half,
                    D = P + (has_content ? R : 0);
      std::vector<CodedBlock> blocks;
      int32_t column = 0, bit = 0;
      for (const int64_t width : {R, P / 2, P / 2})
        for (int64_t first = 0; first < width; first += CHANNELS, column += CHANNELS) {
          const int32_t n = int32_t(std::min<int64_t>(CHANNELS, width - first)), bits = 1 + random() % 8;
          blocks.push_back({column, n, bits, bit + bits});
          bit += n * bits;
        }
      const int64_t bytes = 1 + (bit + 7) / 8;
      const auto draw = [&](int64_t n) {
        std::vector<float> made(n);
        for (float& x : made) x = normal(random);
        return made;
      };
      std::vector<uint8_t> codes(B * T * bytes), mask(B * T);
      for (uint8_t& x : codes) x = random();
      for (uint8_t& x : mask) x = random() % 4 > 0;
      std::vector<int8_t> tables(9 * 256);
      for (int8_t& x : tables) x = int(random() % 255) - 127;
      std::vector<int8_t> pairs(2 << 17);
      for (int b = 1; b <= 8; b++)
        for (int both = 0, size = 256 << b; both < size; both++) {
          pairs[2 * (size + both)] = tables[256 * b + (both >> b)];
          pairs[2 * (size + both) + 1] = tables[256 * b + both % 256];
        }
      std::vector<float> gains(16), scale(columns), offset = draw(columns), turn(2 * TURN * half),
                                                    angles(2 * T * FREQUENCIES);
      for (int i = 0; i < 16; i++) gains[i] = 0.5f + i / 16.0f;
      for (float& x : scale) x = 0.01f + random() % 100 / 5e3f;
      std::vector<int64_t> frequency(P / 2), first(B);
      for (int64_t& f : frequency) f = random() % FREQUENCIES;
      for (int64_t& f : first) f = random() % T;
      const auto angle = [](int64_t slot, int64_t f) { return double(slot) * (f + 1) / 10; };
      for (int64_t t = 0; t < T; t++)
        for (int f = 0; f < FREQUENCIES; f++) {
          angles[t * FREQUENCIES + f] = std::cos(angle(t, f));
          angles[(T + t) * FREQUENCIES + f] = std::sin(angle(t, f));
        }
      for (int64_t t = 0; t < TURN; t++)
        for (int64_t d = 0; d < P / 2; d++) {
          turn[t * half + d] = std::cos(angle(t, frequency[d]));
          turn[(TURN + t) * half + d] = std::sin(angle(t, frequency[d]));
        }
      const int64_t first_tokens = 1 + random() % 4;
      std::vector<bfloat16> wide(B * first_tokens * (R + P)), narrow(B * H * S * D);
      for (bfloat16& x : wide) put(&x, normal(random));
      std::vector<float> query = draw(B * H * S * D);
      for (size_t i = 0; i < query.size(); i++) put(&narrow[i], query[i]), query[i] = number(narrow[i]);
      std::vector<char> out(B * H * S * (R + 1) * (type ? 2 : 4));

      CodedArguments c = {};
      Arguments& a = c;
      a.query = type ? (void*)narrow.data() : (void*)query.data();
      a.key = codes.data(), a.value = wide.data(), a.out = out.data(), a.mask = mask.data();
      a.B = B, a.K = 1, a.G = H, a.S = S, a.T = T, a.D = D, a.V = R;
      a.query_stride[0] = H * S * D, a.query_stride[1] = S * D, a.query_stride[2] = D;
      a.out_stride[0] = H * S * (R + 1), a.out_stride[1] = S * (R + 1), a.out_stride[2] = R + 1;
      a.key_stride[0] = T * bytes, a.key_stride[2] = bytes;
      a.mask_stride[0] = T, a.mask_stride[3] = 1;
      a.causal = 1, a.threads = 4, a.scale = 0.1;
      c.first = first.data(), c.blocks = blocks.data(), c.tables = tables.data(), c.pairs = pairs.data(),
      c.gains = gains.data();
      c.level_scale = scale.data(), c.level_offset = offset.data(), c.turn_cos = turn.data(),
      c.turn_sin = turn.data() + TURN * half;
      c.cos = angles.data(), c.sin = angles.data() + T * FREQUENCIES, c.frequency = frequency.data();
      c.count = blocks.size(), c.P = P, c.bytes = bytes, c.frequencies = FREQUENCIES, c.wide = first_tokens,
      c.has_sums = 1;
      // Of one type the codes lie in pages, the first of which is at the end of memory.
      constexpr int64_t PAGE = 5;
      const int64_t count = (T + PAGE - 1) / PAGE;
      std::vector<uint8_t> pages(B * count * PAGE * bytes);
      std::vector<int32_t> table(B * count), lengths(B, T);
      if (type) {
        for (int64_t i = 0; i < B * count; i++) table[i] = int32_t(B * count - 1 - i);
        for (int64_t b = 0; b < B; b++)
          for (int64_t t = 0; t < T; t++)
            memcpy(&pages[(table[b * count + t / PAGE] * PAGE + t % PAGE) * bytes], &codes[(b * T + t) * bytes], bytes);
        a.key = pages.data(), a.key_stride[0] = PAGE * bytes;
        for (int32_t& length : lengths) length = S + random() % (T - S + 1);
        a.lengths = lengths.data();
        c.table = table.data(), c.table_stride = count, c.page = PAGE, c.pages = B * count;
      }
      headwise_coded(&c, type);

      for (int64_t row = 0; row < B * H * S; row++) {
        const int64_t b = row / (H * S);
        std::vector<double> made(R + 1);
        double total = 0;
        for (int64_t t = 0; t < lengths[b] - S + row % S + 1; t++) {
          if (!mask[b * T + t]) continue;
          const uint8_t* of_token = codes.data() + (b * T + t) * bytes;
          std::vector<double> value(R + P);
          int64_t channel = 0;
          for (const CodedBlock& block : blocks)
            for (int i = 0; i < block.width; i++, channel++) {
              const int begin = block.first + i * block.bits;
              int window = 0;
              for (int k = begin; k < begin + 8; k++) window = window << 1 | (of_token[k / 8] >> (7 - k % 8) & 1);
              const double gain = gains[channel < R ? *of_token & 15 : *of_token >> 4];
              value[channel] =
                  offset[block.column + i] + double(scale[block.column + i]) * gain * tables[256 * block.bits + window];
              if (t >= first[b] && t < first[b] + c.wide)
                value[channel] = number(wide[(b * c.wide + t - first[b]) * (R + P) + channel]);
            }
          double score = 0;
          const float* q = query.data() + row * D;
          for (int64_t d = 0; has_content && d < R; d++) score += double(*q++) * value[d];
          for (int64_t d = 0; d < P / 2; d++) {
            const double x = value[R + d], y = value[R + P / 2 + d], turned = angle(t, frequency[d]);
            score += q[d] * (x * std::cos(turned) - y * std::sin(turned)) +
                     q[P / 2 + d] * (y * std::cos(turned) + x * std::sin(turned));
          }
          const double weight = std::exp(0.1 * score);
          total += weight;
          for (int64_t d = 0; d < R; d++) made[d] += weight * value[d];
        }
        made[R] = total;
        for (int64_t d = 0; d <= R; d++) {
          const double got =
              type ? number(((bfloat16*)out.data())[row * (R + 1) + d]) : ((float*)out.data())[row * (R + 1) + d];
          worst = std::max(worst, std::abs(got - (total ? made[d] / total : 0)) / (type ? 3e-2 : 3e-5));
        }
      }
    }
  puts(worst < 1 ? "no differences" : "differences");
}
