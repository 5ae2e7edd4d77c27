// What the kernels share that read tokens in trellis codes: the parts of a call, and where its tokens are.
#pragma once

#include <algorithm>
#include <cstring>

#include "calls.h"
#include "levels.h"

namespace {

constexpr int SINKS = HEADWISE_SINKS;  // tokens without codes
constexpr int TURN = HEADWISE_TURN;    // slots that share a rotated query
constexpr int KEYS = 16;               // tokens whose keys are computed at a time
static_assert(TURN % BLOCK == 0, "the tokens of a block share a rotated query");

struct StoredTokens {
  // K is 1 and G all query heads. The keys are the codes, uint8 [B, T, bytes], and the values those without codes, bfloat16
  // [B, SINKS, values of a token].
  Arguments call;
  const int64_t* first;              // [B], the slot of each sequence's first token
  const CodedBlock* blocks;          // [count]
  const int8_t* tables;              // [9, 256], whole levels of the windows of codes of so many bits
  const float* gains;                // [16], of each gain number
  const float *scale, *offset;       // [columns], of a whole level; 0 in columns that pad
  const float *turn_cos, *turn_sin;  // [TURN, half], rotation by a number of slots
  const float *cos, *sin;            // [slots, frequencies], rotation by a slot
  const int64_t* frequency;          // [P / 2], each pair's column in those
  int64_t count, P, bytes, frequencies;
};

// Memory for the codes of a block of tokens.
inline int64_t copies_bytes(const StoredTokens& c) { return BLOCK * (c.bytes + OVERRUN); }

// Where the codes of a block of tokens are, with the last one's three times more behind them, and both gains of each token.
inline void find_tokens(const StoredTokens& c, int64_t b, int64_t from, int count, uint8_t* copies, const uint8_t** token,
                        float* first_gain, float* second_gain) {
  const uint8_t* codes = (const uint8_t*)c.call.key + b * c.call.key_stride[0];
  for (int t = 0; t < count; t++) token[t] = codes + (from + t) * c.call.key_stride[2];
  // What lies behind the last token may be no memory of this process.
  const uint8_t* end = codes + (c.call.T - 1) * c.call.key_stride[2] + c.bytes;
  for (int t = count - 1; t >= 0 && token[t] + c.bytes + OVERRUN > end; t--) {
    uint8_t* copy = copies + t * (c.bytes + OVERRUN);
    memcpy(copy, token[t], c.bytes);
    memset(copy + c.bytes, 0, OVERRUN);
    token[t] = copy;
  }
  for (int t = count; t < count + 3; t++) token[t] = token[count - 1];
  for (int t = 0; t < BLOCK; t++) {
    const uint8_t numbers = *token[std::min(t, count - 1)];
    first_gain[t] = c.gains[numbers & 15], second_gain[t] = c.gains[numbers >> 4];
  }
}

}  // namespace
