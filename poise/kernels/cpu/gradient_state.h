// What a worker of the backward pass knows while it works: the call, its scratch memory, the block of queries and chunk
// of keys at hand.
//
// Data and its layout, no arithmetic: piece_gradient.h and gradient.h compute with it. Included once per ISA.
#pragma once
#include "attention.h"
#include "backward.h"
#include "score_terms.h"

namespace poise {
namespace {

POISE_INLINE int64_t saved_place(const ForwardArgs& args, int field, int64_t b, int64_t h, int64_t n) {
  return ((field * args.B + b) * args.H + h) * args.N + n;
}

// Bytes of dQ^T of one block.
inline size_t dqt_bytes(const ForwardArgs& args) { return 4 * kGroups * (size_t)kLanes * rounded_up(args.Dk, 8); }

// Where things lie in one worker's scratch memory. Group buffers follow each other.
struct GradientScratch {
  char* qt[kGroups];  // queries and output gradients in lanes, as the forward pass packs queries ...
  char* gt[kGroups];
  char *q_rows, *g_rows;  // ... and as rows (of pairs of queries), to sum over them
  char* p[kGroups];       // weights and dS of a segment, [kSegment, kLanes] each, cells along the queries
  char* ds[kGroups];
  float *raw, *dp;  // one group's scores, then weights, and dP, then dS, where p and ds hold pairs
  float* spread;    // its distances from the mean score
  float* slope;     // derivative of the cap
  char* ds_pairs;   // dS by pairs of keys
  float* dqt[kGroups];
  float *dk, *dv;       // the chunk's sums, [chunk, wide]
  char *k, *v, *k_mix;  // the chunk's keys and values where the micro-kernels cannot read them in place
  float *strip, *strip_sum, *skewed;
  float* table_sum;

  template <class Cells>
  static size_t layout(const BackwardArgs& back, int64_t chunk, char* base, GradientScratch* out) {
    const ForwardArgs& args = back.call;
    size_t used = 0;
    const auto take = [&](size_t bytes) {
      char* place = base + used;
      used += (bytes + 63) / 64 * 64;
      return place;
    };
    const size_t rows = kScoreRows + kTileRows, k_wide = rounded_up(args.Dk, W), v_wide = rounded_up(args.Dv, W);
    const size_t lane_bytes = 4 * (size_t)kLanes;
    GradientScratch s;
    for (int g = 0; g < kGroups; ++g) {
      s.qt[g] = take(lane_bytes * (size_t)args.Dk);
      s.gt[g] = take(lane_bytes * (size_t)args.Dv);
      s.p[g] = take(lane_bytes * rows);
      s.ds[g] = take(lane_bytes * rows);
      s.dqt[g] = (float*)take(lane_bytes * rounded_up(args.Dk, 8));
    }
    s.q_rows = take(4 * (size_t)(kTile + kLanes) * k_wide);
    s.g_rows = take(4 * (size_t)(kTile + kLanes) * v_wide);
    s.raw = (float*)take(Cells::kPair == 2 ? lane_bytes * rows : 0);
    s.dp = (float*)take(Cells::kPair == 2 ? lane_bytes * rows : 0);
    s.spread = (float*)take(back.d_stats ? lane_bytes * rows : 0);
    s.slope = (float*)take(args.softcap != 0.0f ? lane_bytes * rows : 0);
    s.ds_pairs = take(Cells::kPair == 2 ? lane_bytes * rows : 0);
    s.dk = (float*)take(4 * (size_t)(chunk + kTileRows) * k_wide);
    s.dv = (float*)take(4 * (size_t)(chunk + kTileRows) * v_wide);
    s.k = take(4 * (size_t)chunk * rounded_up(args.Dk, 8));
    s.v = take(4 * (size_t)chunk * rounded_up(args.Dv, 2));
    s.k_mix = take(Cells::kPair == 2 ? 2 * (size_t)(chunk + 2) * rounded_up(args.Dk, 8) : 0);
    s.strip = (float*)take(4 * (size_t)(kSegment + kTile));
    s.strip_sum = (float*)take(4 * (size_t)(kSegment + kTile + 4 * W));
    s.skewed = (float*)take(4 * (size_t)(3 * W * W));
    s.table_sum = (float*)take(args.table ? 4 * (size_t)(2 * args.table_radius + 1) : 0);
    if (out) *out = s;
    return used;
  }
};

// What the statistics pass back to a row's scores, see docs/state.md:
//   dS = w (share (dP - delta) + constant + u (linear + u square) + w own + [sink key] sink) + plain + u plain_linear
// with w = 2^(t - log) the softmax over the keys, p = share w, and u = s - E_w[s].
struct RowTerms {
  float constant[kTile], linear[kTile], square[kTile], own[kTile], sink[kTile];
  float plain[kTile], plain_linear[kTile];
  float shift[kTile];              // E_w[s] - max s
  float log[kTile], share[kTile];  // without a softmax sink: log_sum and 1
};

struct GradientState {
  const BackwardArgs& back;
  const ForwardArgs& args;
  GradientScratch scratch;
  Block block;
  int vecs[kGroups];
  bool touched[kGroups];
  float scale[kTile], sign[kTile];   // as the forward pass splits a query's scale
  float top[kTile], log_sum[kTile];  // what it saved; log_sum is inf for a row without keys: its weights are 0
  float delta[kTile];
  RowTerms terms;
  bool curved;                   // whether any row has more than constant and linear terms
  int64_t b, kv_head, from, to;  // the chunk of keys
  const char *k, *v, *k_mix;     // from its first key on
  int64_t k_row, v_row, k_mix_row;
  int k_cells, v_cells, k_dims, k_wide, v_wide;
  double slope_sum;
  uint64_t kept_words[kSegment];  // per key of a piece: the lanes whose weight dropout keeps
  float* bias_sum = nullptr;      // dS as it is, [kTile, bias_row], if wanted
  int64_t bias_row = 0;

  explicit GradientState(const BackwardArgs& a) : back(a), args(a.call) {}
};

}  // namespace
}  // namespace poise
