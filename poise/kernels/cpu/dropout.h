// Which attention weights dropout keeps: poise/dropout.py's function, for lanes of queries and for one pair.
//
// Philox4x32-10 keyed by the call's seed, counter (b H + h, i, j / 4, 0), word j % 4: a pure function of absolute
// indices, so that tiles, threads and implementations agree. Included once per ISA, and by the exact rows.
#pragma once
#include "forward.h"
#include "vec.h"

namespace poise {
namespace {

constexpr uint32_t kPhilox[2] = {0xD2511F53u, 0xCD9E8D57u}, kWeyl[2] = {0x9E3779B9u, 0xBB67AE85u};
constexpr int kRounds = 10;

// Lanes are whatever holds a word and multiplies to 64 bits: wide vector lanes, whose upper halves are ignored.
template <class Lanes, class Multiply>
POISE_INLINE void philox(Lanes (&c)[4], uint64_t seed, Multiply&& multiply) {
  uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
#pragma GCC unroll 10
  for (int round = 0; round < kRounds; ++round) {
    const Lanes first = multiply(c[0], kPhilox[0]), second = multiply(c[2], kPhilox[1]);
    c[0] = (second >> 32) ^ c[1] ^ key[0];
    c[2] = (first >> 32) ^ c[3] ^ key[1];
    c[1] = second;
    c[3] = first;
    key[0] += kWeyl[0];
    key[1] += kWeyl[1];
  }
}

inline bool kept(const ForwardArgs& args, int64_t head, int64_t i, int64_t j) {
  uint64_t c[4] = {(uint32_t)head, (uint32_t)i, (uint32_t)(j / 4), 0};
  philox(c, args.seed, [](uint64_t x, uint32_t by) { return (x & 0xffffffffu) * by; });
  return (uint32_t)c[j % 4] >= args.drop_below;
}

// words[k]: a bit for each of N vectors of queries from `first` on, set if the weight of key + k is kept.
template <int N>
inline void kept_lanes(const ForwardArgs& args, int64_t head, int64_t first, int64_t key, int keys, uint64_t* words) {
  vw even;
  for (int c = 0; c < W / 2; ++c) even[c] = (uint64_t)(2 * c);
  const auto multiply = [](vw x, uint32_t by) POISE_INLINE_LAMBDA { return multiply_low(x, vw{} + by); };
  for (int64_t quad = key / 4; quad * 4 < key + keys; ++quad) {
    uint64_t bits[4] = {0, 0, 0, 0};
#pragma GCC unroll 8
    for (int half = 0; half < 2 * N; ++half) {  // even lanes of a vector, then odd ones
      vw c[4] = {vw{} + (uint64_t)head, even + (uint64_t)(first + half / 2 * W + half % 2), vw{} + (uint64_t)quad,
                 vw{}};
      philox(c, args.seed, multiply);
      for (int word = 0; word < 4; ++word)
        bits[word] |= (uint64_t)low_halves_reach(c[word], args.drop_below) << (half / 2 * W + half % 2);
    }
    for (int word = 0; word < 4; ++word) {
      const int64_t k = quad * 4 + word - key;
      if (k >= 0 && k < keys) words[k] = bits[word];
    }
  }
}

}  // namespace
}  // namespace poise
