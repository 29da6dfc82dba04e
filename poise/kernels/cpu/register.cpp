// The boundary to torch: operators in, ForwardArgs out.
//
// Registers poise::forward, poise::attend and poise::attend_observed through torch's stable C interface, checks every
// tensor before a kernel may dereference it, allocates the outputs and lends torch's threads. A call that breaks a
// rule raises; nothing is copied or converted here. Knows neither mask objects nor kernels: poise/kernels/ops.py
// lowers the call, forward.h says what the fields mean.
#include <cmath>
#include <limits>
#include <optional>
#include <string>

#include "boundary.h"
#include "forward.h"
#include "torch_abi.h"

namespace poise {
namespace {

bool float_type(int32_t dtype, Dtype* found) {
  const TorchTypes& t = torch_types;
  *found = dtype == t.bf16 ? Dtype::bf16 : dtype == t.f16 ? Dtype::f16 : Dtype::f32;
  return dtype == t.f32 || dtype == t.bf16 || dtype == t.f16;
}

Rows rows_of(const View& v) {
  if (v.sizes[3] > 1 && v.strides[3] != 1) v.refuse("must have a contiguous last dim");
  return {v.data, v.strides[0], v.strides[1], v.strides[2]};
}

constexpr int64_t kLongest = (int64_t(1) << 31) - 1 - kTile;  // positions and their tiles' ends fit 32 bits

void read_inputs(ForwardArgs& a, const View& q, const View& k, const View& v) {
  if (!float_type(q.dtype, &a.dtype)) q.refuse("must be float32, bfloat16 or float16");
  if (k.dtype != q.dtype) k.refuse(std::string("must have q's dtype, ") + type_name(q.dtype));
  if (v.dtype != q.dtype) v.refuse(std::string("must have q's dtype, ") + type_name(q.dtype));
  a.B = q.sizes[0], a.H = q.sizes[1], a.N = q.sizes[2], a.Dk = q.sizes[3];
  a.G = k.sizes[1], a.M = k.sizes[2], a.Dv = v.sizes[3];
  k.expect_size(0, a.B);
  k.expect_size(3, a.Dk);
  v.expect_size(0, a.B);
  v.expect_size(1, a.G);
  v.expect_size(2, a.M);
  if (a.H != 0 && (a.G == 0 || a.H % a.G != 0))
    k.refuse("must have a head count that divides q's " + std::to_string(a.H));
  if (a.N > kLongest) q.refuse("must have at most " + std::to_string(kLongest) + " rows");
  if (a.M > kLongest) k.refuse("must have at most " + std::to_string(kLongest) + " rows");
  a.q = rows_of(q), a.k = rows_of(k), a.v = rows_of(v);
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

// Allocates, computes and puts the results on the stack: [out] or [out, stats].
void answer(ForwardArgs& a, int32_t dtype, bool stats, bool bshd, Value* stack, uint64_t num_outputs) {
  const int64_t sizes[4] = {a.B, a.H, a.N, a.Dv};
  const int64_t row = bshd ? a.H * a.Dv : a.Dv, head = bshd ? a.Dv : a.N * a.Dv;
  const int64_t strides[4] = {a.H * a.N * a.Dv, head, row, 1};
  Output out(4, sizes, strides, dtype);
  a.out = {out.data<void>(), strides[0], head, row};

  const int64_t stat_sizes[4] = {stats ? int64_t(kFields) : 0, a.B, a.H, a.N};
  const int64_t stat_strides[4] = {a.B * a.H * a.N, a.H * a.N, a.N, 1};
  std::optional<Output> packed;  // poise::attend pays for one allocation only
  if (num_outputs == 2) packed.emplace(4, stat_sizes, stat_strides, torch_types.f32);
  a.stats = stats ? packed->data<float>() : nullptr;

  if (a.B != 0 && a.H != 0 && a.N != 0) {
    uint32_t threads = 1;
    check(torch_get_num_threads(&threads), "count its threads");
    const char* error = forward(a, Threads{static_cast<int>(threads), on_torch_threads});
    if (error != nullptr) fail(error);
  }
  stack[0] = out.release();
  if (packed) stack[1] = packed->release();
}

constexpr const char* kForward =
    "forward(Tensor q, Tensor k, Tensor v, float scale, Tensor? scale_rows, float softcap, Tensor? sink, int left, "
    "int right, int offset, Tensor? offsets, Tensor? start, Tensor? end, Tensor? rows, Tensor? tile_ptr, "
    "Tensor? tile_runs, Tensor? patterns, Tensor? mask0, Tensor? mask1, Tensor? bias0, Tensor? bias1, Tensor? table, "
    "Tensor? slopes, Tensor? sink_keys, bool stats, bool bshd) -> (Tensor, Tensor)";

struct ForwardInputs : Inputs {  // the members initialise, and so read the stack, in the schema's order
  using Inputs::Inputs;
  const TensorHandle q = tensor(), k = tensor(), v = tensor();
  const double scale = number();
  const TensorHandle scale_rows = optional_tensor();
  const double softcap = number();
  const TensorHandle sink = optional_tensor();
  const int64_t left = integer(), right = integer(), offset = integer();
  const TensorHandle offsets = optional_tensor(), start = optional_tensor(), end = optional_tensor();
  const TensorHandle rows = optional_tensor();
  const TensorHandle tile_ptr = optional_tensor(), tile_runs = optional_tensor(), patterns = optional_tensor();
  const TensorHandle mask0 = optional_tensor(), mask1 = optional_tensor();
  const TensorHandle bias0 = optional_tensor(), bias1 = optional_tensor();
  const TensorHandle table = optional_tensor(), slopes = optional_tensor(), sink_keys = optional_tensor();
  const bool stats = flag(), bshd = flag();
};

void forward_kernel(Value* stack, uint64_t, uint64_t num_outputs) {
  const ForwardInputs in(stack);
  const TorchTypes& t = torch_types;
  const View q = view(in.q, "q", 4);
  ForwardArgs a{};
  read_inputs(a, q, view(in.k, "k", 4), view(in.v, "v", 4));
  read_band(a, in.left, in.right, in.offset);
  a.offsets = list<int64_t>(in.offsets, "offsets", t.i64, a.B);
  if (a.offsets != nullptr)
    for (int64_t b = 0; b < a.B; ++b) expect_position("offsets", a.offsets[b]);
  a.start = list<int32_t>(in.start, "start", t.i32, a.B);
  a.end = list<int32_t>(in.end, "end", t.i32, a.B);
  read_rows(a, in.rows);
  read_tiles(a, in.tile_ptr, in.tile_runs, in.patterns);
  read_mask(a, in.mask0, "mask0");
  read_mask(a, in.mask1, "mask1");

  if (!(in.softcap >= 0)) fail("softcap must be positive, or 0 for none, got " + std::to_string(in.softcap));
  a.scale = static_cast<float>(in.scale);
  read_scale_rows(a, in.scale_rows);
  // A cap too small for float32 must not become 0, which is none.
  a.softcap = in.softcap > 0 ? std::fmax(static_cast<float>(in.softcap), std::numeric_limits<float>::min()) : 0.0f;
  a.sink = list<float>(in.sink, "sink", t.f32, a.H);
  read_bias(a, in.bias0, "bias0");
  read_bias(a, in.bias1, "bias1");
  read_table(a, in.table);
  a.slopes = list<float>(in.slopes, "slopes", t.f32, a.H);
  read_sink_keys(a, in.sink_keys);
  answer(a, q.dtype, in.stats, in.bshd, stack, num_outputs);
}

constexpr const char* kAttend =
    "attend(Tensor q, Tensor k, Tensor v, float? scale, int left, int right, int offset, bool bshd) -> Tensor";
constexpr const char* kAttendObserved =
    "attend_observed(Tensor q, Tensor k, Tensor v, float? scale, int left, int right, int offset, bool bshd) "
    "-> (Tensor, Tensor)";

constexpr double kNone = -std::numeric_limits<double>::infinity();

struct AttendInputs : Inputs {
  using Inputs::Inputs;
  const TensorHandle q = tensor(), k = tensor(), v = tensor();
  const double scale = optional_number(kNone);
  const int64_t left = integer(), right = integer(), offset = integer();
  const bool bshd = flag();
};

// Both fast ways in: a band or no mask at all, and nothing else. One output is attend, two are attend_observed, which
// watches key 0.
void attend_kernel(Value* stack, uint64_t, uint64_t num_outputs) {
  static const int32_t first_key = 0;
  const AttendInputs in(stack);
  const View q = view(in.q, "q", 4);
  ForwardArgs a{};
  read_inputs(a, q, view(in.k, "k", 4), view(in.v, "v", 4));
  read_band(a, in.left, in.right, in.offset);
  const bool scale_given = in.scale != kNone;
  a.scale = static_cast<float>(scale_given ? in.scale : 1.0 / std::sqrt(static_cast<double>(a.Dk > 0 ? a.Dk : 1)));
  a.sink_keys = &first_key, a.num_sink_keys = a.M > 0 ? 1 : 0;
  answer(a, q.dtype, num_outputs == 2, in.bshd, stack, num_outputs);
}

// Runs once, when the library is loaded. A failure must not end the process: ops.py asks for its name.
const char* register_operators() {
  LibraryHandle definitions = nullptr, kernels = nullptr;
  if (aoti_torch_library_init_def("poise", __FILE__, __LINE__, &definitions) != 0) return "namespace poise";
  if (aoti_torch_library_def(definitions, kForward) != 0) return "poise::forward";
  if (aoti_torch_library_def(definitions, kAttend) != 0) return "poise::attend";
  if (aoti_torch_library_def(definitions, kAttendObserved) != 0) return "poise::attend_observed";
  if (aoti_torch_library_init_impl("poise", "CPU", __FILE__, __LINE__, &kernels) != 0) return "CPU kernels";
  if (torch_library_impl(kernels, "forward", forward_kernel, kTorchAbi) != 0) return "poise::forward on CPU";
  if (torch_library_impl(kernels, "attend", attend_kernel, kTorchAbi) != 0) return "poise::attend on CPU";
  if (torch_library_impl(kernels, "attend_observed", attend_kernel, kTorchAbi) != 0)
    return "poise::attend_observed on CPU";
  return nullptr;
}
const char* const registration_failure = register_operators();

}  // namespace
}  // namespace poise

#define POISE_EXPORT extern "C" __attribute__((visibility("default")))

// Called by ops.py through ctypes: what could not be registered, or null; and the instruction set in use.
POISE_EXPORT const char* poise_registration_failure() { return poise::registration_failure; }
POISE_EXPORT const char* poise_isa() { return poise::isa_name(); }
