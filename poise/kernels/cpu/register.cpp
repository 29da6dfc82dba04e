// The boundary to torch: operators in, ForwardArgs out.
//
// Registers poise::forward, poise::attend and poise::attend_observed through torch's stable C interface, checks every
// tensor before a kernel may dereference it, allocates the outputs and lends torch's threads. A call that breaks a
// rule raises; nothing is copied or converted here. Knows neither mask objects nor kernels: poise/kernels/ops.py
// lowers the call, forward.h says what the fields mean.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string>

#include "backward.h"
#include "boundary.h"
#include "torch_abi.h"

namespace poise {
namespace {

bool float_type(int32_t dtype, Dtype* found) {
  const TorchTypes& t = torch_types;
  *found = dtype == t.bf16 ? Dtype::bf16 : dtype == t.f16 ? Dtype::f16 : Dtype::f32;
  return dtype == t.f32 || dtype == t.bf16 || dtype == t.f16;
}

Rows rows_of(const View& v) {
  const bool empty = v.sizes[0] == 0 || v.sizes[1] == 0 || v.sizes[2] == 0;  // then strides mean nothing
  if (!empty && v.sizes[3] > 1 && v.strides[3] != 1) v.refuse("must have a contiguous last dim");
  return {v.data, v.strides[0], v.strides[1], v.strides[2]};
}

constexpr int64_t kLongest = (int64_t(1) << 31) - 1 - kTile;  // positions and their tiles' ends fit 32 bits

// Sizes that q, k and v share, whatever holds the keys: `entries` sequences or pages.
void read_rows_of_keys(ForwardArgs& a, const View& q, const View& k, const View& v, int64_t entries) {
  if (!float_type(q.dtype, &a.dtype)) q.refuse("must be float32, bfloat16 or float16");
  a.B = q.sizes[0], a.H = q.sizes[1], a.N = q.sizes[2], a.Dk = q.sizes[3];
  a.G = k.sizes[1], a.M = k.sizes[2], a.Dv = v.sizes[3];
  k.expect_size(0, entries);
  k.expect_size(3, a.Dk);
  v.expect_size(0, entries);
  v.expect_size(1, a.G);
  v.expect_size(2, k.sizes[2]);
  if (a.H != 0 && (a.G == 0 || a.H % a.G != 0))
    k.refuse("must have a head count that divides q's " + std::to_string(a.H));
  if (a.N > kLongest) q.refuse("must have at most " + std::to_string(kLongest) + " rows");
  if (a.M > kLongest) k.refuse("must have at most " + std::to_string(kLongest) + " rows");
  a.q = rows_of(q), a.k = rows_of(k), a.v = rows_of(v);
}

// k and v as tensors like q.
void read_inputs(ForwardArgs& a, const View& q, const View& k, const View& v) {
  read_rows_of_keys(a, q, k, v, q.sizes[0]);
  a.kv_dtype = a.dtype;
  if (k.dtype != q.dtype) k.refuse(std::string("must have q's dtype, ") + type_name(q.dtype));
  if (v.dtype != q.dtype) v.refuse(std::string("must have q's dtype, ") + type_name(q.dtype));
}

Scales read_scales(TensorHandle handle, const char* name, const View& rows) {
  if (handle == nullptr) fail(std::string(name) + " must be given with int8 " + rows.name);
  View v = view(handle, name, 3, torch_types.f32);
  for (int axis = 0; axis < 3; ++axis) v.expect_size(axis, rows.sizes[axis]);
  v.expect_packed(2);
  return {v.as<float>(), v.strides[0], v.strides[1]};
}

// Of what a cache holds, the first M keys: of any float dtype, or int8 with factors. a.end is read later.
void read_cache(ForwardArgs& a, const View& q, const View& k, const View& v, TensorHandle pages, TensorHandle k_scale,
                TensorHandle v_scale, int64_t keys) {
  read_rows_of_keys(a, q, k, v, pages == nullptr ? q.sizes[0] : k.sizes[0]);
  if (!float_type(k.dtype, &a.kv_dtype)) {
    if (k.dtype != torch_types.i8) k.refuse("must be float32, bfloat16, float16 or int8");
    a.kv_dtype = Dtype::i8;
    a.k_scale = read_scales(k_scale, "k_scale", k), a.v_scale = read_scales(v_scale, "v_scale", v);
  } else if (k_scale != nullptr || v_scale != nullptr) {
    fail("k_scale and v_scale belong to int8 k and v");
  }
  if (v.dtype != k.dtype) v.refuse(std::string("must have k's dtype, ") + type_name(k.dtype));
  int64_t room = a.M;
  if (pages != nullptr) {
    View table = view(pages, "pages", 2, torch_types.i32);
    table.expect_size(0, a.B);
    table.expect_packed(1);
    if (keys < 0) fail("keys, the length of the longest sequence, must be given with pages");
    a.pages = table.as<int32_t>(), a.pages_b = table.strides[0], a.page = k.sizes[2];
    room = table.sizes[1] * a.page;
  }
  if (keys < 0) return;
  if (keys > room || keys > kLongest)
    fail("keys must be at most the " + std::to_string(room) + " that k has room for, got " + std::to_string(keys));
  a.M = keys;
}

// Every page that holds a key exists.
void check_pages(const ForwardArgs& a, int64_t entries) {
  if (a.pages == nullptr) return;
  for (int64_t b = 0; b < a.B; ++b) {
    const int64_t length = a.end == nullptr ? a.M : std::min<int64_t>(a.end[b], a.M);
    for (int64_t t = 0; t * a.page < length; ++t) {
      const int32_t page = a.pages[b * a.pages_b + t];
      if (page < 0 || page >= entries)
        fail("pages[" + std::to_string(b) + ", " + std::to_string(t) + "] must name one of k's " +
             std::to_string(entries) + " pages, for sequence " + std::to_string(b) + " has " + std::to_string(length) +
             " keys; got " + std::to_string(page));
    }
  }
}

void expect_position(const char* name, int64_t value) {
  if (value < -kUnbounded || value > kUnbounded)
    fail(std::string(name) + " must lie within ±2^40, got " + std::to_string(value));
}

void read_band(ForwardArgs& a, int64_t left, int64_t right, int64_t offset) {
  expect_position("left", left);
  expect_position("right", right);
  expect_position("offset", offset);
  a.left = left, a.right = right, a.offset = offset;
}

void read_mask(ForwardArgs& a, TensorHandle handle, const char* name) {
  if (handle == nullptr) return;
  View v = view(handle, name, 4, torch_types.boolean);
  const int64_t sizes[4] = {a.B, a.H, a.N, a.M};
  for (int axis = 0; axis < 4; ++axis) v.expect_size(axis, sizes[axis], true);
  a.masks[a.num_masks++] = {v.as<uint8_t>(), v.stride(0), v.stride(1), v.stride(2), v.stride(3)};
}

void read_bias(ForwardArgs& a, TensorHandle handle, const char* name) {
  if (handle == nullptr) return;
  View v = view(handle, name, 4);
  Dtype dtype;
  if (!float_type(v.dtype, &dtype)) v.refuse("must be float32, bfloat16 or float16");
  const int64_t sizes[4] = {a.B, a.H, a.N, a.M};
  for (int axis = 0; axis < 4; ++axis) v.expect_size(axis, sizes[axis], true);
  a.biases[a.num_biases++] = {v.data, dtype, v.stride(0), v.stride(1), v.stride(2), v.stride(3)};
}

void read_scale_rows(ForwardArgs& a, TensorHandle handle) {
  if (handle == nullptr) return;
  View v = view(handle, "scale_rows", 3, torch_types.f32);
  v.expect_size(0, a.B, true);
  v.expect_size(1, a.H, true);
  v.expect_size(2, a.N, true);
  a.scale_rows = v.as<float>();
  a.scale_b = v.stride(0), a.scale_h = v.stride(1), a.scale_n = v.stride(2);
}

void read_table(ForwardArgs& a, TensorHandle handle) {
  if (handle == nullptr) return;
  View v = view(handle, "table", 2, torch_types.f32);
  v.expect_size(0, a.H, true);
  v.expect_packed(1);
  if (v.sizes[1] % 2 == 0) v.refuse("must have an odd number of columns, 2R + 1");
  a.table = v.as<float>(), a.table_h = v.stride(0), a.table_radius = v.sizes[1] / 2;
}

void read_rows(ForwardArgs& a, TensorHandle handle) {
  if (handle == nullptr) return;
  View v = view(handle, "rows", 4, torch_types.i32);
  v.expect_size(0, a.B, true);
  v.expect_size(1, a.H, true);
  v.expect_size(2, a.N);
  v.expect_size(3, 2);
  v.expect_packed(2);
  a.rows = v.as<int32_t>(), a.rows_b = v.stride(0), a.rows_h = v.stride(1);
}

// The runs of one query tile: ascending, inside the keys, each with a pattern that exists.
void check_runs(const int32_t* runs, int32_t first, int32_t last, int64_t key_tiles, int64_t num_patterns) {
  int64_t seen = 0;
  for (int32_t e = first; e < last; ++e) {
    const int64_t tile = runs[3 * e], count = runs[3 * e + 1], pattern = runs[3 * e + 2];
    const bool inside = tile >= seen && count >= 1 && tile + count <= key_tiles;
    const bool known = pattern == -1 || (pattern >= 0 && pattern < num_patterns && count == 1);
    if (!inside || !known) {
      fail("tile_runs[" + std::to_string(e) + "] must be (key tile, tiles, pattern) in ascending order, within " +
           std::to_string(key_tiles) + " key tiles and " + std::to_string(num_patterns) +
           " patterns, patterned runs one tile long; got (" + std::to_string(tile) + ", " + std::to_string(count) +
           ", " + std::to_string(pattern) + ")");
    }
    seen = tile + count;
  }
}

void read_tiles(ForwardArgs& a, TensorHandle ptr_handle, TensorHandle runs_handle, TensorHandle patterns_handle) {
  if (ptr_handle == nullptr && runs_handle == nullptr && patterns_handle == nullptr) return;
  if (ptr_handle == nullptr || runs_handle == nullptr || patterns_handle == nullptr)
    fail("tile_ptr, tile_runs and patterns must be given together");
  const int64_t query_tiles = (a.N + kTile - 1) / kTile, key_tiles = (a.M + kTile - 1) / kTile;
  View ptr = view(ptr_handle, "tile_ptr", 3, torch_types.i32);
  ptr.expect_size(0, a.B, true);
  ptr.expect_size(1, a.H, true);
  ptr.expect_size(2, query_tiles + 1);
  ptr.expect_packed(2);
  View runs = view(runs_handle, "tile_runs", 2, torch_types.i32);
  runs.expect_size(1, 3);
  runs.expect_packed(0);
  View patterns = view(patterns_handle, "patterns", 2, torch_types.i64);
  patterns.expect_size(1, kTile);
  patterns.expect_packed(0);
  a.tile_ptr = ptr.as<int32_t>(), a.tile_b = ptr.stride(0), a.tile_h = ptr.stride(1);
  a.tile_runs = runs.as<int32_t>();
  a.patterns = patterns.as<uint64_t>();
  for (int64_t b = 0; b < ptr.sizes[0]; ++b) {
    for (int64_t h = 0; h < ptr.sizes[1]; ++h) {
      const int32_t* row = a.tile_ptr + b * a.tile_b + h * a.tile_h;
      for (int64_t t = 0; t < query_tiles; ++t) {
        if (row[t] < 0 || row[t] > row[t + 1] || row[t + 1] > runs.sizes[0])
          fail("tile_ptr must not decrease and must end within tile_runs' " + std::to_string(runs.sizes[0]) + " runs");
        check_runs(a.tile_runs, row[t], row[t + 1], key_tiles, patterns.sizes[0]);
      }
    }
  }
}

void read_sink_keys(ForwardArgs& a, TensorHandle handle) {
  if (handle == nullptr) return;
  View v = view(handle, "sink_keys", 1, torch_types.i32);
  v.expect_packed(0);
  a.sink_keys = v.as<int32_t>(), a.num_sink_keys = v.sizes[0];
  for (int64_t i = 0; i < a.num_sink_keys; ++i)
    if (a.sink_keys[i] < 0 || a.sink_keys[i] >= a.M)
      fail("sink_keys must lie within the " + std::to_string(a.M) + " keys");
}

struct Job {
  void (*run)(void* context, int worker);
  void* context;
};

void on_torch_threads(int workers, void (*run)(void* context, int worker), void* context) {
  if (workers <= 1) {
    if (workers == 1) run(context, 0);
    return;
  }
  Job job{run, context};
  auto range = [](int64_t begin, int64_t end, void* shared) {
    const Job& shared_job = *static_cast<const Job*>(shared);
    for (int64_t w = begin; w < end; ++w) shared_job.run(shared_job.context, static_cast<int>(w));
  };
  check(torch_parallel_for(0, workers, 1, range, &job), "run the kernel's threads");
}

// A tensor made here that a kernel writes, [b, h, n, d] with its memory in that order or, for bshd, [b, n, h, d].
struct RowsOutput {
  RowsOutput(int64_t b, int64_t h, int64_t n, int64_t d, bool bshd, int32_t dtype)
      : sizes{b, h, n, d},
        strides{h * n * d, bshd ? d : n * d, bshd ? h * d : d, 1},
        tensor(4, sizes, strides, dtype),
        rows{tensor.data<void>(), strides[0], strides[1], strides[2]} {}
  int64_t sizes[4], strides[4];
  Output tensor;
  Rows rows;
};

// Likewise, packed float32.
Output packed_output(std::initializer_list<int64_t> shape) {
  int64_t sizes[5], strides[5], step = 1;
  const int64_t dim = static_cast<int64_t>(shape.size());
  std::copy(shape.begin(), shape.end(), sizes);
  for (int64_t i = dim - 1; i >= 0; --i) strides[i] = step, step *= sizes[i];
  return Output(dim, sizes, strides, torch_types.f32);
}

Threads torch_threads() {
  uint32_t threads = 1;
  check(torch_get_num_threads(&threads), "count its threads");
  return Threads{static_cast<int>(threads), on_torch_threads};
}

void compute(const ForwardArgs& a) {
  if (a.B == 0 || a.H == 0 || a.N == 0) return;
  const char* error = forward(a, torch_threads());
  if (error != nullptr) fail(error);
}

// What forward and backward calls have in common: one attention call.
#define POISE_CALL                                                                                                 \
  "Tensor q, Tensor k, Tensor v, float scale, Tensor? scale_rows, float softcap, Tensor? sink, float dropout, "    \
  "int seed, int left, int right, int offset, Tensor? offsets, Tensor? start, Tensor? end, Tensor? rows, Tensor? " \
  "tile_ptr, Tensor? tile_runs, "                                                                                  \
  "Tensor? patterns, Tensor? mask0, Tensor? mask1, Tensor? bias0, Tensor? bias1, Tensor? table, Tensor? slopes, "  \
  "Tensor? sink_keys, Tensor? pages, Tensor? k_scale, Tensor? v_scale, int? keys"

struct CallInputs : Inputs {  // the members initialise, and so read the stack, in the schema's order
  using Inputs::Inputs;
  const TensorHandle q = tensor(), k = tensor(), v = tensor();
  const double scale = number();
  const TensorHandle scale_rows = optional_tensor();
  const double softcap = number();
  const TensorHandle sink = optional_tensor();
  const double dropout = number();
  const int64_t seed = integer();
  const int64_t left = integer(), right = integer(), offset = integer();
  const TensorHandle offsets = optional_tensor(), start = optional_tensor(), end = optional_tensor();
  const TensorHandle rows = optional_tensor();
  const TensorHandle tile_ptr = optional_tensor(), tile_runs = optional_tensor(), patterns = optional_tensor();
  const TensorHandle mask0 = optional_tensor(), mask1 = optional_tensor();
  const TensorHandle bias0 = optional_tensor(), bias1 = optional_tensor();
  const TensorHandle table = optional_tensor(), slopes = optional_tensor(), sink_keys = optional_tensor();
  const TensorHandle pages = optional_tensor(), k_scale = optional_tensor(), v_scale = optional_tensor();
  const int64_t keys = optional_integer(-1);

  // The call as the kernels read it, checked; and q's description.
  View read(ForwardArgs& a) const {
    const TorchTypes& t = torch_types;
    const View q_view = view(q, "q", 4), k_view = view(k, "k", 4);
    read_cache(a, q_view, k_view, view(v, "v", 4), pages, k_scale, v_scale, keys);
    read_band(a, left, right, offset);
    a.offsets = list<int64_t>(offsets, "offsets", t.i64, a.B);
    if (a.offsets != nullptr)
      for (int64_t b = 0; b < a.B; ++b) expect_position("q_offset", a.offsets[b]);
    a.start = list<int32_t>(start, "start", t.i32, a.B);
    a.end = list<int32_t>(end, "end", t.i32, a.B);
    check_pages(a, k_view.sizes[0]);
    read_rows(a, rows);
    read_tiles(a, tile_ptr, tile_runs, patterns);
    read_mask(a, mask0, "mask0");
    read_mask(a, mask1, "mask1");

    if (!(softcap >= 0)) fail("softcap must be positive, or 0 for none, got " + std::to_string(softcap));
    a.scale = static_cast<float>(scale);
    read_scale_rows(a, scale_rows);
    // A cap too small for float32 must not become 0, which is none.
    a.softcap = softcap > 0 ? std::fmax(static_cast<float>(softcap), std::numeric_limits<float>::min()) : 0.0f;
    a.sink = list<float>(sink, "sink", t.f32, a.H);
    if (!(dropout >= 0 && dropout < 1)) fail("dropout must lie in [0, 1), got " + std::to_string(dropout));
    a.kept_factor = dropout > 0 ? static_cast<float>(1.0 / (1.0 - dropout)) : 0.0f;
    a.drop_below = static_cast<uint32_t>(dropout * 4294967296.0), a.seed = static_cast<uint64_t>(seed);
    read_bias(a, bias0, "bias0");
    read_bias(a, bias1, "bias1");
    read_table(a, table);
    a.slopes = list<float>(slopes, "slopes", t.f32, a.H);
    read_sink_keys(a, sink_keys);
    return q_view;
  }
};

constexpr const char* kForward =
    "forward(" POISE_CALL ", bool stats, bool save, bool bshd) -> (Tensor, Tensor, Tensor)";

struct ForwardInputs : CallInputs {
  using CallInputs::CallInputs;
  const bool stats = flag(), save = flag(), bshd = flag();
};

void forward_kernel(Value* stack, uint64_t, uint64_t) {
  const ForwardInputs in(stack);
  ForwardArgs a{};
  const View q = in.read(a);
  RowsOutput out(a.B, a.H, a.N, a.Dv, in.bshd, q.dtype);
  Output stats = packed_output({in.stats ? int64_t(kFields) : 0, a.B, a.H, a.N});
  Output saved = packed_output({in.save ? int64_t(kSaved) : 0, a.B, a.H, a.N});
  a.out = out.rows;
  if (in.stats) a.stats = stats.data<float>();
  if (in.save) a.saved = saved.data<float>();
  compute(a);
  stack[0] = out.tensor.release(), stack[1] = stats.release(), stack[2] = saved.release();
}

// Which gradients a backward call is to compute; the others come back empty.
enum Wanted : int64_t {
  kWantQ = 1,
  kWantK = 2,
  kWantV = 4,
  kWantTable = 8,
  kWantSlopes = 16,
  kWantScale = 32,
  kWantSink = 64
};

constexpr const char* kBackward =
    "backward(Tensor d_out, Tensor out, Tensor saved, Tensor? stats, Tensor? d_stats, " POISE_CALL
    ", int wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)";
constexpr const char* kBiasGradient =
    "bias_gradient(Tensor d_out, Tensor out, Tensor saved, Tensor? stats, Tensor? d_stats, " POISE_CALL
    ", int b, int h, int n, int m) -> Tensor";

struct ResultInputs : Inputs {
  using Inputs::Inputs;
  const TensorHandle d_out = tensor(), out = tensor(), saved = tensor();
  const TensorHandle stats = optional_tensor(), d_stats = optional_tensor();
};

// A tensor as the output is, and one float32 number for every field and row.
View rows_like(TensorHandle handle, const char* name, const ForwardArgs& a, int32_t dtype) {
  View v = view(handle, name, 4, dtype);
  const int64_t sizes[4] = {a.B, a.H, a.N, a.Dv};
  for (int axis = 0; axis < 4; ++axis) v.expect_size(axis, sizes[axis]);
  return v;
}

const float* packed(TensorHandle handle, const char* name, int64_t fields, const ForwardArgs& a) {
  View v = view(handle, name, 4, torch_types.f32);
  const int64_t sizes[4] = {fields, a.B, a.H, a.N};
  for (int axis = 0; axis < 4; ++axis) v.expect_size(axis, sizes[axis]);
  v.expect_packed(0);
  return v.as<float>();
}

// The stack is read by the bases in their order: results first, then the call.
struct GradientInputs {
  explicit GradientInputs(Value* stack) : results(stack), call(results.rest()) {}
  const ResultInputs results;
  CallInputs call;

  View read(BackwardArgs& back) const {
    ForwardArgs& a = back.call;
    const View q = call.read(a);
    const View k = view(call.k, "k", 4);
    if (k.dtype != q.dtype) k.refuse(std::string("must have q's dtype, ") + type_name(q.dtype));
    if (a.pages != nullptr || a.M != k.sizes[2])
      fail("gradients of a cache are not to be had: pass k and v as tensors");
    const View out = rows_like(results.out, "out", a, q.dtype), d_out = rows_like(results.d_out, "d_out", a, q.dtype);
    a.out = rows_of(out), back.d_out = rows_of(d_out);
    back.saved = packed(results.saved, "saved", kSaved, a);
    if ((results.stats == nullptr) != (results.d_stats == nullptr)) fail("stats and d_stats must be given together");
    if (results.stats == nullptr) return q;
    a.stats = const_cast<float*>(packed(results.stats, "stats", kFields, a));
    back.d_stats = packed(results.d_stats, "d_stats", kFields, a);
    return q;
  }
};

// A gradient has the layout of what it belongs to.
RowsOutput gradient_of(const View& rows, bool wanted) {
  const bool bshd = rows.strides[1] < rows.strides[2];
  return RowsOutput(wanted ? rows.sizes[0] : 0, rows.sizes[1], rows.sizes[2], rows.sizes[3], bshd, rows.dtype);
}

void compute(const BackwardArgs& back) {  // of an empty call too: gradients that are summed over it are 0
  const char* error = backward(back, torch_threads());
  if (error != nullptr) fail(error);
}

void backward_kernel(Value* stack, uint64_t, uint64_t) {
  GradientInputs in(stack);
  const int64_t wanted = in.call.last_integer();
  BackwardArgs back{};
  const View q = in.read(back);
  const ForwardArgs& a = back.call;
  // By their handles: without heads a table is given, but nowhere.
  if ((wanted & kWantTable && !in.call.table) || (wanted & kWantSlopes && !in.call.slopes) ||
      (wanted & kWantSink && !in.call.sink))
    fail("wanted must name gradients of arguments that are given");
  const auto size = [&](Wanted what, int64_t first) { return wanted & what ? first : 0; };
  RowsOutput d_q = gradient_of(q, wanted & kWantQ);
  RowsOutput d_k = gradient_of(view(in.call.k, "k", 4), wanted & kWantK);
  RowsOutput d_v = gradient_of(view(in.call.v, "v", 4), wanted & kWantV);
  Output d_table = packed_output({size(kWantTable, a.H), 2 * a.table_radius + 1});
  Output d_slopes = packed_output({size(kWantSlopes, a.H)});
  Output d_scale = packed_output({size(kWantScale, a.B), a.H, a.N});
  Output d_sink = packed_output({size(kWantSink, a.B), a.H, a.N});
  if (wanted & kWantQ) back.d_q = d_q.rows;
  if (wanted & kWantK) back.d_k = d_k.rows;
  if (wanted & kWantV) back.d_v = d_v.rows;
  if (wanted & kWantTable) back.d_table = d_table.data<float>();
  if (wanted & kWantSlopes) back.d_slopes = d_slopes.data<float>();
  if (wanted & kWantScale) back.d_scale = d_scale.data<float>();
  if (wanted & kWantSink) back.d_sink = d_sink.data<float>();
  compute(back);
  stack[0] = d_q.tensor.release(), stack[1] = d_k.tensor.release(), stack[2] = d_v.tensor.release();
  stack[3] = d_table.release(), stack[4] = d_slopes.release(), stack[5] = d_scale.release();
  stack[6] = d_sink.release();
}

void bias_gradient_kernel(Value* stack, uint64_t, uint64_t) {
  GradientInputs in(stack);
  DenseBiasGradient bias{};
  for (int64_t& size : bias.sizes) size = in.call.last_integer();
  BackwardArgs back{};
  in.read(back);
  const ForwardArgs& a = back.call;
  const int64_t sizes[4] = {a.B, a.H, a.N, a.M};
  for (int axis = 0; axis < 4; ++axis)
    if (bias.sizes[axis] != 1 && bias.sizes[axis] != sizes[axis])
      fail("a bias must have size 1 or " + std::to_string(sizes[axis]) + " in dim " + std::to_string(axis));
  if (a.B == 0 || a.H == 0 || a.N == 0 || a.M == 0) fail("bias_gradient needs rows and keys");
  Output gradient = packed_output({bias.sizes[0], bias.sizes[1], bias.sizes[2], bias.sizes[3]});
  bias.data = gradient.data<float>();
  const char* error = bias_gradient(back, bias, torch_threads());
  if (error != nullptr) fail(error);
  stack[0] = gradient.release();
}

constexpr const char* kAttend =
    "attend(Tensor q, Tensor k, Tensor v, float? scale, int left, int right, int offset, bool bshd) -> Tensor";
constexpr const char* kAttendObserved =
    "attend_observed(Tensor q, Tensor k, Tensor v, float? scale, int left, int right, int offset, bool bshd) "
    "-> (Tensor, Tensor)";

constexpr const char* kAttendSaved =
    "attend_saved(Tensor q, Tensor k, Tensor v, float? scale, int left, int right, int offset, bool bshd) "
    "-> (Tensor, Tensor)";
constexpr const char* kAttendBackward =
    "attend_backward(Tensor d_out, Tensor out, Tensor saved, Tensor q, Tensor k, Tensor v, float? scale, int left, "
    "int right, int offset, int wanted) -> (Tensor, Tensor, Tensor)";

constexpr double kNone = -std::numeric_limits<double>::infinity();

// A plain call: a band or no mask at all, and nothing else.
struct PlainInputs : Inputs {
  using Inputs::Inputs;
  const TensorHandle q = tensor(), k = tensor(), v = tensor();
  const double scale = optional_number(kNone);
  const int64_t left = integer(), right = integer(), offset = integer();

  void read(ForwardArgs& a, const View& q_view, const View& k_view, const View& v_view) const {
    read_inputs(a, q_view, k_view, v_view);
    read_band(a, left, right, offset);
    a.scale = static_cast<float>(scale != kNone ? scale : 1.0 / std::sqrt(static_cast<double>(a.Dk > 0 ? a.Dk : 1)));
  }
};

struct AttendInputs : PlainInputs {
  using PlainInputs::PlainInputs;
  const bool bshd = flag();
};

// The fast ways in. `second` is what the call returns beside the output, [fields, B, H, N]: nothing, the statistics
// with key 0 for a sink key, or what a gradient needs.
template <int64_t fields, float* ForwardArgs::* second>
void attend_kernel(Value* stack, uint64_t, uint64_t) {
  static const int32_t first_key = 0;
  const AttendInputs in(stack);
  const View q = view(in.q, "q", 4);
  ForwardArgs a{};
  in.read(a, q, view(in.k, "k", 4), view(in.v, "v", 4));
  a.sink_keys = &first_key, a.num_sink_keys = a.M > 0 ? 1 : 0;
  RowsOutput out(a.B, a.H, a.N, a.Dv, in.bshd, q.dtype);
  a.out = out.rows;
  if constexpr (fields == 0) {
    compute(a);
  } else {
    Output rows = packed_output({fields, a.B, a.H, a.N});
    a.*second = rows.data<float>();
    compute(a);
    stack[1] = rows.release();
  }
  stack[0] = out.tensor.release();
}

struct AttendResults : Inputs {
  using Inputs::Inputs;
  const TensorHandle d_out = tensor(), out = tensor(), saved = tensor();
};

void attend_backward_kernel(Value* stack, uint64_t, uint64_t) {
  const AttendResults results(stack);
  PlainInputs in(results.rest());
  const int64_t wanted = in.last_integer();
  const View q = view(in.q, "q", 4), k = view(in.k, "k", 4), v = view(in.v, "v", 4);
  BackwardArgs back{};
  ForwardArgs& a = back.call;
  in.read(a, q, k, v);
  a.out = rows_of(rows_like(results.out, "out", a, q.dtype));
  back.d_out = rows_of(rows_like(results.d_out, "d_out", a, q.dtype));
  back.saved = packed(results.saved, "saved", kSaved, a);
  RowsOutput d_q = gradient_of(q, wanted & kWantQ), d_k = gradient_of(k, wanted & kWantK);
  RowsOutput d_v = gradient_of(v, wanted & kWantV);
  if (wanted & kWantQ) back.d_q = d_q.rows;
  if (wanted & kWantK) back.d_k = d_k.rows;
  if (wanted & kWantV) back.d_v = d_v.rows;
  compute(back);
  stack[0] = d_q.tensor.release(), stack[1] = d_k.tensor.release(), stack[2] = d_v.tensor.release();
}

// Runs once, when the library is loaded. A failure must not end the process: ops.py asks for its name.
const char* register_operators() {
  LibraryHandle definitions = nullptr, kernels = nullptr;
  if (aoti_torch_library_init_def("poise", __FILE__, __LINE__, &definitions) != 0) return "namespace poise";
  if (aoti_torch_library_def(definitions, kForward) != 0) return "poise::forward";
  if (aoti_torch_library_def(definitions, kBackward) != 0) return "poise::backward";
  if (aoti_torch_library_def(definitions, kBiasGradient) != 0) return "poise::bias_gradient";
  if (aoti_torch_library_def(definitions, kAttend) != 0) return "poise::attend";
  if (aoti_torch_library_def(definitions, kAttendObserved) != 0) return "poise::attend_observed";
  if (aoti_torch_library_def(definitions, kAttendSaved) != 0) return "poise::attend_saved";
  if (aoti_torch_library_def(definitions, kAttendBackward) != 0) return "poise::attend_backward";
  if (aoti_torch_library_init_impl("poise", "CPU", __FILE__, __LINE__, &kernels) != 0) return "CPU kernels";
  if (torch_library_impl(kernels, "forward", forward_kernel, kTorchAbi) != 0) return "poise::forward on CPU";
  if (torch_library_impl(kernels, "backward", backward_kernel, kTorchAbi) != 0) return "poise::backward on CPU";
  if (torch_library_impl(kernels, "bias_gradient", bias_gradient_kernel, kTorchAbi) != 0)
    return "poise::bias_gradient on CPU";
  if (torch_library_impl(kernels, "attend", attend_kernel<0, &ForwardArgs::stats>, kTorchAbi) != 0)
    return "poise::attend on CPU";
  if (torch_library_impl(kernels, "attend_observed", attend_kernel<kFields, &ForwardArgs::stats>, kTorchAbi) != 0)
    return "poise::attend_observed on CPU";
  if (torch_library_impl(kernels, "attend_saved", attend_kernel<kSaved, &ForwardArgs::saved>, kTorchAbi) != 0)
    return "poise::attend_saved on CPU";
  if (torch_library_impl(kernels, "attend_backward", attend_backward_kernel, kTorchAbi) != 0)
    return "poise::attend_backward on CPU";
  return nullptr;
}
const char* const registration_failure = register_operators();

}  // namespace
}  // namespace poise

#define POISE_EXPORT extern "C" __attribute__((visibility("default")))

// Called by ops.py through ctypes: what could not be registered, or null; and the instruction set in use.
POISE_EXPORT const char* poise_registration_failure() { return poise::registration_failure; }
POISE_EXPORT const char* poise_isa() { return poise::isa_name(); }
