// Chooses the instruction set, once per process, and owns the kernels' memory. No arithmetic.
#include "dispatch.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <vector>

namespace poise {
namespace {

struct Isa {
  const char* name;
  bool available;
  ForwardFunction forward, forward_bf16;
  BackwardFunction backward, backward_bf16;
};

struct Choice {
  Isa isa;
  const char* error;
};

Choice choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  const Isa best_first[] = {
      {"avx512bf16", bf16, forward_avx512, forward_avx512bf16, backward_avx512, backward_avx512bf16},
      {"avx512", avx512, forward_avx512, forward_avx512, backward_avx512, backward_avx512},
      {"avx2", avx2, forward_avx2, forward_avx2, backward_avx2, backward_avx2},
      {"base", true, forward_base, forward_base, backward_base, backward_base}};
#elif defined(__aarch64__)
  const Isa best_first[] = {{"neon", true, forward_neon, forward_neon, backward_neon, backward_neon}};
#else
  const Isa best_first[] = {{"base", true, forward_base, forward_base, backward_base, backward_base}};
#endif
  const char* wish = std::getenv("POISE_ISA");
  if (wish && !*wish) wish = nullptr;
  for (const Isa& isa : best_first) {
    if (wish && std::strcmp(wish, isa.name) != 0) continue;
    if (isa.available) return {isa, nullptr};
    if (wish) return {isa, "POISE_ISA names an instruction set that this machine lacks"};
  }
  return {best_first[0], "POISE_ISA must be one of base, avx2, avx512, avx512bf16 (x86-64) or neon (aarch64)"};
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

constexpr size_t kPage = 4096;

void poison(char* memory, size_t bytes) {
  static const bool wanted = std::getenv("POISE_POISON") != nullptr;
  if (wanted) std::memset(memory, 0xff, bytes);
}

struct Arena {
  char* memory = nullptr;
  size_t bytes = 0;
  ~Arena() { std::free(memory); }
};

}  // namespace

char* scratch_memory(size_t bytes) {
  static thread_local Arena arena;
  if (bytes > arena.bytes) {
    std::free(arena.memory);
    arena.bytes = (bytes + kPage - 1) / kPage * kPage;
    arena.memory = (char*)std::aligned_alloc(kPage, arena.bytes);
    if (!arena.memory) {
      arena.bytes = 0;
      throw std::bad_alloc();
    }
  }
  poison(arena.memory, arena.bytes);
  return arena.memory;
}

char* shared_memory(size_t bytes) {
  bytes = (bytes + kPage - 1) / kPage * kPage;
  char* memory = (char*)std::aligned_alloc(kPage, bytes);
  if (!memory) throw std::bad_alloc();
  poison(memory, bytes);
  return memory;
}

void free_shared_memory(char* memory) { std::free(memory); }

const char* isa_name() { return choice().isa.name; }

int64_t backward_chunk(const ForwardArgs& call) {
  // No more than 64 chunks: a word has a bit for each.
  constexpr int64_t kTasks = 32, kLeast = 512, kMost = 2048, kMostChunks = 64, kStep = 256;
  const int64_t heads = std::max<int64_t>(call.B * call.G, 1), wanted = (kTasks + heads - 1) / heads;
  const int64_t even = (call.M + wanted - 1) / wanted, needed = (call.M + kMostChunks - 1) / kMostChunks;
  const int64_t keys = std::max(std::min(std::max(even, kLeast), kMost), needed);
  return (keys + kStep - 1) / kStep * kStep;
}

int64_t backward_chunks(const ForwardArgs& call) {
  const int64_t chunk = backward_chunk(call);
  return std::max<int64_t>((call.M + chunk - 1) / chunk, 1);
}

void stop_worker() { throw std::runtime_error("poise: another worker failed"); }

namespace {

// The sum of the tasks' parts, in their order.
void add_up(const std::vector<float>& parts, int64_t size, float* sums) {
  for (int64_t i = 0; i < size; ++i) {
    double sum = 0.0;
    for (size_t at = (size_t)i; at < parts.size(); at += (size_t)size) sum += parts[at];
    sums[i] = (float)sum;
  }
}

const char* differentiate(const BackwardArgs& args, const DenseBiasGradient* bias, const Threads& threads) {
  const Choice& chosen = choice();
  if (chosen.error) return chosen.error;
  static uint64_t calls = 0;
  BackwardArgs mine = args;
  mine.serial = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
  const ForwardArgs& call = args.call;
  const int64_t tasks = call.B * backward_chunks(call), columns = call.H * (2 * call.table_radius + 1);
  std::vector<float> tables(args.d_table ? tasks * columns : 0), slopes(args.d_slopes ? tasks * call.H : 0);
  mine.d_table = args.d_table ? tables.data() : nullptr;
  mine.d_slopes = args.d_slopes ? slopes.data() : nullptr;
  (call.dtype == Dtype::bf16 ? chosen.isa.backward_bf16 : chosen.isa.backward)(mine, bias, threads);
  if (args.d_table) add_up(tables, columns, args.d_table);
  if (args.d_slopes) add_up(slopes, call.H, args.d_slopes);
  return nullptr;
}

}  // namespace

const char* backward(const BackwardArgs& args, const Threads& threads) { return differentiate(args, nullptr, threads); }

const char* bias_gradient(const BackwardArgs& args, const DenseBiasGradient& bias, const Threads& threads) {
  BackwardArgs only = args;  // nothing else is computed, so nothing else may be written
  only.d_table = only.d_slopes = nullptr;
  return differentiate(only, &bias, threads);
}

const char* forward(const ForwardArgs& args, const Threads& threads) {
  const Choice& chosen = choice();
  if (chosen.error) return chosen.error;
  if (args.B == 0 || args.H == 0 || args.N == 0) return nullptr;
  const bool bf16 = args.dtype == Dtype::bf16 && args.kv_dtype == Dtype::bf16;
  (bf16 ? chosen.isa.forward_bf16 : chosen.isa.forward)(args, threads);
  return nullptr;
}

}  // namespace poise
