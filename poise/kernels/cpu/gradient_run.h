// A whole backward call over the threads: which tasks there are, in which order dQ of several chunks of keys adds up.
//
// A task is one key/value head and one chunk of its keys, for all queries of all its query heads: it owns its dK and
// dV. dQ of a block of queries is a sum over chunks; each waits for those before it, and whoever comes last writes the
// result. Tasks, chunks and orders depend on the shape only: results are bitwise the same for any number of threads.
// Included once per ISA.
#pragma once
#include <sched.h>

#include "dispatch.h"
#include "gradient.h"

namespace poise {
namespace {

// One key/value head's dQ while its chunks are at work.
struct SharedRows {
  float* sums;     // per block of queries of each query head; null: not yet there
  uint64_t* done;  // likewise: a bit for each chunk that has added its part, or has none
  int64_t left;    // blocks that are not finished
};

struct GradientJob {
  BackwardArgs args;
  DenseBiasGradient bias;  // only for bias_gradient
  int64_t blocks, chunks, chunk, tasks, next;
  bool failed;
  SharedRows* heads;

  GradientJob(const BackwardArgs& a, bool products) : args(a), bias{}, next(0), failed(false), heads(nullptr) {
    args.products = products;
    const ForwardArgs& call = a.call;
    blocks = (call.N + kTile - 1) / kTile;
    chunk = backward_chunk(call);
    chunks = backward_chunks(call);
    tasks = call.B * call.G * chunks;
  }
  ~GradientJob() {
    if (!heads) return;
    for (int64_t i = 0; i < args.call.B * args.call.G; ++i) free_shared_memory((char*)heads[i].sums);
    free_shared_memory((char*)heads);
  }
  int64_t ratio() const { return args.call.H / args.call.G; }
};

// The memory comes from whoever has the first chunk; that task was taken before any other of the head.
inline SharedRows& shared_rows(GradientJob& job, int64_t head, bool first) {
  SharedRows& mine = job.heads[head];
  if (first) {
    const size_t blocks = (size_t)(job.blocks * job.ratio()), sums = blocks * dqt_bytes(job.args.call);
    char* memory = shared_memory(sums + 8 * blocks);
    memset(memory, 0, sums + 8 * blocks);
    mine.done = (uint64_t*)(memory + sums);
    mine.left = (int64_t)blocks;
    __atomic_store_n(&mine.sums, (float*)memory, __ATOMIC_RELEASE);
  }
  return mine;
}

template <class Ready>
inline void wait(GradientJob& job, Ready&& ready) {
  for (int spins = 0; !ready(); ++spins) {
    if (__atomic_load_n(&job.failed, __ATOMIC_RELAXED)) stop_worker();
    if (spins > 64) sched_yield();
  }
}

template <class Cells, bool STATS, bool FINAL>
void differentiate_chunk(GradientJob& job, Gradient<Cells, STATS, FINAL>& gradient, int64_t task) {
  const ForwardArgs& args = job.args.call;
  // A few heads take turns, so that a chunk seldom waits for the one before it; more would need more memory.
  constexpr int64_t kTogether = 4;
  const int64_t first = task / (kTogether * job.chunks) * kTogether;
  const int64_t together = lesser(kTogether, args.B * args.G - first), turn = task - first * job.chunks;
  const int64_t head = first + turn % together, chunk = turn / together, from = chunk * job.chunk;
  const bool split = job.chunks > 1;
  const uint64_t mine = 1ull << chunk, all = job.chunks == 64 ? ~0ull : (1ull << job.chunks) - 1;
  SharedRows* shared = nullptr;
  if (split) {
    shared = &shared_rows(job, head, chunk == 0);
    wait(job, [&] { return __atomic_load_n(&shared->sums, __ATOMIC_ACQUIRE) != nullptr; });
  }
  gradient.begin_chunk(head / args.G, head % args.G, from, lesser(from + job.chunk, args.M));
  for (int64_t r = 0; r < job.ratio(); ++r) {
    const int64_t h = head % args.G * job.ratio() + r;
    gradient.begin_head();
    // Last queries first: under a causal mask all chunks then begin with work of their own.
    for (int64_t row = job.blocks - 1; row >= 0; --row) {
      const bool seen = gradient.reach(h, row * kTile);
      if (seen || !split) gradient.begin_block(seen);
      if (seen) gradient.attend();
      if (!split) {
        gradient.finish_rows(nullptr);
        continue;
      }
      const int64_t place = r * job.blocks + row;
      float* sums = (float*)((char*)shared->sums + place * (int64_t)dqt_bytes(args));
      uint64_t* done = shared->done + place;
      if (seen) {
        wait(job, [&] { return (~__atomic_load_n(done, __ATOMIC_ACQUIRE) & (mine - 1)) == 0; });
        gradient.add_to(sums);
      }
      if ((__atomic_fetch_or(done, mine, __ATOMIC_ACQ_REL) | mine) != all) continue;
      if (!seen) gradient.begin_block(false);
      gradient.finish_rows(sums);
      if (__atomic_sub_fetch(&shared->left, 1, __ATOMIC_ACQ_REL) == 0) {
        // Nobody needs them any more but to see that they once were there.
        free_shared_memory((char*)shared->sums);
        shared->sums = nullptr;
      }
    }
    gradient.finish_head(chunk, job.chunks, h);
  }
  gradient.finish_chunk();
}

// dS of one tile of a dense bias, [kTile or 1, chunk or 1], summed over whatever it broadcasts over.
template <class Cells, bool STATS, bool FINAL>
void differentiate_bias(GradientJob& job, Gradient<Cells, STATS, FINAL>& gradient, int64_t task, float* sums) {
  const ForwardArgs& args = job.args.call;
  const int64_t* sizes = job.bias.sizes;
  const int64_t row_tasks = sizes[2] > 1 ? job.blocks : 1, key_tasks = sizes[3] > 1 ? job.chunks : 1;
  const int64_t key_task = task % key_tasks, row_task = task / key_tasks % row_tasks;
  const int64_t head = task / key_tasks / row_tasks % sizes[1], batch = task / key_tasks / row_tasks / sizes[1];
  const int64_t row = job.chunk + W;  // rows are added to by whole vectors
  memset(sums, 0, 4 * (size_t)(kTile * row));
  gradient.bias_sum = sums, gradient.bias_row = row;
  const auto each = [](int64_t size, int64_t one, int64_t all, auto&& visit) {
    if (size > 1 || all == 1)
      visit(one);
    else
      for (int64_t i = 0; i < all; ++i) visit(i);
  };
  float* out = job.bias.data + (batch * sizes[1] + head) * sizes[2] * sizes[3];
  const int64_t first = sizes[2] > 1 ? row_task * kTile : 0, from = sizes[3] > 1 ? key_task * job.chunk : 0;
  each(sizes[0], batch, args.B, [&](int64_t b) {
    each(sizes[1], head, args.H, [&](int64_t h) {
      each(sizes[3], key_task, job.chunks, [&](int64_t chunk) {
        const int64_t begin = chunk * job.chunk;
        gradient.begin_chunk(b, h / job.ratio(), begin, lesser(begin + job.chunk, args.M));
        each(sizes[2], row_task, job.blocks, [&](int64_t block) {
          if (!gradient.reach(h, block * kTile)) return;
          gradient.begin_block(true);
          gradient.attend();
        });
      });
    });
  });
  const int64_t queries = sizes[2] > 1 ? lesser<int64_t>(kTile, args.N - first) : lesser<int64_t>(kTile, args.N);
  const int64_t keys = sizes[3] > 1 ? lesser(job.chunk, args.M - from) : lesser(job.chunk, args.M);
  for (int64_t n = 0; n < queries; ++n) {
    if (sizes[2] == 1 && n > 0)
      for (int64_t m = 0; m < keys; ++m) sums[m] += sums[n * row + m];
  }
  for (int64_t n = 0; n < (sizes[2] > 1 ? queries : lesser<int64_t>(1, queries)); ++n) {
    const float* mine = sums + n * row;
    int64_t at[4] = {batch, head, sizes[2] > 1 ? first + n : 0, from};
    float* to = out + at[2] * sizes[3] + from;
    if (sizes[3] > 1) {
      memcpy(to, mine, 4 * (size_t)keys);
    } else {
      *to = 0.0f;
      for (int64_t m = 0; m < keys; ++m) *to += mine[m];
    }
    for (int64_t m = 0; m < (sizes[3] > 1 ? keys : 1); ++m, ++at[3])
      if (!(to[m] - to[m] == 0.0f)) to[m] = exact_bias_gradient(gradient.back, sizes, at);
  }
}

template <class Cells, bool STATS, bool FINAL>
void work_backward(void* context, int) {
  GradientJob& job = *(GradientJob*)context;
  const FlushTiny flush;
  const size_t bytes = GradientScratch::layout<Cells>(job.args, job.chunk, nullptr, nullptr);
  const size_t bias_bytes = job.bias.data ? 4 * (size_t)kTile * (size_t)(job.chunk + W) : 0;
  try {
    char* memory = scratch_memory(bytes + bias_bytes);
    Gradient<Cells, STATS, FINAL> gradient(job.args, job.chunk, memory);
    for (;;) {
      const int64_t task = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
      if (task >= job.tasks) return;
      if (job.bias.data)
        differentiate_bias(job, gradient, task, (float*)(memory + bytes));
      else
        differentiate_chunk(job, gradient, task);
    }
  } catch (...) {
    __atomic_store_n(&job.failed, true, __ATOMIC_RELAXED);
    throw;
  }
}

template <class Cells, bool STATS, bool FINAL>
void start_backward(GradientJob& job, const Threads& threads) {
  const ForwardArgs& args = job.args.call;
  if (!job.bias.data && job.chunks > 1) {
    const size_t bytes = sizeof(SharedRows) * (size_t)(args.B * args.G);
    job.heads = (SharedRows*)shared_memory(bytes);
    memset(job.heads, 0, bytes);
  }
  const double multiply_adds =
      2.5 * (double)(args.B * args.H) * (double)args.N * (double)args.M * (double)(args.Dk + args.Dv);
  const int workers = multiply_adds < kInlineWork ? 1 : (int)lesser<int64_t>(threads.count, job.tasks);
  if (workers <= 1)
    work_backward<Cells, STATS, FINAL>(&job, 0);
  else
    threads.parallel(workers, &work_backward<Cells, STATS, FINAL>, &job);
}

// bias null: all gradients but those of dense biases.
template <class Cells>
void run_backward(const BackwardArgs& args, const DenseBiasGradient* bias, const Threads& threads) {
  const bool final_scores = !scores_are_products(args.call);
  GradientJob job(args, !final_scores);
  if (bias) {
    job.bias = *bias;
    job.args.d_q.data = job.args.d_k.data = job.args.d_v.data = nullptr;
    job.args.d_table = job.args.d_slopes = job.args.d_scale = job.args.d_sink = nullptr;
    job.tasks =
        bias->sizes[0] * bias->sizes[1] * (bias->sizes[2] > 1 ? job.blocks : 1) * (bias->sizes[3] > 1 ? job.chunks : 1);
  }
  if (args.d_stats)
    final_scores ? start_backward<Cells, true, true>(job, threads) : start_backward<Cells, true, false>(job, threads);
  else
    final_scores ? start_backward<Cells, false, true>(job, threads) : start_backward<Cells, false, false>(job, threads);
}

}  // namespace
}  // namespace poise
