// The two products of decoding, in dot-product form: a few query rows against keys and values read where they lie.
//
// Dims lie in the vector lanes, so that a row of keys is loaded once, as it is stored, for all query rows of a bundle.
// Scores come out as [key][slot], slot = query row of the bundle, packed to a power of two so that one vector holds
// several keys. Keys are reached through pointers, one per row: pages cost nothing more. Each step asks for rows to
// come, in the order of their addresses. Knows no masks and no softmax. Included once per ISA.
#pragma once
#include "keys.h"

namespace poise {
namespace {

constexpr int kBundleRows = W == 16 ? 8 : 4;            // query rows that share a load
constexpr int kSums = kVectorRegisters == 32 ? 16 : 8;  // accumulators of a pass over the values
constexpr int kLine = 64;

constexpr int power_of_two(int rows) { return rows <= 1 ? 1 : rows == 2 ? 2 : rows <= 4 ? 4 : 8; }

// How storage becomes vectors of floats: `kSize` elements make kVecs vectors, in an order of its own that queries and
// outputs follow: element d stands at place(d).
template <Dtype DTYPE>
struct Storage {
  static constexpr int kSize = W, kVecs = 1, kBytes = W * (DTYPE == Dtype::f32 ? 4 : DTYPE == Dtype::i8 ? 1 : 2);
  typedef vf Query;
  static POISE_INLINE int place(int d) { return d; }
  static POISE_INLINE void load(const char* p, vf* x) { x[0] = elements(p, DTYPE, 0); }
  static POISE_INLINE vf dot(vf sum, const vf* x, const char* q) { return sum + x[0] * poise::load(q); }
};

template <>
struct Storage<Dtype::bf16> {
  static constexpr int kSize = 2 * W, kVecs = 2, kBytes = 4 * W;
  static POISE_INLINE int place(int d) { return d / kSize * kSize + d % 2 * W + d % kSize / 2; }
  static POISE_INLINE void load(const char* p, vf* x) {
    const vi both = (vi)poise::load(p);
    x[0] = (vf)(both << 16);
    x[1] = (vf)(both & (int32_t)0xffff0000);
  }
  static POISE_INLINE vf dot(vf sum, const vf* x, const char* q) {
    return sum + x[0] * poise::load(q) + x[1] * poise::load(q + 4 * W);
  }
};

// Elements [0, count) of a unit, the others 0; reads nothing else.
template <class Rows>
POISE_INLINE void load_some(const char* p, int count, vf* x) {
  char unit[4 * W];
  store(unit, load_bytes(p, count * Rows::kBytes / Rows::kSize));
  Rows::load(unit, x);
}

// Keys as they meet the queries. What is multiplied may be another form than what values need.
template <Dtype DTYPE>
struct KeyRows {
  typedef Storage<DTYPE> Rows;
  static constexpr int kBytes = Rows::kBytes, kSize = Rows::kSize, kQueryBytes = 4 * W * Rows::kVecs;
  struct Unit {
    vf x[Rows::kVecs];
  };
  static POISE_INLINE Unit load(const char* p) {
    Unit unit;
    Rows::load(p, unit.x);
    return unit;
  }
  static POISE_INLINE Unit load_part(const char* p, int count) {
    Unit unit;
    load_some<Rows>(p, count, unit.x);
    return unit;
  }
  static POISE_INLINE vf dot(vf sum, const Unit& unit, const char* q) { return Rows::dot(sum, unit.x, q); }
  // One query row of floats, zero from `dims` on.
  static void pack(const float* q, int dims, char* to) {
    float* packed = (float*)to;
    memset(to, 0, (size_t)(dims + kSize - 1) / kSize * kQueryBytes);
    for (int d = 0; d < dims; ++d) packed[Rows::place(d)] = q[d];
  }
};

#if defined(__AVX512BF16__)
// bf16 keys and bf16 queries: pairs of products at once.
struct PairedKeyRows {
  static constexpr int kBytes = 64, kSize = 32, kQueryBytes = 64;
  typedef __m512bh Unit;
  static POISE_INLINE Unit load(const char* p) { return (Unit)_mm512_loadu_si512(p); }
  static POISE_INLINE Unit load_part(const char* p, int count) { return (Unit)load_bytes(p, 2 * count); }
  static POISE_INLINE vf dot(vf sum, Unit unit, const char* q) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, unit, (Unit)_mm512_loadu_si512(q));
  }
  static void pack(const float* q, int dims, char* to) {
    memset(to, 0, (size_t)(dims + kSize - 1) / kSize * kQueryBytes);
    for (int d = 0; d < dims; ++d) ((uint16_t*)to)[d] = bf16_of(q[d]);
  }
};
#endif

// ONCE: it is not to push anything out of the caches, being too much for them to be there when it is read again.
template <bool ONCE>
POISE_INLINE void ask_for(const char* line) {
  __builtin_prefetch(line, 0, ONCE ? 0 : 3);
}

// s [keys, P] = products of keys with ROWS query rows, P = power_of_two(ROWS); whole vectors are written, with copies
// of the last key in what is beyond it. rows[i] is key i; those `ahead` further are asked for.
template <class Keys, int ROWS, bool ONCE>
void score_keys(const char* const* rows, int ahead, int keys, int dims, const char* q, float* s) {
  constexpr int P = power_of_two(ROWS), kKeys = W / P, kInner = ROWS > 1 ? 1 : 4;
  const int units = dims / Keys::kSize, rest = dims % Keys::kSize;
  const ptrdiff_t q_row = (ptrdiff_t)(units + (rest != 0)) * Keys::kQueryBytes;
  const int row_bytes = dims * Keys::kBytes / Keys::kSize;
  for (int first = 0; first < keys; first += kKeys, s += W) {
    vf sums[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) sums[i] = splat(0.0f);
#pragma GCC unroll 4
    for (int k = 0; k < kKeys; k += kInner) {
      const char* at[kInner];
      vf sum[kInner][ROWS];
#pragma GCC unroll 4
      for (int i = 0; i < kInner; ++i) {
        const int key = first + k + i;
        at[i] = rows[key < keys ? key : keys - 1];
        for (int x = 0; x < row_bytes; x += kLine) ask_for<ONCE>(rows[key + ahead] + x);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) sum[i][r] = splat(0.0f);
      }
      const char* query = q;
      for (int u = 0; u < units; ++u, query += Keys::kQueryBytes) {
#pragma GCC unroll 4
        for (int i = 0; i < kInner; ++i) {
          const auto unit = Keys::load(at[i]);
          at[i] += Keys::kBytes;
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) sum[i][r] = Keys::dot(sum[i][r], unit, query + r * q_row);
        }
      }
      if (rest) {
#pragma GCC unroll 4
        for (int i = 0; i < kInner; ++i) {
          const auto unit = Keys::load_part(at[i], rest);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) sum[i][r] = Keys::dot(sum[i][r], unit, query + r * q_row);
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < kInner; ++i)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) sums[(k + i) * P + r] = sum[i][r];
    }
    store(s, sum_each(sums));
  }
}

// Rows to come, asked for bit by bit while others are worked on.
template <bool ONCE>
struct Coming {
  const char* const* row;
  int bytes, seen, asked;
  POISE_INLINE void step(int by) {
    seen += by;
    for (; asked < seen && asked < bytes; asked += kLine) ask_for<ONCE>(*row + asked);
    if (seen < bytes) return;
    ++row;
    seen = asked = 0;
  }
};

template <class Rows, int ROWS, int UNITS, bool ONCE>
POISE_INLINE void add_units(const char* const* rows, int keys, const float* p, int64_t at, int some, float* o,
                            ptrdiff_t o_row, const float* alpha, Coming<ONCE>& coming) {
  constexpr int P = power_of_two(ROWS), kVecs = UNITS * Rows::kVecs;
  vf sum[ROWS][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) sum[r][v] = splat(0.0f);
  for (int k = 0; k < keys; ++k, p += P) {
    const char* row = rows[k] + at;
    coming.step(UNITS * Rows::kBytes);
#pragma GCC unroll 16
    for (int u = 0; u < UNITS; ++u) {
      vf x[Rows::kVecs];
      if (some)
        load_some<Rows>(row, some, x);
      else
        Rows::load(row + u * Rows::kBytes, x);
#pragma GCC unroll 2
      for (int v = 0; v < Rows::kVecs; ++v)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) sum[r][u * Rows::kVecs + v] += x[v] * splat(p[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) {
      float* to = o + r * o_row + v * W;
      store(to, load(to) * splat(alpha[r]) + sum[r][v]);
    }
}

// Passes of UNITS units over the dims, then narrower ones.
template <class Rows, int ROWS, int UNITS, bool ONCE>
POISE_INLINE void add_passes(const char* const* rows, int keys, const float* p, int& d, int dims, float* o,
                             ptrdiff_t o_row, const float* alpha, Coming<ONCE>& coming) {
  constexpr int kElements = UNITS * Rows::kSize;
  for (; d + kElements <= dims; d += kElements)
    add_units<Rows, ROWS, UNITS, ONCE>(rows, keys, p, (int64_t)d * Rows::kBytes / Rows::kSize, 0, o + d, o_row, alpha,
                                       coming);
  if constexpr (UNITS > 1) add_passes<Rows, ROWS, UNITS / 2, ONCE>(rows, keys, p, d, dims, o, o_row, alpha, coming);
}

// o [ROWS, o_row] = alpha o + the values of `keys` keys weighted by p [keys, power_of_two(ROWS)].
template <class Rows, int ROWS, bool ONCE>
void add_values(const char* const* rows, int ahead, int keys, int dims, const float* p, float* o, ptrdiff_t o_row,
                const float* alpha) {
  constexpr int kMost = kSums / Rows::kVecs / power_of_two(ROWS);
  Coming<ONCE> coming = {rows + ahead, dims * Rows::kBytes / Rows::kSize, 0, 0};
  int d = 0;
  add_passes<Rows, ROWS, (kMost < 1 ? 1 : kMost), ONCE>(rows, keys, p, d, dims, o, o_row, alpha, coming);
  if (d < dims)
    add_units<Rows, ROWS, 1, ONCE>(rows, keys, p, (int64_t)d * Rows::kBytes / Rows::kSize, dims - d, o + d, o_row,
                                   alpha, coming);
}

// The kernels for a number of rows and a storage type, as a call uses them throughout.
struct DecodeKernels {
  int rows, slots;  // rows of a bundle that are computed, and as scores lie: a power of two
  void (*score)(const char* const* rows, int ahead, int keys, int dims, const char* q, float* s);
  void (*add)(const char* const* rows, int ahead, int keys, int dims, const float* p, float* o, ptrdiff_t o_row,
              const float* alpha);
  void (*pack)(const float* q, int dims, char* to);
  int (*place)(int d);
  int key_unit, query_bytes, value_unit;  // elements of keys' and values' units; bytes of a unit of queries
};

template <class Keys, Dtype DTYPE, int ROWS, bool ONCE = false>
DecodeKernels kernels_for() {
  typedef Storage<DTYPE> Rows;
  return {ROWS,
          power_of_two(ROWS),
          score_keys<Keys, ROWS, ONCE>,
          add_values<Rows, ROWS, ONCE>,
          Keys::pack,
          Rows::place,
          Keys::kSize,
          Keys::kQueryBytes,
          Rows::kSize};
}

template <class Keys, Dtype DTYPE>
DecodeKernels kernels_for(int rows, bool once) {
  if constexpr (kBundleRows == 8) {
    if (rows > 6) return kernels_for<Keys, DTYPE, 8>();
    if (rows > 4) return kernels_for<Keys, DTYPE, 6>();
  }
  if (rows == 1) return once ? kernels_for<Keys, DTYPE, 1, true>() : kernels_for<Keys, DTYPE, 1>();
  return rows == 2   ? kernels_for<Keys, DTYPE, 2>()
         : rows == 3 ? kernels_for<Keys, DTYPE, 3>()
                     : kernels_for<Keys, DTYPE, 4>();
}

// At most kBundleRows rows; once: keys are more than caches hold. Cells::kPair tells whether queries and keys are bf16
// that the hardware multiplies.
template <class Cells>
DecodeKernels decode_kernels(Dtype dtype, int rows, bool once) {
#if defined(__AVX512BF16__)
  if constexpr (Cells::kPair == 2)
    return kernels_for<PairedKeyRows, Dtype::bf16>(rows, once);
  else
#endif
    return dtype == Dtype::f32    ? kernels_for<KeyRows<Dtype::f32>, Dtype::f32>(rows, once)
           : dtype == Dtype::bf16 ? kernels_for<KeyRows<Dtype::bf16>, Dtype::bf16>(rows, once)
           : dtype == Dtype::f16  ? kernels_for<KeyRows<Dtype::f16>, Dtype::f16>(rows, once)
                                  : kernels_for<KeyRows<Dtype::i8>, Dtype::i8>(rows, once);
}

}  // namespace
}  // namespace poise
