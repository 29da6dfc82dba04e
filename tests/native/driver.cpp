// Replays cases dumped by dump_cases.py through poise::forward, without torch or Python: what sanitizers and emulators
// can run quickly. Every case runs on one worker and on three, in both output layouts; all four must agree to the bit
// and lie within the case's error budget. Exit status 1 if any case fails.
//
//   driver cases.bin      (POISE_ISA chooses the instruction set)
//
// File: records, each name, type, dims, sizes, strides (in elements), bytes. A record "case" opens a case and names
// it; the other names are the arguments of poise::forward, and out64, out_budget, stats64, stats_budget to compare
// with.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "forward.h"

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
  a.dtype = static_cast<Dtype>(q.type);
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

double value_at(const unsigned char* bytes, Dtype dtype, int64_t i) {
  if (dtype == Dtype::f32) {
    float value;
    std::memcpy(&value, bytes + 4 * i, 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, bytes + 2 * i, 2);
  if (dtype == Dtype::bf16) {
    uint32_t word = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  }
  const double sign = (half & 0x8000) != 0 ? -1 : 1;
  const int exponent = (half >> 10) & 31, fraction = half & 1023;
  if (exponent == 31) return fraction != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  return sign * (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25));
}

void sequentially(int workers, void (*run)(void* context, int worker), void* context) {
  for (int w = 0; w < workers; ++w) run(context, w);
}

struct Result {
  std::vector<double> out;  // [B, H, N, Dv], whatever the layout in memory
  std::vector<float> stats;
};

Result run(ForwardArgs a, int workers, bool bshd, bool stats) {
  const int64_t rows = a.B * a.H * a.N, size = a.dtype == Dtype::f32 ? 4 : 2;
  const int64_t head = bshd ? a.Dv : a.N * a.Dv, row = bshd ? a.H * a.Dv : a.Dv;
  std::unique_ptr<unsigned char[]> memory(new unsigned char[rows * a.Dv * size]);
  std::memset(memory.get(), 0xff, rows * a.Dv * size);  // NaN in every dtype: an element not written shows
  Result result;
  result.stats.assign(stats ? kFields * rows : 0, std::nanf(""));
  a.out = {memory.get(), a.H * a.N * a.Dv, head, row};
  a.stats = stats ? result.stats.data() : nullptr;
  if (const char* error = rows == 0 ? nullptr : forward(a, Threads{workers, sequentially})) {
    std::fprintf(stderr, "driver: %s\n", error);
    std::exit(2);
  }
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t h = 0; h < a.H; ++h)
      for (int64_t n = 0; n < a.N; ++n)
        for (int64_t d = 0; d < a.Dv; ++d)
          result.out.push_back(value_at(memory.get(), a.dtype, b * a.out.b + h * head + n * row + d));
  return result;
}

// The first element that is off by more than the budget; infinities and NaN must be the expected ones.
template <typename T>
bool close(const Case& c, const char* what, const T* got, const double* expected, int64_t count, double budget) {
  for (int64_t i = 0; i < count; ++i) {
    const double x = got[i], y = expected[i];
    if (std::isnan(y) ? std::isnan(x) : x == y || std::fabs(x - y) <= budget) continue;
    std::printf("FAIL %s: %s[%lld] is %.9g, expected %.9g within %.3g\n", c.name.c_str(), what,
                static_cast<long long>(i), x, y, budget);
    return false;
  }
  return true;
}

bool same_bits(const Case& c, const char* what, const Result& x, const Result& y) {
  const bool same = std::memcmp(x.out.data(), y.out.data(), x.out.size() * sizeof(double)) == 0 &&
                    std::memcmp(x.stats.data(), y.stats.data(), x.stats.size() * sizeof(float)) == 0;
  if (!same) std::printf("FAIL %s: the result depends on %s\n", c.name.c_str(), what);
  return same;
}

bool passes(const Case& c) {
  const ForwardArgs a = arguments(c);
  const Result result = run(a, 1, false, true);
  const int64_t rows = a.B * a.H * a.N;
  bool ok = close(c, "out", result.out.data(), c.data<double>("out64"), rows * a.Dv, c.number("out_budget"));
  for (int field = 0; field < kFields; ++field)
    ok &= close(c, ("stats field " + std::to_string(field)).c_str(), result.stats.data() + field * rows,
                c.data<double>("stats64") + field * rows, rows, c.data<double>("stats_budget")[field]);
  ok &= same_bits(c, "the number of workers", result, run(a, 3, false, true));
  ok &= same_bits(c, "the output's layout", result, run(a, 1, true, true));
  Result plain = run(a, 3, true, false);  // without statistics: another path through the kernels
  ok &= close(c, "out without stats", plain.out.data(), c.data<double>("out64"), rows * a.Dv, c.number("out_budget"));
  return ok;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: driver cases.bin\n");
    return 2;
  }
  std::FILE* file = std::fopen(argv[1], "rb");
  if (file == nullptr) {
    std::perror(argv[1]);
    return 2;
  }
  int run_count = 0, failures = 0;
  Case current;
  auto finish = [&] {
    if (current.arrays.empty()) return;
    ++run_count;
    failures += !passes(current);
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
  std::printf("%s: %d of %d cases pass\n", isa_name(), run_count - failures, run_count);
  return failures != 0 || run_count == 0;
}
