// Chooses the instruction set, once per process, and owns the kernels' memory. No arithmetic.
#include "dispatch.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace poise {
namespace {

struct Isa {
  const char* name;
  bool available;
  ForwardFunction forward, forward_bf16;
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
  const Isa best_first[] = {{"avx512bf16", bf16, forward_avx512, forward_avx512bf16},
                            {"avx512", avx512, forward_avx512, forward_avx512},
                            {"avx2", avx2, forward_avx2, forward_avx2},
                            {"base", true, forward_base, forward_base}};
#elif defined(__aarch64__)
  const Isa best_first[] = {{"neon", true, forward_neon, forward_neon}};
#else
  const Isa best_first[] = {{"base", true, forward_base, forward_base}};
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

const char* forward(const ForwardArgs& args, const Threads& threads) {
  const Choice& chosen = choice();
  if (chosen.error) return chosen.error;
  if (args.B == 0 || args.H == 0 || args.N == 0) return nullptr;
  (args.dtype == Dtype::bf16 ? chosen.isa.forward_bf16 : chosen.isa.forward)(args, threads);
  return nullptr;
}

}  // namespace poise
