// The backward kernels' contract: everything one backward call needs, as plain data, beside the forward call itself.
//
// With s the scores, p their softmax (sink included), O = P V and dP = dO V^T:
//   dS = p (dP - delta) + what the statistics pass back,   delta_i = sum over d of dO_id O_id
//   dZ = dS (1 - tanh^2(z / softcap)),   dQ = scale dZ K,   dK = (scale dZ)^T Q,   dV = P^T dO
// (docs/state.md has the statistics' part). Scores are computed again from q, k and what the forward call saved.
#pragma once
#include "forward.h"

namespace poise {

struct BackwardArgs {
  ForwardArgs call;      // as it was; call.out is read, call.stats is the statistics if d_stats is given
  Rows d_out;            // [B, H, N, Dv], of q's dtype
  const float* saved;    // [kSaved, B, H, N]
  const float* d_stats;  // [kFields, B, H, N], or null

  // Results. Null data: not wanted.
  Rows d_q, d_k, d_v;
  float* d_table;   // [H, 2R + 1]
  float* d_slopes;  // [H]
  float* d_scale;   // [B, H, N]
  float* d_sink;    // [B, H, N]

  // Set by the kernels themselves, whose d_table and d_slopes are [B, chunks, ...]: each task has its own.
  bool products;    // whether kSavedTop is a product q.k, not a score
  uint64_t serial;  // tells one call from another
};

// The gradient of one dense bias: dS summed over the dims in which it broadcasts.
struct DenseBiasGradient {
  float* data;       // packed [sizes]
  int64_t sizes[4];  // of [B, H, N, M], or 1
};

// The keys of a head are differentiated in chunks, small enough for caches and many enough for threads: of how many
// keys, and how many there are, by the call's shape alone.
int64_t backward_chunk(const ForwardArgs& call);
int64_t backward_chunks(const ForwardArgs& call);

// Null on success, else a static message, as forward.
const char* backward(const BackwardArgs& args, const Threads& threads);
const char* bias_gradient(const BackwardArgs& args, const DenseBiasGradient& bias, const Threads& threads);

}  // namespace poise
