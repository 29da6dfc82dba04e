#include "run.h"

namespace poise {

void forward_avx512bf16(const ForwardArgs& args, const Threads& threads) { run<Bf16Cells>(args, threads); }

}  // namespace poise
