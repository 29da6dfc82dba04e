#include "gradient_run.h"
#include "run.h"

namespace poise {

void forward_base(const ForwardArgs& args, const Threads& threads) { run<FloatCells>(args, threads); }

void backward_base(const BackwardArgs& args, const DenseBiasGradient* bias, const Threads& threads) {
  run_backward<FloatCells>(args, bias, threads);
}

}  // namespace poise
