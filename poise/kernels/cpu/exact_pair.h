// One query-key pair in double precision, from storage: what exact.cpp and exact_gradient.cpp are made of.
#pragma once
#include <cmath>
#include <limits>

#include "keys.h"
#include "visible.h"

namespace poise {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline void read_row(const ForwardArgs& args, const Rows& rows, int64_t head, int64_t n, int64_t dims, float* to,
                     const Block& block) {
  widen_rows(row_at(rows, args.dtype, block.b, head, n), 0, args.dtype, 1, (int)dims, (int)dims, to);
}

inline void read_key(const ForwardArgs& args, const Rows& rows, const Scales& scales, int64_t head, int64_t j,
                     int64_t dims, float* to, const Block& block) {
  widen_rows(key_row(args, rows, block.b, head, j), 0, args.kv_dtype, 1, (int)dims, (int)dims, to);
  if (scales.data) scale_rows(args, scales, block.b, head, j, 1, (int)dims, (int)dims, to);
}

inline double dot(const float* a, const float* b, int64_t dims) {
  double sums[4] = {0.0, 0.0, 0.0, 0.0};
  int64_t d = 0;
  for (; d + 4 <= dims; d += 4)
    for (int lane = 0; lane < 4; ++lane) sums[lane] += (double)a[d + lane] * b[d + lane];
  for (; d < dims; ++d) sums[0] += (double)a[d] * b[d];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

inline double bias_of(const ForwardArgs& args, const Block& block, int64_t i, int64_t j) {
  double bias = 0.0;
  for (int n = 0; n < args.num_biases; ++n) {
    const DenseBias& dense = args.biases[n];
    bias += element((const char*)dense.data, dense.dtype,
                    block.b * dense.b + block.h * dense.h + i * dense.n + j * dense.m);
  }
  const int64_t distance = j - (block.position + i - block.first);
  if (args.table) {
    const int64_t radius = args.table_radius;
    bias += args.table[block.h * args.table_h + lesser(greater(distance, -radius), radius) + radius];
  }
  if (args.slopes) bias -= (double)args.slopes[block.h] * (double)(distance < 0 ? -distance : distance);
  return bias;
}

inline double scale_of(const ForwardArgs& args, const Block& block, int64_t i) {
  if (!args.scale_rows) return args.scale;
  return args.scale_rows[block.b * args.scale_b + block.h * args.scale_h + i * args.scale_n];
}

}  // namespace
}  // namespace poise
