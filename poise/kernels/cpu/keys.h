// Where keys and values lie: rows of a tensor, or of pages that a table names; and int8 ones' factors.
//
// The only file that reads the page table. Knows nothing of what rows are for.
#pragma once
#include "tile.h"

namespace poise {
namespace {

// Where key j of a sequence stands: in which entry of k's and v's first dim, and in which row of it.
struct KeyPlace {
  int64_t entry, row;
};

POISE_INLINE KeyPlace place_of(const ForwardArgs& args, int64_t b, int64_t j) {
  if (!args.pages) return {b, j};
  return {args.pages[b * args.pages_b + j / args.page], j % args.page};
}

POISE_INLINE const char* key_row(const ForwardArgs& args, const Rows& rows, int64_t b, int64_t g, int64_t j) {
  const KeyPlace at = place_of(args, b, j);
  return row_at(rows, args.kv_dtype, at.entry, g, at.row);
}

POISE_INLINE const float* key_scale(const ForwardArgs& args, const Scales& scales, int64_t b, int64_t g, int64_t j) {
  const KeyPlace at = place_of(args, b, j);
  return scales.data + at.entry * scales.b + g * scales.h + at.row;
}

// Calls visit(i, count) for pieces [i, i + count) of the keys from `key` on that follow each other in memory.
template <class Visit>
inline void for_pages(const ForwardArgs& args, int64_t key, int keys, Visit&& visit) {
  for (int i = 0; i < keys;) {
    int count = keys - i;
    if (args.pages && count > args.page - (key + i) % args.page) count = (int)(args.page - (key + i) % args.page);
    visit(i, count);
    i += count;
  }
}

// Rows of `dims` elements from their pages to one place, packed.
inline void gather_rows(const ForwardArgs& args, const Rows& rows, int64_t b, int64_t g, int64_t key, int keys,
                        int64_t dims, char* to) {
  const int64_t bytes = dims * size_of(args.kv_dtype), step = rows.n * size_of(args.kv_dtype);
  for_pages(args, key, keys, [&](int i, int count) {
    const char* from = key_row(args, rows, b, g, key + i);
    for (int r = 0; r < count; ++r) memcpy(to + (i + r) * bytes, from + r * step, bytes);
  });
}

// Rows of floats, `wide` apart, times their keys' factors.
inline void scale_rows(const ForwardArgs& args, const Scales& scales, int64_t b, int64_t g, int64_t key, int keys,
                       int dims, int wide, float* rows) {
  for_pages(args, key, keys, [&](int i, int count) {
    const float* factor = key_scale(args, scales, b, g, key + i);
    for (int r = 0; r < count; ++r)
      for (int d = 0; d < dims; ++d) rows[(int64_t)(i + r) * wide + d] *= factor[r];
  });
}

}  // namespace
}  // namespace poise
