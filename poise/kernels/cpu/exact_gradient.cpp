// See exact_gradient.h. Compiled once, without special instructions.
#include "exact_gradient.h"

#include <vector>

#include "dropout.h"
#include "exact_pair.h"
#include "score_terms.h"

namespace poise {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// What a query's visible keys make together. What the forward pass saved of them is rounded as its float scores are: an
// error that all of a row's weights share, which their gradients would show.
struct KnownRow {
  bool known = false;
  double top, lse_of_keys, lse, delta;  // lse: the sink's share included; NaN if the row attended a NaN
};

// Every key of a head asks for the same rows.
struct KnownRows {
  uint64_t call = 0;
  std::vector<std::vector<KnownRow>> heads;
};

struct Query {
  Block block;  // the one that holds it
  int64_t i;
  double scale;
  KnownRow row;
  ScoreTerms terms;
  std::vector<float> q, d_out;
};

// What one visible pair contributes.
struct Pair {
  bool visible;
  double logit;           // z
  double p, to_value;     // weight, and what dropout makes of it
  double d_score, d_raw;  // the gradients of s and of z
};

class Call {
 public:
  explicit Call(const BackwardArgs& back) : back_(back), args_(back.call), row_(args_.Dk), value_(args_.Dv) {}

  Query query(const Block& block, int64_t i) {
    Query query = unknown_query(block, i);
    query.q.resize(args_.Dk), query.d_out.resize(args_.Dv);
    read_row(args_, args_.q, block.h, i, args_.Dk, query.q.data(), block);
    read_row(args_, back_.d_out, block.h, i, args_.Dv, query.d_out.data(), block);
    query.row = known_row(query);
    if (back_.d_stats) query.terms = score_terms(back_, block.b, block.h, i);
    return query;
  }

  // Enough to ask what it sees.
  Query unknown_query(const Block& block, int64_t i) const {
    return Query{block, i, scale_of(args_, block, i), {}, {}, {}, {}};
  }

  // Keys [first, last) one by one, those that the query sees.
  template <class Visit>
  void for_visible(const Query& query, int64_t first, int64_t last, Visit&& visit) {
    const int r = (int)(query.i - query.block.first);
    bool more = true;
    for_segments(args_, query.block, first, last, 1, [&](const Segment& segment) {
      uint64_t words[kSegment];
      const bool partial = visible_words(args_, query.block, segment, words);
      for (int n = 0; n < segment.keys && more; ++n)
        if (!partial || (words[n] >> r & 1)) more = visit((int64_t)segment.key + n);
    });
  }

  // s and z of a pair; false if its bias hides it.
  bool scores(const Query& query, int64_t j, double* logit, double* score) {
    const double bias = bias_of(args_, query.block, query.i, j), cap = args_.softcap;
    if (bias == -kInfinity) return false;
    read_row(args_, args_.k, kv_head(query), j, args_.Dk, row_.data(), query.block);
    *logit = query.scale * dot(query.q.data(), row_.data(), args_.Dk);
    *score = (cap != 0.0 ? cap * std::tanh(*logit / cap) : *logit) + bias;
    return true;
  }

  // Leaves the key's row in `row()`.
  Pair pair(const Query& query, int64_t j) {
    Pair pair{};
    double score = 0.0;
    if (!scores(query, j, &pair.logit, &score)) return pair;
    pair.visible = true;
    pair.p = std::exp(score - query.row.lse);
    read_row(args_, args_.v, kv_head(query), j, args_.Dv, value_.data(), query.block);
    const double factor = dropout_factor(query, j);
    const double inner = factor == 0.0 ? 0.0 : factor * dot(query.d_out.data(), value_.data(), args_.Dv);
    pair.to_value = factor == 0.0 ? 0.0 : factor * pair.p;
    pair.d_score = pair.p * (inner - query.row.delta);
    if (back_.d_stats) {
      const ScoreTerms& terms = query.terms;
      const double weight = std::exp(score - query.row.lse_of_keys);
      const double u = score - query.row.top - terms.shift, near = weight == 0.0 ? 0.0 : u;
      double passed = terms.constant + near * (terms.linear + near * terms.square) + weight * terms.own;
      for (int64_t s = 0; s < args_.num_sink_keys; ++s)
        if (args_.sink_keys[s] == j) passed += terms.sink;
      pair.d_score += weight * passed + terms.plain + u * terms.plain_linear;
    }
    pair.d_raw = pair.d_score;
    if (args_.softcap != 0.0f) {
      const double y = std::tanh(pair.logit / args_.softcap);
      pair.d_raw *= 1.0 - y * y;
    }
    return pair;
  }

  const std::vector<float>& row() const { return row_; }

 private:
  int64_t kv_head(const Query& query) const { return query.block.h / (args_.H / args_.G); }

  // By what dropout multiplies a weight.
  double dropout_factor(const Query& query, int64_t j) const {
    if (args_.kept_factor == 0.0f) return 1.0;
    return kept(args_, query.block.b * args_.H + query.block.h, query.i, j) ? args_.kept_factor : 0.0;
  }

  const KnownRow& known_row(Query& query) {
    static thread_local KnownRows known;
    if (known.call != back_.serial) {
      known.call = back_.serial;
      known.heads.assign((size_t)(args_.B * args_.H), {});
    }
    std::vector<KnownRow>& rows = known.heads[query.block.b * args_.H + query.block.h];
    rows.resize((size_t)args_.N);
    KnownRow& row = rows[query.i];
    if (!row.known) {
      find_lse(query);
      find_delta(query);
      query.row.known = true;
      row = query.row;
    }
    return row;
  }

  void find_lse(Query& query) {
    double top = -kInfinity, sum = 0.0;
    for_visible(query, 0, args_.M, [&](int64_t j) {
      double logit = 0.0, score = 0.0;
      if (!scores(query, j, &logit, &score)) return true;
      if (score > top) {
        sum = sum * std::exp(top - score) + 1.0;
        top = score;
      } else {
        sum += std::exp(score - top);
      }
      return sum == sum;
    });
    query.row.top = top;
    query.row.lse = query.row.lse_of_keys = sum == sum ? top + std::log(sum) : kNan;
    if (args_.sink && sum == sum) {
      const double sink = args_.sink[query.block.h], most = sink > top ? sink : top;
      query.row.lse = most == -kInfinity ? most : most + std::log(sum * std::exp(top - most) + std::exp(sink - most));
    }
  }

  // From the output, as the kernels have it; an output that is not finite may be so by values that dropout dropped,
  // whose weights have no gradient.
  void find_delta(Query& query) {
    read_row(args_, args_.out, query.block.h, query.i, args_.Dv, value_.data(), query.block);
    double& delta = query.row.delta = dot(query.d_out.data(), value_.data(), args_.Dv);
    if (std::isfinite(delta)) return;
    delta = 0.0;
    for_visible(query, 0, args_.M, [&](int64_t j) {
      double logit = 0.0, score = 0.0;
      const double factor = dropout_factor(query, j);
      if (factor == 0.0 || !scores(query, j, &logit, &score)) return true;
      read_row(args_, args_.v, kv_head(query), j, args_.Dv, value_.data(), query.block);
      delta += factor * std::exp(score - query.row.lse) * dot(query.d_out.data(), value_.data(), args_.Dv);
      return delta == delta;
    });
  }

  const BackwardArgs& back_;
  const ForwardArgs& args_;
  std::vector<float> row_, value_;
};

void put_row(const ForwardArgs& args, const Rows& rows, int64_t b, int64_t h, int64_t n, const std::vector<double>& x) {
  char* out = (char*)row_at(rows, args.dtype, b, h, n);
  for (size_t d = 0; d < x.size(); ++d) put_one(out, args.dtype, (int64_t)d, (float)x[d]);
}

}  // namespace

void exact_query_gradients(const BackwardArgs& back, int64_t b, int64_t h, int64_t first, uint64_t rows) {
  const ForwardArgs& args = back.call;
  const Block block = make_block(args, b, h, first);
  Call call(back);
  for (int r = 0; r < block.queries; ++r) {
    if (!(rows >> r & 1)) continue;
    const Query query = call.query(block, first + r);
    std::vector<double> sums(args.Dk, 0.0);
    double of_scale = 0.0;
    bool any = false;
    call.for_visible(query, 0, args.M, [&](int64_t j) {
      const Pair pair = call.pair(query, j);
      if (!pair.visible) return true;
      any = true;
      const double d_raw = pair.d_raw;
      for (int64_t d = 0; d < args.Dk; ++d) sums[d] += d_raw * query.scale * call.row()[d];
      of_scale += d_raw * dot(query.q.data(), call.row().data(), args.Dk);
      return d_raw == d_raw;  // nothing is left to find out about a row that is NaN throughout
    });
    if (back.d_q.data) put_row(args, back.d_q, b, h, first + r, sums);
    const int64_t place = (b * args.H + h) * args.N + first + r;
    if (back.d_scale) back.d_scale[place] = (float)of_scale;
    if (!back.d_sink) continue;
    const double share = any ? std::exp(args.sink[h] - query.row.lse) : 0.0;  // without keys: no output to change
    back.d_sink[place] = share == 0.0 ? 0.0f : (float)(-share * query.row.delta);
  }
}

void exact_key_gradient(const BackwardArgs& back, int64_t b, int64_t kv_head, int64_t n, bool key) {
  const ForwardArgs& args = back.call;
  const int64_t heads = args.H / args.G, dims = key ? args.Dk : args.Dv;
  std::vector<double> sums(dims, 0.0);
  Call call(back);
  bool more = true;
  for (int64_t h = kv_head * heads; h < (kv_head + 1) * heads && more; ++h)
    for (int64_t first = 0; first < args.N && more; first += kTile) {
      const Block block = make_block(args, b, h, first);
      for (int r = 0; r < block.queries && more; ++r) {
        if (block.low[r] > n || block.high[r] <= n) continue;
        Query query;
        bool known = false;
        call.for_visible(call.unknown_query(block, first + r), n, n + 1, [&](int64_t) { return known = true; });
        if (!known) continue;
        query = call.query(block, first + r);
        const Pair pair = call.pair(query, n);
        if (!pair.visible) continue;
        const double weight = key ? pair.d_raw * query.scale : pair.to_value;
        const std::vector<float>& from = key ? query.q : query.d_out;
        for (int64_t d = 0; d < dims; ++d) sums[d] += weight * from[d];
        more = weight == weight;
      }
    }
  put_row(args, key ? back.d_k : back.d_v, b, kv_head, n, sums);
}

float exact_bias_gradient(const BackwardArgs& back, const int64_t* sizes, const int64_t* at) {
  const ForwardArgs& args = back.call;
  const int64_t all[4] = {args.B, args.H, args.N, args.M};
  int64_t from[4], to[4];  // what the entry was broadcast to
  for (int axis = 0; axis < 4; ++axis) {
    from[axis] = sizes[axis] > 1 ? at[axis] : 0;
    to[axis] = sizes[axis] > 1 ? at[axis] + 1 : all[axis];
  }
  Call call(back);
  double sum = 0.0;
  for (int64_t b = from[0]; b < to[0]; ++b)
    for (int64_t h = from[1]; h < to[1]; ++h)
      for (int64_t i = from[2]; i < to[2] && sum == sum; ++i) {
        const Block block = make_block(args, b, h, i / kTile * kTile);
        const int64_t r = i - block.first;
        if (block.low[r] >= to[3] || block.high[r] <= from[3]) continue;
        const Query query = call.query(block, i);
        call.for_visible(query, from[3], to[3], [&](int64_t j) {
          sum += call.pair(query, j).d_score;  // 0 if it is hidden after all
          return sum == sum;
        });
      }
  return (float)sum;
}

void exact_distance_gradients(const BackwardArgs& back, int64_t b, int64_t h, int64_t from, int64_t to, float* table,
                              float* slope) {
  const ForwardArgs& args = back.call;
  const int64_t radius = args.table_radius;
  std::vector<double> sums(2 * radius + 1, 0.0);
  double slopes = 0.0;
  Call call(back);
  for (int64_t i = 0; i < args.N; ++i) {
    const Block block = make_block(args, b, h, i / kTile * kTile);
    const int64_t r = i - block.first;
    if (block.low[r] >= to || block.high[r] <= from) continue;
    const Query query = call.query(block, i);
    call.for_visible(query, from, to, [&](int64_t j) {
      const int64_t distance = j - (block.position + r);
      const double d_score = call.pair(query, j).d_score;
      sums[lesser(greater(distance, -radius), radius) + radius] += d_score;
      slopes -= d_score * (double)(distance < 0 ? -distance : distance);
      return true;
    });
  }
  if (table)
    for (size_t x = 0; x < sums.size(); ++x) table[x] = (float)sums[x];
  if (slope) *slope = (float)slopes;
}

}  // namespace poise
