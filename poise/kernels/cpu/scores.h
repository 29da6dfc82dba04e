// From raw products to the scores that the softmax sees: scale, cap, biases, hidden pairs to -inf.
//
// Works on S^T of one group of lanes, in place. In raw mode (see softmax.h) only masks are left to apply; in final mode
// everything is. Dense biases are read where they lie, W x W at a time, and transposed in registers; biases that depend
// on the distance alone come from a strip that is filled once per segment.
#pragma once
#include "softmax.h"

namespace poise {
namespace {

// Keys for one group of lanes: [keys] rows of k and v, and who sees them (words null: everyone sees all).
struct Piece {
  const char* k;
  int64_t k_row;
  const char* v;
  int64_t v_row;
  int64_t key;  // absolute index of the first
  int begin;    // its place in the segment
  int keys;
  const uint64_t* words;
};

constexpr int kBiasAhead = 128;  // bytes
constexpr int kStrip = kSegment + kTile - 1;

// strip[x] is the bias at distance j - i' = (segment.key - position) + kSegment - 1 - x, so that neighbouring queries
// read neighbouring values.
inline void fill_strip(const ForwardArgs& args, const Block& block, const Segment& segment, float* strip) {
  const int64_t first = segment.key - block.position + kSegment - 1, radius = args.table_radius;
  if (args.table) {
    const float* table = args.table + block.h * args.table_h + radius;
    for (int x = 0; x < kStrip; ++x) strip[x] = table[lesser(greater(first - x, -radius), radius)];
  } else {
    memset(strip, 0, 4 * kStrip);
  }
  if (!args.slopes) return;
  const float slope = args.slopes[block.h];
  for (int x = 0; x < kStrip; ++x) strip[x] -= slope * (float)(first < x ? x - first : first - x);
}

// The next tiles of these rows are asked for early: so many rows at once are more than hardware prefetchers follow.
template <Dtype DTYPE>
POISE_INLINE void load_transposed(const char* corner, int64_t row, vf* tile) {
#pragma GCC unroll 16
  for (int r = 0; r < W; ++r) {
    const char* at = corner + r * row * size_of(DTYPE);
    __builtin_prefetch(at + kBiasAhead);
    tile[r] = elements(at, DTYPE, 0);
  }
  transpose(tile);
}

// tile[i] = the bias of key + i for the queries from `query` on, one per lane; the first `width` keys are valid.
POISE_INLINE void load_bias(const DenseBias& bias, const Block& block, int query, int64_t key, int width, vf* tile) {
  const int64_t place = block.b * bias.b + block.h * bias.h + (block.first + query) * bias.n + key * bias.m;
  const char* corner = (const char*)bias.data + size_of(bias.dtype) * place;
  const int queries = lesser(W, block.queries - query);
  if (bias.m == 1 && bias.n != 0 && width == W && queries == W) {
    if (bias.dtype == Dtype::f32)
      load_transposed<Dtype::f32>(corner, bias.n, tile);
    else if (bias.dtype == Dtype::bf16)
      load_transposed<Dtype::bf16>(corner, bias.n, tile);
    else
      load_transposed<Dtype::f16>(corner, bias.n, tile);
    return;
  }
  for (int i = 0; i < width; ++i) {
    if (bias.n == 0) {  // the same for every query
      tile[i] = splat(element(corner, bias.dtype, i * bias.m));
    } else {
      tile[i] = splat(0.0f);
      for (int r = 0; r < queries; ++r) tile[i][r] = element(corner, bias.dtype, r * bias.n + i * bias.m);
    }
  }
}

// Final mode: products to scores in natural units. `strip` points at the first key's and query's distance, or is null.
template <int N, bool STATS, bool DENSE, bool CAP>
inline void finish_tiles(const ForwardArgs& args, const Block& block, float* s, int lane0, const Piece& piece,
                         const float* scale, const float* strip, vf* top, vf* top_logit, vf* lowest) {
  const vf cap = splat(args.softcap), uncap = splat(CAP ? 1.0f / args.softcap : 0.0f);
  for (int j = 0; j < N; ++j) {
    const vf factor = load(scale + lane0 + j * W);
    vf largest = splat(-kInf), largest_logit = top_logit[j], least = lowest[j];
    for (int i = 0; i < piece.keys; i += W) {
      const int width = lesser(W, piece.keys - i);
      vf bias[W];
      if (DENSE) {
        load_bias(args.biases[0], block, lane0 + j * W, piece.key + i, width, bias);
        for (int n = 1; n < args.num_biases; ++n) {
          vf more[W];
          load_bias(args.biases[n], block, lane0 + j * W, piece.key + i, width, more);
          for (int r = 0; r < width; ++r) bias[r] += more[r];
        }
      }
      for (int r = 0; r < width; ++r) {
        float* at = s + (i + r) * kLanes + j * W;
        const vf product = load(at), logit = product * factor;
        // Fused by name: the output must not depend on whether statistics are compiled in.
        vf added = splat(0.0f);
        if (DENSE) added = bias[r];
        if (strip) added += load(strip - (i + r) + j * W);
        vf score = CAP ? multiply_add(cap, tanh_of(logit * uncap), added) : multiply_add(product, factor, added);
        if (piece.words) score = select(mask_of(piece.words[i + r] >> (lane0 + j * W)), score, splat(-kInf));
        store(at, score);
        largest = vmax(score, largest);
        if (STATS) {
          largest_logit = vmax(select(equal(score, splat(-kInf)), splat(-kInf), logit), largest_logit);
          least = vmin(logit, least);
        }
      }
    }
    top[j] = largest;
    top_logit[j] = largest_logit;
    lowest[j] = least;
  }
}

template <int N, bool STATS>
POISE_INLINE void finish_scores(const ForwardArgs& args, const Block& block, float* s, int lane0, const Piece& piece,
                                const float* scale, const float* strip, vf* top, vf* top_logit, vf* lowest) {
  const auto finish =
      args.num_biases
          ? (args.softcap != 0.0f ? finish_tiles<N, STATS, true, true> : finish_tiles<N, STATS, true, false>)
          : (args.softcap != 0.0f ? finish_tiles<N, STATS, false, true> : finish_tiles<N, STATS, false, false>);
  finish(args, block, s, lane0, piece, scale, strip, top, top_logit, lowest);
}

}  // namespace
}  // namespace poise
