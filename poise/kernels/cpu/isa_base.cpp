#include "run.h"

namespace poise {

void forward_base(const ForwardArgs& args, const Threads& threads) { run<FloatCells>(args, threads); }

}  // namespace poise
