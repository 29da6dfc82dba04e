// Replays dumped calls, forward and backward, without torch or Python: what sanitizers and emulators can run.
//
//   driver cases.bin results.bin      (POISE_ISA chooses the instruction set)
//
// Every case runs forward on one worker and on three, in both output layouts, which must agree to the bit, and without
// statistics; then backward on one worker and on three, with and without what comes back to statistics. The results go
// to a file that cases.py, which wrote the cases, compares with the exact answers; exit status 1 if a run disagrees
// with another.
//
// Files: records, each the lengths of its name, its type and its dims; name, sizes, strides (in elements), bytes. A
// record "case" opens a case and names it; the others are the arguments of poise::forward, d_out and d_stats, or
// results.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backward.h"

namespace {

using namespace poise;

enum Type : uint32_t { kF32, kBf16, kF16, kI32, kI64, kBool, kF64, kText };

struct Array {
  uint32_t type = kF32;
  std::vector<int64_t> sizes, strides;
  std::unique_ptr<unsigned char[]> bytes;  // exactly as long as the tensor reaches, so that a sanitizer sees its end
  uint64_t num_bytes = 0;

  template <typename T>
  const T* as() const {
    return reinterpret_cast<const T*>(bytes.get());
  }
  int64_t stride(size_t axis) const { return sizes[axis] == 1 ? 0 : strides[axis]; }
};

struct Case {
  std::string name;
  std::map<std::string, Array> arrays;

  const Array* find(const char* key) const {
    auto found = arrays.find(key);
    return found == arrays.end() ? nullptr : &found->second;
  }
  const Array& at(const char* key) const {
    if (const Array* found = find(key)) return *found;
    std::fprintf(stderr, "%s: no record %s\n", name.c_str(), key);
    std::exit(2);
  }
  template <typename T>
  const T* data(const char* key) const {
    const Array* found = find(key);
    return found == nullptr ? nullptr : found->as<T>();
  }
  int64_t integer(const char* key) const { return *at(key).as<int64_t>(); }
  double number(const char* key) const { return *at(key).as<double>(); }
};

bool get(std::FILE* file, void* into, size_t bytes) {
  if (bytes == 0 || std::fread(into, 1, bytes, file) == bytes) return true;
  if (std::feof(file) && !std::ferror(file)) return false;
  std::perror("driver");
  std::exit(2);
}

bool read_record(std::FILE* file, std::string& name, Array& array) {
  uint32_t header[3];  // length of the name, type, dims
  if (!get(file, header, sizeof header)) return false;
  name.resize(header[0]);
  array.type = header[1];
  array.sizes.resize(header[2]);
  array.strides.resize(header[2]);
  bool whole = get(file, &name[0], name.size()) && get(file, array.sizes.data(), 8 * header[2]) &&
               get(file, array.strides.data(), 8 * header[2]) && get(file, &array.num_bytes, 8);
  if (whole) {
    array.bytes.reset(new unsigned char[array.num_bytes]);
    whole = get(file, array.bytes.get(), array.num_bytes);
  }
  if (!whole) {
    std::fprintf(stderr, "driver: the file of cases is cut short\n");
    std::exit(2);
  }
  return true;
}

Rows rows_of(const Array& a) { return {a.bytes.get(), a.strides[0], a.strides[1], a.strides[2]}; }

ForwardArgs arguments(const Case& c) {
  ForwardArgs a{};
  const Array &q = c.at("q"), &k = c.at("k"), &v = c.at("v");
  a.dtype = a.kv_dtype = static_cast<Dtype>(q.type);
  a.B = q.sizes[0], a.H = q.sizes[1], a.N = q.sizes[2], a.Dk = q.sizes[3];
  a.G = k.sizes[1], a.M = k.sizes[2], a.Dv = v.sizes[3];
  a.q = rows_of(q), a.k = rows_of(k), a.v = rows_of(v);
  a.scale = static_cast<float>(c.number("scale"));
  a.softcap = static_cast<float>(c.number("softcap"));
  if (const Array* s = c.find("scale_rows")) {
    a.scale_rows = s->as<float>();
    a.scale_b = s->stride(0), a.scale_h = s->stride(1), a.scale_n = s->stride(2);
  }
  a.sink = c.data<float>("sink");
  const double dropout = c.number("dropout");
  a.kept_factor = dropout > 0 ? static_cast<float>(1.0 / (1.0 - dropout)) : 0.0f;
  a.drop_below = static_cast<uint32_t>(dropout * 4294967296.0), a.seed = static_cast<uint64_t>(c.integer("seed"));
  a.slopes = c.data<float>("slopes");
  if (const Array* table = c.find("table")) {
    a.table = table->as<float>(), a.table_h = table->stride(0), a.table_radius = table->sizes[1] / 2;
  }
  a.left = c.integer("left"), a.right = c.integer("right"), a.offset = c.integer("offset");
  a.offsets = c.data<int64_t>("offsets");
  a.start = c.data<int32_t>("start");
  a.end = c.data<int32_t>("end");
  if (const Array* rows = c.find("rows")) {
    a.rows = rows->as<int32_t>(), a.rows_b = rows->stride(0), a.rows_h = rows->stride(1);
  }
  if (const Array* ptr = c.find("tile_ptr")) {
    a.tile_ptr = ptr->as<int32_t>(), a.tile_b = ptr->stride(0), a.tile_h = ptr->stride(1);
    a.tile_runs = c.at("tile_runs").as<int32_t>();
    a.patterns = c.at("patterns").as<uint64_t>();
  }
  for (const char* key : {"mask0", "mask1"})
    if (const Array* m = c.find(key))
      a.masks[a.num_masks++] = {m->as<uint8_t>(), m->stride(0), m->stride(1), m->stride(2), m->stride(3)};
  for (const char* key : {"bias0", "bias1"})
    if (const Array* b = c.find(key))
      a.biases[a.num_biases++] = {b->bytes.get(), static_cast<Dtype>(b->type), b->stride(0), b->stride(1), b->stride(2),
                                  b->stride(3)};
  if (const Array* keys = c.find("sink_keys")) a.sink_keys = keys->as<int32_t>(), a.num_sink_keys = keys->sizes[0];
  return a;
}

// Real threads, so that a sanitizer sees what they share.
void at_once(int workers, void (*run)(void* context, int worker), void* context) {
  std::vector<std::thread> others;
  for (int w = 1; w < workers; ++w) others.emplace_back(run, context, w);
  run(context, 0);
  for (std::thread& other : others) other.join();
}

struct Result {
  std::vector<unsigned char> out, plain_out;  // [B, H, N, Dv] in memory order; with statistics, and without
  std::vector<float> stats;                   // [kFields, B, H, N]
};

// Bytes 0xff are NaN in every dtype: an element that no kernel writes shows.
std::vector<unsigned char> output(ForwardArgs& a, int workers, bool bshd, float* stats) {
  const int64_t size = a.dtype == Dtype::f32 ? 4 : 2, count = a.B * a.H * a.N * a.Dv;
  std::vector<unsigned char> memory(count * size, 0xff);
  const int64_t head = bshd ? a.Dv : a.N * a.Dv, row = bshd ? a.H * a.Dv : a.Dv;
  a.out = {memory.data(), a.H * a.N * a.Dv, head, row};
  a.stats = stats;
  if (const char* error = forward(a, Threads{workers, at_once})) {
    std::fprintf(stderr, "driver: %s\n", error);
    std::exit(2);
  }
  if (!bshd) return memory;
  std::vector<unsigned char> ordered;
  ordered.reserve(memory.size());
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t h = 0; h < a.H; ++h)
      for (int64_t n = 0; n < a.N; ++n) {
        const unsigned char* from = memory.data() + (b * a.out.b + h * head + n * row) * size;
        ordered.insert(ordered.end(), from, from + a.Dv * size);
      }
  return ordered;
}

Result run(ForwardArgs a, int workers, bool bshd) {
  Result result;
  result.stats.assign(kFields * a.B * a.H * a.N, std::numeric_limits<float>::quiet_NaN());
  result.out = output(a, workers, bshd, result.stats.data());
  result.plain_out = output(a, workers, bshd, nullptr);
  return result;
}

bool same_bits(const Case& c, const char* what, const Result& x, const Result& y) {
  const bool same = x.out == y.out && x.plain_out == y.plain_out &&
                    (x.stats.empty() || std::memcmp(x.stats.data(), y.stats.data(), 4 * x.stats.size()) == 0);
  if (!same) std::printf("FAIL %s: the result depends on %s\n", c.name.c_str(), what);
  return same;
}

void put(std::FILE* file, const void* bytes, size_t count) {
  if (count == 0 || std::fwrite(bytes, 1, count, file) == count) return;
  std::perror("driver");
  std::exit(2);
}

// A flat record: whoever reads it knows the shape.
void write_record(std::FILE* file, const std::string& name, uint32_t type, const void* bytes, uint64_t num_bytes) {
  const uint32_t header[3] = {static_cast<uint32_t>(name.size()), type, 0};
  put(file, header, sizeof header);
  put(file, name.data(), name.size());
  put(file, &num_bytes, 8);
  put(file, bytes, num_bytes);
}

using Gradients = std::map<std::string, std::vector<unsigned char>>;  // by the name of the record

// Every result starts as NaN, as outputs do.
Gradients differentiate(const Case& c, ForwardArgs a, int workers, bool watched) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const int64_t rows = a.B * a.H * a.N, size = a.dtype == Dtype::f32 ? 4 : 2;
  std::vector<float> stats(kFields * rows, nan), saved(kSaved * rows, nan);
  a.saved = saved.data();
  const std::vector<unsigned char> out = output(a, workers, false, stats.data());
  BackwardArgs back{};
  back.call = a;
  back.call.out = {out.data(), a.H * a.N * a.Dv, a.N * a.Dv, a.Dv};
  back.call.saved = nullptr;
  if (!watched) back.call.stats = nullptr;
  back.saved = saved.data();
  back.d_out = rows_of(c.at("d_out"));
  back.d_stats = watched ? c.data<float>("d_stats") : nullptr;
  Gradients results;
  const auto memory = [&](const char* name, int64_t bytes) {
    std::vector<unsigned char>& made = results[name];
    made.assign(bytes, 0xff);
    return made.data();
  };
  const auto packed = [&](const char* name, int64_t b, int64_t h, int64_t n, int64_t d) {
    return Rows{memory(name, b * h * n * d * size), h * n * d, n * d, d};
  };
  const auto floats = [&](const char* name, int64_t count) {
    return reinterpret_cast<float*>(memory(name, 4 * count));
  };
  back.d_q = packed("d_q", a.B, a.H, a.N, a.Dk);
  back.d_k = packed("d_k", a.B, a.G, a.M, a.Dk);
  back.d_v = packed("d_v", a.B, a.G, a.M, a.Dv);
  if (a.table) back.d_table = floats("d_table", a.H * (2 * a.table_radius + 1));
  if (a.slopes) back.d_slopes = floats("d_slopes", a.H);
  if (a.scale_rows) back.d_scale = floats("d_scale", rows);
  if (a.sink) back.d_sink = floats("d_sink", rows);
  const Threads threads{workers, at_once};
  const char* error = a.B != 0 && a.H != 0 ? backward(back, threads) : nullptr;
  for (int n = 0; n < a.num_biases && error == nullptr && rows * a.M != 0; ++n) {
    const DenseBias& dense = a.biases[n];
    DenseBiasGradient bias{nullptr, {dense.b ? a.B : 1, dense.h ? a.H : 1, dense.n ? a.N : 1, dense.m ? a.M : 1}};
    const std::string name = "d_bias" + std::to_string(n);
    bias.data = floats(name.c_str(), bias.sizes[0] * bias.sizes[1] * bias.sizes[2] * bias.sizes[3]);
    error = bias_gradient(back, bias, threads);
  }
  if (error != nullptr) {
    std::fprintf(stderr, "driver: %s\n", error);
    std::exit(2);
  }
  return results;
}

bool replay_backward(const Case& c, const ForwardArgs& a, std::FILE* results) {
  bool same = true;
  for (const bool watched : {false, true}) {
    const Gradients gradients = differentiate(c, a, 1, watched);
    same &= gradients == differentiate(c, a, 3, watched);
    if (!watched) continue;
    for (const auto& [name, bytes] : gradients) write_record(results, name, c.at("q").type, bytes.data(), bytes.size());
  }
  if (!same) std::printf("FAIL %s: a gradient depends on the number of workers\n", c.name.c_str());
  return same;
}

bool replay(const Case& c, std::FILE* results) {
  const ForwardArgs a = arguments(c);
  const Result result = run(a, 1, false);
  write_record(results, "case", kText, c.name.data(), c.name.size());
  write_record(results, "out", c.at("q").type, result.out.data(), result.out.size());
  write_record(results, "plain_out", c.at("q").type, result.plain_out.data(), result.plain_out.size());
  write_record(results, "stats", kF32, result.stats.data(), 4 * result.stats.size());
  const bool workers = same_bits(c, "the number of workers", result, run(a, 3, false));
  const bool layout = same_bits(c, "the output's layout", result, run(a, 1, true));
  const bool gradients = replay_backward(c, a, results);
  return workers && layout && gradients;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: driver cases.bin results.bin\n");
    return 2;
  }
  std::FILE* file = std::fopen(argv[1], "rb");
  std::FILE* results = std::fopen(argv[2], "wb");
  if (file == nullptr || results == nullptr) {
    std::perror(argv[file == nullptr ? 1 : 2]);
    return 2;
  }
  int count = 0, failures = 0;
  Case current;
  auto finish = [&] {
    if (current.arrays.empty()) return;
    ++count;
    failures += !replay(current, results);
    current = Case();
  };
  std::string name;
  for (Array array; read_record(file, name, array); array = Array()) {
    if (name == "case") {
      finish();
      current.name.assign(array.as<char>(), array.num_bytes);
    } else {
      current.arrays[name] = std::move(array);
    }
  }
  finish();
  std::fclose(file);
  if (std::fclose(results) != 0) {
    std::perror(argv[2]);
    return 2;
  }
  std::printf("%s: %d cases run, %d inconsistent\n", isa_name(), count, failures);
  return failures != 0 || count == 0;
}
