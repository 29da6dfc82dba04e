// What the gradients of a row's statistics pass back to its scores: a polynomial in the score, per row.
//
// docs/state.md derives it. Compiled once per ISA and once for exact_gradient.cpp.
#pragma once
#include "backward.h"
#include "vec.h"

namespace poise {
namespace {

// dS_j = p_j (dP_j - delta + constant + u_j (linear + u_j square) + p_j unshare own + [j is a sink key] sink)
//        + plain + u_j plain_linear,   u_j = s_j - E[s] under the keys' softmax = (s_j - max) - shift
struct ScoreTerms {
  float constant, linear, square, own, unshare, sink, plain, plain_linear, shift;
};

// `log` is what the forward pass saved: log2 of the softmax's sum, with the sink, relative to the largest score.
inline ScoreTerms score_terms(const BackwardArgs& back, int64_t b, int64_t h, int64_t n, float log) {
  const ForwardArgs& args = back.call;
  const int64_t step = args.B * args.H * args.N, place = (b * args.H + h) * args.N + n;
  const auto value = [&](Field field) { return args.stats[field * step + place]; };
  const auto passed = [&](Field field) { return back.d_stats[field * step + place]; };
  ScoreTerms terms{};
  const float count = value(kCount);
  if (count == 0.0f) return terms;
  // The statistics' softmax leaves the sink out: its weights are p times this, unless the sink took them all.
  float share = 1.0f;
  if (args.sink) share = exp2_of(vmin(splat(value(kLogSum) * kLog2e - log), splat(0.0f)))[0];
  const float more = share > 1e-30f || share != share ? 1.0f / share : 0.0f;
  const float from_shift = passed(kShift), from_spread = passed(kVarP), from_collision = 2.0f * passed(kCollision);
  terms.constant = more * (passed(kLogSum) + from_shift - from_spread * value(kVarP) -
                           from_collision * value(kCollision) - passed(kSinkMass) * value(kSinkMass));
  terms.linear = more * (from_shift + 2.0f * from_spread);
  terms.square = more * from_spread;
  terms.own = more * from_collision, terms.unshare = more;  // apart: a share's square may be too small to divide by
  terms.sink = more * passed(kSinkMass);
  terms.shift = value(kShift);
  terms.plain_linear = 2.0f * passed(kVar) / count;
  terms.plain = passed(kMean) / count + terms.plain_linear * (terms.shift + (value(kMaxScore) - value(kMean)));
  return terms;
}

}  // namespace
}  // namespace poise
