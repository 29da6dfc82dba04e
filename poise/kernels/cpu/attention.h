// Forward attention of one block of queries, and the walk over all blocks: the kernel proper, as a sequence of steps.
//
// Per segment of keys and group of lanes: raw scores, finish them (scale, cap, bias, mask) where needed, move the state
// to the new maximum, weights, accumulate. Rows whose result is not finite are computed again by exact.cpp, which
// selects visible pairs one by one: that alone decides whether a NaN was hidden or attended. Included once per ISA.
#pragma once
#include "dropout.h"
#include "exact.h"
#include "keys.h"
#include "scores.h"

namespace poise {
namespace {

constexpr int kGroups = (kTile + kLanes - 1) / kLanes;
constexpr int kScoreRows = kSegment + 4;

constexpr double kInlineWork = 1.5e6;  // multiply-adds below which waking threads costs more than it saves

POISE_INLINE int64_t rounded_up(int64_t x, int to) { return (x + to - 1) / to * to; }

// Where things lie in one worker's scratch memory.
struct Scratch {
  char* qt[kGroups];
  float* ot[kGroups];
  State* state;  // [kGroups]
  float *scores, *strip;
  char *k, *v, *half;
  char *k_pages, *v_pages;  // a segment's rows out of their pages
  uint8_t* ready;           // per tile of keys: whether v, which then holds the whole head, has it

  // Interleaving values by pairs of keys is worth keeping for the head's other blocks, while it stays small.
  template <class Cells>
  static bool keeps_values(const ForwardArgs& args) {
    return Cells::kPair == 2 && !args.pages && args.M * rounded_up(args.Dv, 8) <= (int64_t(1) << 21);
  }

  template <class Cells>
  static size_t layout(const ForwardArgs& args, char* base, Scratch* out) {
    size_t used = 0;
    const auto take = [&](size_t bytes) {
      char* p = base + used;
      used += (bytes + 63) / 64 * 64;
      return p;
    };
    Scratch s;
    s.state = (State*)take(sizeof(State) * kGroups);
    for (int g = 0; g < kGroups; ++g) s.qt[g] = take(4 * (size_t)args.Dk * kLanes);
    for (int g = 0; g < kGroups; ++g) s.ot[g] = (float*)take(4 * (size_t)rounded_up(args.Dv, 8) * kLanes);
    s.scores = (float*)take(4 * (size_t)kScoreRows * kLanes);
    s.strip = (float*)take(4 * (kSegment + kTile));
    s.k = take(4 * (size_t)kSegment * rounded_up(args.Dk, 2));
    const size_t v_rows = keeps_values<Cells>(args) ? rounded_up(args.M, kTile) / 2 : kSegment;
    s.v = take(4 * v_rows * rounded_up(args.Dv, 8));
    s.ready = (uint8_t*)take((size_t)args.M / kTile + 1);
    s.half = take(4 * (size_t)rounded_up(args.Dv, 8));
    const size_t gathered = args.pages ? kSegment * (size_t)size_of(args.kv_dtype) : 0;
    s.k_pages = take(gathered * args.Dk);
    s.v_pages = take(gathered * args.Dv);
    if (out) *out = s;
    return used;
  }
};

// A chunk of keys' contribution to one block, kept until the block's other chunks are there.
struct Partial {
  static size_t bytes(const ForwardArgs& args) {
    return kGroups * (sizeof(State) + 4 * (size_t)rounded_up(args.Dv, 8) * kLanes);
  }
};

template <class Cells, bool STATS, bool FINAL>
struct Forward {
  const ForwardArgs& args;
  Scratch scratch;
  Block block;
  int vecs[kGroups];      // lane vectors in use, per group
  bool touched[kGroups];  // whether ot holds anything yet
  float scale[kTile];     // per query, positive: a negative scale's sign is packed into the query
  int64_t kv_head;
  const char *k, *v;    // the head's first key and value; null where they lie in pages
  int k_cells, v_dims;  // contraction length of scores; dims of O^T, padded
  bool copy_k, copy_v, keep_v;

  Forward(const ForwardArgs& a, char* memory) : args(a) {
    Scratch::layout<Cells>(a, memory, &scratch);
    k = v = nullptr;
    keep_v = Scratch::keeps_values<Cells>(a);
    v_dims = (int)rounded_up(a.Dv, 8);
    k_cells = (int)(a.Dk + Cells::kPair - 1) / Cells::kPair;
    copy_k = Cells::kPair == 2 ? a.Dk % 2 != 0 : a.kv_dtype != Dtype::f32;
    copy_v = Cells::kPair == 2 || a.kv_dtype != Dtype::f32 || a.Dv % 8 != 0;
  }

  int groups() const { return (block.queries + kLanes - 1) / kLanes; }

  // Which queries the lanes are, and nothing known of them yet; sign[r] is that of scale.
  void place(int64_t b, int64_t h, int64_t first, float* sign) {
    block = make_block(args, b, h, first);
    for (int r = 0; r < kTile; ++r) {
      float mine = args.scale;
      if (args.scale_rows && r < block.queries)
        mine = args.scale_rows[b * args.scale_b + h * args.scale_h + (first + r) * args.scale_n];
      sign[r] = mine < 0 ? -1.0f : mine == 0 ? 0.0f : 1.0f;
      scale[r] = mine < 0 ? -mine : mine == 0 ? 1.0f : mine;
    }
    for (int g = 0; g < groups(); ++g) {
      vecs[g] = (lesser(kLanes, block.queries - g * kLanes) + W - 1) / W;
      touched[g] = false;
      reset(scratch.state[g]);
    }
  }

  // --- What run.h asks of a kernel: blocks of work, `blocks` for each of `heads` ---
  static int64_t heads(const ForwardArgs& args) { return args.B * args.H; }
  static int64_t blocks(const ForwardArgs& args) { return (args.N + kTile - 1) / kTile; }
  static size_t scratch_bytes(const ForwardArgs& args) { return Scratch::layout<Cells>(args, nullptr, nullptr); }
  static size_t partial_bytes(const ForwardArgs& args) { return Partial::bytes(args); }

  void begin(int64_t head, int64_t row) {
    const int64_t b = head / args.H, h = head % args.H, first = row * kTile;
    float sign[kTile];
    place(b, h, first, sign);
    kv_head = h / (args.H / args.G);
    k = args.pages ? nullptr : row_at(args.k, args.kv_dtype, b, kv_head, 0);
    const char* values = args.pages ? nullptr : row_at(args.v, args.kv_dtype, b, kv_head, 0);
    if (keep_v && values != v) memset(scratch.ready, 0, args.M / kTile + 1);
    v = values;
    for (int g = 0; g < groups(); ++g) {
      const int queries = lesser(kLanes, block.queries - g * kLanes);
      const char* q = row_at(args.q, args.dtype, b, h, first + g * kLanes);
      const int64_t row = args.q.n * size_of(args.dtype);
#if defined(__AVX512BF16__)
      if constexpr (Cells::kPair == 2) {
        pack_query_pairs(q, row, queries, vecs[g], (int)args.Dk, sign + g * kLanes, scratch.qt[g]);
        continue;
      }
#endif
      const auto pack = args.dtype == Dtype::f32    ? pack_queries<Dtype::f32>
                        : args.dtype == Dtype::bf16 ? pack_queries<Dtype::bf16>
                                                    : pack_queries<Dtype::f16>;
      pack(q, row, queries, vecs[g], (int)args.Dk, sign + g * kLanes, (float*)scratch.qt[g]);
    }
  }

  // The keys of [from, to) into the state.
  void attend(int64_t from, int64_t to) {
    for_segments(args, block, from, to, Cells::kPair, [&](const Segment& segment) {
      uint64_t words[kSegment];
      const bool partial = visible_words(args, block, segment, words);
      if (FINAL && (args.table || args.slopes)) fill_strip(args, block, segment, scratch.strip);
      const int64_t width = size_of(args.kv_dtype);
      int64_t k_row = args.k.n * width, v_row = args.v.n * width;
      const char* k_rows = args.pages ? nullptr : k + segment.key * k_row;
      const char* v_rows = args.pages ? nullptr : v + segment.key * v_row;
      bool copied = false;
      for (int g = 0; g < groups(); ++g) {
        int begin = 0, end = segment.keys;
        const uint64_t* mine = nullptr;
        uint64_t seen = everyone(g);
        if (partial && !narrow(words, g, begin, end, mine, seen)) continue;
        scratch.state[g].seen |= seen;
        if (!copied) {
          copied = true;
          copy_rows(segment, k_rows, k_row, v_rows, v_row);
        }
        const Piece piece = {k_rows + begin * k_row,
                             k_row,
                             v_rows + begin / Cells::kPair * v_row,
                             v_row,
                             segment.key + begin,
                             begin,
                             end - begin,
                             mine};
        switch (vecs[g]) {
          case 1:
            attend_group<1>(g, piece);
            break;
          case 2:
            attend_group<2>(g, piece);
            break;
          case 3:
            if constexpr (kGroupVecs >= 3) attend_group<3>(g, piece);
            break;
          case 4:
            if constexpr (kGroupVecs >= 4) attend_group<4>(g, piece);
            break;
        }
      }
    });
  }

 private:
  // A bit for each query of the group.
  uint64_t everyone(int g) const {
    const int queries = lesser(kLanes, block.queries - g * kLanes);
    return queries == 64 ? ~0ull : (1ull << queries) - 1;
  }

  // Narrows [begin, end) to what the group sees at all; mine = null if it sees all of that. False: nothing.
  bool narrow(const uint64_t* words, int g, int& begin, int& end, const uint64_t*& mine, uint64_t& seen) const {
    const uint64_t all = everyone(g) << (g * kLanes);
    while (begin < end && !(words[begin] & all)) ++begin;
    while (begin < end && !(words[end - 1] & all)) --end;
    if (begin == end) return false;
    begin -= begin % Cells::kPair;  // pairs of keys stay together
    uint64_t common = all, any = 0;
    for (int i = begin; i < end; ++i) {
      common &= words[i];
      any |= words[i];
    }
    mine = common == all ? nullptr : words + begin;
    seen = (any & all) >> (g * kLanes);
    return true;
  }

  // Storage the micro-kernels cannot read in place goes to scratch; the pointers follow.
  void copy_rows(const Segment& segment, const char*& k_rows, int64_t& k_row, const char*& v_rows, int64_t& v_row) {
    const int keys = segment.keys, k_dims = (int)args.Dk, dims = (int)args.Dv;
    if (args.pages) {
      gather_rows(args, args.k, block.b, kv_head, segment.key, keys, k_dims, scratch.k_pages);
      gather_rows(args, args.v, block.b, kv_head, segment.key, keys, dims, scratch.v_pages);
      k_rows = scratch.k_pages, k_row = k_dims * size_of(args.kv_dtype);
      v_rows = scratch.v_pages, v_row = dims * size_of(args.kv_dtype);
    }
    if (copy_k) {
#if defined(__AVX512BF16__)
      if constexpr (Cells::kPair == 2)
        pad_rows(k_rows, k_row, keys, k_dims, 2 * k_cells, scratch.k);
      else
#endif
      {
        widen_rows(k_rows, k_row, args.kv_dtype, keys, k_dims, k_dims, (float*)scratch.k);
        if (args.k_scale.data)
          scale_rows(args, args.k_scale, block.b, kv_head, segment.key, keys, k_dims, k_dims, (float*)scratch.k);
      }
      k_rows = scratch.k;
      k_row = 4 * k_cells;
    }
    if (!copy_v) return;
    const char* to = scratch.v;
#if defined(__AVX512BF16__)
    if constexpr (Cells::kPair == 2) {
      if (keep_v) {
        for (int tile = segment.key / kTile; tile <= (segment.key + keys - 1) / kTile; ++tile) {
          if (scratch.ready[tile]) continue;
          scratch.ready[tile] = 1;
          interleave_keys(v + (int64_t)tile * kTile * v_row, v_row, (int)lesser<int64_t>(kTile, args.M - tile * kTile),
                          dims, v_dims, scratch.v + (int64_t)tile * kTile * 2 * v_dims);
        }
        to = scratch.v + (int64_t)segment.key * 2 * v_dims;
      } else {
        interleave_keys(v_rows, v_row, keys, dims, v_dims, scratch.v);
      }
    } else
#endif
    {
      widen_rows(v_rows, v_row, args.kv_dtype, keys, dims, v_dims, (float*)scratch.v);
      if (args.v_scale.data)
        scale_rows(args, args.v_scale, block.b, kv_head, segment.key, keys, dims, v_dims, (float*)scratch.v);
    }
    v_rows = to;
    v_row = 4 * v_dims;
  }

  // The piece's scores as the softmax takes them, hidden ones -inf, and the largest of each query.
  template <int N>
  POISE_INLINE void score(int g, const Piece& piece, vf* top) {
    State& state = scratch.state[g];
    float* const s = scratch.scores;
    for (int j = 0; j < N; ++j) top[j] = splat(-kInf);
    const auto multiply_keys = [&](auto&& finish) POISE_INLINE_LAMBDA {
      score_rows<Cells, N>(piece.k, piece.k_row, piece.keys, scratch.qt[g], k_cells, s, top, finish);
    };
    if constexpr (FINAL) {
      const int lane0 = g * kLanes;
      const float* const strip =
          args.table || args.slopes ? scratch.strip + kSegment - 1 - piece.begin + lane0 : nullptr;
      if (strip && !piece.words && !args.num_biases && args.softcap == 0.0f) {
        // As finish_scores would, but before the products are stored.
        vf factor[N];
        for (int j = 0; j < N; ++j) factor[j] = load(scale + lane0 + j * W);
        multiply_keys([&](vf product, int row, int j) POISE_INLINE_LAMBDA {
          const vf finished = multiply_add(product, factor[j], load(strip - row + j * W));
          if (STATS) {
            const vf logit = product * factor[j], lost = splat(-kInf);
            state.top_logit[j] = vmax(select(equal(finished, lost), lost, logit), state.top_logit[j]);
            state.lowest_product[j] = vmin(logit, state.lowest_product[j]);
          }
          return finished;
        });
        return;
      }
      multiply_keys(AsItIs());
      finish_scores<N, STATS>(args, block, s, lane0, piece, scale, strip, top, state.top_logit.at,
                              state.lowest_product.at);
    } else {
      if (piece.words)
        hide<N>(g, piece, top);
      else
        multiply_keys(AsItIs());
    }
  }

  // Out of line: with a second product beside it, GCC runs out of registers in the first.
  template <int N>
  __attribute__((noinline)) void hide(int g, const Piece& piece, vf* top) {
    State& state = scratch.state[g];
    const auto hidden = [&](vf product, int row, int j) POISE_INLINE_LAMBDA {
      if (STATS) state.lowest_product[j] = vmin(product, state.lowest_product[j]);
      return select(mask_of(piece.words[row] >> (g * kLanes + j * W)), product, splat(-kInf));
    };
    score_rows<Cells, N>(piece.k, piece.k_row, piece.keys, scratch.qt[g], k_cells, scratch.scores, top, hidden);
  }

  template <int N>
  __attribute__((noinline)) void attend_group(int g, const Piece& piece) {
    State& state = scratch.state[g];
    float* s = scratch.scores;
    vf top[N];
    score<N>(g, piece, top);
    const bool odd = piece.keys % Cells::kPair != 0;
    if (odd) {
      // The pair's other half is hidden: weights are taken with a mask then, so the products are looked at first.
      for (int j = 0; j < N; ++j) {
        if (STATS && !FINAL && !piece.words)
          for (int i = 0; i < piece.keys; ++i)
            state.lowest_product[j] = vmin(load(s + i * kLanes + j * W), state.lowest_product[j]);
        store(s + piece.keys * kLanes + j * W, splat(-kInf));
      }
    }
    const int rows = (int)rounded_up(piece.keys, Cells::kPair);
    const bool masked = STATS && (FINAL || piece.words || odd);

    vf alpha[N];
    for (int j = 0; j < N; ++j) {
      const vf slope = load(scale + g * kLanes + j * W) * splat(kLog2e);
      top[j] = vmax(top[j], state.top[j]);
      const vf reference = FINAL ? top[j] : top[j] * slope;
      const vf intercept = zero_if_empty(reference), move = state.reference[j] - intercept;
      alpha[j] = exp2_of(FINAL ? move * splat(kLog2e) : move);
      const vf finite_move = select(equal(state.reference[j], splat(-kInf)), splat(0.0f), move);
      vf pilot = splat(0.0f);
      if (STATS) {
        add_sink_keys(g, j, piece, slope, intercept, alpha[j]);
        pilot = guess_mean<FINAL>(state, j, finite_move, s + j * W, rows, slope, intercept);
      }
      const Added added = masked ? weights<Cells, STATS, true, FINAL>(s + j * W, rows, slope, intercept, pilot)
                                 : weights<Cells, STATS, false, FINAL>(s + j * W, rows, slope, intercept, pilot);
      join_lanes<STATS>(state, j, alpha[j], finite_move, added);
      state.top[j] = top[j];
      state.reference[j] = reference;
    }
    if (args.kept_factor != 0.0f) drop_weights<N>(g, piece);
    add_values<N>(g, piece, rows / Cells::kPair, alpha);
    touched[g] = true;
  }

  // The sum of weights is that before dropout: only what meets the values is dropped.
  template <int N>
  void drop_weights(int g, const Piece& piece) {
    uint64_t words[kSegment + 1];
    kept_lanes<N>(args, block.b * args.H + block.h, block.first + g * kLanes, piece.key, piece.keys, words);
    words[piece.keys] = 0;
    for (int k = 0; k < piece.keys; k += Cells::kPair)
      for (int j = 0; j < N; ++j) {
        float* at = scratch.scores + k / Cells::kPair * kLanes + j * W;
        if constexpr (Cells::kPair == 2)
          Cells::keep_pair(at, words[k] >> (j * W), words[k + 1] >> (j * W));
        else
          store(at, select(mask_of(words[k] >> (j * W)), load(at), splat(0.0f)));
      }
  }

  // O^T moves by alpha and gains the weighted values. A pair of keys at either end may hold one that the whole group
  // does not see: its weight is 0, but if its value is not finite it is cleared first, or every row would need
  // exact_rows.
  template <int N>
  POISE_INLINE void add_values(int g, const Piece& piece, int cells, const vf* alpha) {
    const char* p = (const char*)scratch.scores;
    float* ot = scratch.ot[g];
    if constexpr (Cells::kPair == 2) {
      const bool first = piece.words && !(piece.words[0] >> (g * kLanes) & everyone(g));
      const bool first_taints = first && pair_taints(piece.v, 0x7f80u);
      const bool last_taints = piece.keys % 2 != 0 && pair_taints(piece.v + (cells - 1) * piece.v_row, 0x7f800000u);
      if (first_taints || last_taints) {
        vf one[N];
        for (int j = 0; j < N; ++j) one[j] = splat(1.0f);
        bool begun = false;
        const auto add = [&](const char* v, int cell, int count) {
          accumulate<Cells, N>(v, piece.v_row, v_dims, p + cell * kLanes * 4, count, ot, begun ? one : alpha,
                               !begun && !touched[g]);
          begun = true;
        };
        if (first_taints) add(half_of_pair(piece.v, 0xffff0000u), 0, 1);
        const int from = first_taints ? 1 : 0, to = last_taints ? cells - 1 : cells;
        if (from < to) add(piece.v + from * piece.v_row, from, to - from);
        if (last_taints) add(half_of_pair(piece.v + (cells - 1) * piece.v_row, 0x0000ffffu), cells - 1, 1);
        return;
      }
    }
    accumulate<Cells, N>(piece.v, piece.v_row, v_dims, p, cells, ot, alpha, !touched[g]);
  }

  // Whether a row of pairs holds an infinity or NaN in the half whose exponent bits are given.
  bool pair_taints(const char* row, uint32_t exponent) const {
    bool taints = false;
    for (int d = 0; d < v_dims; ++d) {
      uint32_t cell;
      memcpy(&cell, row + 4 * d, 4);
      taints |= (cell & exponent) == exponent;
    }
    return taints;
  }

  const char* half_of_pair(const char* row, uint32_t half) {
    for (int d = 0; d < v_dims; ++d) {
      uint32_t cell;
      memcpy(&cell, row + 4 * d, 4);
      cell &= half;
      memcpy(scratch.half + 4 * d, &cell, 4);
    }
    return scratch.half;
  }

  POISE_INLINE void add_sink_keys(int g, int j, const Piece& piece, vf slope, vf intercept, vf alpha) {
    vf added = splat(0.0f);
    for (int64_t i = 0; i < args.num_sink_keys; ++i) {
      const int64_t row = args.sink_keys[i] - piece.key;
      if (row < 0 || row >= piece.keys) continue;
      const vf score = load(scratch.scores + row * kLanes + j * W);
      added += exp2_of(FINAL ? (score - intercept) * splat(kLog2e) : score * slope - intercept);
    }
    vf& sum = scratch.state[g].sink_sum[j];
    sum = alpha * sum + added;
  }

 public:
  // --- Chunks of keys: save what this worker has, and join what others saved ---
  void save(char* to) {
    for (int g = 0; g < groups(); ++g) {
      if (!touched[g]) memset(scratch.ot[g], 0, 4 * (size_t)v_dims * kLanes);
      memcpy(to, &scratch.state[g], sizeof(State));
      memcpy(to + sizeof(State), scratch.ot[g], 4 * (size_t)v_dims * kLanes);
      to += sizeof(State) + 4 * (size_t)v_dims * kLanes;
    }
  }

  // Joins lane vector j of another state to mine: the sums of either shrink by alpha and other_alpha.
  static void join_states(State& mine, int j, const State& other, vf& alpha, vf& other_alpha) {
    const vf reference = vmax(mine.reference[j], other.reference[j]), safe = zero_if_empty(reference);
    const vf empty = splat(-kInf), zero = splat(0.0f), unit = splat(FINAL ? kLog2e : 1.0f);
    const vf move = mine.reference[j] - safe, other_move = other.reference[j] - safe;
    alpha = exp2_of(move * unit);
    other_alpha = exp2_of(other_move * unit);
    const vf by = select(equal(other.reference[j], empty), zero, other_move);
    const Added added = {
        {other_alpha * other.soft.weight[j], other.soft.mean[j] + by, other_alpha * other.soft.deviation[j]},
        {other.plain.weight[j], other.plain.mean[j] + by, other.plain.deviation[j]},
        other_alpha * other_alpha * other.squares[j],
        other.low[j]};
    join_lanes<STATS>(mine, j, alpha, select(equal(mine.reference[j], empty), zero, move), added);
    if (STATS) {
      mine.lowest_product[j] = vmin(other.lowest_product[j], mine.lowest_product[j]);
      mine.top_logit[j] = vmax(other.top_logit[j], mine.top_logit[j]);
      mine.sink_sum[j] = alpha * mine.sink_sum[j] + other_alpha * other.sink_sum[j];
    }
    mine.top[j] = vmax(other.top[j], mine.top[j]);
    mine.reference[j] = reference;
  }

  void join(const char* from) {
    for (int g = 0; g < groups(); ++g) {
      State& mine = scratch.state[g];
      State other;
      memcpy(&other, from, sizeof(State));
      const float* ot = (const float*)(from + sizeof(State));
      mine.seen |= other.seen;
      from += sizeof(State) + 4 * (size_t)v_dims * kLanes;
      for (int j = 0; j < vecs[g]; ++j) {
        vf alpha, other_alpha;
        join_states(mine, j, other, alpha, other_alpha);
        for (int d = 0; d < v_dims; ++d) {
          float* o = scratch.ot[g] + d * kLanes + j * W;
          const vf theirs = load(ot + d * kLanes + j * W) * other_alpha;
          store(o, touched[g] ? load(o) * alpha + theirs : theirs);
        }
      }
      touched[g] = true;
    }
  }

  // --- The state becomes the output and the statistics ---
  struct Verdict {
    uint64_t rows, stats;  // lanes to be computed again, or whose statistics are
  };

  // The statistics of group g, and what its sums of values are to be multiplied by.
  Verdict judge(int g, vf* inverse) {
    State& state = scratch.state[g];
    uint64_t bad = 0, odd = 0;
    for (int j = 0; j < vecs[g]; ++j) {
      inverse[j] = normaliser(state, g, j);
      bad |= needs_care(state, g, j) << (j * W);
      if (STATS) odd |= missed_infinity(state, j) << (j * W);
    }
    if (args.saved) save_softmax(g, inverse, bad);
    if (args.kept_factor != 0.0f)
      for (int j = 0; j < vecs[g]; ++j) inverse[j] *= splat(args.kept_factor);
    if (STATS)
      for (int j = 0; j < vecs[g]; ++j) write_stats(g, j);
    return {bad & everyone(g), odd & everyone(g)};
  }

  void finish_block() {
    uint64_t bad = 0, bad_stats = 0;
    for (int g = 0; g < groups(); ++g) {
      if (!touched[g]) memset(scratch.ot[g], 0, 4 * (size_t)v_dims * kLanes);
      const int queries = lesser(kLanes, block.queries - g * kLanes);
      vf inverse[kGroupVecs];
      const Verdict verdict = judge(g, inverse);
      char* out = (char*)row_at(args.out, args.dtype, block.b, block.h, block.first + g * kLanes);
      const auto unpack = args.dtype == Dtype::f32    ? unpack_output<Dtype::f32>
                          : args.dtype == Dtype::bf16 ? unpack_output<Dtype::bf16>
                                                      : unpack_output<Dtype::f16>;
      const uint64_t infinite =
          unpack(scratch.ot[g], queries, vecs[g], (int)args.Dv, inverse, out, args.out.n * size_of(args.dtype));
      bad |= (verdict.rows | (infinite & everyone(g))) << (g * kLanes);
      bad_stats |= verdict.stats << (g * kLanes);
    }
    if (bad | bad_stats) exact_rows(args, block.b, block.h, block.first, bad | bad_stats, bad);
  }

 private:
  // The lanes whose sums cannot be trusted: not finite; scores so large that rounding the reference moves them; or no
  // weight although keys were visible (a -inf bias hides, other scores of -inf must show).
  uint64_t needs_care(const State& state, int g, int j) const {
    const vf weight = state.soft.weight[j], off = rounding(state, g, j);
    const vf size = vmax(off, -off) + (weight - weight);  // NaN if the weight is not finite
    const uint64_t untrusted = ~(uint64_t)bits_of(less(size, splat(1.0f)));
    const uint64_t none = bits_of(equal(weight, splat(0.0f))) & (state.seen >> (j * W));
    return (untrusted | none) & ((1u << W) - 1);
  }

  // The lanes whose statistics alone are wrong: a -inf that no mask put there was taken for hidden.
  uint64_t missed_infinity(const State& state, int j) const {
    const vf lost = splat(-kInf);
    return bits_of(equal(state.lowest_product[j], lost)) | bits_of(equal(state.low[j], lost));
  }

  // By how much the reference, a rounded product, exceeds top's exact place, in t's units.
  vf rounding(const State& state, int g, int j) const {
    if (FINAL) return splat(0.0f);
    const vf slope = load(scale + g * kLanes + j * W) * splat(kLog2e);
    const vf off = state.reference[j] - state.top[j] * slope;  // one FMA: exact
    return select(equal(state.reference[j], splat(-kInf)), splat(0.0f), off);
  }

  // What to multiply O by: 1 / sum, the sink counted in; 0 for a row that sees nothing.
  vf normaliser(const State& state, int g, int j) const {
    const vf zero = splat(0.0f), one = splat(1.0f), sum = state.soft.weight[j];
    if (!args.sink) return select(equal(sum, zero), zero, one / sum);
    // e^-|top - sink| with the roundings of the product and of the difference carried along: far apart, the exponent's
    // last digit counts.
    const vf factor = FINAL ? one : load(scale + g * kLanes + j * W), sink = splat(args.sink[block.h]);
    const vf top = state.top[j] * factor, top_tail = state.top[j] * factor - top;
    const vf gap = top - sink, back = gap - top, gap_tail = (top - (gap - back)) - (sink + back) + top_tail;
    const vf size = vmax(gap, -gap), t = -size * splat(kLog2e);
    const vf tail = select(less(gap, zero), gap_tail, -gap_tail) * splat(kLog2e) - size * splat(1.9259630e-8f) -
                    (size * splat(kLog2e) + t);
    const vf usable = select(less(size, splat(1e30f)), tail, zero);
    const vf small = exp2_of(t) * (one + usable * splat(kLn2));
    const vf keys = select(less(gap, zero), small, one) * exp2_of(rounding(state, g, j));
    const vf total = sum * keys + select(less(gap, zero), one, small);
    return select(equal(sum, zero), zero, keys / total);
  }

  // The state as a backward call wants it; rows that need care have no sum to be trusted.
  void save_softmax(int g, const vf* inverse, uint64_t careful) const {
    for (int j = 0; j < vecs[g]; ++j) {
      const vf none = splat(kInf), nan = splat(__builtin_nanf(""));
      const vf log = select(equal(inverse[j], splat(0.0f)), none, -log_of(inverse[j]) * splat(kLog2e));
      const vf value[kSaved] = {scratch.state[g].top[j], select(mask_of(careful >> (j * W)), nan, log)};
      const int first = g * kLanes + j * W, mine = lesser(W, block.queries - first);
      float* to = args.saved + (block.b * args.H + block.h) * args.N + block.first + first;
      for (int field = 0; field < kSaved; ++field, to += args.B * args.H * args.N) memcpy(to, &value[field], 4 * mine);
    }
  }

  void write_stats(int g, int j) const {
    const State& state = scratch.state[g];
    const vf zero = splat(0.0f), one = splat(1.0f), unit = splat(FINAL ? 1.0f : kLn2);
    const vf factor = load(scale + g * kLanes + j * W);
    const vmask empty = equal(state.plain.weight[j], zero);
    const vf sum = select(equal(state.soft.weight[j], zero), one, state.soft.weight[j]);
    const vf count = select(empty, one, state.plain.weight[j]);
    const vf top = FINAL ? state.top[j] : state.top[j] * factor;
    const vf off = rounding(state, g, j);
    vf value[kFields];
    value[kLogSum] = vmax(log_of(sum) + off * unit, zero);
    value[kMaxScore] = top;
    value[kMaxLogit] = FINAL ? state.top_logit[j] : top;
    value[kMinScore] = FINAL ? state.low[j] : state.low[j] * factor;
    value[kMean] = (state.reference[j] + state.plain.mean[j]) * unit;
    value[kVar] = state.plain.deviation[j] / count * unit * unit;
    value[kCount] = state.plain.weight[j];
    value[kShift] = vmin((state.soft.mean[j] + off) * unit, zero);
    value[kVarP] = state.soft.deviation[j] / sum * unit * unit;
    value[kCollision] = state.squares[j] / (sum * sum);
    value[kSinkMass] = state.sink_sum[j] / sum;
    static const Field zero_when_empty[] = {kLogSum, kMean, kVar, kShift, kVarP, kCollision, kSinkMass};
    for (Field field : zero_when_empty) value[field] = select(empty, zero, value[field]);
    const int first = g * kLanes + j * W, mine = lesser(W, block.queries - first);
    float* to = args.stats + (block.b * args.H + block.h) * args.N + block.first + first;
    for (int field = 0; field < kFields; ++field, to += args.B * args.H * args.N) {
      if (mine == W)
        store(to, value[field]);
      else
        memcpy(to, &value[field], 4 * mine);
    }
  }
};

}  // namespace
}  // namespace poise
