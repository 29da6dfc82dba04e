// What this machine can do at best, measured: multiply-adds per second of one core, bytes read per second.
//
// Built and loaded by limits.py. Independent chains long enough to hide latency, operands in registers, nothing else.
#include <immintrin.h>
#include <time.h>

#include <cstddef>
#include <cstdint>

namespace {

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

constexpr int kSteps = 200000;
volatile float keep_float;
volatile uint64_t keep_word;

// Best of several runs: floating-point operations per second.
template <class Run>
double best(double flops, Run run) {
  double least = 1e9;
  for (int i = 0; i < 40; ++i) {
    const double start = now();
    run();
    const double took = now() - start;
    if (took < least) least = took;
  }
  return flops / least;
}

#define CHAINS(count, TYPE, ZERO, STEP)                                        \
  TYPE sum[count];                                                             \
  _Pragma("GCC unroll 24") for (int j = 0; j < count; ++j) sum[j] = ZERO;      \
  for (int i = 0; i < kSteps; ++i) {                                           \
    _Pragma("GCC unroll 24") for (int j = 0; j < count; ++j) {                 \
      STEP;                                                                    \
      asm volatile("" : "+v"(sum[j]));                                         \
    }                                                                          \
  }                                                                            \
  float total = 0;                                                             \
  _Pragma("GCC unroll 24") for (int j = 0; j < count; ++j) total += sum[j][0]; \
  keep_float = total;

__attribute__((target("avx2,fma"))) void fma256() {
  const __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(1.5f);
  CHAINS(12, __m256, _mm256_setzero_ps(), sum[j] = _mm256_fmadd_ps(a, b, sum[j]))
}
__attribute__((target("avx512f"))) void fma512() {
  const __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(1.5f);
  CHAINS(24, __m512, _mm512_setzero_ps(), sum[j] = _mm512_fmadd_ps(a, b, sum[j]))
}
__attribute__((target("avx512f,avx512bf16"))) void dot_bf16() {
  const __m512bh a = (__m512bh)_mm512_set1_ps(0.5f), b = (__m512bh)_mm512_set1_ps(1.5f);
  CHAINS(24, __m512, _mm512_setzero_ps(), sum[j] = _mm512_dpbf16_ps(sum[j], a, b))
}

}  // namespace

// Each 0 where the machine lacks the instructions. Flop/s of the calling core.
extern "C" double peak_fma256() {
  if (!__builtin_cpu_supports("fma")) return 0;
  return best(kSteps * 12.0 * 8 * 2, fma256);
}
extern "C" double peak_fma512() {
  if (!__builtin_cpu_supports("avx512f")) return 0;
  return best(kSteps * 24.0 * 16 * 2, fma512);
}
extern "C" double peak_bf16() {
  if (!__builtin_cpu_supports("avx512bf16")) return 0;
  return best(kSteps * 24.0 * 32 * 2, dot_bf16);
}

// Reads all of it once, asking for what lies `ahead` words further (0: that is left to the hardware). For limits.py.
typedef uint64_t line __attribute__((vector_size(64), aligned(8)));
extern "C" __attribute__((target_clones("avx512f", "avx2", "default"))) void read_memory(const uint64_t* memory,
                                                                                         size_t words, size_t ahead) {
  line sum[4] = {};
  for (size_t i = 0; i + 32 <= words; i += 32)
    for (int j = 0; j < 4; ++j) {
      if (ahead) __builtin_prefetch(memory + i + 8 * j + ahead);
      sum[j] += *(const line*)(memory + i + 8 * j);
    }
  const line total = sum[0] + sum[1] + sum[2] + sum[3];
  for (int lane = 0; lane < 8; ++lane) keep_word = total[lane];
}
