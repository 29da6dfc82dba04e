// The row state: what a set of keys leaves behind for each query, and how two such states become one.
//
// Kept per lane; sums over keys are relative to a reference near the largest score and move with it, so that large
// scores cancel nothing (docs/state.md has the formulas). Two modes, one per call:
//   raw    no bias, no cap: scores stay unscaled products, t = product * slope - reference with slope = scale * log2(e)
//          and reference = top * slope, so that the scaling costs nothing: t is in units of log 2.
//   final  scores were rewritten as s: t = s - reference in natural units, reference = top. The subtraction comes first,
//          for a score may be as large as finfo.max.
#pragma once
#include "tile.h"
#include "visible.h"

namespace poise {
namespace {

template <int N>
struct Lanes {
  vf at[N];
  POISE_INLINE vf& operator[](int j) { return at[j]; }
  POISE_INLINE const vf& operator[](int j) const { return at[j]; }
};

struct State {
  Lanes<kGroupVecs> top;        // largest score; -inf while nothing is visible
  Lanes<kGroupVecs> reference;  // what sums are relative to; -inf likewise
  Lanes<kGroupVecs> sum;        // sum of w = 2^t (raw) or e^t (final)
  // From here on only with statistics.
  Lanes<kGroupVecs> sum_t, sum_tt;  // sums of w t and w t^2
  Lanes<kGroupVecs> squares;        // sum of w^2
  Lanes<kGroupVecs> count, mean, deviation;  // of t over the visible keys: how many, mean, sum of squared deviations
  Lanes<kGroupVecs> low;            // smallest score, in top's units
  Lanes<kGroupVecs> top_logit;      // largest z; only where it is not top
  Lanes<kGroupVecs> sink_sum;       // sum of w over sink_keys
};

inline void reset(State& state) {
  for (int j = 0; j < kGroupVecs; ++j) {
    state.top[j] = state.reference[j] = state.top_logit[j] = splat(-kInf);
    state.low[j] = splat(kInf);
    state.sum[j] = state.sum_t[j] = state.sum_tt[j] = state.squares[j] = splat(0.0f);
    state.count[j] = state.mean[j] = state.deviation[j] = state.sink_sum[j] = splat(0.0f);
  }
}

POISE_INLINE vf zero_if_empty(vf reference) {
  return select(equal(reference, splat(-kInf)), splat(0.0f), reference);
}

// What more keys add, relative to the new reference; mean and deviation as in State.
struct Added {
  vf sum, sum_t, sum_tt, squares, count, mean, deviation, low;
};

// Adds keys to the sums of lane vector j, apart from `sum` itself: the old ones move by `move` (in t's units, 0 if there
// were none) and shrink by alpha. 
POISE_INLINE void merge_moments(State& state, int j, vf alpha, vf move, const Added& added) {
  const vf sum = state.sum[j], sum_t = state.sum_t[j];
  state.sum_tt[j] = alpha * (state.sum_tt[j] + move * (sum_t + sum_t + move * sum)) + added.sum_tt;
  state.sum_t[j] = alpha * (sum_t + move * sum) + added.sum_t;
  state.squares[j] = alpha * alpha * state.squares[j] + added.squares;
  const vf zero = splat(0.0f), one = splat(1.0f);
  const vf old_mean = state.mean[j] + move, count = state.count[j] + added.count;
  const vf difference = added.mean - old_mean;
  const vf share = added.count / select(equal(count, zero), one, count);
  state.deviation[j] = state.deviation[j] + added.deviation + difference * difference * state.count[j] * share;
  state.mean[j] = old_mean + difference * share;
  state.count[j] = count;
  state.low[j] = vmin(added.low, state.low[j]);
}

// The exponentials of one lane vector: scores s [rows, kLanes] become weights in place (bf16: pairs, half the rows).
// MASKED: hidden entries are -inf and must not enter the plain moments.
template <class Cells, bool STATS, bool MASKED, bool FINAL>
POISE_INLINE Added weights(float* s, int rows, vf slope, vf intercept) {
  constexpr int kUnroll = 4;
  const vf zero = splat(0.0f);
  vf sums[kUnroll] = {zero, zero, zero, zero};
  Added added = {zero, zero, zero, zero, zero, zero, zero, splat(kInf)};
  vf total = zero, total_square = zero;  // of t, over visible keys
  const auto weigh = [&](int k, vf& sum) POISE_INLINE_LAMBDA {
    const vf score = load(s + k * kLanes);
    vf t = FINAL ? score - intercept : score * slope - intercept;
    const vf p = exp2_of(FINAL ? t * splat(kLog2e) : t);
    sum += p;
    if (STATS) {
      if (MASKED) {
        const vmask hidden = equal(score, splat(-kInf));
        t = select(hidden, zero, t);
        added.count += select(hidden, zero, splat(1.0f));
        added.low = vmin(select(hidden, splat(kInf), score), added.low);
      } else {
        added.low = vmin(score, added.low);
      }
      vf pt = p * t;
      if (FINAL) pt = select(equal(p, zero), zero, pt);  // t itself may have overflowed
      total += t;
      total_square += t * t;
      added.sum_t += pt;
      added.sum_tt += pt * t;
      added.squares += p * p;
    }
    return p;
  };
  int k = 0;
#if defined(__AVX512BF16__)
  if constexpr (Cells::kPair == 2) {
    for (; k + 4 <= rows; k += 4) {
#pragma GCC unroll 2
      for (int u = 0; u < 4; u += 2) {
        const vf low = weigh(k + u, sums[u]), high = weigh(k + u + 1, sums[u + 1]);
        Cells::store_pair(s + (k + u) / 2 * kLanes, low, high);
      }
    }
    for (; k < rows; k += 2) {
      const vf low = weigh(k, sums[0]), high = weigh(k + 1, sums[1]);
      Cells::store_pair(s + k / 2 * kLanes, low, high);
    }
  } else
#endif
  {
    for (; k + kUnroll <= rows; k += kUnroll) {
#pragma GCC unroll 4
      for (int u = 0; u < kUnroll; ++u) store(s + (k + u) * kLanes, weigh(k + u, sums[u]));
    }
    for (; k < rows; ++k) store(s + k * kLanes, weigh(k, sums[0]));
  }
  added.sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  if (STATS) {
    if (!MASKED) added.count = splat((float)rows);
    added.mean = total / select(equal(added.count, zero), splat(1.0f), added.count);
    const vf deviation = total_square - total * added.mean;
    // Infinite squares (scores near finfo.max) make this inf - inf: the deviation is infinite then.
    added.deviation = select(equal(deviation, deviation), vmax(deviation, zero), splat(kInf));
  }
  return added;
}

}  // namespace
}  // namespace poise
