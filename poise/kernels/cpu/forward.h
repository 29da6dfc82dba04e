// The kernels' contract: everything one forward call needs, as plain data.
//
// Filled by register.cpp from torch tensors, read by the kernels (one translation unit per instruction set) and by
// the torch-free driver. Knows nothing of torch, of Python or of mask objects: masks and biases arrive lowered (see
// poise/plan.py for what the fields mean and how they are made).
//
// Letters: B batch, H query heads, G key/value heads, N queries, M keys, Dk / Dv head dims. Strides count elements.
#pragma once
#include <cstdint>

namespace poise {

enum class Dtype : int32_t { f32 = 0, bf16 = 1, f16 = 2, i8 = 3 };  // i8: only keys and values

// One value per row each, packed [kFields, B, H, N]; the order is poise/stats.py's FIELDS. All without the sink.
enum Field : int32_t {
  kLogSum,  // log sum exp(s - max s) >= 0; lse = max s + this (apart: their sum cancels at large scores)  empty row: 0
  kMaxScore,   // max s                                  empty row: -inf
  kMaxLogit,   // max z                                  empty row: -inf
  kMinScore,   // min s                                  empty row: +inf
  kMean,       // mean of s over the visible keys        empty row: 0
  kVar,        // population variance of s               empty row: 0
  kCount,      // number of visible keys
  kShift,      // sum p (s - max s), never positive      empty row: 0
  kVarP,       // variance of s under p                  empty row: 0
  kCollision,  // sum p^2                                empty row: 0
  kSinkMass,   // sum of p over sink_keys                empty row: 0
  kFields
};

// What a forward call saves of each row's softmax for the backward call.
enum Saved : int32_t {
  kSavedTop,  // the largest score, in the kernel's units: q.k times the sign of its scale; with a bias or cap, s
  kSavedLog,  // log2 of the sum of e^(s - max s), the sink's share included; NaN: the row needs exact arithmetic
  kSaved
};

constexpr int64_t kUnbounded = int64_t(1) << 40;  // "no limit" for left and right
constexpr int kTile = 64;                         // a tile of the tile map: 64 queries x 64 keys
constexpr int kMaxDense = 2;                      // dense masks, and dense biases, read in place per call

struct Rows {  // q, k, v or out: the last dim is contiguous
  const void* data;
  int64_t b, h, n;  // strides
};

struct Scales {  // a factor per key of int8 keys or values; keys of one head and page (or sequence) are contiguous
  const float* data;
  int64_t b, h;  // strides
};

struct DenseMask {  // bool, true = may attend; broadcast dims have stride 0
  const uint8_t* data;
  int64_t b, h, n, m;
};

struct DenseBias {
  const void* data;
  Dtype dtype;
  int64_t b, h, n, m;
};

struct ForwardArgs {
  Dtype dtype;     // of q and out
  Dtype kv_dtype;  // of k and v
  int64_t B, H, G, N, M, Dk, Dv;
  Rows q, k, v, out;        // out is written; k and v may be longer than M
  Scales k_scale, v_scale;  // int8 k and v only, else null: what they hold is the integer times this

  // Null, or: key j of sequence b is row j % page of page pages[b * pages_b + j / page], and b in k, v and their scales
  // steps from page to page. Entries for keys at or beyond end[b] mean nothing.
  const int32_t* pages;
  int64_t pages_b, page;

  // Score: z = scale q.k, c = softcap tanh(z / softcap), s = c + bias
  float scale;              // used when scale_rows is null
  const float* scale_rows;  // [B|1, H|1, N|1]
  int64_t scale_b, scale_h, scale_n;
  float softcap;      // 0 = none
  const float* sink;  // [H] or null
  int num_biases;
  DenseBias biases[kMaxDense];
  const float* table;  // [H|1, 2R + 1] at clamp(j - i', -R, R) + R, or null
  int64_t table_h, table_radius;
  const float* slopes;  // [H]: -slope |i' - j|, or null

  // Who sees whom; all of it is intersected. i' = i + offset.
  int64_t offset;          // used when offsets is null
  const int64_t* offsets;  // [B]
  int64_t left, right;     // i' - left <= j <= i' + right
  const int32_t* start;    // [B] start <= j, or null
  const int32_t* end;      // [B] j < end, or null
  const int32_t* rows;     // [B|1, H|1, N, 2] lo <= j < hi, or null
  int64_t rows_b, rows_h;
  const int32_t* tile_ptr;  // [B|1, H|1, T + 1], T = ceil(N / 64): runs of query tile t are ptr[t] .. ptr[t + 1]
  int64_t tile_b, tile_h;
  const int32_t* tile_runs;  // [E, 3]: first key tile, number of key tiles, pattern (-1 = full; else one tile)
  const uint64_t* patterns;  // [P, 64]: word = key within the tile, bit = query within the tile
  int num_masks;
  DenseMask masks[kMaxDense];

  // Dropout: a weight is kept where its word of the counter-based generator is at least drop_below.
  float kept_factor;  // 1 / (1 - p), what kept weights are multiplied by; 0 = no dropout
  uint32_t drop_below;
  uint64_t seed;

  // Statistics; stats null = none wanted
  const int32_t* sink_keys;
  int64_t num_sink_keys;
  float* stats;  // [kFields, B, H, N]

  float* saved;  // [kSaved, B, H, N]: what a backward call needs to know of each row's softmax; null = not wanted
};

// Runs fn(task, worker) style loops on the caller's threads: run(context, w) for w in [0, workers), maybe in parallel.
struct Threads {
  int count;
  void (*parallel)(int workers, void (*run)(void* context, int worker), void* context);
};

const char* isa_name();  // the instruction set in use: "base", "avx2", "avx512", "avx512bf16" or "neon"

// Null on success, else a static message (only an unknown POISE_ISA or one this machine lacks).
const char* forward(const ForwardArgs& args, const Threads& threads);

}  // namespace poise
