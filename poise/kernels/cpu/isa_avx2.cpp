#include "run.h"

namespace poise {

void forward_avx2(const ForwardArgs& args, const Threads& threads) { run<FloatCells>(args, threads); }

}  // namespace poise
