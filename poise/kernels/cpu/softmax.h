// The row state: what a set of keys leaves behind for each query, and how two such states become one.
//
// Kept per lane; sums over keys are relative to a reference near the largest score and move with it, so that large
// scores cancel nothing (docs/state.md has the formulas). Two modes, one per call:
//   raw    no bias, no cap: scores stay unscaled products, t = product * slope - reference with slope = scale * log2(e)
//          and reference = top * slope, so that the scaling costs nothing: t is in units of log 2.
//   final  scores were rewritten as s: t = s - reference in natural units, reference = top. The subtraction comes
//          first, for a score may be as large as finfo.max.
#pragma once
#include "tile.h"
#include "visible.h"

namespace poise {
namespace {

// Whether a call runs in raw mode.
inline bool scores_are_products(const ForwardArgs& args) {
  return kFused && args.softcap == 0.0f && !args.num_biases && !args.table && !args.slopes;
}

template <int N>
struct Lanes {
  vf at[N];
  POISE_INLINE vf& operator[](int j) { return at[j]; }
  POISE_INLINE const vf& operator[](int j) const { return at[j]; }
};

// Moments of t over keys, each with a weight: their sum, the mean, and the weighted squares about that mean.
struct Moments {
  Lanes<kGroupVecs> weight, mean, deviation;
};

struct State {
  Lanes<kGroupVecs> top;        // largest score; -inf while nothing is visible
  Lanes<kGroupVecs> reference;  // what t is relative to; -inf likewise
  uint64_t seen;                // a bit for each query that some key was visible to, whatever its score
  Moments soft;                 // with weights w = 2^t (raw) or e^t (final): its weight is the softmax's denominator
  // From here on, and soft's moments, only with statistics.
  Moments plain;                     // every visible key counts 1
  Lanes<kGroupVecs> squares;         // sum of w^2
  Lanes<kGroupVecs> low;             // smallest score, in top's units
  Lanes<kGroupVecs> lowest_product;  // before masks; -inf tells that a score of -inf may be an attended one
  Lanes<kGroupVecs> top_logit;       // largest z; only where it is not top
  Lanes<kGroupVecs> sink_sum;        // sum of w over sink_keys
};

inline void reset(State& state) {
  const vf zero = splat(0.0f);
  state.seen = 0;
  for (int j = 0; j < kGroupVecs; ++j) {
    state.top[j] = state.reference[j] = state.top_logit[j] = splat(-kInf);
    state.low[j] = state.lowest_product[j] = splat(kInf);
    state.squares[j] = state.sink_sum[j] = zero;
    state.soft.weight[j] = state.soft.mean[j] = state.soft.deviation[j] = zero;
    state.plain.weight[j] = state.plain.mean[j] = state.plain.deviation[j] = zero;
  }
}

POISE_INLINE vf zero_if_empty(vf reference) { return select(equal(reference, splat(-kInf)), splat(0.0f), reference); }

struct Moment {
  vf weight, mean, deviation;
};

// The moments of a sum of w, w (t - about) and w (t - about)^2.
POISE_INLINE Moment moment(vf weight, vf sum, vf square, vf about) {
  const vf zero = splat(0.0f);
  const vf mean = sum / select(equal(weight, zero), splat(1.0f), weight), deviation = square - sum * mean;
  // Infinite squares (scores near finfo.max) make this inf - inf: the deviation is infinite then.
  return {weight, about + mean, select(equal(deviation, deviation), vmax(deviation, zero), splat(kInf))};
}

// Chan's merge: lane vector j of `into`, whose weights shrink by alpha and whose t moved by `move`, and `added`.
POISE_INLINE void merge(Moments& into, int j, vf alpha, vf move, const Moment& added) {
  const vf zero = splat(0.0f), old = alpha * into.weight[j], weight = multiply_add(alpha, into.weight[j], added.weight);
  const vf share = added.weight / select(equal(weight, zero), splat(1.0f), weight);
  const vf old_mean = into.mean[j] + move, difference = added.mean - old_mean;
  const vf apart = difference * difference * old * share;  // may be inf * 0 where one side is empty
  into.deviation[j] = alpha * into.deviation[j] + added.deviation + select(equal(old * share, zero), zero, apart);
  into.mean[j] = select(equal(share, zero), old_mean, old_mean + difference * share);
  into.weight[j] = weight;
}

// What more keys add, relative to the new reference.
struct Added {
  Moment soft, plain;
  vf squares, low;
};

// Joins keys to lane vector j: what is there moves by `move` (in t's units, 0 for nothing) and shrinks by alpha.
template <bool STATS>
POISE_INLINE void join_lanes(State& state, int j, vf alpha, vf move, const Added& added) {
  if (!STATS) {
    state.soft.weight[j] = multiply_add(alpha, state.soft.weight[j], added.soft.weight);
    return;
  }
  merge(state.soft, j, alpha, move, added.soft);
  merge(state.plain, j, splat(1.0f), move, added.plain);
  state.squares[j] = alpha * alpha * state.squares[j] + added.squares;
  state.low[j] = vmin(added.low, state.low[j]);
}

// A guess at the mean of t: the state's if it has one, else that of the visible among a few of these rows.
template <bool FINAL, int ROW = kLanes>
POISE_INLINE vf guess_mean(const State& state, int j, vf move, const float* s, int rows, vf slope, vf intercept) {
  const vf zero = splat(0.0f);
  vf sum = zero, count = zero;
  for (int n = 0; n < 8; ++n) {  // spread over the rows: neighbours may be alike, and hidden
    const vf score = load(s + n * rows / 8 * ROW), t = FINAL ? score - intercept : score * slope - intercept;
    const vmask counts = less(splat(-3e38f), t);  // visible, finite
    sum += select(counts, t, zero);
    count += select(counts, splat(1.0f), zero);
  }
  const vf own = sum / select(equal(count, zero), splat(1.0f), count);
  return select(equal(state.plain.weight[j], zero), own, state.plain.mean[j] + move);
}

// The exponentials of one lane vector: scores s [rows, ROW] become weights in place (bf16: pairs, half the rows).
// MASKED: hidden entries are -inf and must not enter the plain moments. Sums are kept short, a chunk of rows each, and
// then added up: one long chain of additions would lose the low digits of the means. Plain moments are taken about the
// pilot, a guess at the mean of t; soft ones too where attention is flat, else about the maximum, where a peaked row
// has its mean: anywhere else squares would cancel.
template <class Cells, bool STATS, bool MASKED, bool FINAL, int ROW = kLanes>
POISE_INLINE Added weights(float* s, int rows, vf slope, vf intercept, vf pilot) {
  constexpr int kUnroll = 4, kChunk = 32;
  const vf zero = splat(0.0f), center = select(less(splat(-2.0f), pilot), pilot, zero);
  vf weight = zero, soft_sum = zero, soft_square = zero, squares = zero;
  vf count = MASKED ? zero : splat((float)rows), plain_sum = zero, plain_square = zero, lowest = splat(kInf);
  for (int first = 0; first < rows; first += kChunk) {
    vf sums[kUnroll] = {zero, zero, zero, zero};
    vf pt_sum = zero, ptt_sum = zero, pp_sum = zero, t_sum = zero, tt_sum = zero;
    const auto weigh = [&](int k, vf& sum) POISE_INLINE_LAMBDA {
      const vf score = load(s + k * ROW);
      const vf t = FINAL ? score - intercept : score * slope - intercept;
      const vf p = exp2_of(FINAL ? t * splat(kLog2e) : t);
      sum += p;
      if (STATS) {
        vf from_pilot = t - pilot, pt = p * (t - center), visible_score = score;
        if (MASKED) {
          const vmask hidden = equal(score, splat(-kInf));
          from_pilot = select(hidden, zero, from_pilot);
          visible_score = select(hidden, splat(kInf), score);
          count += select(hidden, zero, splat(1.0f));
          pt = select(equal(p, zero), zero, pt);  // t is infinite, or overflowed
        }
        const vf ptt = pt * (MASKED ? select(equal(p, zero), zero, t - center) : t - center);
        lowest = vmin(visible_score, lowest);
        t_sum += from_pilot;
        tt_sum += from_pilot * from_pilot;
        pt_sum += pt;
        ptt_sum += ptt;
        pp_sum += p * p;
      }
      return p;
    };
    const int end = lesser(first + kChunk, rows);
    int k = first;
#if defined(__AVX512BF16__)
    if constexpr (Cells::kPair == 2) {
      for (; k + kUnroll <= end; k += kUnroll) {
#pragma GCC unroll 2
        for (int u = 0; u < kUnroll; u += 2) {
          const vf low = weigh(k + u, sums[u]), high = weigh(k + u + 1, sums[u + 1]);
          Cells::store_pair(s + (k + u) / 2 * ROW, low, high);
        }
      }
      for (; k < end; k += 2) {
        const vf low = weigh(k, sums[0]), high = weigh(k + 1, sums[1]);
        Cells::store_pair(s + k / 2 * ROW, low, high);
      }
    } else
#endif
    {
      for (; k + kUnroll <= end; k += kUnroll) {
#pragma GCC unroll 4
        for (int u = 0; u < kUnroll; ++u) store(s + (k + u) * ROW, weigh(k + u, sums[u]));
      }
      for (; k < end; ++k) store(s + k * ROW, weigh(k, sums[0]));
    }
    weight += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if (STATS) {
      soft_sum += pt_sum;
      soft_square += ptt_sum;
      squares += pp_sum;
      plain_sum += t_sum;
      plain_square += tt_sum;
    }
  }
  if (!STATS) return {{weight, zero, zero}, {zero, zero, zero}, zero, zero};
  return {moment(weight, soft_sum, soft_square, center), moment(count, plain_sum, plain_square, pilot), squares,
          lowest};
}

}  // namespace
}  // namespace poise
