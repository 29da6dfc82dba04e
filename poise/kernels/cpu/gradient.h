// Backward attention of blocks of queries against one chunk of keys: the kernel proper, as a sequence of steps.
//
// Per segment of keys and group of lanes: weights P again from what the forward pass saved, dP = V dO^T, dS from both,
// dQ^T += K^T dS; then, for all groups at once, dV += P dO and dK += dS Q. Everything is transposed as in the forward
// pass (attention.h): queries lie in the lanes. Which chunks there are and how their dQ come together is
// gradient_run.h's; what is not finite in the end is computed again by exact_gradient.cpp. Included once per ISA.
#pragma once
#include "exact_gradient.h"
#include "piece_gradient.h"

namespace poise {
namespace {

template <class Cells, bool STATS, bool FINAL>
struct Gradient : PieceGradient<Cells, STATS, FINAL> {
  using Piecewise = PieceGradient<Cells, STATS, FINAL>;
  using Piecewise::kPairs, Piecewise::back, Piecewise::args, Piecewise::scratch, Piecewise::block, Piecewise::vecs,
      Piecewise::touched, Piecewise::scale, Piecewise::sign, Piecewise::top, Piecewise::log_sum, Piecewise::delta,
      Piecewise::terms, Piecewise::curved, Piecewise::b, Piecewise::kv_head, Piecewise::from, Piecewise::to,
      Piecewise::k, Piecewise::v, Piecewise::k_mix, Piecewise::k_row, Piecewise::v_row, Piecewise::k_mix_row,
      Piecewise::k_cells, Piecewise::v_cells, Piecewise::k_dims, Piecewise::k_wide, Piecewise::v_wide,
      Piecewise::slope_sum, Piecewise::add_strip;
  using Piecewise::PieceGradient;

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
            this->template attend_group<1>(g, segment, begin, end, mine);
            break;
          case 2:
            this->template attend_group<2>(g, segment, begin, end, mine);
            break;
          case 3:
            if constexpr (kGroupVecs >= 3) this->template attend_group<3>(g, segment, begin, end, mine);
            break;
          case 4:
            if constexpr (kGroupVecs >= 4) this->template attend_group<4>(g, segment, begin, end, mine);
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
      terms.log[r] = log_sum[r], terms.share[r] = 1.0f;
      if (r >= block.queries) continue;
      const int64_t n = block.first + r;
      const ScoreTerms mine = score_terms(back, b, block.h, n);
      // Without the sink; a row that is to be computed again, whose saved logarithm is NaN, keeps that.
      if (args.sink && mine.any && log_sum[r] == log_sum[r])
        terms.log[r] = args.stats[saved_place(args, kLogSum, b, block.h, n)] * kLog2e;
      terms.constant[r] = mine.constant, terms.linear[r] = mine.linear, terms.square[r] = mine.square;
      terms.own[r] = mine.own, terms.sink[r] = mine.sink;
      terms.plain[r] = mine.plain, terms.plain_linear[r] = mine.plain_linear, terms.shift[r] = mine.shift;
      curved |= mine.square != 0.0f || mine.own != 0.0f || mine.plain != 0.0f || mine.plain_linear != 0.0f;
    }
    // The reference is rounded: it is not where the largest score lies, from which the statistics count
    // (docs/state.md).
    for (int r = 0; r < kTile; r += W) {
      const vf slope = load(scale + r) * splat(kLog2e), reference = load(top + r) * slope;
      const vf off = FINAL ? splat(0.0f) : multiply_add(load(top + r), slope, -reference);
      store(terms.shift + r, load(terms.shift + r) + off * splat(kLn2));
      if (!args.sink) continue;
      const vf log = load(terms.log + r) + off, share = exp2_of(vmin(log - load(log_sum + r), splat(0.0f)));
      store(terms.log + r, log);
      store(terms.share + r, select(equal(log, splat(kInf)), splat(1.0f), share));  // a row without keys
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
