// Rows computed again, one visible pair at a time, in double precision: for rows whose fast result is not finite.
#pragma once
#include "forward.h"

namespace poise {

// Writes the statistics of the queries first + r whose bit r is set in `rows`, and the output of those in `outputs`.
// What is hidden is never read into a sum; a NaN or infinity that is attended shows as IEEE arithmetic over the visible
// pairs gives it.
void exact_rows(const ForwardArgs& args, int64_t b, int64_t h, int64_t first, uint64_t rows, uint64_t outputs);

}  // namespace poise
