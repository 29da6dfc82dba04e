// What the per-ISA translation units offer to dispatch.cpp, and the memory they get from it.
#pragma once
#include <cstddef>

#include "backward.h"

namespace poise {

typedef void (*ForwardFunction)(const ForwardArgs&, const Threads&);
// All gradients but those of dense biases, or that of one dense bias.
typedef void (*BackwardFunction)(const BackwardArgs&, const DenseBiasGradient*, const Threads&);

void forward_base(const ForwardArgs& args, const Threads& threads);
void forward_avx2(const ForwardArgs& args, const Threads& threads);
void forward_avx512(const ForwardArgs& args, const Threads& threads);
void forward_avx512bf16(const ForwardArgs& args, const Threads& threads);  // bf16 only
void forward_neon(const ForwardArgs& args, const Threads& threads);

void backward_base(const BackwardArgs& args, const DenseBiasGradient* bias, const Threads& threads);
void backward_avx2(const BackwardArgs& args, const DenseBiasGradient* bias, const Threads& threads);
void backward_avx512(const BackwardArgs& args, const DenseBiasGradient* bias, const Threads& threads);
void backward_avx512bf16(const BackwardArgs& args, const DenseBiasGradient* bias, const Threads& threads);  // bf16 only
void backward_neon(const BackwardArgs& args, const DenseBiasGradient* bias, const Threads& threads);

// The calling thread's scratch memory, page-aligned, kept between calls; contents are undefined (all NaN with
// POISE_POISON set, to prove that nobody reads what nobody wrote).
char* scratch_memory(size_t bytes);

// Memory that the workers of one call share.
char* shared_memory(size_t bytes);
void free_shared_memory(char* memory);

// Ends a worker whose fellow has failed.
[[noreturn]] void stop_worker();

}  // namespace poise
