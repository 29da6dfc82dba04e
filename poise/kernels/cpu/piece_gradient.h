// From a piece of keys to its weights P and score gradients dS, for one group of lanes, and to dQ^T += K^T dS.
//
// Plain calls go tile by tile, hardly leaving the registers; biases, caps, dropout and short rests go in steps over a
// few keys. Nothing here is summed over queries but along diagonals, for biases that depend on the distance: gradient.h
// does the rest. Included once per ISA.
#pragma once
#include "gradient_state.h"

namespace poise {
namespace {

constexpr int kStep = 64;  // keys whose weights are differentiated at once

template <class Cells, bool STATS, bool FINAL>
struct PieceGradient : GradientState {
  static constexpr bool kPairs = Cells::kPair == 2;
  static constexpr int kStripMargin = 2 * W;  // diagonals of a tile reach beyond the strip, where they are zero
  PieceGradient(const BackwardArgs& a, int64_t chunk, char* memory) : GradientState(a) {
    GradientScratch::layout<Cells>(a, chunk, memory, &scratch);
    k_cells = (int)(args.Dk + Cells::kPair - 1) / Cells::kPair;
    v_cells = (int)(args.Dv + Cells::kPair - 1) / Cells::kPair;
    k_dims = (int)rounded_up(args.Dk, 8);
    k_wide = (int)rounded_up(args.Dk, W);
    v_wide = (int)rounded_up(args.Dv, W);
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

  void add_strip(const Segment& segment) {
    const int64_t first = segment.key - block.position + kSegment - 1, radius = args.table_radius;
    const float* sums = scratch.strip_sum + kStripMargin;
    for (int x = 0; x < kStrip; ++x) {
      const int64_t distance = first - x;
      if (back.d_table) scratch.table_sum[lesser(greater(distance, -radius), radius) + radius] += sums[x];
      if (back.d_slopes) slope_sum -= (double)sums[x] * (double)(distance < 0 ? -distance : distance);
    }
  }

 private:
  // Whether nothing lies between products and weights.
  bool plain() const {
    return !FINAL && args.kept_factor == 0.0f && !(STATS && args.sink) && lesser(k_cells, v_cells) > 0 &&
           greater(k_cells, v_cells) <= kChain;
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
    if (STATS && args.sink) count_sink<N>(g, piece);
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

  // Scores of one lane vector become weights in place; with statistics, weights without the sink, and distances from
  // the mean.
  template <bool MASKED>
  POISE_INLINE void weigh(int g, int j, const Piece& piece) {
    const int lane = g * kLanes + j * W;
    const vf slope = load(scale + lane) * splat(kLog2e), log = load((STATS ? terms.log : log_sum) + lane);
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
      if (!STATS) {
        store(at, p * (load(at) + minus_delta));
        continue;
      }
      vf inner = load(terms.share + lane) * (load(at) + minus_delta);
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

  // Weights among the keys become those among keys and sink.
  template <int N>
  void count_sink(int g, const Piece& piece) {
    for (int i = 0; i < piece.keys; ++i)
      for (int j = 0; j < N; ++j) {
        float* at = scratch.raw + i * kLanes + j * W;
        store(at, load(at) * load(terms.share + g * kLanes + j * W));
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
};

}  // namespace
}  // namespace poise
