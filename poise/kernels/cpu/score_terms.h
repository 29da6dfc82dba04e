// What the gradients of a row's statistics pass back to its scores: a polynomial in the score, per row.
//
// docs/state.md derives it. Compiled once per ISA and once for exact_gradient.cpp.
#pragma once
#include "backward.h"

namespace poise {
namespace {

// dS_j = p_j (dP_j - delta) + w_j (constant + u_j (linear + u_j square) + w_j own + [j is a sink key] sink)
//        + plain + u_j plain_linear,   u_j = s_j - E[s] = (s_j - max) - shift
// where w and E are of the keys' softmax, which a softmax sink has no part in: p_j = w_j times the keys' share.
struct ScoreTerms {
  bool any;  // whether the row has keys
  float constant, linear, square, own, sink, plain, plain_linear, shift;
};

inline ScoreTerms score_terms(const BackwardArgs& back, int64_t b, int64_t h, int64_t n) {
  const ForwardArgs& args = back.call;
  const int64_t step = args.B * args.H * args.N, place = (b * args.H + h) * args.N + n;
  const auto value = [&](Field field) { return args.stats[field * step + place]; };
  const auto passed = [&](Field field) { return back.d_stats[field * step + place]; };
  ScoreTerms terms{};
  const float count = value(kCount);
  terms.any = count != 0.0f;
  if (!terms.any) return terms;
  const float from_shift = passed(kShift), from_spread = passed(kVarP), from_collision = 2.0f * passed(kCollision);
  terms.constant = passed(kLogSum) + from_shift - from_spread * value(kVarP) - from_collision * value(kCollision) -
                   passed(kSinkMass) * value(kSinkMass);
  terms.linear = from_shift + 2.0f * from_spread;
  terms.square = from_spread;
  terms.own = from_collision;
  terms.sink = passed(kSinkMass);
  terms.shift = value(kShift);
  terms.plain_linear = 2.0f * passed(kVar) / count;
  terms.plain = passed(kMean) / count + terms.plain_linear * (terms.shift + (value(kMaxScore) - value(kMean)));
  return terms;
}

}  // namespace
}  // namespace poise
