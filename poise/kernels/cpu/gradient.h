// Backward attention of blocks of queries against one chunk of keys: the kernel proper, as a sequence of steps.
//
// Per segment of keys and group of lanes: weights P again from what the forward pass saved, dP = V dO^T, dS from both,
// dQ^T += K^T dS; then, for all groups at once, dV += P dO and dK += dS Q. Everything is transposed as in the forward
// pass (attention.h): queries lie in the lanes. Which chunks there are and how their dQ come together is
// gradient_run.h's; what is not finite in the end is computed again by exact_gradient.cpp. Included once per ISA.
#pragma once
#include "attention.h"
#include "backward.h"
#include "exact_gradient.h"
#include "score_terms.h"

namespace poise {
namespace {

constexpr int kStep = 64;  // keys whose weights are differentiated at once

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
//   dS = p (dP + constant + u (linear + u square) + p own + [sink key] sink) + plain + u plain_linear
// with u = s - E_p[s] over the keys.
struct RowTerms {
  float constant[kTile], linear[kTile], square[kTile], own[kTile], sink[kTile], plain[kTile], plain_linear[kTile];
  float shift[kTile];  // E_p[s] - max s
};

template <class Cells, bool STATS, bool FINAL>
struct Gradient {
  static constexpr bool kPairs = Cells::kPair == 2;
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

  Gradient(const BackwardArgs& a, int64_t chunk, char* memory) : back(a), args(a.call) {
    GradientScratch::layout<Cells>(a, chunk, memory, &scratch);
    k_cells = (int)(args.Dk + Cells::kPair - 1) / Cells::kPair;
    v_cells = (int)(args.Dv + Cells::kPair - 1) / Cells::kPair;
    k_dims = (int)rounded_up(args.Dk, 8);
    k_wide = (int)rounded_up(args.Dk, W);
    v_wide = (int)rounded_up(args.Dv, W);
  }

  int groups() const { return (block.queries + kLanes - 1) / kLanes; }

  // --- A chunk of keys ---
  void begin_chunk(int64_t batch, int64_t head, int64_t first, int64_t last) {
    b = batch, kv_head = head, from = first, to = last;
    const int64_t width = size_of(args.dtype);
    k = row_at(args.k, args.dtype, b, kv_head, from);
    v = row_at(args.v, args.dtype, b, kv_head, from);
    k_row = args.k.n * width, v_row = args.v.n * width;
    const int keys = (int)(to - from), dk = (int)args.Dk, dv = (int)args.Dv;
    const char* k_natural = k;
    const int64_t k_natural_row = k_row;
    if constexpr (kPairs) {
#if defined(__AVX512BF16__)
      interleave_keys(k_natural, k_natural_row, keys, dk, k_dims, scratch.k_mix);
      if (dk % 2) {
        pad_rows(k, k_row, keys, dk, 2 * k_cells, scratch.k);
        k = scratch.k, k_row = 4 * k_cells;
      }
      if (dv % 2) {
        pad_rows(v, v_row, keys, dv, 2 * v_cells, scratch.v);
        v = scratch.v, v_row = 4 * v_cells;
      }
#endif
      k_mix = scratch.k_mix, k_mix_row = 4 * k_dims;
    } else {
      (void)k_natural_row;
      if (args.dtype != Dtype::f32 || dk % 8) {
        widen_rows(k_natural, k_row, args.dtype, keys, dk, k_dims, (float*)scratch.k);
        k = scratch.k, k_row = 4 * k_dims;
      }
      if (args.dtype != Dtype::f32) {
        widen_rows(v, v_row, args.dtype, keys, dv, dv, (float*)scratch.v);
        v = scratch.v, v_row = 4 * dv;
      }
      k_mix = k, k_mix_row = k_row;
    }
    if (back.d_k.data) memset(scratch.dk, 0, 4 * (size_t)(keys + kTileRows) * k_wide);
    if (back.d_v.data) memset(scratch.dv, 0, 4 * (size_t)(keys + kTileRows) * v_wide);
  }

  void begin_head() {
    if (args.table) memset(scratch.table_sum, 0, 4 * (size_t)(2 * args.table_radius + 1));
    slope_sum = 0.0;
  }

  // Whether any query of the block from `first` on may see a key of the chunk; fills `block`.
  bool reach(int64_t h, int64_t first) {
    block = make_block(args, b, h, first);
    return block.widest_low < to && block.widest_high > from;
  }

  // --- A block of queries ---
  void begin_block(bool seen) {
    read_rows();
    if (STATS && seen) read_terms();
    for (int g = 0; g < groups(); ++g) {
      const int queries = lesser(kLanes, block.queries - g * kLanes);
      vecs[g] = (queries + W - 1) / W;
      touched[g] = false;
    }
    if (!seen) return;
    static const Ones ones;
    pack(args.q, (int)args.Dk, sign, args.scale_rows ? scale : nullptr, scratch.qt, scratch.q_rows, k_wide);
    pack(back.d_out, (int)args.Dv, ones.at, nullptr, scratch.gt, scratch.g_rows, v_wide);
  }

  // The chunk's keys for the block.
  void attend() {
    for_segments(args, block, from, to, Cells::kPair, [&](const Segment& segment) {
      uint64_t words[kSegment];
      const bool partial = visible_words(args, block, segment, words);
      if (args.table || args.slopes) {
        fill_strip(args, block, segment, scratch.strip);
        memset(scratch.strip_sum, 0, 4 * (size_t)(kSegment + kTile + 4 * W));
      }
      Contribution to_v[kGroups], to_k[kGroups];
      int count = 0, last = 0;
      for (int g = 0; g < groups(); ++g) {
        int begin = 0, end = segment.keys;
        if (partial && !narrow(words, g, begin, end)) continue;
        const uint64_t* mine = partial ? words : nullptr;
        switch (vecs[g]) {
          case 1:
            attend_group<1>(g, segment, begin, end, mine);
            break;
          case 2:
            attend_group<2>(g, segment, begin, end, mine);
            break;
          case 3:
            if constexpr (kGroupVecs >= 3) attend_group<3>(g, segment, begin, end, mine);
            break;
          case 4:
            if constexpr (kGroupVecs >= 4) attend_group<4>(g, segment, begin, end, mine);
            break;
        }
        const int stop = (int)rounded_up(end, kTileRows), queries = lesser(kLanes, block.queries - g * kLanes);
        const int cells = (queries + Cells::kPair - 1) / Cells::kPair, first = g * kLanes / Cells::kPair;
        to_v[count] = {scratch.p[g], scratch.g_rows + 4 * (size_t)first * v_wide, begin, stop, cells};
        to_k[count] = {scratch.ds[g], scratch.q_rows + 4 * (size_t)first * k_wide, begin, stop, cells};
        last = greater(last, stop);
        ++count;
      }
      if (!count) return;
      const int64_t place = segment.key - from;
      constexpr ptrdiff_t row = 4 * kLanes / Cells::kPair;
      if (back.d_v.data) add_products<Cells>(to_v, count, last, row, 4 * v_wide, scratch.dv + place * v_wide, v_wide);
      if (back.d_k.data) add_products<Cells>(to_k, count, last, row, 4 * k_wide, scratch.dk + place * k_wide, k_wide);
      if (back.d_table || back.d_slopes) add_strip(segment);
    });
  }

  // --- The block's dQ^T, group by group in memory of its own: what several chunks add up to ---
  void add_to(float* sums) const {
    for (int g = 0; g < groups(); ++g, sums += kLanes * k_dims)
      if (touched[g])
        for (int i = 0; i < kLanes * k_dims; i += W) store(sums + i, load(sums + i) + load(scratch.dqt[g] + i));
  }

  // dQ, and what else a row's gradients make; sums null: the scratch memory's own.
  void finish_rows(const float* sums) {
    uint64_t bad = 0;
    for (int g = 0; g < groups(); ++g) {
      float* mine = scratch.dqt[g];
      if (sums)
        memcpy(mine, sums + g * kLanes * k_dims, 4 * (size_t)kLanes * k_dims);
      else if (!touched[g])
        memset(mine, 0, 4 * (size_t)kLanes * k_dims);
      const int queries = lesser(kLanes, block.queries - g * kLanes), first = g * kLanes;
      const int64_t row = block.first + first;
      if (back.d_scale)
        for (int r = 0; r < queries; ++r) {
          const char* q = row_at(args.q, args.dtype, b, block.h, row + r);
          float sum = 0.0f;
          for (int d = 0; d < args.Dk; ++d) sum += element(q, args.dtype, d) * mine[d * kLanes + r];
          back.d_scale[(b * args.H + block.h) * args.N + row + r] = sum;
          if (!(sum - sum == 0.0f)) bad |= 1ull << (first + r);
        }
      if (!back.d_q.data) continue;
      vf factor[kGroupVecs];
      for (int j = 0; j < vecs[g]; ++j) factor[j] = load(scale + first + j * W) * load(sign + first + j * W);
      char* out = (char*)row_at(back.d_q, args.dtype, b, block.h, row);
      const auto unpack = args.dtype == Dtype::f32    ? unpack_output<Dtype::f32>
                          : args.dtype == Dtype::bf16 ? unpack_output<Dtype::bf16>
                                                      : unpack_output<Dtype::f16>;
      const uint64_t odd = unpack(mine, queries, vecs[g], (int)args.Dk, factor, out, back.d_q.n * size_of(args.dtype));
      bad |= odd << first;
    }
    if (back.d_sink) finish_sink();
    if (block.queries < 64) bad &= (1ull << block.queries) - 1;
    if (bad) exact_query_gradients(back, b, block.h, block.first, bad);
  }

  void finish_head(int64_t chunk, int64_t chunks, int64_t h) {
    const int64_t place = (b * chunks + chunk) * args.H + h, columns = 2 * args.table_radius + 1;
    float* const table = back.d_table ? back.d_table + place * columns : nullptr;
    float* const slope = back.d_slopes ? back.d_slopes + place : nullptr;
    float taint = 0.0f;
    if (table) memcpy(table, scratch.table_sum, 4 * (size_t)columns);
    if (slope) *slope = (float)slope_sum;
    for (int64_t x = 0; table && x < columns; ++x) taint += table[x] - table[x];
    if (slope) taint += *slope - *slope;
    if (taint != 0.0f) exact_distance_gradients(back, b, h, from, to, table, slope);  // NaN is not 0 either
  }

  void finish_chunk() {
    const float factor = args.scale_rows ? 1.0f : args.scale;
    if (back.d_k.data) write_keys(back.d_k, scratch.dk, (int)args.Dk, k_wide, factor, true);
    if (back.d_v.data) write_keys(back.d_v, scratch.dv, (int)args.Dv, v_wide, 1.0f, false);
  }

 private:
  struct Ones {
    float at[kTile];
    Ones() {
      for (float& x : at) x = 1.0f;
    }
  };

  // What the forward pass knew of each query, and delta.
  void read_rows() {
    const int64_t h = block.h;
    for (int r = 0; r < kTile; ++r) {
      float mine = args.scale;
      const int64_t n = block.first + r;
      if (args.scale_rows && r < block.queries)
        mine = args.scale_rows[b * args.scale_b + h * args.scale_h + n * args.scale_n];
      sign[r] = mine < 0 ? -1.0f : mine == 0 ? 0.0f : 1.0f;
      scale[r] = mine < 0 ? -mine : mine == 0 ? 1.0f : mine;
      top[r] = 0.0f, log_sum[r] = kInf, delta[r] = 0.0f;
      if (r >= block.queries) continue;
      const float saved = back.saved[saved_place(args, kSavedTop, b, h, n)];
      if (saved != -kInf) top[r] = saved, log_sum[r] = back.saved[saved_place(args, kSavedLog, b, h, n)];
      delta[r] = row_dot(row_at(args.out, args.dtype, b, h, n), row_at(back.d_out, args.dtype, b, h, n));
    }
  }

  float row_dot(const char* x, const char* y) const {
    vf sum = splat(0.0f);
    int64_t d = 0;
    for (; d + W <= args.Dv; d += W) sum += elements(x, args.dtype, d) * elements(y, args.dtype, d);
    float total = 0.0f;
    for (int lane = 0; lane < W; ++lane) total += sum[lane];
    for (; d < args.Dv; ++d) total += element(x, args.dtype, d) * element(y, args.dtype, d);
    return total;
  }

  void read_terms() {
    curved = false;
    for (int r = 0; r < kTile; ++r) {
      terms.constant[r] = terms.linear[r] = terms.square[r] = terms.own[r] = terms.sink[r] = 0.0f;
      terms.plain[r] = terms.plain_linear[r] = terms.shift[r] = 0.0f;
      if (r >= block.queries) continue;
      const ScoreTerms mine = score_terms(back, b, block.h, block.first + r, log_sum[r]);
      terms.constant[r] = mine.constant, terms.linear[r] = mine.linear, terms.square[r] = mine.square;
      terms.own[r] = mine.own, terms.sink[r] = mine.sink;
      terms.plain[r] = mine.plain, terms.plain_linear[r] = mine.plain_linear, terms.shift[r] = mine.shift;
      curved |= mine.square != 0.0f || mine.own != 0.0f || mine.plain != 0.0f || mine.plain_linear != 0.0f;
    }
    if (FINAL) return;
    // The reference is rounded: it is not where the largest score lies, from which the shift counts (docs/state.md).
    for (int r = 0; r < kTile; r += W) {
      const vf slope = load(scale + r) * splat(kLog2e), reference = load(top + r) * slope;
      const vf off = multiply_add(load(top + r), slope, -reference) * splat(kLn2);
      store(terms.shift + r, load(terms.shift + r) + off);
    }
  }

  // Rows of the block into lanes, times sign, and as rows to sum over queries, times factor (only for floats: pairs
  // have it in dS instead, where it costs no rounding of its own).
  void pack(const Rows& rows, int dims, const float* signs, const float* factor, char* const* lanes, char* to,
            int wide) {
    const int64_t row = rows.n * size_of(args.dtype);
    const char* first = row_at(rows, args.dtype, b, block.h, block.first);
    for (int g = 0; g < groups(); ++g) {
      const int queries = lesser(kLanes, block.queries - g * kLanes);
      const char* mine = first + g * kLanes * row;
      const float* sign_of = signs + g * kLanes;
#if defined(__AVX512BF16__)
      if constexpr (kPairs) {
        pack_query_pairs(mine, row, queries, vecs[g], dims, sign_of, lanes[g]);
        interleave_keys(mine, row, queries, dims, wide, to + 4 * (size_t)(g * kLanes / 2) * wide);
        continue;
      }
#endif
      const auto pack_lanes = args.dtype == Dtype::f32    ? pack_queries<Dtype::f32>
                              : args.dtype == Dtype::bf16 ? pack_queries<Dtype::bf16>
                                                          : pack_queries<Dtype::f16>;
      pack_lanes(mine, row, queries, vecs[g], dims, sign_of, (float*)lanes[g]);
      float* out = (float*)to + (size_t)g * kLanes * wide;
      widen_rows(mine, row, args.dtype, queries, dims, wide, out);
      if (factor)
        for (int r = 0; r < queries; ++r)
          for (int d = 0; d < wide; ++d) out[r * wide + d] *= factor[g * kLanes + r] * sign_of[r];
    }
  }

  // Narrows [begin, end) to what the group sees at all, begin to a multiple of kTileRows. False: nothing.
  bool narrow(const uint64_t* words, int g, int& begin, int& end) const {
    const int queries = lesser(kLanes, block.queries - g * kLanes);
    const uint64_t all = (queries == 64 ? ~0ull : (1ull << queries) - 1) << (g * kLanes);
    while (begin < end && !(words[begin] & all)) ++begin;
    while (begin < end && !(words[end - 1] & all)) --end;
    begin -= begin % kTileRows;
    return begin < end;
  }

  template <int N>
  __attribute__((noinline)) void attend_group(int g, const Segment& segment, int begin, int end,
                                              const uint64_t* words) {
    const Piece piece = {k + (segment.key - from + begin) * k_row,
                         k_row,
                         v + (segment.key - from + begin) * v_row,
                         v_row,
                         segment.key + begin,
                         begin,
                         end - begin,
                         words ? words + begin : nullptr};
    int at = 0;
    if (plain() && !(STATS && favours_sink_keys(piece))) {
      // A rest of less than a tile is left to the general way, together with the tile before it: alone it is slow.
      const int tiled = piece.keys % kTileRows ? greater(piece.keys / kTileRows - 1, 0) : piece.keys / kTileRows;
      at = tiled * kTileRows;
      if (STATS && curved)
        words ? differentiate_tiles<N, true, true>(g, piece, tiled)
              : differentiate_tiles<N, false, true>(g, piece, tiled);
      else
        words ? differentiate_tiles<N, true, false>(g, piece, tiled)
              : differentiate_tiles<N, false, false>(g, piece, tiled);
    }
    // A few keys at a time, so that their scores stay in the nearest cache from the product to its last use.
    for (int keys; at < piece.keys; at += keys) {
      keys = lesser(kStep, piece.keys - at);
      if (piece.keys - at - keys < kTileRows) keys = piece.keys - at;  // a rest is slow alone
      differentiate_keys<N>(g,
                            {piece.k + at * k_row, k_row, piece.v + at * v_row, v_row, piece.key + at, begin + at, keys,
                             words ? piece.words + at : nullptr},
                            at);
    }
    if (!back.d_q.data && !back.d_scale) return;
    vf one[N];
    for (int j = 0; j < N; ++j) one[j] = splat(1.0f);
    const char* mixed = k_mix + (segment.key - from + begin) / Cells::kPair * k_mix_row;
    const char* weights = kPairs ? scratch.ds_pairs : scratch.ds[g] + 4 * (size_t)begin * kLanes;
    const int cells = (piece.keys + Cells::kPair - 1) / Cells::kPair;
    accumulate<Cells, N>(mixed, k_mix_row, k_dims, weights, cells, scratch.dqt[g], one, !touched[g]);
    touched[g] = true;
  }

  // Whether nothing lies between products and weights.
  bool plain() const {
    return !FINAL && args.kept_factor == 0.0f && lesser(k_cells, v_cells) > 0 && greater(k_cells, v_cells) <= kChain;
  }

  // Whether some query passes a gradient back to the mass on a sink key of the piece.
  bool favours_sink_keys(const Piece& piece) const {
    bool holds = false, passed = false;
    for (int64_t n = 0; n < args.num_sink_keys; ++n)
      holds |= args.sink_keys[n] >= piece.key && args.sink_keys[n] < piece.key + piece.keys;
    for (int r = 0; holds && r < block.queries; ++r) passed |= terms.sink[r] != 0.0f;
    return passed;
  }

  // P and dS tile by tile, hardly leaving the registers, of a plain call: what differentiate_keys does in steps.
  // CURVED: the statistics pass back more than a line in the score, p (constant + u linear), as lse and entropy do.
  template <int N, bool MASKED, bool CURVED>
  POISE_INLINE void differentiate_tiles(int g, const Piece& piece, int tiles) {
    constexpr int M = kTileRows;
    vf slope[N], offset[N], minus_delta[N];
    [[maybe_unused]] vf factor[kGroupVecs];
    const auto term = [&](const float* of, int j) POISE_INLINE_LAMBDA { return load(of + g * kLanes + j * W); };
    for (int j = 0; j < kGroupVecs; ++j) factor[j] = splat(1.0f);
    for (int j = 0; j < N; ++j) {
      const int lane = g * kLanes + j * W;
      slope[j] = load(scale + lane) * splat(kLog2e);
      // Rounded as the forward pass rounds its reference.
      offset[j] = load(top + lane) * slope[j];
      minus_delta[j] = -load(delta + lane);
      if (STATS) minus_delta[j] += load(terms.constant + lane);
      if (kPairs && args.scale_rows) factor[j] = load(scale + lane) * load(sign + lane);
    }
    const float* const log = log_sum + g * kLanes;
    const char *k_tile = piece.k, *v_tile = piece.v;
    for (int i = 0; i < tiles * M; i += M, k_tile += M * k_row, v_tile += M * v_row) {
      float* const p = kPairs ? scratch.raw : (float*)scratch.p[g] + (piece.begin + i) * kLanes;
      vf sum[M][N];
      clear(sum);
      multiply<Cells, M, N>(sum, k_tile, k_row, 4, scratch.qt[g], k_cells, k_tile + M * k_row, 4 * M);
#pragma GCC unroll 16
      for (int r = 0; r < M; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) {
          const vf t = sum[r][j] * slope[j] - offset[j];
          vf weight = exp2_of<kPairs>(t - load(log + j * W));
          const vmask visible = mask_of(MASKED ? piece.words[i + r] >> (g * kLanes + j * W) : ~0ull);
          if (MASKED) weight = select(visible, weight, splat(0.0f));
          store(p + r * kLanes + j * W, weight);
          sum[r][j] = minus_delta[j];
          if (STATS) {
            // Finite where t is not, in lanes without keys, whose terms are 0; far below, where weights are 0, no
            // square overflows.
            const vf u = vmax(t * splat(kLn2) - term(terms.shift, j), splat(-3e38f)), near = vmax(u, splat(-1e4f));
            vf line = term(terms.linear, j);
            if (CURVED) {
              line += near * term(terms.square, j);
              sum[r][j] += weight * term(terms.own, j);
              vf plain = term(terms.plain, j) + u * term(terms.plain_linear, j);
              if (MASKED) plain = select(visible, plain, splat(0.0f));
              store(scratch.spread + r * kLanes + j * W, plain);
            }
            sum[r][j] += near * line;
          }
        }
      multiply<Cells, M, N>(sum, v_tile, v_row, 4, scratch.gt[g], v_cells, v_tile + M * v_row, 4 * M);
#pragma GCC unroll 16
      for (int r = 0; r < M; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) {
          sum[r][j] *= load(p + r * kLanes + j * W);
          if (CURVED) sum[r][j] += load(scratch.spread + r * kLanes + j * W);
          if (!kPairs) store((float*)scratch.ds[g] + (piece.begin + i + r) * kLanes + j * W, sum[r][j]);
        }
#if defined(__AVX512BF16__)
      if constexpr (kPairs) {
        char* const halves = scratch.p[g] + 2 * (size_t)(piece.begin + i) * kLanes;
        char* const ds_halves = scratch.ds[g] + 2 * (size_t)(piece.begin + i) * kLanes;
#pragma GCC unroll 16
        for (int r = 0; r < M; ++r) {
          store_halves(halves + 2 * r * kLanes, load(p + r * kLanes), N > 1 ? load(p + r * kLanes + W) : splat(0.0f));
          store_halves(ds_halves + 2 * r * kLanes, sum[r][0] * factor[0],
                       N > 1 ? sum[r][N - 1] * factor[1] : splat(0.0f));
        }
#pragma GCC unroll 16
        for (int r = 0; r < M; r += 2)
#pragma GCC unroll 8
          for (int j = 0; j < N; ++j)
            Cells::store_pair(scratch.ds_pairs + 4 * ((i + r) / 2 * kLanes + j * W), sum[r][j], sum[r + 1][j]);
      }
#endif
    }
  }

  // P and dS of some keys, from `at` on in the group's piece.
  template <int N>
  POISE_INLINE void differentiate_keys(int g, const Piece& piece, int at) {
    const bool masked = piece.words != nullptr;
    if (!kPairs) {
      scratch.raw = (float*)scratch.p[g] + piece.begin * kLanes;
      scratch.dp = (float*)scratch.ds[g] + piece.begin * kLanes;
    }
    vf unused[N];
    for (int j = 0; j < N; ++j) unused[j] = splat(0.0f);
    score_rows<Cells, N>(piece.k, piece.k_row, piece.keys, scratch.qt[g], k_cells, scratch.raw, unused);
    if (FINAL) finish<N>(g, piece);
    for (int j = 0; j < N; ++j) masked ? weigh<true>(g, j, piece) : weigh<false>(g, j, piece);
    score_rows<Cells, N>(piece.v, piece.v_row, piece.keys, scratch.gt[g], v_cells, scratch.dp, unused);
    if (args.kept_factor != 0.0f) drop_gradients<N>(g, piece);
    for (int j = 0; j < N; ++j) masked ? differentiate<true>(g, j, piece) : differentiate<false>(g, j, piece);
    if (STATS) add_sink_keys<N>(g, piece);
    if (args.kept_factor != 0.0f) drop_weights<N>(piece);
    if (back.d_table || back.d_slopes) add_diagonals<N>(g, piece);
    if (bias_sum) add_to_bias<N>(g, piece);
    if (FINAL && args.softcap != 0.0f) uncap<N>(piece);
    store_weights<N>(g, piece, at);
  }

  // Raw products to scores with cap and bias, hidden ones to -inf; the cap's derivative is kept.
  template <int N>
  void finish(int g, const Piece& piece) {
    const int lane0 = g * kLanes;
    if (args.softcap != 0.0f) {
      const vf uncap = splat(1.0f / args.softcap);
      for (int i = 0; i < piece.keys; ++i)
        for (int j = 0; j < N; ++j) {
          const vf product = load(scratch.raw + i * kLanes + j * W);
          const vf y = tanh_of(product * load(scale + lane0 + j * W) * uncap);
          store(scratch.slope + i * kLanes + j * W, splat(1.0f) - y * y);
        }
    }
    const float* strip = args.table || args.slopes ? scratch.strip + kSegment - 1 - piece.begin + lane0 : nullptr;
    vf top_score[N], top_logit[N], lowest[N];
    for (int j = 0; j < N; ++j) top_score[j] = top_logit[j] = lowest[j] = splat(0.0f);
    finish_scores<N, false>(args, block, scratch.raw, lane0, piece, scale, strip, top_score, top_logit, lowest);
  }

  // Scores of one lane vector become weights in place, with statistics also distances from the mean.
  template <bool MASKED>
  POISE_INLINE void weigh(int g, int j, const Piece& piece) {
    const int lane = g * kLanes + j * W;
    const vf slope = load(scale + lane) * splat(kLog2e), log = load(log_sum + lane);
    const vf reference = FINAL ? load(top + lane) : load(top + lane) * slope;
    const vf shift = STATS ? load(terms.shift + lane) : splat(0.0f);
    for (int i = 0; i < piece.keys; ++i) {
      float* at = scratch.raw + i * kLanes + j * W;
      const vf score = load(at);
      vf t = FINAL ? score - reference : score * slope - reference;
      if (MASKED && !FINAL) t = select(mask_of(piece.words[i] >> lane), t, splat(-kInf));
      store(at, exp2_of(FINAL ? t * splat(kLog2e) - log : t - log));
      if (STATS) store(scratch.spread + i * kLanes + j * W, (FINAL ? t : t * splat(kLn2)) - shift);
    }
  }

  // Dropout: dP passes through what was kept.
  template <int N>
  void drop_gradients(int g, const Piece& piece) {
    kept_lanes<N>(args, b * args.H + block.h, block.first + g * kLanes, piece.key, piece.keys, kept_words);
    drop<N>(scratch.dp, piece);
  }

  // And so do the weights, once dS is made of them, on their way to dV.
  template <int N>
  void drop_weights(const Piece& piece) {
    drop<N>(scratch.raw, piece);
  }

  template <int N>
  POISE_INLINE void drop(float* tile, const Piece& piece) {
    const vf factor = splat(args.kept_factor), zero = splat(0.0f);
    for (int i = 0; i < piece.keys; ++i)
      for (int j = 0; j < N; ++j) {
        float* at = tile + i * kLanes + j * W;
        store(at, select(mask_of(kept_words[i] >> (j * W)), load(at) * factor, zero));
      }
  }

  // dP becomes dS in place.
  template <bool MASKED>
  POISE_INLINE void differentiate(int g, int j, const Piece& piece) {
    const int lane = g * kLanes + j * W;
    const vf minus_delta = -load(delta + lane), zero = splat(0.0f);
    for (int i = 0; i < piece.keys; ++i) {
      float* at = scratch.dp + i * kLanes + j * W;
      const vf p = load(scratch.raw + i * kLanes + j * W);
      vf inner = load(at) + minus_delta;
      if (!STATS) {
        store(at, p * inner);
        continue;
      }
      const vf u = load(scratch.spread + i * kLanes + j * W), near = select(equal(p, zero), zero, u);
      inner += load(terms.constant + lane) + near * (load(terms.linear + lane) + near * load(terms.square + lane));
      inner += p * load(terms.own + lane);
      vf plain = load(terms.plain + lane) + u * load(terms.plain_linear + lane);
      if (MASKED) plain = select(mask_of(piece.words[i] >> lane), plain, zero);
      if (FINAL) plain = select(equal(u, splat(-kInf)), zero, plain);
      store(at, p * inner + plain);
    }
  }

  template <int N>
  void add_sink_keys(int g, const Piece& piece) {
    for (int64_t n = 0; n < args.num_sink_keys; ++n) {
      const int64_t i = args.sink_keys[n] - piece.key;
      if (i < 0 || i >= piece.keys) continue;
      for (int j = 0; j < N; ++j) {
        float* at = scratch.dp + i * kLanes + j * W;
        store(at, load(at) + load(scratch.raw + i * kLanes + j * W) * load(terms.sink + g * kLanes + j * W));
      }
    }
  }

  template <int N>
  void uncap(const Piece& piece) {
    for (int i = 0; i < piece.keys; ++i)
      for (int j = 0; j < N; ++j) {
        float* at = scratch.dp + i * kLanes + j * W;
        store(at, load(at) * load(scratch.slope + i * kLanes + j * W));
      }
  }

  // Rows of zeros up to a whole tile; pairs of P and dS to where the products read them.
  template <int N>
  void store_weights([[maybe_unused]] int g, const Piece& piece, [[maybe_unused]] int at) {
    const int whole = (int)rounded_up(piece.keys, kTileRows);
    for (int i = piece.keys; i < whole; ++i)
      for (int j = 0; j < N; ++j) {
        store(scratch.raw + i * kLanes + j * W, splat(0.0f));
        store(scratch.dp + i * kLanes + j * W, splat(0.0f));
      }
#if defined(__AVX512BF16__)
    if constexpr (kPairs) {
      char *p = scratch.p[g] + 2 * (size_t)piece.begin * kLanes, *ds = scratch.ds[g] + 2 * (size_t)piece.begin * kLanes;
      vf factor[2] = {splat(1.0f), splat(1.0f)};
      if (args.scale_rows)
        for (int j = 0; j < N; ++j) factor[j] = load(scale + g * kLanes + j * W) * load(sign + g * kLanes + j * W);
      for (int i = 0; i < whole; ++i) {
        const float *p_row = scratch.raw + i * kLanes, *ds_row = scratch.dp + i * kLanes;
        const vf high = N > 1 ? load(p_row + W) : splat(0.0f), ds_high = N > 1 ? load(ds_row + W) : splat(0.0f);
        store_halves(p + 2 * i * kLanes, load(p_row), high);
        store_halves(ds + 2 * i * kLanes, load(ds_row) * factor[0], ds_high * factor[1]);
      }
      for (int i = 0; i < whole; i += 2)
        for (int j = 0; j < N; ++j)
          Cells::store_pair(scratch.ds_pairs + 4 * ((at + i) / 2 * kLanes + j * W),
                            load(scratch.dp + i * kLanes + j * W), load(scratch.dp + (i + 1) * kLanes + j * W));
    }
#endif
  }

  // --- Biases that depend on the distance: sums along diagonals of dS ---
  // strip_sum's index is that of the strip (see fill_strip), so that row i of a piece meets lanes at first - i.
  template <int N>
  void add_diagonals(int g, const Piece& piece) {
    float* const first = scratch.strip_sum + kSegment - 1 - piece.begin + g * kLanes;
    for (int j = 0; j < N; ++j)
      for (int i = 0; i < piece.keys; i += W) {
        const int rows = lesser(W, piece.keys - i);
        for (int r = 0; r < rows; ++r) {
          float* line = scratch.skewed + 3 * W * r;
          store(line, splat(0.0f));
          store(line + W, load(scratch.dp + (i + r) * kLanes + j * W));
          store(line + 2 * W, splat(0.0f));
        }
        vf low = splat(0.0f), high = splat(0.0f);  // diagonals first - i - W + 1 + [0, 2 W)
        for (int r = 0; r < rows; ++r) {
          const float* line = scratch.skewed + 3 * W * r + 1 + r;
          low += load(line);
          high += load(line + W);
        }
        float* at = first - i - W + 1 + j * W + kStripMargin;
        store(at, load(at) + low);
        store(at + W, load(at + W) + high);
      }
  }

  // dS of a piece to rows of queries.
  template <int N>
  void add_to_bias(int g, const Piece& piece) {
    for (int j = 0; j < N; ++j)
      for (int i = 0; i < piece.keys; i += W) {
        const int rows = lesser(W, piece.keys - i);
        vf tile[W];
        for (int r = 0; r < W; ++r) tile[r] = r < rows ? load(scratch.dp + (i + r) * kLanes + j * W) : splat(0.0f);
        transpose(tile);
        for (int lane = 0; lane < W && g * kLanes + j * W + lane < block.queries; ++lane) {
          float* at = bias_sum + (g * kLanes + j * W + lane) * bias_row + (piece.key + i - from);
          store(at, load(at) + tile[lane]);
        }
      }
  }

  static constexpr int kStripMargin = 2 * W;  // diagonals of a tile reach beyond the strip, where they are zero

  void add_strip(const Segment& segment) {
    const int64_t first = segment.key - block.position + kSegment - 1, radius = args.table_radius;
    const float* sums = scratch.strip_sum + kStripMargin;
    for (int x = 0; x < kStrip; ++x) {
      const int64_t distance = first - x;
      if (back.d_table) scratch.table_sum[lesser(greater(distance, -radius), radius) + radius] += sums[x];
      if (back.d_slopes) slope_sum -= (double)sums[x] * (double)(distance < 0 ? -distance : distance);
    }
  }

  // --- Results ---
  // d sink = -p_sink delta, with p_sink = e^(sink - lse).
  void finish_sink() {
    for (int r = 0; r < block.queries; ++r) {
      const float sink = args.sink[block.h], largest = FINAL ? top[r] : top[r] * scale[r];
      const bool all = log_sum[r] == kInf;  // of the weight: there is no output that it could change
      const float t = (sink - largest) * kLog2e - log_sum[r];
      const float share = all || sink == -kInf ? 0.0f : exp2_of(splat(t))[0];
      back.d_sink[(b * args.H + block.h) * args.N + block.first + r] = share == 0.0f ? 0.0f : -share * delta[r];
    }
  }

  void write_keys(const Rows& rows, const float* sums, int dims, int wide, float factor, bool keys) {
    const vf times = splat(factor);
    for (int64_t n = from; n < to; ++n, sums += wide) {
      char* out = (char*)row_at(rows, args.dtype, b, kv_head, n);
      vf taint = splat(0.0f);
      int d = 0;
      for (; d + W <= dims; d += W) {
        const vf x = load(sums + d) * times;
        taint += x - x;
        put(out, args.dtype, d, x);
      }
      for (; d < dims; ++d) {
        const float x = sums[d] * factor;
        taint[0] += x - x;
        put_one(out, args.dtype, d, x);
      }
      if (bits_of(equal(taint, splat(0.0f))) != (1u << W) - 1) exact_key_gradient(back, b, kv_head, n, keys);
    }
  }
};

}  // namespace
}  // namespace poise
