#include "gradient_run.h"
#include "run.h"

namespace poise {

void forward_avx512bf16(const ForwardArgs& args, const Threads& threads) { run<Bf16Cells>(args, threads); }

void backward_avx512bf16(const BackwardArgs& args, const DenseBiasGradient* bias, const Threads& threads) {
  run_backward<Bf16Cells>(args, bias, threads);
}

}  // namespace poise
