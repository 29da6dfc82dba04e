// Attention of a few queries over many keys: what reading the keys costs is all that it should cost.
//
// A block is all queries of some query heads that share a key/value head: their rows meet each key together. Rows come
// in bundles of at most kBundleRows; a bundle's scores [key][slot] fill vectors, so a lane belongs to a slot and to
// every few keys. All lanes of a slot share one reference (see softmax.h), each sums up its own keys, and they fold
// into one when a chunk of keys is done. Judging and finishing rows, and their statistics, are attention.h's.
// Included once per ISA.
#pragma once
#include "attention.h"
#include "decode_rows.h"

namespace poise {
namespace {

constexpr int kBundles = kGroupVecs, kBlockRows = kBundles * kBundleRows;
constexpr int kMostQueries = kBlockRows < 16 ? kBlockRows : 16;
constexpr int64_t kAheadBytes = 16 << 10;   // of keys, or of values, that are asked for early; half for single rows
constexpr int64_t kCachedBytes = 32 << 20;  // beyond this the next call finds nothing of these keys in a cache

// Whether a call is this kernel's: few queries, and nothing that the general kernel alone can do.
inline bool decodes(const ForwardArgs& args) {
  return args.N <= kMostQueries && args.M > 0 && !args.tile_ptr && args.kept_factor == 0.0f;
}

template <class Cells, bool STATS, bool FINAL>
struct Decode {
  typedef Forward<FloatCells, STATS, FINAL> Finish;

  // How the query heads of a key/value head are divided into blocks.
  struct Division {
    int blocks, heads;  // heads of a block; the last may have fewer
    explicit Division(const ForwardArgs& args) {
      const int ratio = (int)(args.H / args.G), most = (int)(kBlockRows / args.N);
      blocks = (ratio + most - 1) / most;
      heads = (ratio + blocks - 1) / blocks;
    }
    int rows(const ForwardArgs& args) const { return heads * (int)args.N; }
    int bundles(const ForwardArgs& args) const { return (rows(args) + kBundleRows - 1) / kBundleRows; }
  };

  static DecodeKernels kernels_of(const ForwardArgs& args) {
    const Division division(args);
    const int bundles = division.bundles(args);
    const int64_t bytes = args.B * args.G * args.M * (args.Dk + args.Dv) * size_of(args.kv_dtype);
    return decode_kernels<Cells>(args.kv_dtype, (division.rows(args) + bundles - 1) / bundles, bytes > kCachedBytes);
  }

  struct Memory {
    State* state;
    char* q;                    // [bundles, rows of a bundle] in the kernels' order
    float* q_floats;            // one row
    float* o;                   // as q
    float *scores, *bias;       // [bundles, kSegment * slots], [key][slot]
    float *k_scale, *v_scale;   // [kSegment * slots] likewise: int8 keys' factors
    const char **k_at, **v_at;  // where the segment's rows are, and those that follow

    static size_t layout(const ForwardArgs& args, char* base, Memory* out) {
      size_t used = Finish::scratch_bytes(args);
      const auto take = [&](size_t bytes) {
        char* p = base + used;
        used += (bytes + 63) / 64 * 64;
        return p;
      };
      const size_t bundles = (size_t)Division(args).bundles(args);
      const DecodeKernels run = kernels_of(args);
      const size_t scores = 4 * kSegment * (size_t)run.slots;
      Memory m;
      m.state = (State*)take(sizeof(State));
      m.q = take(bundles * run.rows * q_bytes(args, run));
      m.q_floats = (float*)take(4 * (size_t)args.Dk);
      m.o = (float*)take(bundles * run.rows * 4 * o_row(args, run));
      m.scores = (float*)take(bundles * scores);
      m.bias = (float*)take(FINAL ? bundles * scores : 0);
      m.k_scale = (float*)take(args.k_scale.data ? scores : 0);
      m.v_scale = (float*)take(args.v_scale.data ? scores : 0);
      m.k_at = (const char**)take(sizeof(char*) * kPointers);
      m.v_at = (const char**)take(sizeof(char*) * kPointers);
      if (out) *out = m;
      return used;
    }
  };

  static constexpr int kMostAhead = 128, kPointers = kSegment + W + kMostAhead;

  static size_t q_bytes(const ForwardArgs& args, const DecodeKernels& run) {
    return (size_t)((args.Dk + run.key_unit - 1) / run.key_unit * run.query_bytes);
  }
  static size_t o_row(const ForwardArgs& args, const DecodeKernels& run) {
    return (size_t)((args.Dv + run.value_unit - 1) / run.value_unit * run.value_unit);
  }

  // --- What run.h asks of a kernel ---
  static int64_t heads(const ForwardArgs& args) { return args.B * args.G; }
  static int64_t blocks(const ForwardArgs& args) { return Division(args).blocks; }
  static size_t scratch_bytes(const ForwardArgs& args) { return Memory::layout(args, nullptr, nullptr); }
  static size_t partial_bytes(const ForwardArgs& args) {
    const DecodeKernels run = kernels_of(args);
    return sizeof(State) + 4 * (size_t)(Division(args).bundles(args) * run.rows) * o_row(args, run);
  }

  const ForwardArgs& args;
  ForwardArgs plain;  // without dense masks: visible.h takes a block for one head's
  const Division division;
  const DecodeKernels run;
  const int bundles, step, k_ahead, v_ahead;
  const size_t wide, q_row;
  Finish finish;
  Memory memory;
  Block block;             // rows are [head][query]
  int64_t kv_head, first;  // first query head
  int heads_here;
  vf scale[kBundles];  // per lane

  Decode(const ForwardArgs& a, char* base)
      : args(a),
        plain(a),
        division(a),
        run(kernels_of(a)),
        bundles(division.bundles(a)),
        step(step_of()),
        k_ahead(ahead_of(a.Dk)),
        v_ahead(ahead_of(a.Dv)),
        wide(o_row(a, run)),
        q_row(q_bytes(a, run)),
        finish(a, base) {
    Memory::layout(a, base, &memory);
    plain.num_masks = 0;
  }

  void begin(int64_t head, int64_t row) {
    kv_head = head % args.G;
    const int64_t b = head / args.G, ratio = args.H / args.G;
    first = kv_head * ratio + row * division.heads;
    heads_here = (int)lesser<int64_t>(division.heads, ratio - row * division.heads);
    make_rows(b);
    reset(*memory.state);
    memset(memory.o, 0, 4 * wide * bundles * run.rows);
    float lanes[kBundles * W];
    for (float& lane : lanes) lane = 1.0f;
    for (int r = 0; r < bundles * run.rows; ++r) {
      char* to = memory.q + r * q_row;
      if (r >= block.queries) {
        memset(to, 0, q_row);
        continue;
      }
      const int64_t h = first + r / args.N, n = r % args.N;
      const float mine =
          args.scale_rows ? args.scale_rows[b * args.scale_b + h * args.scale_h + n * args.scale_n] : args.scale;
      const float sign = mine < 0 ? -1.0f : mine == 0 ? 0.0f : 1.0f;
      for (int lane = r % run.rows; lane < W; lane += run.slots)
        lanes[r / run.rows * W + lane] = mine == 0 ? 1.0f : mine * sign;
      widen_rows(row_at(args.q, args.dtype, b, h, n), 0, args.dtype, 1, (int)args.Dk, (int)args.Dk, memory.q_floats);
      if (sign != 1.0f)
        for (int d = 0; d < args.Dk; ++d) memory.q_floats[d] *= sign;
      run.pack(memory.q_floats, (int)args.Dk, to);
    }
    for (int j = 0; j < bundles; ++j) scale[j] = load(lanes + j * W);
  }

  void attend(int64_t from, int64_t to) {
    for_segments(plain, block, from, to, 1, [&](const Segment& segment) {
      uint64_t words[kSegment];
      const bool partial = visible(segment, words);
      memory.state->seen |= partial ? 0 : everyone();
      point_at_rows(segment);
      if (FINAL) fill_bias(segment);
      for (int i = 0; i < segment.keys; i += step) {
        const int keys = lesser(step, segment.keys - i);
        if (partial) {
          uint64_t seen = 0;
          for (int k = 0; k < keys; ++k) seen |= words[i + k];
          if (!seen) continue;
          memory.state->seen |= seen;
        }
        attend_keys(segment, i, keys, partial ? words + i : nullptr);
      }
    });
    fold();
  }

  void save(char* to) {
    memcpy(to, memory.state, sizeof(State));
    memcpy(to + sizeof(State), memory.o, 4 * wide * bundles * run.rows);
  }

  void join(const char* from) {
    State other;
    memcpy(&other, from, sizeof(State));
    const float* o = (const float*)(from + sizeof(State));
    memory.state->seen |= other.seen;
    for (int j = 0; j < bundles; ++j) {
      vf alpha, other_alpha;
      Finish::join_states(*memory.state, j, other, alpha, other_alpha);
      for (int r = 0; r < run.rows; ++r) {
        const int64_t row = (int64_t)(j * run.rows + r) * wide;
        for (size_t d = 0; d < wide; d += W)
          store(memory.o + row + d,
                load(memory.o + row + d) * splat(alpha[r]) + load(o + row + d) * splat(other_alpha[r]));
      }
    }
  }

  void finish_block() {
    for (int h = 0; h < heads_here; ++h) finish_head(h);
  }

 private:
  // Values that take several passes should still be in the cache at the last.
  int step_of() const { return bundles == 1 && args.Dv * run.slots <= kSums * W ? kSegment : 64; }
  int ahead_of(int64_t dims) const {
    const int64_t bytes = run.rows == 1 ? kAheadBytes / 2 : kAheadBytes;
    return (int)greater<int64_t>(
        8, lesser<int64_t>(kMostAhead, bytes / greater<int64_t>(dims * size_of(args.kv_dtype), 1)));
  }

  uint64_t everyone() const { return (1ull << block.queries) - 1; }

  // The block's rows: intervals of each head's queries, one head after the other.
  void make_rows(int64_t b) {
    const int queries = (int)args.N;
    block = make_block(args, b, first, 0);
    for (int h = 1; h < heads_here; ++h) {
      const Block other = args.rows ? make_block(args, b, first + h, 0) : block;
      memcpy(block.low + h * queries, other.low, 4 * queries);
      memcpy(block.high + h * queries, other.high, 4 * queries);
      block.widest_low = lesser(block.widest_low, other.widest_low);
      block.widest_high = greater(block.widest_high, other.widest_high);
      block.common_low = greater(block.common_low, other.common_low);
      block.common_high = lesser(block.common_high, other.common_high);
    }
    block.queries = heads_here * queries;
  }

  // As visible_words, with the dense masks of every head.
  bool visible(const Segment& segment, uint64_t* words) {
    const bool partial = visible_words(plain, block, segment, words);
    if (!args.num_masks) return partial;
    if (!partial)
      for (int k = 0; k < segment.keys; ++k) words[k] = everyone();
    const uint64_t all = (1ull << args.N) - 1;
    Block one = block;
    one.queries = (int)args.N;
    for (int i = 0; i < args.num_masks; ++i)
      for (int h = 0; h < heads_here; ++h) {
        uint64_t mine[kSegment];
        for (int k = 0; k < segment.keys; ++k) mine[k] = all;
        one.h = first + h;
        and_dense(args.masks[i], one, segment.key, segment.keys, mine);
        const int shift = h * (int)args.N;
        for (int k = 0; k < segment.keys; ++k) words[k] &= ~((mine[k] ^ all) << shift);
      }
    return true;
  }

  // Rows of this segment, and of what follows it while there are any.
  void point_at_rows(const Segment& segment) {
    const int wanted = kPointers;
    const int keys = args.pages ? (int)lesser<int64_t>(wanted, block.widest_high - segment.key) : wanted;
    const int64_t width = size_of(args.kv_dtype), k_row = args.k.n * width, v_row = args.v.n * width;
    for_pages(args, segment.key, keys, [&](int i, int count) {
      const char* k = key_row(args, args.k, block.b, kv_head, segment.key + i);
      const char* v = key_row(args, args.v, block.b, kv_head, segment.key + i);
      for (int n = 0; n < count; ++n) {
        memory.k_at[i + n] = (const char*)((uintptr_t)k + n * k_row);  // beyond the last row only to be asked for
        memory.v_at[i + n] = (const char*)((uintptr_t)v + n * v_row);
      }
    });
    for (int i = keys; i < wanted; ++i) {
      memory.k_at[i] = memory.k_at[keys - 1];
      memory.v_at[i] = memory.v_at[keys - 1];
    }
    if (args.k_scale.data) spread_scales(args.k_scale, segment, memory.k_scale);
    if (args.v_scale.data) spread_scales(args.v_scale, segment, memory.v_scale);
  }

  // A factor per key to [key][slot].
  void spread_scales(const Scales& scales, const Segment& segment, float* to) {
    for_pages(args, segment.key, segment.keys, [&](int i, int count) {
      const float* factor = key_scale(args, scales, block.b, kv_head, segment.key + i);
      if (run.slots == 1) {
        memcpy(to + i, factor, 4 * count);
        return;
      }
      for (int n = 0; n < count; ++n)
        for (int slot = 0; slot < run.slots; ++slot) to[(i + n) * run.slots + slot] = factor[n];
    });
  }

  void fill_bias(const Segment& segment) {
    memset(memory.bias, 0, 4 * (size_t)(bundles * kSegment * run.slots));
    for (int r = 0; r < block.queries; ++r) {
      float* to = memory.bias + r / run.rows * kSegment * run.slots + r % run.rows;
      const int64_t h = first + r / args.N, n = r % args.N;
      const int64_t distance = segment.key - (block.position + n);  // of the first key
      if (args.table) {
        const int64_t radius = args.table_radius;
        const float* table = args.table + h * args.table_h + radius;
        for (int k = 0; k < segment.keys; ++k)
          to[k * run.slots] = table[lesser(greater(distance + k, -radius), radius)];
      }
      if (args.slopes) {
        const float slope = args.slopes[h];
        for (int k = 0; k < segment.keys; ++k)
          to[k * run.slots] -= slope * (float)(distance + k < 0 ? -(distance + k) : distance + k);
      }
      for (int i = 0; i < args.num_biases; ++i) {
        const DenseBias& bias = args.biases[i];
        const int64_t at = block.b * bias.b + h * bias.h + n * bias.n + segment.key * bias.m;
        for (int k = 0; k < segment.keys; ++k)
          to[k * run.slots] += element((const char*)bias.data, bias.dtype, at + k * bias.m);
      }
    }
  }

  // Who sees the keys of vector i of bundle j, a bit per lane; words null: all rows see all keys there are.
  uint64_t lanes_seeing(int i, int j, int keys, const uint64_t* words) const {
    const int in_vector = W / run.slots, begin = i * in_vector, here = lesser(in_vector, keys - begin);
    if (!words) return here == in_vector ? (1ull << W) - 1 : (1ull << (here * run.slots)) - 1;
    uint64_t lanes = 0;
    const uint64_t mine = (1ull << run.rows) - 1;
    for (int k = 0; k < here; ++k) lanes |= (words[begin + k] >> (j * run.rows) & mine) << (k * run.slots);
    return lanes;
  }

  void attend_keys(const Segment& segment, int begin, int keys, const uint64_t* words) {
    for (int j = 0; j < bundles; ++j) {
      float* s = memory.scores + j * kSegment * run.slots;
      run.score(memory.k_at + begin, k_ahead, keys, (int)args.Dk, memory.q + j * run.rows * q_row, s);
      alignas(64) float alpha[W];
      store(alpha, weigh(segment, j, begin, keys, words, s));
      run.add(memory.v_at + begin, v_ahead, keys, (int)args.Dv, s, memory.o + j * run.rows * wide, (ptrdiff_t)wide,
              alpha);
    }
  }

  // Products to weights, in place; the state moves to the new maximum, and what there was shrinks by what is returned.
  vf weigh(const Segment& segment, int j, int begin, int keys, const uint64_t* words, float* s) {
    State& state = *memory.state;
    const int in_vector = W / run.slots, vectors = (keys + in_vector - 1) / in_vector;
    const bool hidden = words || keys % in_vector;
    if (args.k_scale.data)
      for (int i = 0; i < vectors; ++i)
        store(s + i * W, load(s + i * W) * load(memory.k_scale + begin * run.slots + i * W));
    vf top = splat(-kInf);
    if (FINAL) {
      top = finish_products(state, j, begin, keys, words, s);
    } else if (hidden) {
      for (int i = 0; i < vectors; ++i) {
        const vf product = load(s + i * W);
        const vf score = select(mask_of(lanes_seeing(i, j, keys, words)), product, splat(-kInf));
        if (STATS) state.lowest_product[j] = vmin(product, state.lowest_product[j]);
        store(s + i * W, score);
        top = vmax(score, top);
      }
    } else {
      for (int i = 0; i < vectors; ++i) top = vmax(load(s + i * W), top);
    }
    for (int by = run.slots; by < W; by *= 2) top = vmax(swap_lanes(top, by), top);

    const vf slope = scale[j] * splat(kLog2e);
    top = vmax(top, state.top[j]);
    const vf reference = FINAL ? top : top * slope;
    const vf intercept = zero_if_empty(reference), move = state.reference[j] - intercept;
    const vf alpha = exp2_of(FINAL ? move * splat(kLog2e) : move);
    const vf finite_move = select(equal(state.reference[j], splat(-kInf)), splat(0.0f), move);
    vf pilot = splat(0.0f);
    if (STATS) pilot = guess_mean<FINAL, W>(state, j, finite_move, s, vectors, slope, intercept);
    const bool masked = STATS && (FINAL || hidden);
    const Added added = masked ? weights<FloatCells, STATS, true, FINAL, W>(s, vectors, slope, intercept, pilot)
                               : weights<FloatCells, STATS, false, FINAL, W>(s, vectors, slope, intercept, pilot);
    join_lanes<STATS>(state, j, alpha, finite_move, added);
    state.top[j] = top;
    state.reference[j] = reference;
    if (STATS) add_sink_keys(state, j, segment.key + begin, keys, alpha, s);
    if (args.v_scale.data)
      for (int i = 0; i < vectors; ++i)
        store(s + i * W, load(s + i * W) * load(memory.v_scale + begin * run.slots + i * W));
    return alpha;
  }

  // Final mode: products to scores; returns the largest.
  vf finish_products(State& state, int j, int begin, int keys, const uint64_t* words, float* s) {
    const int in_vector = W / run.slots, vectors = (keys + in_vector - 1) / in_vector;
    const vf cap = splat(args.softcap), uncap = splat(args.softcap != 0.0f ? 1.0f / args.softcap : 0.0f);
    const float* bias = memory.bias + (j * kSegment + begin) * run.slots;
    vf top = splat(-kInf);
    for (int i = 0; i < vectors; ++i) {
      const vf product = load(s + i * W), logit = product * scale[j], added = load(bias + i * W);
      vf score = args.softcap != 0.0f ? multiply_add(cap, tanh_of(logit * uncap), added)
                                      : multiply_add(product, scale[j], added);
      score = select(mask_of(lanes_seeing(i, j, keys, words)), score, splat(-kInf));
      store(s + i * W, score);
      top = vmax(score, top);
      if (STATS) {
        state.top_logit[j] = vmax(select(equal(score, splat(-kInf)), splat(-kInf), logit), state.top_logit[j]);
        state.lowest_product[j] = vmin(logit, state.lowest_product[j]);
      }
    }
    return top;
  }

  void add_sink_keys(State& state, int j, int64_t key, int keys, vf alpha, const float* s) {
    vf sum = alpha * state.sink_sum[j];
    for (int64_t i = 0; i < args.num_sink_keys; ++i) {
      const int64_t at = args.sink_keys[i] - key;
      if (at < 0 || at >= keys) continue;
      for (int slot = 0; slot < run.slots; ++slot) sum[slot] += s[at * run.slots + slot];
    }
    state.sink_sum[j] = sum;
  }

  // All lanes of a slot into each of them.
  void fold() {
    State& state = *memory.state;
    for (int j = 0; j < bundles; ++j)
      for (int by = run.slots; by < W; by *= 2) {
        if (!STATS) {
          state.soft.weight[j] += swap_lanes(state.soft.weight[j], by);
          continue;
        }
        State other;
        for_fields(other, state,
                   [&](Lanes<kGroupVecs>& to, const Lanes<kGroupVecs>& from) { to[j] = swap_lanes(from[j], by); });
        vf alpha, other_alpha;
        Finish::join_states(state, j, other, alpha, other_alpha);
      }
  }

  template <class Visit>
  static void for_fields(State& a, const State& b, Visit&& visit) {
    visit(a.top, b.top);
    visit(a.reference, b.reference);
    visit(a.soft.weight, b.soft.weight);
    if (!STATS) return;
    visit(a.soft.mean, b.soft.mean);
    visit(a.soft.deviation, b.soft.deviation);
    visit(a.plain.weight, b.plain.weight);
    visit(a.plain.mean, b.plain.mean);
    visit(a.plain.deviation, b.plain.deviation);
    visit(a.squares, b.squares);
    visit(a.low, b.low);
    visit(a.lowest_product, b.lowest_product);
    visit(a.top_logit, b.top_logit);
    visit(a.sink_sum, b.sink_sum);
  }

  // One head's rows to a block of attention.h's, which knows what becomes of them.
  void finish_head(int h) {
    const int queries = (int)args.N;
    float sign[kTile];
    finish.place(block.b, first + h, 0, sign);
    State& to = finish.scratch.state[0];
    to.seen = memory.state->seen >> (h * queries) & ((1ull << queries) - 1);
    for_fields(to, *memory.state, [&](Lanes<kGroupVecs>& mine, const Lanes<kGroupVecs>& from) {
      for (int n = 0; n < queries; ++n) {
        const int row = h * queries + n;
        mine[n / W][n % W] = from[row / run.rows][row % run.rows];
      }
    });
    vf inverse[kGroupVecs];
    auto verdict = finish.judge(0, inverse);
    for (int n = 0; n < queries; ++n) {
      const float* o = memory.o + (int64_t)(h * queries + n) * wide;
      char* out = (char*)row_at(args.out, args.dtype, block.b, first + h, n);
      if (!write_row(o, inverse[n / W][n % W], out)) verdict.rows |= 1ull << n;
    }
    if (verdict.rows | verdict.stats)
      exact_rows(args, block.b, first + h, 0, verdict.rows | verdict.stats, verdict.rows);
  }

  // False if something in it is not finite.
  bool write_row(const float* o, float inverse, char* out) const {
    const int dims = (int)args.Dv;
    vf taint = splat(0.0f);
    if (run.value_unit == W) {
      for (int d = 0; d < dims; d += W) {
        const vf x = load(o + d) * splat(inverse);
        taint += x - x;
        if (d + W <= dims) {
          put(out, args.dtype, d, x);
        } else {
          for (int lane = 0; lane < dims - d; ++lane) put_one(out, args.dtype, d + lane, x[lane]);
        }
      }
    } else {
      for (int d = 0; d < (int)wide; d += W) {
        const vf x = load(o + d) * splat(inverse);
        taint += x - x;
      }
      for (int d = 0; d < dims; ++d) put_one(out, args.dtype, d, o[run.place(d)] * inverse);
    }
    return bits_of(equal(taint, splat(0.0f))) == (1u << W) - 1;
  }
};

}  // namespace
}  // namespace poise
