// See exact_gradient.h. Compiled once, without special instructions.
#include "exact_gradient.h"

#include <vector>

#include "dropout.h"
#include "exact_pair.h"
#include "score_terms.h"

namespace poise {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

constexpr double kLogOf2 = 0.69314718055994530942;

struct KnownRows {
  uint64_t call = 0;
  int64_t head = -1;
  std::vector<double> lse;
  std::vector<char> has;
};

struct Query {
  Block block;  // the one that holds it
  int64_t i;
  double scale, lse, delta;  // lse: the sink's share included; NaN if the row attended a NaN
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
    Query query{block, i, scale_of(args_, block, i), 0.0, 0.0, {}, {}, {}};
    query.q.resize(args_.Dk), query.d_out.resize(args_.Dv);
    read_row(args_, args_.q, block.h, i, args_.Dk, query.q.data(), block);
    read_row(args_, back_.d_out, block.h, i, args_.Dv, query.d_out.data(), block);
    read_row(args_, args_.out, block.h, i, args_.Dv, value_.data(), block);
    query.delta = dot(query.d_out.data(), value_.data(), args_.Dv);
    const int64_t place = (block.b * args_.H + block.h) * args_.N + i, step = args_.B * args_.H * args_.N;
    const double top = back_.saved[kSavedTop * step + place], log = back_.saved[kSavedLog * step + place];
    const double largest = back_.products ? top * std::fabs(query.scale) : top;
    query.lse = log == log ? largest + log * kLogOf2 : known_lse(query);
    if (back_.d_stats) {
      const double relative = log == log ? log : (query.lse - args_.stats[kMaxScore * step + place]) / kLogOf2;
      query.terms = score_terms(back_, block.b, block.h, i, (float)relative);
    }
    return query;
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
    pair.p = std::exp(score - query.lse);
    read_row(args_, args_.v, kv_head(query), j, args_.Dv, value_.data(), query.block);
    double inner = dot(query.d_out.data(), value_.data(), args_.Dv), plain = 0.0;
    if (args_.kept_factor != 0.0f) {
      const bool keeps = kept(args_, query.block.b * args_.H + query.block.h, query.i, j);
      pair.to_value = keeps ? pair.p * args_.kept_factor : 0.0;
      inner = keeps ? inner * args_.kept_factor : 0.0;
    } else {
      pair.to_value = pair.p;
    }
    inner -= query.delta;
    if (back_.d_stats) {
      const ScoreTerms& terms = query.terms;
      const int64_t place = (query.block.b * args_.H + query.block.h) * args_.N + query.i;
      const double top = args_.stats[kMaxScore * args_.B * args_.H * args_.N + place];
      const double u = score - top - terms.shift, near = pair.p == 0.0 ? 0.0 : u;
      inner += terms.constant + near * (terms.linear + near * terms.square) + pair.p * terms.own;
      for (int64_t s = 0; s < args_.num_sink_keys; ++s)
        if (args_.sink_keys[s] == j) inner += terms.sink;
      plain = terms.plain + u * terms.plain_linear;
    }
    pair.d_raw = pair.d_score = pair.p * inner + plain;
    if (args_.softcap != 0.0f) {
      const double y = std::tanh(pair.logit / args_.softcap);
      pair.d_raw *= 1.0 - y * y;
    }
    return pair;
  }

  const std::vector<float>& row() const { return row_; }

 private:
  int64_t kv_head(const Query& query) const { return query.block.h / (args_.H / args_.G); }

  // Every key of the head asks for the same rows.
  double known_lse(const Query& query) {
    static thread_local KnownRows known;
    const int64_t head = query.block.b * args_.H + query.block.h;
    if (known.call != back_.serial || known.head != head) {
      known.call = back_.serial, known.head = head;
      known.lse.assign((size_t)args_.N, 0.0);
      known.has.assign((size_t)args_.N, 0);
    }
    if (!known.has[query.i]) {
      known.lse[query.i] = exact_lse(query);
      known.has[query.i] = 1;
    }
    return known.lse[query.i];
  }

  double exact_lse(const Query& query) {
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
    if (sum != sum) return kNan;
    if (args_.sink) {
      const double sink = args_.sink[query.block.h], most = sink > top ? sink : top;
      if (most == -kInfinity) return most;
      return most + std::log(sum * std::exp(top - most) + std::exp(sink - most));
    }
    return top + std::log(sum);
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
    call.for_visible(query, 0, args.M, [&](int64_t j) {
      const Pair pair = call.pair(query, j);
      if (!pair.visible) return true;
      const double d_raw = pair.d_raw;
      for (int64_t d = 0; d < args.Dk; ++d) sums[d] += d_raw * query.scale * call.row()[d];
      of_scale += d_raw * dot(query.q.data(), call.row().data(), args.Dk);
      return d_raw == d_raw;  // nothing is left to find out about a row that is NaN throughout
    });
    if (back.d_q.data) put_row(args, back.d_q, b, h, first + r, sums);
    if (back.d_scale) back.d_scale[(b * args.H + h) * args.N + first + r] = (float)of_scale;
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
        Query probe{block, first + r, 0.0, 0.0, 0.0, {}, {}, {}};
        call.for_visible(probe, n, n + 1, [&](int64_t) { return known = true; });
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
