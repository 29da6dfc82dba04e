// Gradients computed again, one visible pair at a time, in double precision: for results that are not finite.
#pragma once
#include "backward.h"

namespace poise {

// Writes dQ, and the scale's and the sink's gradients, of the queries first + r whose bit r is set in `rows`.
void exact_query_gradients(const BackwardArgs& args, int64_t b, int64_t h, int64_t first, uint64_t rows);

// Writes dK (key: true) or dV of key n of a key/value head.
void exact_key_gradient(const BackwardArgs& args, int64_t b, int64_t kv_head, int64_t n, bool key);

// One entry of a dense bias' gradient: dS summed over what the entry, of `sizes`, is broadcast to.
float exact_bias_gradient(const BackwardArgs& args, const int64_t* sizes, const int64_t* at);

// The sums over diagonals of one query head and keys [from, to): the table's [2R + 1], and the slope's. Null: not
// wanted.
void exact_distance_gradients(const BackwardArgs& args, int64_t b, int64_t h, int64_t from, int64_t to, float* table,
                              float* slope);

}  // namespace poise
