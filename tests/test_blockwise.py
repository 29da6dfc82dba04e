"""Derivatives of blockwise in every order and mode, and NaN that neither leaks nor hides in them, in tiny tiles.

Its results are in test_case_table.py too, its memory in test_blockwise_memory.py, its products in test_selective.py.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import poise
from poise import reference
from poise.kernels import blockwise, tiles
from poise.problem import Problem, prepare, seeded
from poise.stats import FIELDS

B, H, G, N, M, D, DV = 2, 4, 2, 13, 17, 8, 6


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def positive(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) + 0.1


# What is passed besides q, k, v; made when called, after the fixture has seeded.
FEATURES = {
    "plain": dict,
    "causal": lambda: {"mask": poise.causal()},
    "causal-before-the-keys": lambda: {"mask": poise.causal(), "q_offset": -3},
    "causal-offset-per-sequence": lambda: {"mask": poise.causal(), "q_offset": torch.tensor([2, -4])},
    "window": lambda: {"mask": poise.window(3, 2)},
    "prefix": lambda: {"mask": poise.causal() | poise.prefix(9)},
    "lengths": lambda: {"mask": poise.lengths(torch.tensor([5, 0]))},
    "lengths-of-numbers": lambda: {"mask": poise.lengths(9, 3)},
    "not-causal": lambda: {"mask": ~poise.causal()},
    "dilated": lambda: {"mask": poise.dilated(2, 3) & poise.causal()},
    "global": lambda: {"mask": poise.window(2) | poise.global_tokens([0, 5])},
    "blocks": lambda: {"mask": poise.blocks(torch.rand(H, 5, 5) > 0.5, 4)},
    "documents": lambda: {"mask": poise.documents(torch.randint(0, 3, (B, M)))},
    "lowered": lambda: {"mask": poise.window(4).lower(N, M, q_offset="end")},
    "tensor-mask": lambda: {"mask": torch.rand(B, 1, N, M) > 0.6},
    "bias": lambda: {"bias": normal(H, N, M)},
    "bias-broadcast": lambda: {"bias": normal(B, 1, 1, M) + poise.alibi(positive(H))},
    "bias-minus-infinity": lambda: {"bias": normal(N, M).masked_fill(torch.rand(N, M) > 0.5, -math.inf)},
    "relative": lambda: {"bias": poise.relative(normal(H, 7)), "q_offset": torch.tensor([1, 3])},
    "scale-per-head": lambda: {"scale": positive(H)},
    "scale-per-row": lambda: {"scale": positive(B, 1, N)},
    "softcap": lambda: {"softcap": 2.0, "mask": poise.causal()},
    "sink": lambda: {"sink": normal(H), "mask": poise.causal(), "q_offset": -3},
    "dropout": lambda: {"dropout": 0.3, "mask": poise.causal(), "sink_keys": (0, 2, 16)},
    "everything": lambda: {
        "mask": poise.causal() & (torch.rand(N, M) > 0.3),
        "bias": normal(N, M) + poise.alibi(positive(H)) + poise.relative(normal(1, 5)),
        "scale": positive(B, H, N),
        "softcap": 3.0,
        "sink": normal(H),
        "dropout": 0.2,
        "sink_keys": (0, 1),
    },
}


def problem_of(feature: str) -> Problem:
    given = {"q_offset": "end", **FEATURES[feature]()}
    return seeded(prepare(normal(B, H, N, D), normal(B, G, M, D), normal(B, G, M, DV), **given))


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles along every axis, even of a tiny problem."""
    monkeypatch.setattr(tiles, "_CPU_BUDGET", 200)
    monkeypatch.setattr(tiles, "_FEWEST_ROWS", 1)


@pytest.fixture(params=["ordinary", "selective"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of products, whatever the data."""
    if request.param == "selective":
        monkeypatch.setattr(blockwise, "needs_care", lambda problem, *tensors: True)


def with_gradients(problem: Problem) -> tuple[Problem, list[Tensor]]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tiles.operands(problem)]
    return tiles.with_operands(problem, leaves), leaves


def finite(value: Tensor) -> Tensor:
    """Without the infinities of empty rows, which no loss would use."""
    return torch.where(value.detach().isfinite(), value, 0.0)


def loss(run, problem: Problem) -> Tensor:
    """A scalar that depends on every entry of the output and of the statistics, each with its own weight."""
    out, packed = run(problem, True)
    weigh = torch.Generator().manual_seed(5)
    return sum(
        (finite(x) * torch.randn(x.shape, generator=weigh, dtype=x.dtype)).sum() for x in (out, packed) if x is not None
    )


def assert_same(got: Tensor | None, expected: Tensor | None) -> None:
    got, expected = (x if x is not None else torch.zeros((), dtype=torch.float64) for x in (got, expected))
    got, expected = torch.broadcast_tensors(got, expected)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.usefixtures("small_tiles", "products")
@pytest.mark.parametrize("feature", FEATURES)
class TestAgainstTheReference:
    """In fp64, where the two formulations differ by rounding alone."""

    def test_output_and_statistics_agree(self, feature):
        problem = problem_of(feature)
        for got, expected in zip(blockwise.run(problem, True), reference.run(problem, True), strict=True):
            assert_same(got, expected)

    def test_gradients_of_output_and_statistics_agree(self, feature):
        problem, leaves = with_gradients(problem_of(feature))
        got = torch.autograd.grad(loss(blockwise.run, problem), leaves, allow_unused=True)
        expected = torch.autograd.grad(loss(reference.run, problem), leaves, allow_unused=True)
        for mine, theirs in zip(got, expected, strict=True):
            assert_same(mine, theirs)

    def test_second_derivatives_agree(self, feature):
        problem, leaves = with_gradients(problem_of(feature))

        def second(run) -> tuple[Tensor | None, ...]:
            first = torch.autograd.grad(loss(run, problem), leaves, create_graph=True, allow_unused=True)
            norm = sum(x.square().sum() for x in first if x is not None)
            return torch.autograd.grad(norm, leaves, allow_unused=True)

        for mine, theirs in zip(second(blockwise.run), second(reference.run), strict=True):
            assert_same(mine, theirs)

    def test_received_is_the_column_sum_of_the_probabilities(self, feature):
        problem = replace(problem_of(feature), dropout=0.0)
        packed = reference.run(problem, True)[1]
        lse = poise.ScoreStats(packed, problem.sink).lse
        p = reference.score_tile(problem, torch.arange(N), torch.arange(M), "prob")
        assert_same(blockwise.received(problem, lse), p.sum(-2))


TINY = {"b": 1, "h": 2, "g": 1, "n": 3, "m": 4, "d": 2}


def tiny(feature: str) -> tuple[Problem, list[Tensor]]:
    b, h, g, n, m, d = TINY.values()
    given = {
        "plain": dict,
        "empty-row": lambda: {
            "mask": torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]]).bool(),
            "sink_keys": (0,),
        },
        "dropout": lambda: {"dropout": 0.3, "mask": poise.causal()},
        "everything": lambda: {
            "mask": poise.causal(),
            "bias": normal(n, m) + poise.alibi(positive(h)) + poise.relative(normal(h, 3)),
            "scale": positive(1, h, n),
            "softcap": 2.0,
            "sink": normal(h),
            "sink_keys": (0, 1),
        },
    }[feature]()
    tensors = normal(b, h, n, d), normal(b, g, m, d), normal(b, g, m, d)
    return with_gradients(seeded(prepare(*tensors, q_offset="end", **given)))


def function_of(problem: Problem):
    """Output and statistics as a function of the operands alone."""

    def call(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        out, packed = blockwise.run(tiles.with_operands(problem, leaves), True)
        assert packed is not None
        return out, finite(packed)

    return call


@pytest.mark.usefixtures("small_tiles", "products")
@pytest.mark.parametrize("feature", ["plain", "empty-row", "dropout", "everything"])
class TestDerivatives:
    """Against finite differences and against one another."""

    def test_reverse_and_forward_mode_are_the_derivative(self, feature):
        problem, leaves = tiny(feature)
        assert gradcheck(function_of(problem), leaves, check_forward_ad=True)

    def test_reverse_over_reverse_is_the_second_derivative(self, feature):
        problem, leaves = tiny(feature)
        call = function_of(problem)
        assert gradgradcheck(lambda *x: call(*x)[0], leaves)

    def test_forward_over_reverse_is_the_second_derivative(self, feature):
        problem, leaves = tiny(feature)
        call = function_of(problem)
        assert gradgradcheck(
            lambda *x: call(*x)[0],
            leaves,
            check_fwd_over_rev=True,
            check_rev_over_rev=False,
            check_undefined_grad=False,
        )

    def test_torch_func_grad_equals_autograd(self, feature):
        problem, leaves = tiny(feature)
        call = function_of(problem)
        got = torch.func.grad(lambda *x: call(*x)[0].square().sum(), argnums=tuple(range(len(leaves))))(*leaves)
        for mine, theirs in zip(got, torch.autograd.grad(call(*leaves)[0].square().sum(), leaves), strict=True):
            assert_same(mine, theirs)

    def test_torch_func_hessian_equals_autograd(self, feature):
        problem, leaves = tiny(feature)
        call = function_of(problem)

        def of_q(q: Tensor) -> Tensor:
            return call(q, *leaves[1:])[0].square().sum()

        assert_same(torch.func.hessian(of_q)(leaves[0]), torch.autograd.functional.hessian(of_q, leaves[0]))

    def test_vmap_equals_a_loop(self, feature):
        problem, leaves = tiny(feature)
        call = function_of(problem)
        stacked = [torch.stack([leaf, 1.1 * leaf]) for leaf in leaves]
        expected = [call(*(x[i] for x in stacked)) for i in range(2)]
        for got, parts in zip(torch.func.vmap(call)(*stacked), zip(*expected, strict=True), strict=True):
            assert_same(got, torch.stack(parts))

    def test_batched_gradients_equal_a_loop(self, feature):
        problem, leaves = tiny(feature)
        out, _ = function_of(problem)(*leaves)
        incoming = normal(3, *out.shape)
        got = torch.autograd.grad(out, leaves, incoming, is_grads_batched=True, retain_graph=True, allow_unused=True)
        for i in range(3):
            expected = torch.autograd.grad(out, leaves, incoming[i], retain_graph=True, allow_unused=True)
            for mine, theirs in zip(got, expected, strict=True):
                assert_same(None if mine is None else mine[i], theirs)


class TestGraph:
    def test_nothing_is_recorded_without_a_gradient_to_keep(self):
        out, packed = blockwise.run(problem_of("causal"), True)
        assert not out.requires_grad
        assert packed is not None
        assert not packed.requires_grad

    def test_only_what_asks_for_a_gradient_gets_one(self):
        problem = problem_of("causal")
        v = problem.v.clone().requires_grad_()
        out, _ = blockwise.run(replace(problem, v=v), False)
        (d_v,) = torch.autograd.grad(out.sum(), [v])
        assert d_v.shape == v.shape

    def test_keys_made_from_the_queries_are_differentiated_once(self):
        x = normal(1, 1, 5, 4).requires_grad_()

        def call(run) -> Tensor:
            out, _ = run(prepare(x, 2 * x, x.square(), mask=poise.causal()), False)
            (first,) = torch.autograd.grad(out.square().sum(), [x], create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), [x])
            return torch.cat([first, second])

        assert_same(call(blockwise.run), call(reference.run))

    def test_a_tensor_changed_in_place_after_the_call_is_noticed(self):
        problem, leaves = with_gradients(problem_of("causal"))
        k = leaves[1] * 1.0
        out, _ = blockwise.run(replace(problem, k=k), False)
        k.detach().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    def test_autocast_does_not_reach_the_products(self):
        problem = prepare(*(torch.randn(1, 2, 9, 16) for _ in range(3)))
        with torch.autocast("cpu", torch.bfloat16):
            inside, _ = blockwise.run(problem, False)
        assert torch.equal(inside, blockwise.run(problem, False)[0])

    def test_checkpointing_around_the_call_gives_the_same_gradient(self):
        problem, leaves = with_gradients(problem_of("causal"))

        def call(q: Tensor) -> Tensor:
            return blockwise.run(replace(problem, q=q), False)[0].square().sum()

        wrapped = torch.utils.checkpoint.checkpoint(call, leaves[0], use_reentrant=False)
        assert_same(torch.autograd.grad(wrapped, leaves[0])[0], torch.autograd.grad(call(leaves[0]), leaves[0])[0])

    def test_output_of_a_transposed_query_lies_transposed(self):
        q, k, v = (torch.randn(2, 9, 3, 4) for _ in range(3))
        out, _ = blockwise.run(prepare(q, k, v, layout="bshd"), False)
        assert out.transpose(1, 2).is_contiguous()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_gradients_of_half_precision_are_float32_gradients_rounded_once(self, dtype):
        halves = [torch.randn(1, 2, 40, 8).to(dtype).requires_grad_() for _ in range(3)]
        singles = [x.detach().float().requires_grad_() for x in halves]
        incoming = torch.randn(1, 2, 40, 8).to(dtype)
        got = torch.autograd.grad(blockwise.run(prepare(*halves), False)[0], halves, incoming)
        expected = torch.autograd.grad(blockwise.run(prepare(*singles), False)[0], singles, incoming.float())
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.equal(mine, theirs.to(dtype))

    @pytest.mark.parametrize(("n", "m"), [(0, 5), (5, 0), (0, 0)])
    def test_no_queries_or_no_keys_give_gradients_of_zero(self, n, m):
        leaves = [torch.randn(1, 2, size, 4).requires_grad_() for size in (n, m, m)]
        out, packed = blockwise.run(prepare(*leaves, sink_keys=()), True)
        assert packed is not None
        assert packed.shape == (len(FIELDS), 1, 2, n)
        for leaf, gradient in zip(leaves, torch.autograd.grad(out.sum(), leaves, allow_unused=True), strict=True):
            assert gradient is None or torch.equal(gradient, torch.zeros_like(leaf))


def poisoned(tensor: Tensor, share: float) -> Tensor:
    """Some entries replaced by NaN, inf and -inf."""
    draw = torch.rand(tensor.shape)
    for value, low in ((math.nan, 0.0), (math.inf, share), (-math.inf, 2 * share)):
        tensor = tensor.masked_fill((draw >= low) & (draw < low + share), value)
    return tensor


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("feature", FEATURES)
def test_scattered_nan_and_infinity_show_exactly_where_the_reference_shows_them(feature):
    for operand in (0, 1, 2, -1):
        torch.manual_seed(operand + 7)
        problem = problem_of(feature)
        values = tiles.operands(problem)
        if operand >= 0 or problem.bias:
            values[operand] = poisoned(values[operand], 0.02 if operand == 2 else 0.005)
        problem, leaves = with_gradients(tiles.with_operands(problem, values))
        (out, packed), (expected, expected_packed) = blockwise.run(problem, True), reference.run(problem, True)
        assert_same(out, expected)
        assert_same(packed, expected_packed)
        incoming = torch.randn_like(out)
        got = torch.autograd.grad(out, leaves, incoming, allow_unused=True)
        for mine, theirs in zip(got, torch.autograd.grad(expected, leaves, incoming, allow_unused=True), strict=True):
            assert_same(mine, theirs)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
class TestMasked:
    """Eight queries and keys; one holds the value, and who does not see it must not notice, forward or backward."""

    def both(self, name: str, value: float, mask: poise.mask.Mask | Tensor, at: int) -> tuple[Problem, Problem]:
        """The same call clean, and with the query, key, value or bias column at one place poisoned."""
        given = {name: normal(1, 2, 8, 4) for name in "qkv"}
        given |= {"bias": normal(1, 1, 8, 8), "scale": positive(2)}
        dirty = given[name].clone()
        (dirty[..., at] if name == "bias" else dirty[:, :, at]).fill_(value)
        options = {"mask": mask, "softcap": 3.0, "sink_keys": (0,)}
        return prepare(**given, **options), prepare(**{**given, name: dirty}, **options)

    @pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
    def test_rows_before_the_key_do_not_change(self, name, value):
        clean, dirty = self.both(name, value, poise.causal(), at=5)
        (out, packed), (expected, expected_packed) = blockwise.run(dirty, True), blockwise.run(clean, True)
        assert packed is not None
        assert expected_packed is not None
        assert_same(out[:, :, :5], expected[:, :, :5])
        assert_same(packed[..., :5], expected_packed[..., :5])

    @pytest.mark.parametrize("name", ["k", "v", "bias"])
    def test_a_key_hidden_from_all_changes_no_gradient(self, name, value):
        clean, dirty = self.both(name, value, poise.causal() & ~poise.lengths(6, 5), at=5)
        self.assert_all_the_same(dirty, clean)

    def test_the_query_of_an_empty_row_changes_no_gradient(self, value):
        mask = torch.ones(8, 8, dtype=torch.bool)
        mask[3] = False
        clean, dirty = self.both("q", value, mask, at=3)
        self.assert_all_the_same(dirty, clean)

    def assert_all_the_same(self, dirty: Problem, clean: Problem) -> None:
        results = []
        for problem in (dirty, clean):
            problem, leaves = with_gradients(problem)
            gradients = torch.autograd.grad(loss(blockwise.run, problem), leaves)
            assert all(gradient.isfinite().all() for gradient in gradients)
            results.append([*blockwise.run(problem, True), *gradients])
        for got, expected in zip(*results, strict=True):
            assert_same(got, expected)

    def test_an_incoming_gradient_reaches_only_what_its_row_sees(self, value):
        problem, leaves = with_gradients(prepare(*(normal(1, 2, 8, 4) for _ in range(3)), mask=poise.causal()))
        incoming = torch.ones(1, 2, 8, 4, dtype=torch.float64)
        incoming[:, :, 2] = value
        d_q, d_k, d_v = torch.autograd.grad(blockwise.run(problem, False)[0], leaves, incoming)
        assert not d_v[:, :, :3].isfinite().any()
        assert d_v[:, :, 3:].isfinite().all()
        assert d_k[:, :, 3:].isfinite().all()
        assert d_q[:, :, [0, 1, 3, 4, 5, 6, 7]].isfinite().all()
