// Who sees whom, for one block of queries: from the lowered mask to runs of keys and, where needed, bits per key.
//
// A block is kTile queries of one head. Its keys come in segments of at most kSegment; a segment that some query sees
// only in part gets one 64-bit word per key (bit = query within the block), whatever the mask was made of. A few
// scalar instructions per key; knows nothing of scores.
#pragma once
#include <cstddef>
#include <cstring>

#include "forward.h"
#include "vec.h"

namespace poise {
namespace {

constexpr int kSegment = 256;  // keys processed at once

template <class T>
inline T lesser(T a, T b) {
  return b < a ? b : a;
}
template <class T>
inline T greater(T a, T b) {
  return a < b ? b : a;
}

struct Block {
  int64_t b, h, first;  // batch, head, first query
  int queries;
  int64_t position;                 // i' of the first query
  int32_t low[kTile], high[kTile];  // query r sees keys in [low, high), further masks aside
  int32_t widest_low, widest_high;  // over all its queries: outside, nobody sees anything ...
  int32_t common_low, common_high;  // ... inside, everybody sees everything (intervals only)
};

struct Segment {
  int32_t key;  // first key
  int keys;
  bool tiled;
  int32_t pattern[kSegment / kTile + 1];  // per tile from key / kTile on: a bit pattern, or -1 for full
};

inline Block make_block(const ForwardArgs& args, int64_t b, int64_t h, int64_t first) {
  Block block;
  block.b = b;
  block.h = h;
  block.first = first;
  block.queries = (int)lesser<int64_t>(kTile, args.N - first);
  block.position = first + (args.offsets ? args.offsets[b] : args.offset);
  const int64_t start = args.start ? greater<int64_t>(args.start[b], 0) : 0;
  const int64_t end = args.end ? lesser<int64_t>(args.end[b], args.M) : args.M;
  const int32_t* table = args.rows ? args.rows + b * args.rows_b + h * args.rows_h + 2 * first : nullptr;
  block.widest_low = (int32_t)args.M;
  block.widest_high = 0;
  block.common_low = 0;
  block.common_high = (int32_t)args.M;
  for (int r = 0; r < block.queries; ++r) {
    const int64_t position = block.position + r;
    int64_t low = start, high = end;
    if (args.left < kUnbounded) low = greater(low, position - args.left);
    if (args.right < kUnbounded) high = lesser(high, position + args.right + 1);
    if (table) {
      low = greater<int64_t>(low, table[2 * r]);
      high = lesser<int64_t>(high, table[2 * r + 1]);
    }
    if (low >= high) low = high = 0;
    block.low[r] = (int32_t)low;
    block.high[r] = (int32_t)high;
    block.common_low = greater(block.common_low, (int32_t)low);
    block.common_high = lesser(block.common_high, (int32_t)high);
    if (low < high) {
      block.widest_low = lesser(block.widest_low, (int32_t)low);
      block.widest_high = greater(block.widest_high, (int32_t)high);
    }
  }
  return block;
}

// Calls visit(segment) for the block's segments within [from, to), in ascending order of keys. Segments start at
// multiples of `align` (1 or 2, which divides `from`): then the first may hold a key that nobody sees.
template <class Visit>
inline void for_segments(const ForwardArgs& args, const Block& block, int64_t from, int64_t to, int align,
                         Visit&& visit) {
  const int64_t high = lesser<int64_t>(block.widest_high, to);
  int64_t low = greater<int64_t>(block.widest_low, from);
  low -= low % align;
  Segment segment;
  if (!args.tile_ptr) {
    segment.tiled = false;
    for (int64_t key = low; key < high; key += kSegment) {
      segment.key = (int32_t)key;
      segment.keys = (int)lesser<int64_t>(kSegment, high - key);
      visit(segment);
    }
    return;
  }
  const int32_t* ptr = args.tile_ptr + block.b * args.tile_b + block.h * args.tile_h + block.first / kTile;
  segment.tiled = true;
  segment.keys = 0;
  // Runs that adjoin share a segment; a segment starts anew where they do not, or when it is full.
  for (int64_t e = ptr[0]; e < ptr[1]; ++e) {
    const int32_t* run = args.tile_runs + 3 * e;
    for (int64_t tile = greater<int64_t>(run[0], low / kTile); tile < (int64_t)run[0] + run[1]; ++tile) {
      const int64_t key = greater(tile * kTile, low), end = lesser((tile + 1) * kTile, high);
      if (key >= end) break;
      if (segment.keys && (segment.key + segment.keys != key || end - segment.key > kSegment)) {
        visit(segment);
        segment.keys = 0;
      }
      if (!segment.keys) segment.key = (int32_t)key;
      segment.pattern[tile - segment.key / kTile] = run[2];
      segment.keys = (int)(end - segment.key);
    }
  }
  if (segment.keys) visit(segment);
}

// Hacker's Delight's recursive transpose: word r, bit c <-> word c, bit r.
inline void transpose_bits(uint64_t* word) {
  uint64_t mask = 0x00000000ffffffffull;
  for (int j = 32; j; j >>= 1, mask ^= mask << j)
    for (int k = 0; k < 64; k = ((k | j) + 1) & ~j) {
      const uint64_t swap = ((word[k] >> j) ^ word[k | j]) & mask;
      word[k] ^= swap << j;
      word[k | j] ^= swap;
    }
}

// And the words of `keys` keys from `key` on with a dense bool mask, read where it lies.
inline void and_dense(const DenseMask& mask, const Block& block, int64_t key, int keys, uint64_t* words) {
  const uint8_t* corner = mask.data + block.b * mask.b + block.h * mask.h + block.first * mask.n + key * mask.m;
  const int queries = mask.n ? block.queries : 1;  // rows that are the same are read once
  for (int part = 0; part < keys; part += 64) {
    uint64_t bits[64];
    const int width = lesser(64, keys - part);
    for (int r = 0; r < queries; ++r) {
      const uint8_t* row = corner + r * mask.n + part * mask.m;
      uint64_t word = 0;
      if (mask.m == 1 && width == 64)
        word = nonzero_bytes(row);
      else
        for (int c = 0; c < width; ++c) word |= (uint64_t)(row[c * mask.m] != 0) << c;
      bits[r] = word;
    }
    if (!mask.n) {
      for (int c = 0; c < width; ++c) words[part + c] &= (uint64_t)0 - ((bits[0] >> c) & 1);
      continue;
    }
    for (int r = queries; r < 64; ++r) bits[r] = 0;
    transpose_bits(bits);
    for (int c = 0; c < width; ++c) words[part + c] &= bits[c];
  }
}

// Fills words[k] with the queries that see key segment.key + k; false (and no words) if every query sees every key.
inline bool visible_words(const ForwardArgs& args, const Block& block, const Segment& segment, uint64_t* words) {
  const int32_t key = segment.key, end = key + segment.keys;
  const bool partial_rows = block.common_low > key || block.common_high < end;
  bool partial_tiles = false;
  if (segment.tiled)
    for (int t = 0; t <= (end - 1) / kTile - key / kTile; ++t) partial_tiles |= segment.pattern[t] >= 0;
  if (!partial_rows && !partial_tiles && !args.num_masks) return false;

  const uint64_t everyone = block.queries == 64 ? ~0ull : (1ull << block.queries) - 1;
  if (partial_rows) {
    // Every query flips its bit where its keys begin and where they end; a running xor turns flips into intervals.
    uint64_t flips[kSegment + 1];
    memset(flips, 0, sizeof(uint64_t) * (segment.keys + 1));
    for (int r = 0; r < block.queries; ++r) {
      const int32_t low = lesser(greater(block.low[r], key), end), high = lesser(greater(block.high[r], key), end);
      flips[low - key] ^= 1ull << r;
      flips[high - key] ^= 1ull << r;
    }
    uint64_t word = 0;
    for (int k = 0; k < segment.keys; ++k) words[k] = word ^= flips[k];
  } else {
    for (int k = 0; k < segment.keys; ++k) words[k] = everyone;
  }
  if (partial_tiles)
    for (int32_t k = key; k < end; ++k) {
      const int32_t pattern = segment.pattern[k / kTile - key / kTile];
      if (pattern >= 0) words[k - key] &= args.patterns[(int64_t)pattern * kTile + k % kTile];
    }
  for (int i = 0; i < args.num_masks; ++i) and_dense(args.masks[i], block, key, segment.keys, words);
  return true;
}

}  // namespace
}  // namespace poise
