// The matrix work: micro-kernels of broadcast rows times vectors, and the packing that feeds them.
//
// Scores are computed transposed, S^T = K Q^T, and so is the output, O^T = V^T P^T: queries lie in the vector lanes, so
// that all softmax work is vertical. Only the queries (and bf16 values, by pairs) are repacked; keys and values are
// broadcast from where they lie unless their storage needs conversion. Knows no masks and no softmax.
#pragma once
#include "forward.h"
#include "vec.h"

namespace poise {
namespace {

constexpr int kLanes = W * kGroupVecs;  // queries in a group: the row length of packed queries, scores and outputs

// sum[i][j] += over c < count of a(i, c) * b[c][j]: a's cells lie at a + i * step_i + c * step_c (bytes), b's rows of
// cells row_b apart. The one inner loop of the project. Each step asks for one line of a to come, at `ahead`: hardware
// follows neither eight short rows at once nor one column of many, and both cost several percent.
template <class Cells, int M, int N>
POISE_INLINE void multiply(vf (&sum)[M][N], const char* a, ptrdiff_t step_i, ptrdiff_t step_c, const char* b, int count,
                           const char* ahead, ptrdiff_t ahead_step, ptrdiff_t row_b = kLanes * 4) {
  for (int c = 0; c < count; ++c) {
    __builtin_prefetch(ahead);
    ahead += ahead_step;
    typename Cells::vec row[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) row[j] = Cells::row(b + j * W * 4);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const auto cell = Cells::cell(a + i * step_i);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sum[i][j] = Cells::dot(sum[i][j], cell, row[j]);
    }
    a += step_c;
    b += row_b;
  }
}

template <int M, int N>
POISE_INLINE void clear(vf (&sum)[M][N]) {
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) sum[i][j] = splat(0.0f);
}

// Longest sum in one chain of additions; longer ones are added up from such pieces. Without FMA every step rounds
// twice.
constexpr int kChain = kFused ? 128 : 16;

// What becomes of a product before it is stored: finish(product, its row, its vector of lanes).
struct AsItIs {
  POISE_INLINE vf operator()(vf product, int, int) const { return product; }
};

// Finished products of keys [0, M): S^T [M, kLanes], and their running maximum per lane.
template <class Cells, int M, int N, class Finish>
POISE_INLINE void score_tile(const char* k, ptrdiff_t k_row, const char* qt, int cells, float* s, vf* top,
                             Finish&& finish) {
  vf sum[M][N];
  clear(sum);
  const char* next = k + M * k_row;  // the next tile's rows, which usually follow each other
  multiply<Cells, M, N>(sum, k, k_row, 4, qt, cells < kChain ? cells : kChain, next, 4 * M);
  for (int c = kChain; c < cells; c += kChain) {
    vf more[M][N];
    clear(more);
    multiply<Cells, M, N>(more, k + 4 * c, k_row, 4, qt + 4 * c * kLanes, cells - c < kChain ? cells - c : kChain,
                          next + 4 * M * c, 4 * M);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sum[i][j] += more[i][j];
  }
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {
    vf largest = top[j];
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const vf score = finish(sum[i][j], i, j);
      largest = vmax(score, largest);
      store(s + i * kLanes + j * W, score);
    }
    top[j] = largest;
  }
}

// Finished products of `keys` keys. A tail is computed as a whole tile that overlaps the last one: the same sums again.
template <class Cells, int N, class Finish = AsItIs>
POISE_INLINE void score_rows(const char* k, ptrdiff_t k_row, int keys, const char* qt, int cells, float* s, vf* top,
                             Finish&& finish = {}) {
  int i = 0;
  const auto from_here = [&](vf product, int row, int j) POISE_INLINE_LAMBDA { return finish(product, i + row, j); };
  for (; i + kTileRows <= keys; i += kTileRows)
    score_tile<Cells, kTileRows, N>(k + i * k_row, k_row, qt, cells, s + i * kLanes, top, from_here);
  if (i < keys && keys >= kTileRows) {
    i = keys - kTileRows;
    score_tile<Cells, kTileRows, N>(k + i * k_row, k_row, qt, cells, s + i * kLanes, top, from_here);
    return;
  }
  for (; i < keys; ++i) score_tile<Cells, 1, N>(k + i * k_row, k_row, qt, cells, s + i * kLanes, top, from_here);
}

constexpr int kRowsAhead = 8;

// O^T [dims, kLanes] = alpha * O^T + V^T P^T, or V^T P^T alone when fresh. dims is a multiple of kTileRows.
template <class Cells, int N>
POISE_INLINE void accumulate(const char* v, ptrdiff_t v_row, int dims, const char* p, int cells, float* ot,
                             const vf* alpha, bool fresh) {
  for (int d = 0; d < dims; d += kTileRows) {
    vf sum[kTileRows][N];
    clear(sum);
    multiply<Cells, kTileRows, N>(sum, v + d * 4, 4, v_row, p, cells, v + d * 4 + kRowsAhead * v_row, v_row);
    float* o = ot + d * kLanes;
    if (fresh) {
#pragma GCC unroll 16
      for (int i = 0; i < kTileRows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) store(o + i * kLanes + j * W, sum[i][j]);
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < kTileRows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) store(o + i * kLanes + j * W, sum[i][j] + load(o + i * kLanes + j * W) * alpha[j]);
    }
  }
}

// One operand of a sum over queries: a group's weights, [keys, kLanes] from `row` bytes apart, for keys [from, to) of a
// segment, and what each query contributes, [queries, ...] cells.
struct Contribution {
  const char* weights;
  const char* values;
  int from, to, cells;
};

template <class Cells, int N>
POISE_INLINE void add_product_columns(const Contribution* groups, int count, int keys, ptrdiff_t row,
                                      ptrdiff_t value_row, float* sums, ptrdiff_t wide, int d) {
  for (int k = 0; k < keys; k += kTileRows) {
    vf sum[kTileRows][N];
    clear(sum);
    bool any = false;
    for (int g = 0; g < count; ++g) {
      const Contribution& mine = groups[g];
      if (k < mine.from || k >= mine.to) continue;
      any = true;
      const char* weights = mine.weights + k * row;
      multiply<Cells, kTileRows, N>(sum, weights, row, 4, mine.values + 4 * d, mine.cells, weights + kTileRows * row,
                                    kTileRows * row / mine.cells, value_row);
    }
    if (!any) continue;
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) {
        float* at = sums + (k + i) * wide + d + j * W;
        store(at, load(at) + sum[i][j]);
      }
  }
}

// sums [keys, wide] += weights^T values over the queries of all groups. Ranges of keys are multiples of kTileRows: rows
// beyond a segment's last key hold zeros, and sums has room for them. wide is a multiple of W.
template <class Cells>
inline void add_products(const Contribution* groups, int count, int keys, ptrdiff_t row, ptrdiff_t value_row,
                         float* sums, int wide) {
  int d = 0;
  for (; d + kLanes <= wide; d += kLanes)
    add_product_columns<Cells, kGroupVecs>(groups, count, keys, row, value_row, sums, wide, d);
  for (; d < wide; d += W) add_product_columns<Cells, 1>(groups, count, keys, row, value_row, sums, wide, d);
}

// --- Storage to floats and back ---
POISE_INLINE int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : dtype == Dtype::i8 ? 1 : 2; }

POISE_INLINE const char* row_at(const Rows& rows, Dtype dtype, int64_t b, int64_t h, int64_t n) {
  return (const char*)rows.data + (b * rows.b + h * rows.h + n * rows.n) * size_of(dtype);
}

POISE_INLINE float element(const char* row, Dtype dtype, int64_t i) {
  if (dtype == Dtype::f32) return ((const float*)row)[i];
  if (dtype == Dtype::i8) return ((const int8_t*)row)[i];
  const uint16_t x = ((const uint16_t*)row)[i];
  return dtype == Dtype::bf16 ? float_of_bf16(x) : float_of_f16(x);
}

POISE_INLINE vf elements(const char* row, Dtype dtype, int64_t i) {
  if (dtype == Dtype::f32) return load((const float*)row + i);
  if (dtype == Dtype::i8) return load_i8((const int8_t*)row + i);
  const uint16_t* p = (const uint16_t*)row + i;
  return dtype == Dtype::bf16 ? load_bf16(p) : load_f16(p);
}

POISE_INLINE vf some_elements(const char* row, Dtype dtype, int64_t i, int count) {
  vf x = splat(0.0f);
  for (int lane = 0; lane < count; ++lane) x[lane] = element(row, dtype, i + lane);
  return x;
}

// Rows to rows of floats, `wide` floats apart, zero beyond `dims`: for storage the micro-kernels cannot broadcast from.
inline void widen_rows(const char* from, int64_t row_bytes, Dtype dtype, int rows, int dims, int wide, float* to) {
  for (int r = 0; r < rows; ++r, from += row_bytes, to += wide) {
    int d = 0;
    for (; d + W <= dims; d += W) store(to + d, elements(from, dtype, d));
    for (; d < dims; ++d) to[d] = element(from, dtype, d);
    for (; d < wide; ++d) to[d] = 0.0f;
  }
}

// Queries into lanes: qt [dims, kLanes] for `vecs` vectors; lanes from `queries` on are zero; row r times sign[r].
template <Dtype DTYPE>
inline void pack_queries(const char* q, int64_t row_bytes, int queries, int vecs, int dims, const float* sign,
                         float* qt) {
  for (int j = 0; j < vecs; ++j) {
    const int mine = queries - j * W;
    for (int d = 0; d < dims; d += W) {
      vf tile[W];
      const int width = dims - d < W ? dims - d : W;
      const char* rows = q + j * W * row_bytes;
      if (mine >= W && width == W) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) tile[i] = elements(rows + i * row_bytes, DTYPE, d) * splat(sign[j * W + i]);
      } else {
        for (int i = 0; i < W; ++i) {
          if (i >= mine)
            tile[i] = splat(0.0f);
          else
            tile[i] = (width == W ? elements(rows + i * row_bytes, DTYPE, d)
                                  : some_elements(rows + i * row_bytes, DTYPE, d, width)) *
                      splat(sign[j * W + i]);
        }
      }
      transpose(tile);
      for (int i = 0; i < width; ++i) store(qt + (d + i) * kLanes + j * W, tile[i]);
    }
  }
}

POISE_INLINE void put(char* row, Dtype dtype, int64_t i, vf x) {
  if (dtype == Dtype::f32)
    store((float*)row + i, x);
  else if (dtype == Dtype::bf16)
    store_bf16((uint16_t*)row + i, x);
  else
    store_f16((uint16_t*)row + i, x);
}

POISE_INLINE void put_one(char* row, Dtype dtype, int64_t i, float x) {
  if (dtype == Dtype::f32)
    ((float*)row)[i] = x;
  else
    ((uint16_t*)row)[i] = dtype == Dtype::bf16 ? bf16_of(x) : f16_of(x);
}

// O^T times `inverse` per lane, back into rows. Lanes whose result is not finite are added to the bits returned.
template <Dtype DTYPE>
inline uint64_t unpack_output(const float* ot, int queries, int vecs, int dims, const vf* inverse, char* out,
                              int64_t row_bytes) {
  uint64_t bad = 0;
  for (int j = 0; j < vecs; ++j) {
    const int mine = queries - j * W;
    vf taint = splat(0.0f);
    for (int d = 0; d < dims; d += W) {
      vf tile[W];
      char* rows = out + j * W * row_bytes;
      if (mine >= W && dims - d >= W) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) {
          tile[i] = load(ot + (d + i) * kLanes + j * W) * inverse[j];
          taint += tile[i] - tile[i];  // NaN from the first infinity or NaN on
        }
        transpose(tile);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) put(rows + i * row_bytes, DTYPE, d, tile[i]);
        continue;
      }
      const int width = dims - d < W ? dims - d : W;
      for (int i = 0; i < W; ++i) {
        tile[i] = i < width ? load(ot + (d + i) * kLanes + j * W) * inverse[j] : splat(0.0f);
        taint += tile[i] - tile[i];
      }
      transpose(tile);
      for (int i = 0; i < W && i < mine; ++i) {
        if (width == W)
          put(rows + i * row_bytes, DTYPE, d, tile[i]);
        else
          for (int lane = 0; lane < width; ++lane) put_one(rows + i * row_bytes, DTYPE, d + lane, tile[i][lane]);
      }
    }
    bad |= (uint64_t)(bits_of(equal(taint, splat(0.0f))) ^ ((1u << W) - 1)) << (j * W);
  }
  return bad;
}

#if defined(__AVX512BF16__)
// The same for pairs of bf16: cells hold two neighbours along the contraction, so that one dot product adds both.

// qt [ceil(dims / 2), kLanes] cells.
inline void pack_query_pairs(const char* q, int64_t row_bytes, int queries, int vecs, int dims, const float* sign,
                             char* qt) {
  const int cells = (dims + 1) / 2;
  for (int j = 0; j < vecs; ++j) {
    const int mine = queries - j * W;
    for (int c = 0; c < cells; c += W) {
      vf tile[W];
      const int values = 2 * c + 2 * W <= dims ? 2 * W : dims - 2 * c;
      const __mmask32 in = values >= 32 ? ~0u : (1u << values) - 1;
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) {
        __m512i x = _mm512_setzero_si512();
        if (i < mine) {
          x = _mm512_maskz_loadu_epi16(in, q + (j * W + i) * row_bytes + 4 * c);
          if (sign[j * W + i] != 1.0f) {  // -1, or 0 (which must keep NaN)
            const vf even = (vf)_mm512_slli_epi32(x, 16) * splat(sign[j * W + i]);
            const vf odd = (vf)_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)) * splat(sign[j * W + i]);
            x = _mm512_or_si512(_mm512_srli_epi32((__m512i)even, 16), (__m512i)odd);
          }
        }
        tile[i] = (vf)x;
      }
      transpose(tile);
      for (int i = 0; i < W && c + i < cells; ++i) store(qt + ((c + i) * kLanes + j * W) * 4, tile[i]);
    }
  }
}

// Values of two keys interleaved: to [ceil(keys / 2), wide] cells, zero beyond the last key and beyond `dims`.
inline void interleave_keys(const char* v, int64_t row_bytes, int keys, int dims, int wide, char* to) {
  alignas(64) static const uint16_t first[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(first), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int k = 0; k < keys; k += 2, v += 2 * row_bytes, to += wide * 4) {
    for (int d = 0; d < wide; d += 32) {
      const int values = dims - d < 32 ? dims - d : 32, cells = wide - d < 32 ? wide - d : 32;
      const __mmask32 in = values >= 32 ? ~0u : (1u << values) - 1;
      const __m512i a = _mm512_maskz_loadu_epi16(in, v + 2 * d);
      const __m512i b = k + 1 < keys ? _mm512_maskz_loadu_epi16(in, v + row_bytes + 2 * d) : _mm512_setzero_si512();
      _mm512_mask_storeu_epi32(to + 4 * d, cells >= 16 ? 0xffff : (1u << cells) - 1,
                               _mm512_permutex2var_epi16(a, low, b));
      if (cells > 16)
        _mm512_mask_storeu_epi32(to + 4 * d + 64, cells >= 32 ? 0xffff : (1u << (cells - 16)) - 1,
                                 _mm512_permutex2var_epi16(a, high, b));
    }
  }
}

// Rows to rows `wide` values apart, zero beyond `dims`: for odd head dims, whose last pair would run into the next row.
inline void pad_rows(const char* from, int64_t row_bytes, int rows, int dims, int wide, char* to) {
  for (int r = 0; r < rows; ++r, from += row_bytes, to += 2 * wide) {
    memcpy(to, from, 2 * dims);
    memset(to + 2 * dims, 0, 2 * (wide - dims));
  }
}
#endif

}  // namespace
}  // namespace poise
