"""Products over visible pairs: what is not finite shows where it is attended, as IEEE has it, and nowhere else."""

import math

import pytest
import torch
from torch import Tensor

import poise
from poise.kernels import blockwise, selective
from poise.problem import prepare


def poisoned(tensor: Tensor) -> Tensor:
    """One entry in 20 each replaced by NaN, inf and -inf."""
    draw = torch.rand(tensor.shape)
    for place, value in enumerate((math.nan, math.inf, -math.inf)):
        tensor = tensor.masked_fill((draw * 20).floor() == place, value)
    return tensor


class TestSelective:
    """The products themselves, against the sum over visible pairs written out."""

    @pytest.fixture
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        weights = torch.randn(20, 9, 15, dtype=torch.float64)
        weights = weights.masked_fill(torch.rand(weights.shape) < 0.3, 0.0)
        return weights, poisoned(torch.randn(20, 15, 4, dtype=torch.float64)), torch.rand(20, 9, 15) > 0.5

    def test_mix_is_the_sum_of_the_visible_products(self, operands):
        w, x, visible = operands
        terms = torch.where(visible[..., None], w[..., None] * x[:, None], 0.0)
        torch.testing.assert_close(selective.mix(w, x, visible), terms.sum(-2), equal_nan=True)

    def test_pair_is_zero_where_masked(self, operands):
        _, x, visible = operands
        a = torch.randn(20, 9, 4, dtype=torch.float64)
        expected = torch.where(visible, (a[:, :, None] * x[:, None]).sum(-1), 0.0)
        torch.testing.assert_close(selective.pair(a, x, visible), expected, equal_nan=True)

    def test_finite_operands_without_a_mask_need_no_care(self):
        problem = prepare(*(torch.full((1, 1, 2, 2), math.nan) for _ in range(3)))
        assert not selective.needs_care(problem, problem.q)

    def test_masked_operands_need_care_if_one_of_them_is_infinite(self):
        problem = prepare(*(torch.ones(1, 1, 2, 2) for _ in range(3)), mask=poise.causal())
        assert not selective.needs_care(problem, problem.q, problem.k)
        assert selective.needs_care(problem, problem.q, problem.k / 0)


def test_scores_that_overflow_reach_only_what_their_row_sees():
    q, k, v = (torch.ones(1, 1, 4, 1) for _ in range(3))
    q[0, 0, 1], k = 1e30, 1e10 * k
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = blockwise.run(prepare(*leaves, mask=poise.causal(), scale=1.0), False)
    assert out[0, 0, :, 0].isnan().tolist() == [False, True, False, False]
    _, d_k, d_v = torch.autograd.grad(out.sum(), leaves)
    assert d_k[0, 0, :, 0].isfinite().tolist() == [False, False, True, True]
    assert d_v[0, 0, :, 0].isfinite().tolist() == [False, False, True, True]


class TestAttended:
    def out(self, scores: list[float], values: list[float]) -> float:
        """Attention of one query to keys with these scores and values, beside a hidden key that holds a NaN."""
        q = torch.ones(1, 1, 1, 1)
        k = torch.tensor([*scores, math.nan]).reshape(1, 1, -1, 1)
        v = torch.tensor([*values, math.nan]).reshape(1, 1, -1, 1)
        return float(blockwise.run(prepare(q, k, v, mask=poise.lengths(len(scores)), scale=1.0), False)[0])

    def test_an_infinite_value_with_weight_is_infinite(self):
        assert self.out([0.0, 1.0], [1.0, -math.inf]) == -math.inf

    def test_an_infinite_value_without_weight_is_nan(self):
        assert math.isnan(self.out([0.0, -1e4], [1.0, math.inf]))

    def test_opposite_infinities_are_nan(self):
        assert math.isnan(self.out([0.0, 1.0], [math.inf, -math.inf]))

    def test_an_infinite_score_is_nan(self):
        assert math.isnan(self.out([0.0, math.inf], [1.0, 2.0]))

    def test_a_score_of_minus_infinity_beside_others_has_no_weight(self):
        assert self.out([0.0, -math.inf], [1.0, 2.0]) == 1.0

    def test_only_scores_of_minus_infinity_are_nan(self):
        assert math.isnan(self.out([-math.inf, -math.inf], [1.0, 2.0]))

    def test_a_nan_value_stays_in_its_dim(self):
        v = torch.ones(1, 1, 4, 3)
        v[0, 0, 1, 2] = math.nan
        out, _ = blockwise.run(prepare(torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2), v, mask=poise.causal()), False)
        assert out[0, 0].isnan().tolist() == [[False, False, row >= 1] for row in range(4)]
