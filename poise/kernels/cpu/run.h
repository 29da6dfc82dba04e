// All blocks of a call over the threads: which tasks there are, who takes them, and how chunks of keys come together.
//
// Tasks depend on the shape only and a block's chunks merge in their order, whoever computed them: results are bitwise
// the same for any number of threads. Included once per ISA.
#pragma once
#include "attention.h"
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

template <class Cells, bool STATS, bool FINAL>
void work(void* context, int) {
  Job& job = *(Job*)context;
  const ForwardArgs& args = *job.args;
  const FlushTiny flush;
  char* memory = scratch_memory(Scratch::layout<Cells>(args, nullptr, nullptr));
  Forward<Cells, STATS, FINAL> forward(args, memory);
  for (;;) {
    const int64_t task = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
    if (task >= job.tasks) return;
    // Later queries see more keys under a causal mask: first, so that the work ends with small pieces.
    const int64_t head = task / (job.blocks * job.chunks), rest = task % (job.blocks * job.chunks);
    const int64_t row = job.blocks - 1 - rest / job.chunks, chunk = rest % job.chunks;
    forward.begin(head / args.H, head % args.H, row * kTile);
    forward.attend(chunk * job.chunk_keys, lesser((chunk + 1) * job.chunk_keys, args.M));
    if (job.chunks == 1) {
      forward.finish_block();
      continue;
    }
    const int64_t place = head * job.blocks + row;
    char* mine = job.partials + (size_t)(place * job.chunks) * job.partial_bytes;
    forward.save(mine + chunk * job.partial_bytes);
    if (__atomic_add_fetch(&job.arrived[place], 1, __ATOMIC_ACQ_REL) < job.chunks) continue;
    forward.begin(head / args.H, head % args.H, row * kTile);  // the last to arrive joins all, in order
    for (int64_t c = 0; c < job.chunks; ++c) forward.join(mine + c * job.partial_bytes);
    forward.finish_block();
  }
}

template <class Cells, bool STATS, bool FINAL>
void start(const ForwardArgs& args, const Threads& threads) {
  Job job;
  job.args = &args;
  job.blocks = (args.N + kTile - 1) / kTile;
  job.chunks = 1;
  job.next = 0;
  const int64_t blocks = args.B * args.H * job.blocks;
  if (blocks < kEnoughTasks)
    job.chunks = greater<int64_t>(1, lesser((kEnoughTasks + blocks - 1) / blocks, args.M / kLeastChunk));
  job.chunk_keys = rounded_up((args.M + job.chunks - 1) / job.chunks, kSegment);
  job.tasks = blocks * job.chunks;
  job.partial_bytes = Partial::bytes(args);
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
    work<Cells, STATS, FINAL>(&job, 0);
  else
    threads.parallel(workers, &work<Cells, STATS, FINAL>, &job);
}

template <class Cells>
void run(const ForwardArgs& args, const Threads& threads) {
  const bool final_scores = !scores_are_products(args);
  if (args.stats)
    final_scores ? start<Cells, true, true>(args, threads) : start<Cells, true, false>(args, threads);
  else
    final_scores ? start<Cells, false, true>(args, threads) : start<Cells, false, false>(args, threads);
}

}  // namespace
}  // namespace poise
