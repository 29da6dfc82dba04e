// All blocks of a call over the threads: which tasks there are, who takes them, and how chunks of keys come together.
//
// Tasks depend on the shape only and a block's chunks merge in their order, whoever computed them: results are bitwise
// the same for any number of threads. Included once per ISA.
#pragma once
#include "decode.h"
#include "dispatch.h"

namespace poise {
namespace {

constexpr int64_t kEnoughTasks = 32;  // below this a block's keys are split too
constexpr int64_t kLeastChunk = 2 * kSegment;

struct Job {
  const ForwardArgs* args;
  int64_t blocks, chunks, chunk_keys, tasks;
  int64_t next;      // the next task to take
  int32_t* arrived;  // per block: how many of its chunks are done
  char* partials;    // per block and chunk
  size_t partial_bytes;
};

// Freed also when a worker throws.
struct SharedMemory {
  char* memory = nullptr;
  ~SharedMemory() { free_shared_memory(memory); }
};

template <class Kernel>
void work(void* context, int) {
  Job& job = *(Job*)context;
  const ForwardArgs& args = *job.args;
  const FlushTiny flush;
  char* memory = scratch_memory(Kernel::scratch_bytes(args));
  Kernel kernel(args, memory);
  for (;;) {
    const int64_t task = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
    if (task >= job.tasks) return;
    // Later queries see more keys under a causal mask: first, so that the work ends with small pieces.
    const int64_t head = task / (job.blocks * job.chunks), rest = task % (job.blocks * job.chunks);
    const int64_t row = job.blocks - 1 - rest / job.chunks, chunk = rest % job.chunks;
    kernel.begin(head, row);
    kernel.attend(chunk * job.chunk_keys, lesser((chunk + 1) * job.chunk_keys, args.M));
    if (job.chunks == 1) {
      kernel.finish_block();
      continue;
    }
    const int64_t place = head * job.blocks + row;
    char* mine = job.partials + (size_t)(place * job.chunks) * job.partial_bytes;
    kernel.save(mine + chunk * job.partial_bytes);
    if (__atomic_add_fetch(&job.arrived[place], 1, __ATOMIC_ACQ_REL) < job.chunks) continue;
    kernel.begin(head, row);  // the last to arrive joins all, in order
    for (int64_t c = 0; c < job.chunks; ++c) kernel.join(mine + c * job.partial_bytes);
    kernel.finish_block();
  }
}

template <class Kernel>
void start(const ForwardArgs& args, const Threads& threads) {
  Job job;
  job.args = &args;
  job.blocks = Kernel::blocks(args);
  job.chunks = 1;
  job.next = 0;
  const int64_t blocks = Kernel::heads(args) * job.blocks;
  if (blocks < kEnoughTasks)
    job.chunks = greater<int64_t>(1, lesser((kEnoughTasks + blocks - 1) / blocks, args.M / kLeastChunk));
  job.chunk_keys = rounded_up((args.M + job.chunks - 1) / job.chunks, kSegment);
  job.tasks = blocks * job.chunks;
  job.partial_bytes = Kernel::partial_bytes(args);
  job.partials = nullptr;
  SharedMemory shared;
  if (job.chunks > 1) {
    job.partials = shared.memory = shared_memory(job.partial_bytes * (size_t)job.tasks + 4 * (size_t)blocks);
    job.arrived = (int32_t*)(job.partials + job.partial_bytes * (size_t)job.tasks);
    memset(job.arrived, 0, 4 * (size_t)blocks);
  }
  const double multiply_adds =
      (double)(args.B * args.H) * (double)args.N * (double)args.M * (double)(args.Dk + args.Dv);
  const int workers = multiply_adds < kInlineWork ? 1 : (int)lesser<int64_t>(threads.count, job.tasks);
  if (workers <= 1)
    work<Kernel>(&job, 0);
  else
    threads.parallel(workers, &work<Kernel>, &job);
}

template <class Cells, bool STATS, bool FINAL>
void start_best(const ForwardArgs& args, const Threads& threads) {
  if (decodes(args))
    start<Decode<Cells, STATS, FINAL>>(args, threads);
  else
    start<Forward<Cells, STATS, FINAL>>(args, threads);
}

template <class Cells>
void run(const ForwardArgs& args, const Threads& threads) {
  const bool final_scores = !scores_are_products(args);
  if (args.stats)
    final_scores ? start_best<Cells, true, true>(args, threads) : start_best<Cells, true, false>(args, threads);
  else
    final_scores ? start_best<Cells, false, true>(args, threads) : start_best<Cells, false, false>(args, threads);
}

}  // namespace
}  // namespace poise
