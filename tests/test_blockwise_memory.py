"""Blockwise computes no more scores than a band needs and keeps O(N * block) of them, forward and backward."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import poise
from poise.kernels import blockwise, tiles
from poise.problem import prepare, seeded


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an op makes, and how many scores the products compute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.elements, self.scores, self.width = 0, 0, width

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor._is_view():
                self.elements = max(self.elements, tensor.numel())
        if func is torch.ops.aten.bmm.default and result.shape[-1] != self.width:
            self.scores += result.numel()
        return result


class TestMemory:
    @pytest.mark.parametrize(
        "given",
        [{}, {"mask": poise.causal()}, {"dropout": 0.1}, {"bias": poise.alibi([0.1, 0.2])}, {"softcap": 5.0}],
        ids=["plain", "causal", "dropout", "alibi", "softcap"],
    )
    def test_no_tensor_is_larger_than_the_budget_or_the_operands(self, given, monkeypatch):
        monkeypatch.setattr(tiles, "_CPU_BUDGET", 1 << 15)
        size, width = 700, 16
        leaves = [torch.randn(1, 2, size, width).requires_grad_() for _ in range(3)]
        problem = seeded(prepare(*leaves, **given))
        with Largest(width) as seen:
            out, packed = blockwise.run(problem, True)
            (out.sum() + packed.square().mean()).backward()
        # Dropout draws four words for every four keys, of which the last few may be unused.
        assert seen.elements <= max(1.05 * (1 << 15), 11 * 2 * size, 2 * size * width)

    def test_a_call_of_16_times_the_pairs_needs_4_times_the_memory(self):
        """Peak resident memory of forward, backward, statistics and received in a process of their own."""
        program = """
import resource, torch, poise
from poise.kernels import blockwise
from poise.problem import prepare

def call(n):
    q, k, v = (torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(3))
    problem = prepare(q, k, v, mask=poise.causal())
    out, packed = blockwise.run(problem, True)
    (out.sum() + packed[4].sum()).backward()
    with torch.no_grad():
        blockwise.received(problem, poise.ScoreStats(packed).lse)

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
torch.set_num_threads(1)
call(2048)
before = peak()
call(8192)
print(peak() - before)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        matrix = 8192 * 8192 * 4
        assert int(done.stdout) < matrix / 4  # the backward of one kept score matrix would be several

    @pytest.mark.parametrize("mask", [poise.window(100), poise.window(60, 40), poise.dilated(25, 4) & poise.causal()])
    def test_keys_out_of_a_bands_reach_are_not_computed(self, mask):
        size, width = 4096, 16
        problem = prepare(*(torch.randn(1, 1, size, width) for _ in range(3)), mask=mask)
        with Largest(width) as seen:
            blockwise.run(problem, False)
        assert size * 100 <= seen.scores <= size * 400  # of 4096 per row

    def test_a_causal_call_computes_little_more_than_half_the_scores(self):
        size, width = 4096, 16
        problem = prepare(*(torch.randn(1, 1, size, width) for _ in range(3)), mask=poise.causal())
        with Largest(width) as seen:
            blockwise.run(problem, False)
        assert seen.scores <= 0.55 * size * size

    def test_keys_and_values_of_grouped_heads_are_not_repeated(self):
        q, (k, v) = torch.randn(1, 8, 2, 16), (torch.randn(1, 1, 512, 16) for _ in range(2))
        with Largest(16) as seen:
            blockwise.run(prepare(q, k, v), False)
        assert seen.elements == 8 * 2 * 512  # the scores; repeated keys would be 8 * 512 * 16
