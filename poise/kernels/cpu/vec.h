// The thin vector layer: everything that differs between instruction sets, and the only intrinsics.
//
// Arithmetic is GCC/Clang vector extensions (a * b + c contracts to FMA where there is one). Each ISA's translation
// unit compiles this whole file with its own flags, so everything here has internal linkage and nothing from the
// standard library that might be emitted out of line is used: the linker must not hand one ISA's code to another.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define POISE_INLINE inline __attribute__((always_inline))
#define POISE_INLINE_LAMBDA __attribute__((always_inline))

namespace poise {
namespace {

// Width W in floats; a tile is kTileRows broadcast rows by up to kGroupVecs vectors, sized to the register file.
#if defined(__AVX512F__)
constexpr int W = 16, kTileRows = 8, kGroupVecs = 2;
#define POISE_PIN "+v"
#elif defined(__AVX2__)
constexpr int W = 8, kTileRows = 4, kGroupVecs = 3;
#define POISE_PIN "+x"
#elif defined(__aarch64__)
constexpr int W = 4, kTileRows = 4, kGroupVecs = 4;
#define POISE_PIN "+w"
#elif defined(__x86_64__)
constexpr int W = 4, kTileRows = 4, kGroupVecs = 2;
#define POISE_PIN "+x"
#else
constexpr int W = 4, kTileRows = 4, kGroupVecs = 2;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef float vf_unaligned __attribute__((vector_size(W * 4), aligned(1), may_alias));  // rows of int8 start anywhere
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint64_t vw __attribute__((vector_size(W * 4)));  // W / 2 wide lanes

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorRegisters = 16;
#endif

// Whether a * b + c is rounded once, which the raw mode of softmax.h counts on.
#if defined(__FMA__) || defined(__aarch64__)
constexpr bool kFused = true;
#else
constexpr bool kFused = false;
#endif

constexpr float kInf = __builtin_inff();
constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.693147180559945309417f;

POISE_INLINE vf load(const void* p) { return *(const vf_unaligned*)p; }
POISE_INLINE void store(void* p, vf x) { *(vf_unaligned*)p = x; }
// The first `count` bytes at p, zeros after them; nothing else is read.
POISE_INLINE vf load_bytes(const void* p, int count) {
#if defined(__AVX512BW__)
  return (vf)_mm512_maskz_loadu_epi8((1ull << count) - 1, p);
#else
  vf x = {};
  memcpy(&x, p, (size_t)count);
  return x;
#endif
}
POISE_INLINE vf splat(float x) {
#if defined(__AVX512F__)
  return (vf)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (vf)_mm256_set1_ps(x);
#else
  return vf{x, x, x, x};
#endif
}

// Keeps an operand in its register: GCC otherwise loads it again for every FMA that uses it.
POISE_INLINE vf pin(vf x) {
#if defined(POISE_PIN)
  asm("" : POISE_PIN(x));
#endif
  return x;
}

// a * b + c with one rounding wherever there is FMA: for sums that must come out the same in differently compiled code.
POISE_INLINE vf multiply_add(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// --- Masks: one bit per lane where the hardware has such registers, else all-ones lanes ---
#if defined(__AVX512F__)
typedef __mmask16 vmask;
POISE_INLINE vmask mask_of(uint64_t bits) { return (vmask)bits; }
POISE_INLINE uint32_t bits_of(vmask m) { return m; }
POISE_INLINE vf select(vmask m, vf yes, vf no) { return (vf)_mm512_mask_blend_ps(m, (__m512)no, (__m512)yes); }
POISE_INLINE vmask equal(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ); }
POISE_INLINE vmask less(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ); }
#else
typedef vi vmask;
POISE_INLINE vmask mask_of(uint64_t bits) {
  vi lane;
  for (int i = 0; i < W; ++i) lane[i] = 1 << i;
  return ((vi{} + (int32_t)(bits & ((1u << W) - 1))) & lane) != 0;
}
POISE_INLINE uint32_t bits_of(vmask m) {
#if defined(__AVX2__)
  return (uint32_t)_mm256_movemask_ps((__m256)m);
#elif defined(__x86_64__)
  return (uint32_t)_mm_movemask_ps((__m128)m);
#else
  uint32_t bits = 0;
  for (int i = 0; i < W; ++i) bits |= (uint32_t)(m[i] & 1) << i;
  return bits;
#endif
}
POISE_INLINE vf select(vmask m, vf yes, vf no) { return (vf)(((vi)yes & m) | ((vi)no & ~m)); }
POISE_INLINE vmask equal(vf a, vf b) { return a == b; }
POISE_INLINE vmask less(vf a, vf b) { return a < b; }
#endif

// The second operand wins when either is NaN: max(new, running) never lets a NaN into a running maximum.
POISE_INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
  return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
  return select(less(b, a), a, b);
#endif
}
POISE_INLINE vf vmin(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
  return (vf)_mm_min_ps((__m128)a, (__m128)b);
#else
  return select(less(a, b), a, b);
#endif
}

// While it lives, results too small to be normal are 0: where hardware computes with subnormals in microcode, the far
// tail of a softmax costs more than all the rest. Restores what the caller's thread had.
class FlushTiny {
 public:
#if defined(__x86_64__)
  FlushTiny() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8000); }
  ~FlushTiny() { _mm_setcsr(before_); }

 private:
  uint32_t before_;
#elif defined(__aarch64__)
  FlushTiny() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | (1ull << 24)));
  }
  ~FlushTiny() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  uint64_t before_;
#endif
};

// The 64-bit products of the low halves of wide lanes.
POISE_INLINE vw multiply_low(vw a, vw b) {
#if defined(__AVX512F__)
  return (vw)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vw)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (vw)_mm_mul_epu32((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
  return (vw)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// Bit 2 c = whether the low half of wide lane c is at least `least`.
POISE_INLINE uint32_t low_halves_reach(vw x, uint32_t least) {
#if defined(__AVX512F__)
  return _mm512_cmpge_epu32_mask((__m512i)x, _mm512_set1_epi32((int)least)) & 0x5555u;
#else
  const vw reached = (x & 0xffffffffu) >= (vw{} + least);
  uint32_t bits = 0;
  for (int c = 0; c < W / 2; ++c) bits |= (uint32_t)(reached[c] & 1) << (2 * c);
  return bits;
#endif
}

// Bit c = whether byte c of 64 is not zero.
POISE_INLINE uint64_t nonzero_bytes(const uint8_t* p) {
#if defined(__AVX512BW__)
  const __m512i x = _mm512_loadu_si512(p);
  return _mm512_test_epi8_mask(x, x);
#else
  uint64_t bits = 0;
  for (int c = 0; c < 64; c += 8) {  // eight bytes to 0 or 1 each, then to eight bits by one product
    uint64_t eight;
    memcpy(&eight, p + c, 8);
    eight = ((((eight & 0x7f7f7f7f7f7f7f7full) + 0x7f7f7f7f7f7f7f7full) | eight) >> 7) & 0x0101010101010101ull;
    bits |= ((eight * 0x0102040810204080ull) >> 56) << c;
  }
  return bits;
#endif
}

// --- Elementary functions ---
// 2^t for t <= 0 (and slightly above): 2 ulp, or 7e-5 where ROUGH, for what is rounded to bf16 right away; exactly 0 at
// -inf and below the normal range; NaN stays NaN.
template <bool ROUGH = false>
POISE_INLINE vf exp2_of(vf t) {
#if defined(__AVX512F__)
  const vf whole = (vf)_mm512_roundscale_ps((__m512)t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vf clamped = vmax(splat(-127.0f), t);  // NaN passes
  const vf magic = splat(12582912.0f);         // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const vf shifted = clamped + magic, whole = shifted - magic;
#endif
#if defined(__AVX512F__)
  const vf f = t - whole;  // NaN at t = -inf, where scalef gives 0 all the same
#else
  const vf f = clamped - whole;
#endif
  vf p;
  if (ROUGH) {
    p = splat(5.517167e-2f) * f + splat(2.4261113e-1f);
    p = p * f + splat(6.9326099e-1f);
    p = p * f + splat(9.9992807e-1f);
  } else {
    p = splat(1.326472725e-3f) * f + splat(9.671512786e-3f);
    p = p * f + splat(5.550733744e-2f);
    p = p * f + splat(2.402224208e-1f);
    p = p * f + splat(6.931469776e-1f);
    p = p * f + splat(1.0f);
  }
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  const vf power = (vf)(((vi)shifted + 127) << 23);  // 2^whole; a NaN in p survives the product whatever this is
  return select(less(t, splat(-126.0f)), splat(0.0f), p * power);
#endif
}

// Natural logarithm of normal positive x, to about 1 ulp. The reduction to [sqrt(1/2), sqrt(2)) keeps log(1 + tiny)
// exact.
POISE_INLINE vf log_of(vf x) {
  const vi bits = (vi)x - 0x3f3504f3;  // sqrt(1/2)
  const vi exponent = bits >> 23;
  const vf f = (vf)((vi)x - (exponent << 23)) - splat(1.0f);
  const vf e = __builtin_convertvector(exponent, vf);
  vf p = splat(7.0376836292e-2f);
  p = p * f + splat(-1.1514610310e-1f);
  p = p * f + splat(1.1676998740e-1f);
  p = p * f + splat(-1.2420140846e-1f);
  p = p * f + splat(1.4249322787e-1f);
  p = p * f + splat(-1.6668057665e-1f);
  p = p * f + splat(2.0000714765e-1f);
  p = p * f + splat(-2.4999993993e-1f);
  p = p * f + splat(3.3333331174e-1f);
  const vf square = f * f;
  vf tail = p * f * square + e * splat(-2.12194440e-4f) - splat(0.5f) * square;
  return f + tail + e * splat(0.693359375f);
}

// tanh x: an odd polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel; the latter elsewhere. NaN stays NaN.
POISE_INLINE vf tanh_of(vf x) {
  const vf size = (vf)((vi)x & 0x7fffffff);
  const vf square = x * x;
  vf p = splat(-5.70498872745e-3f);
  p = p * square + splat(2.06390887954e-2f);
  p = p * square + splat(-5.37397155531e-2f);
  p = p * square + splat(1.33314422036e-1f);
  p = p * square + splat(-3.33332819422e-1f);
  const vf near = p * square * x + x;
  const vf e = exp2_of(size * splat(-2.0f * kLog2e));  // in (0, 1]
  const vf far = (splat(1.0f) - e) / (splat(1.0f) + e);
  const vf signed_far = (vf)(((vi)far & 0x7fffffff) | ((vi)x & (int32_t)0x80000000));
  return select(less(size, splat(0.625f)), near, select(equal(x, x), signed_far, x));
}

// --- Storage types ---
POISE_INLINE float float_of_bf16(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
POISE_INLINE uint16_t bf16_of(float x) {  // nearest even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
POISE_INLINE float float_of_f16(uint16_t x) {
#if defined(__F16C__) || defined(__AVX512F__)
  return _cvtsh_ss(x);
#elif defined(__aarch64__)
  __fp16 h;
  memcpy(&h, &x, 2);
  return (float)h;
#else
  const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff;
  uint32_t bits = (rest << 13) + 0x38000000;             // exponent bias 15 -> 127
  if (rest >= 0x7c00) bits = (rest << 13) | 0x7f800000;  // inf, NaN
  float f;
  if (rest < 0x0400) {  // subnormal: rest * 2^-24
    f = (float)rest * 5.9604644775390625e-8f;
    memcpy(&bits, &f, 4);
  }
  bits |= sign;
  memcpy(&f, &bits, 4);
  return f;
#endif
}
POISE_INLINE uint16_t f16_of(float x) {
#if defined(__F16C__) || defined(__AVX512F__)
  return (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  const __fp16 h = (__fp16)x;
  uint16_t bits;
  memcpy(&bits, &h, 2);
  return bits;
#else
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // rounds beyond 65504
  if (bits < 0x38800000) {                                   // subnormal result: let the adder round
    float f;
    memcpy(&f, &bits, 4);
    f += 0.5f;
    memcpy(&bits, &f, 4);
    return (uint16_t)(sign | (bits - 0x3f000000));
  }
  return (uint16_t)(sign | ((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13));
#endif
}
POISE_INLINE vf load_bf16(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  vf x;
  for (int i = 0; i < W; ++i) x[i] = float_of_bf16(p[i]);
  return x;
#endif
}
POISE_INLINE vf load_f16(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vf x;
  for (int i = 0; i < W; ++i) x[i] = float_of_f16(p[i]);
  return x;
#endif
}
POISE_INLINE vf load_i8(const int8_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  vf x;
  for (int i = 0; i < W; ++i) x[i] = p[i];
  return x;
#endif
}
POISE_INLINE void store_bf16(uint16_t* p, vf x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
  for (int i = 0; i < W; ++i) p[i] = bf16_of(x[i]);
#endif
}
POISE_INLINE void store_f16(uint16_t* p, vf x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < W; ++i) p[i] = f16_of(x[i]);
#endif
}

// --- Transposes of W x W floats, in registers ---
#if defined(__AVX512F__)
POISE_INLINE void transpose(vf* rows) {
  __m512 *r = (__m512*)rows, t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    r[i] = (__m512)_mm512_unpacklo_pd((__m512d)t[i], (__m512d)t[i + 2]);
    r[i + 1] = (__m512)_mm512_unpackhi_pd((__m512d)t[i], (__m512d)t[i + 2]);
    r[i + 2] = (__m512)_mm512_unpacklo_pd((__m512d)t[i + 1], (__m512d)t[i + 3]);
    r[i + 3] = (__m512)_mm512_unpackhi_pd((__m512d)t[i + 1], (__m512d)t[i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}
#elif defined(__AVX2__)
POISE_INLINE void transpose(vf* rows) {
  __m256 *r = (__m256*)rows, t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    const __m256 low = r[i], high = r[i + 4];
    r[i] = _mm256_permute2f128_ps(low, high, 0x20);
    r[i + 4] = _mm256_permute2f128_ps(low, high, 0x31);
  }
}
#else
POISE_INLINE void transpose(vf* r) {
  for (int i = 0; i < W; ++i)
    for (int j = i + 1; j < W; ++j) {
      const float swap = r[i][j];
      r[i][j] = r[j][i];
      r[j][i] = swap;
    }
}
#endif

// Lane i is the sum of x[i]'s lanes; x has W vectors.
POISE_INLINE vf sum_each(vf* x) {
#if defined(__AVX512F__)
  const __m512* a = (const __m512*)x;
  __m512 b[8], c[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    b[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d low = (__m512d)b[2 * i], high = (__m512d)b[2 * i + 1];
    c[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(low, high), (__m512)_mm512_unpackhi_pd(low, high));
  }
  const auto join = [](__m512 low, __m512 high) {  // adds neighbouring quarters
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  };
  return (vf)join(join(c[0], c[1]), join(c[2], c[3]));
#else
  transpose(x);
  vf sum = x[0];
#pragma GCC unroll 8
  for (int i = 1; i < W; ++i) sum += x[i];
  return sum;
#endif
}

// Lane i gets what is in lane i ^ by.
POISE_INLINE vf swap_lanes(vf x, int by) {
#if defined(__AVX512F__)
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (vf)_mm512_permutexvar_ps(_mm512_xor_si512(lane, _mm512_set1_epi32(by)), (__m512)x);
#elif defined(__AVX2__)
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return (vf)_mm256_permutevar8x32_ps((__m256)x, _mm256_xor_si256(lane, _mm256_set1_epi32(by)));
#else
  vf y;
  for (int i = 0; i < W; ++i) y[i] = x[i ^ by];
  return y;
#endif
}

// --- Operands of the matrix kernels: 4-byte cells, one float or a pair of bf16 ---
struct FloatCells {
  static constexpr int kPair = 1;  // matrix elements in a cell
  typedef vf vec;
  static POISE_INLINE vec row(const void* p) { return pin(load(p)); }
  static POISE_INLINE vec cell(const char* p) {
    float x;
    memcpy(&x, p, 4);
    return splat(x);
  }
  static POISE_INLINE vf dot(vf sum, vec a, vec b) { return sum + a * b; }
};

#if defined(__AVX512BF16__)
struct Bf16Cells {
  static constexpr int kPair = 2;
  typedef __m512bh vec;
  static POISE_INLINE vec row(const void* p) {
    __m512i x = _mm512_loadu_si512(p);
    asm("" : "+v"(x));
    return (vec)x;
  }
  static POISE_INLINE vec cell(const char* p) {
    int32_t x;
    memcpy(&x, p, 4);
    return (vec)_mm512_set1_epi32(x);
  }
  static POISE_INLINE vf dot(vf sum, vec a, vec b) { return (vf)_mm512_dpbf16_ps((__m512)sum, a, b); }
  // One cell per lane: the roundings of low (first in memory) and high.
  static POISE_INLINE void store_pair(void* p, vf low, vf high) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi16(order, both));
  }
  // Clears what is not kept of such cells: a bit per lane for each half.
  static POISE_INLINE void keep_pair(void* p, uint64_t low, uint64_t high) {
    const __m512i kept = _mm512_or_si512(_mm512_maskz_set1_epi32((__mmask16)low, 0x0000ffff),
                                         _mm512_maskz_set1_epi32((__mmask16)high, (int)0xffff0000));
    _mm512_storeu_si512(p, _mm512_and_si512(_mm512_loadu_si512(p), kept));
  }
};
// The roundings of two lane vectors, one after the other.
POISE_INLINE void store_halves(void* p, vf first, vf second) {
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}
#endif

}  // namespace
}  // namespace poise
