// The values that trellis codes stand for, before any rotation.
//
// Products and sums are not rounded as one, so that the values are those of torch's operations; see encode.cpp.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include <vector>

#include "trellis.h"

namespace {

// Decodes up to BLOCK tokens from `from` on; `copies` has room for their codes and what may be read behind them.
template <class T>
void decode_tokens(const DecoderArguments& a, const std::vector<BlockPlan>& plans, int64_t from, int count,
                   uint8_t* copies) {
  alignas(64) int8_t levels[(BLOCK + 3) * CHANNELS];
  const uint8_t* token[BLOCK + 3];
  float gains[2][BLOCK];
  for (int t = 0; t < count; t++, copies += a.bytes + OVERRUN) {
    memcpy(copies, a.codes + (from + t) * a.stride, a.bytes);
    token[t] = copies;
    gains[0][t] = a.gains[*copies & 15], gains[1][t] = a.gains[*copies >> 4];
  }
  for (int t = count; t < count + 3; t++) token[t] = token[count - 1];
  const Levels tables(a);
  int64_t channel = 0;
  for (const BlockPlan& block : plans) {
    decode_block(block, tables, token, count, levels, CHANNELS);
    const float *gain = gains[channel >= a.part], *scale = a.level_scale + block.column,
                *offset = a.level_offset + block.column;
    for (int t = 0; t < count; t++) {
      T* out = (T*)a.out + (from + t) * a.width + channel;
      for (int c = 0; c < block.width; c++)
        put(out + c, float(levels[t * CHANNELS + c]) * gain[t] * scale[c] + offset[c]);
    }
    channel += block.width;
  }
}

}  // namespace

int headwise_decode(const DecoderArguments* arguments, int type) try {
  const DecoderArguments& a = *arguments;
  const int threads = useful_threads(double(a.rows) * a.width * 0.001, a.threads);
  const std::vector<BlockPlan> plans(a.blocks, a.blocks + a.count);
  const int64_t block_bytes = BLOCK * (a.bytes + OVERRUN), blocks = (a.rows + BLOCK - 1) / BLOCK;
  std::vector<uint8_t> copies(threads * block_bytes);
  return with_type(type, [&](auto q) {
    in_threads(threads, [&](int thread) {
      for (int64_t i = blocks * thread / threads; i < blocks * (thread + 1) / threads; i++) {
        const int count = int(std::min<int64_t>(BLOCK, a.rows - i * BLOCK));
        decode_tokens<decltype(q)>(a, plans, i * BLOCK, count, copies.data() + thread * block_bytes);
      }
    });
  });
} catch (const std::bad_alloc&) {
  return NO_MEMORY;
}
