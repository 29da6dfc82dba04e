// See exact.h. Compiled once, without special instructions: rare rows, and the arithmetic of the definition.
#include "exact.h"

#include <cmath>
#include <limits>
#include <vector>

#include "dropout.h"
#include "exact_pair.h"

namespace poise {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct Key {
  int64_t index;
  double logit, score;
};

// The keys that query i sees; a score of -inf that a bias made counts as hidden. Once a logit is NaN so is the row, and
// only the count still matters: no more products are computed.
std::vector<Key> visible_keys(const ForwardArgs& args, const Block& block, int64_t i) {
  std::vector<Key> keys;
  const int r = (int)(i - block.first);
  const int64_t kv_head = block.h / (args.H / args.G);
  std::vector<float> q(args.Dk), k(args.Dk);
  read_row(args, args.q, block.h, i, args.Dk, q.data(), block);
  const double scale = scale_of(args, block, i);
  bool lost = false;
  for_segments(args, block, 0, args.M, 1, [&](const Segment& segment) {
    uint64_t words[kSegment];
    const bool partial = visible_words(args, block, segment, words);
    for (int n = 0; n < segment.keys; ++n) {
      if (partial && !(words[n] >> r & 1)) continue;
      const int64_t j = segment.key + n;
      const double bias = bias_of(args, block, i, j);
      if (bias == -kInfinity) continue;
      if (lost) {
        keys.push_back({j, kNan, kNan});
        continue;
      }
      read_key(args, args.k, args.k_scale, kv_head, j, args.Dk, k.data(), block);
      const double logit = scale * dot(q.data(), k.data(), args.Dk), cap = args.softcap;
      const double score = (cap != 0.0 ? cap * std::tanh(logit / cap) : logit) + bias;
      lost = logit != logit;
      keys.push_back({j, logit, score});
    }
  });
  return keys;
}

// max or min that lets a NaN show.
void widen(double& extreme, double x, bool up) {
  if (x != x || (up ? x > extreme : x < extreme)) extreme = x;
}

void write_row(const ForwardArgs& args, const Block& block, int64_t i, bool output) {
  const std::vector<Key> keys = visible_keys(args, block, i);
  const int64_t kv_head = block.h / (args.H / args.G), n = (int64_t)keys.size();
  double top = -kInfinity, low = kInfinity, top_logit = -kInfinity, mean = 0.0;
  for (const Key& key : keys) {
    if (top == top) widen(top, key.score, true);
    if (low == low) widen(low, key.score, false);
    if (top_logit == top_logit) widen(top_logit, key.logit, true);
    mean += key.score / (double)n;
  }
  // Relative to the largest score; a row of visible -inf scores has no largest, and no weights: NaN, as in IEEE.
  double sum = 0.0, shift = 0.0, shift_square = 0.0, squares = 0.0, deviation = 0.0, sink_sum = 0.0;
  std::vector<double> weight(keys.size());
  for (size_t n_key = 0; n_key < keys.size(); ++n_key) {
    const double t = keys[n_key].score - top, w = std::exp(t);
    weight[n_key] = w;
    sum += w;
    if (w != 0.0) {
      shift += w * t;
      shift_square += w * t * t;
      squares += w * w;
    }
    deviation += (keys[n_key].score - mean) * (keys[n_key].score - mean);
    for (int64_t s = 0; s < args.num_sink_keys; ++s)
      if (args.sink_keys[s] == keys[n_key].index) sink_sum += w;
  }
  const double total = args.sink ? sum + std::exp((double)args.sink[block.h] - top) : sum;

  if (output) {
    const bool drops = args.kept_factor != 0.0f;
    const bool lost = total != total && !drops;  // no need to look at the values: all is NaN
    std::vector<double> sums(args.Dv, lost ? kNan : 0.0);
    std::vector<float> v(args.Dv);
    for (size_t n_key = 0; n_key < keys.size() && !lost; ++n_key) {
      read_key(args, args.v, args.v_scale, kv_head, keys[n_key].index, args.Dv, v.data(), block);
      double p = weight[n_key] / total;
      if (drops) p = kept(args, block.b * args.H + block.h, i, keys[n_key].index) ? p * args.kept_factor : 0.0;
      for (int64_t d = 0; d < args.Dv; ++d) sums[d] += p * v[d];
    }
    char* out = (char*)row_at(args.out, args.dtype, block.b, block.h, i);
    for (int64_t d = 0; d < args.Dv; ++d) put_one(out, args.dtype, d, (float)sums[d]);
  }
  if (!args.stats) return;
  double value[kFields] = {0.0, top, top_logit, low, 0.0, 0.0, (double)n, 0.0, 0.0, 0.0, 0.0};
  if (n) {
    const double mean_t = shift / sum, spread = shift_square / sum - mean_t * mean_t;
    value[kLogSum] = std::log(sum);
    value[kMean] = mean;
    value[kVar] = deviation / (double)n;
    value[kShift] = mean_t;
    value[kVarP] = spread < 0.0 ? 0.0 : spread;
    value[kCollision] = squares / (sum * sum);
    value[kSinkMass] = sink_sum / sum;
  }
  float* to = args.stats + (block.b * args.H + block.h) * args.N + i;
  for (int field = 0; field < kFields; ++field) to[field * args.B * args.H * args.N] = (float)value[field];
}

}  // namespace

void exact_rows(const ForwardArgs& args, int64_t b, int64_t h, int64_t first, uint64_t rows, uint64_t outputs) {
  const Block block = make_block(args, b, h, first);
  for (int r = 0; r < block.queries; ++r)
    if ((rows | outputs) >> r & 1) write_row(args, block, first + r, outputs >> r & 1);
}

}  // namespace poise
