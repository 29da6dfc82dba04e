"""The specification itself: cases by hand, a loop in plain Python, torch's own attention in float64, derivatives."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

import poise
from poise import reference
from poise.problem import prepare
from poise.score import Alibi, Dense, Relative

NAN, INF = math.nan, math.inf


def run(q, k, v, **given):
    return reference.run(prepare(q, k, v, **given), False)[0]


def doubles(*shapes, grad=False):
    return [torch.randn(shape, dtype=torch.float64, requires_grad=grad) for shape in shapes]


class TestByHand:
    """One query; scores are set through q = 1 (or a bias), weights by logarithms of small integers."""

    q = torch.ones(1, 1, dtype=torch.float64)
    k = torch.tensor([[math.log(1.0)], [math.log(2.0)], [math.log(5.0)]], dtype=torch.float64)
    v = torch.tensor([[8.0, 0.0], [16.0, 8.0], [0.0, 16.0]], dtype=torch.float64)

    def attention(self, **given):
        return poise.attention(self.q, self.k, self.v, impl="reference", **given)[0].tolist()

    def test_weights_are_the_normalised_exponentials_of_the_scores(self):
        assert self.attention() == pytest.approx([(1 * 8 + 2 * 16) / 8, (2 * 8 + 5 * 16) / 8])

    def test_scale_multiplies_the_scores(self):
        assert self.attention(scale=2.0) == pytest.approx([(1 * 8 + 4 * 16) / 30, (4 * 8 + 25 * 16) / 30])

    def test_the_default_scale_is_one_over_the_root_of_the_head_dim(self):
        q, k = torch.full((1, 4), 0.5, dtype=torch.float64), self.k.expand(3, 4) * 1.0
        out = poise.attention(q, k, self.v, impl="reference")  # q.k = 2 log n, halved again
        assert out[0].tolist() == pytest.approx(self.attention())

    def test_a_masked_key_takes_no_part(self):
        assert self.attention(mask=torch.tensor([[True, False, True]])) == pytest.approx([8 / 6, 80 / 6])

    def test_a_bias_is_added_to_the_scores(self):
        bias = torch.tensor([[math.log(5.0), 0.0, -INF]], dtype=torch.float64)
        assert self.attention(bias=bias) == pytest.approx([(5 * 8 + 2 * 16) / 7, 2 * 8 / 7])

    def test_a_sink_takes_weight_and_gives_nothing(self):
        sink = torch.tensor([math.log(8.0)], dtype=torch.float64)
        assert self.attention(sink=sink) == pytest.approx([40 / 16, 96 / 16])

    def test_softcap_acts_after_scale_and_before_bias_and_sink(self):
        # atanh undoes the cap of 2 log 5 for key 2; the bias and the sink are far above it.
        cap = 2 * math.log(5.0)
        key = torch.tensor([[0.0], [0.0], [math.atanh(0.5)]], dtype=torch.float64)
        bias = torch.tensor([[math.log(1e3), 0.0, math.log(1e3)]], dtype=torch.float64)
        sink = torch.tensor([math.log(4e3)], dtype=torch.float64)
        out = poise.attention(self.q, key, self.v, scale=cap, softcap=cap, bias=bias, sink=sink, impl="reference")
        assert out[0].tolist() == pytest.approx([(1e3 * 8 + 16) / 10001, (8 + 5e3 * 16) / 10001])

    def test_a_row_without_visible_keys_is_zero(self):
        assert self.attention(mask=poise.lengths(0)) == [0, 0]
        assert self.attention(mask=poise.lengths(0), sink=torch.zeros(1)) == [0, 0]
        assert self.attention(bias=torch.full((1, 3), -INF)) == [0, 0]

    def test_the_smallest_finite_bias_is_an_ordinary_number(self):
        smallest = torch.full((1, 3), torch.finfo(torch.float64).min, dtype=torch.float64)
        assert self.attention(bias=smallest) == pytest.approx([8, 8])

    def test_statistics_of_the_hand_computed_row(self):
        _, stats = poise.observe(self.q, self.k, self.v, sink_keys=(0, 2), impl="reference")
        p = [1 / 8, 2 / 8, 5 / 8]
        assert float(stats.lse) == pytest.approx(math.log(8))
        assert float(stats.entropy) == pytest.approx(-sum(x * math.log(x) for x in p))
        assert float(stats.collision) == pytest.approx(30 / 64)
        assert float(stats.sink_mass) == pytest.approx(6 / 8)
        assert float(stats.mean) == pytest.approx(math.log(10) / 3)


def loop(problem):
    """The definition for one call, with Python floats: out [B, H, N, Dv] and lse [B, H, N]."""
    batch, heads, queries, keys = problem.shape
    groups = problem.k.shape[1]
    out, lse = torch.zeros(batch, heads, queries, problem.v.shape[3]), torch.full((batch, heads, queries), -INF)
    visible = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    if problem.mask is not None:
        visible = problem.mask.evaluate(torch.arange(queries), torch.arange(keys), problem.offset, problem.shape)
    visible = visible.expand(problem.shape).tolist()
    q, k, v = problem.q.tolist(), problem.k.tolist(), problem.v.tolist()
    for b in range(batch):
        offset = problem.offset if isinstance(problem.offset, int) else int(problem.offset[b])
        for h in range(heads):
            for i in range(queries):
                exponentials, total = [], 0.0
                for j in range(keys):
                    z = _at(problem.scale, b, h, i) * sum(
                        x * y for x, y in zip(q[b][h][i], k[b][h * groups // heads][j], strict=True)
                    )
                    s = z if problem.softcap is None else problem.softcap * math.tanh(z / problem.softcap)
                    for term in problem.bias:
                        s += _bias(term, b, h, i, j, j - (i + offset))
                    exponentials.append(math.exp(s) if visible[b][h][i][j] else 0.0)
                    total += exponentials[-1]
                if problem.sink is not None:
                    total += math.exp(float(problem.sink[h]))
                if total:
                    lse[b, h, i] = math.log(total)
                    for j, e in enumerate(exponentials):
                        out[b, h, i] += e / total * torch.tensor(v[b][h * groups // heads][j])
    return out, lse


def _at(value, *index):
    if isinstance(value, float):
        return value
    return float(value[tuple(0 if size == 1 else i for i, size in zip(index, value.shape, strict=True))])


def _bias(term, b, h, i, j, distance):
    if isinstance(term, Dense):
        return _at(term.tensor, b, h, i, j)
    if isinstance(term, Alibi):
        return -float(term.slopes[h]) * abs(distance)
    assert isinstance(term, Relative)
    radius = term.table.shape[1] // 2
    return _at(term.table, h, max(-radius, min(radius, distance)) + radius)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equals_the_definition_as_a_loop(data):
    def choose(*choices):
        return data.draw(st.sampled_from(choices))

    torch.manual_seed(data.draw(st.integers(0, 1000)))
    b, g, r, n, m = choose(1, 2), choose(1, 2), choose(1, 2), choose(0, 1, 4), choose(0, 1, 5)
    h = g * r
    mask = choose(None, poise.causal(), poise.window(1, 1), poise.keep(torch.rand(b, 1, n, m) < 0.5))
    bias = choose(
        None, torch.randn(n, m), torch.randn(h, 1, m) + poise.alibi(torch.rand(h)), poise.relative(torch.randn(h, 3))
    )
    problem = prepare(
        *doubles((b, h, n, 3), (b, g, m, 3), (b, g, m, 2)),
        mask=mask,
        bias=bias,
        scale=choose(None, -0.5, torch.randn(h), torch.randn(1, h, n)),
        softcap=choose(None, 1.5),
        sink=choose(None, torch.randn(h)),
        q_offset=choose(0, "end", 1, torch.arange(b) - 1),
    )
    out, packed = reference.run(problem, True)
    expected, lse = loop(problem)
    torch.testing.assert_close(out.float(), expected)
    torch.testing.assert_close(poise.ScoreStats(packed, problem.sink).lse.float(), lse.to(torch.float32))


class TestAgainstTorch:
    """torch's unfused attention in float64, where the two mean the same."""

    def compare(self, q, k, v, ours, **theirs):
        with sdpa_kernel(SDPBackend.MATH):
            expected = F.scaled_dot_product_attention(q, k, v, **theirs)
        torch.testing.assert_close(run(q, k, v, **ours), expected, rtol=1e-12, atol=1e-14)

    def test_plain_and_other_scale(self):
        q, k, v = doubles((2, 3, 17, 8), (2, 3, 29, 8), (2, 3, 29, 5))
        self.compare(q, k, v, {})
        self.compare(q, k, v, {"scale": 0.3}, scale=0.3)

    def test_causal_from_the_first_key(self):
        q, k, v = doubles((2, 3, 17, 8), (2, 3, 29, 8), (2, 3, 29, 8))
        self.compare(q, k, v, {"mask": poise.causal(), "q_offset": "start"}, is_causal=True)

    def test_bool_mask_with_empty_rows(self):
        q, k, v = doubles((2, 3, 17, 8), (2, 3, 9, 8), (2, 3, 9, 8))
        mask = torch.rand(2, 1, 17, 9) < 0.2
        self.compare(q, k, v, {"mask": mask}, attn_mask=mask)

    def test_additive_mask(self):
        q, k, v = doubles((2, 3, 17, 8), (2, 3, 9, 8), (2, 3, 9, 8))
        bias = torch.randn(3, 17, 9, dtype=torch.float64).masked_fill(torch.rand(3, 17, 9) < 0.3, -INF)
        self.compare(q, k, v, {"bias": bias}, attn_mask=bias)

    def test_grouped_heads(self):
        q, k, v = doubles((2, 6, 17, 8), (2, 2, 9, 8), (2, 2, 9, 8))
        self.compare(q, k, v, {}, enable_gqa=True)

    def test_gradients(self):
        tensors = doubles((2, 4, 7, 8), (2, 2, 9, 8), (2, 2, 9, 5), (4, 7, 9), grad=True)
        q, k, v, bias = tensors
        ours = torch.autograd.grad(run(q, k, v, bias=bias).square().sum(), tensors)
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
        for mine, theirs in zip(ours, torch.autograd.grad(out.square().sum(), tensors), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


class TestStages:
    @pytest.fixture
    def problem(self):
        q, k = doubles((2, 4, 6, 8), (2, 2, 9, 8))
        sink, bias = torch.randn(4), torch.randn(4, 6, 9).masked_fill(torch.rand(4, 6, 9) < 0.2, -INF)
        return prepare(
            q, k, k, mask=poise.causal(), bias=bias, softcap=2.0, sink=sink, q_offset=2, scale=torch.randn(1, 4, 6)
        )

    def tile(self, problem, stage, rows=slice(None), keys=slice(None), lse=None):
        n, m = problem.shape[2:]
        return reference.score_tile(problem, torch.arange(n)[rows], torch.arange(m)[keys], stage, lse)

    @pytest.mark.parametrize("stage", reference.STAGES)
    def test_a_tile_is_a_part_of_the_whole(self, problem, stage):
        part = self.tile(problem, stage, slice(1, 5), slice(3, 8))
        torch.testing.assert_close(part, self.tile(problem, stage)[:, :, 1:5, 3:8])

    def test_each_stage_follows_from_the_one_before(self, problem):
        raw = (problem.q @ problem.k.repeat_interleave(2, 1).mT) * problem.scale[..., None]
        torch.testing.assert_close(self.tile(problem, "raw"), raw)
        capped = self.tile(problem, "capped")
        torch.testing.assert_close(capped, 2.0 * torch.tanh(raw / 2.0))
        hidden = ~torch.ones(6, 9).tril(2).bool()
        biased = self.tile(problem, "biased")
        torch.testing.assert_close(biased, (capped + problem.bias[0].tensor).masked_fill(hidden, -INF))
        sink = problem.sink[:, None, None].expand(2, 4, 6, 1)
        p = torch.softmax(torch.cat([biased, sink], -1), -1)[..., :9]
        torch.testing.assert_close(self.tile(problem, "prob"), p)

    def test_probabilities_from_a_given_lse_need_no_other_keys(self, problem):
        _, packed = reference.run(problem, True)
        lse = poise.ScoreStats(packed, problem.sink).lse
        part = self.tile(problem, "prob", slice(2, 4), slice(1, 3), lse)
        torch.testing.assert_close(part, self.tile(problem, "prob")[:, :, 2:4, 1:3])

    def test_the_output_is_the_probabilities_times_the_values(self, problem):
        expected = self.tile(problem, "prob") @ problem.v.repeat_interleave(2, 1)
        torch.testing.assert_close(reference.run(problem, False)[0], expected)

    def test_an_unknown_stage_is_an_error(self, problem):
        with pytest.raises(ValueError, match="raw, capped, biased, prob"):
            self.tile(problem, "logits")


WAYS_TO_MASK = {
    "mask": lambda visible: {"mask": visible},
    "bias": lambda visible: {"bias": torch.where(visible, 0.0, -INF).double()},
    "nan bias": lambda visible: {"mask": visible, "bias": torch.where(visible, 0.0, NAN).double()},
}


class TestMaskedPairs:
    """What is masked contributes to nothing, forward or backward; what is attended shows."""

    @pytest.fixture(params=WAYS_TO_MASK.values(), ids=WAYS_TO_MASK)
    def call(self, request):
        causal = torch.ones(5, 5).tril().bool()
        return lambda q, k, v, visible=causal: run(q, k, v, **request.param(visible))

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    @pytest.mark.parametrize("where", ["k", "v"])
    def test_future_poison_changes_neither_earlier_rows_nor_their_gradients(self, call, where, bad):
        tensors = dict(zip("qkv", doubles((1, 2, 5, 3), (1, 2, 5, 3), (1, 2, 5, 3)), strict=True))
        clean = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        tensors[where][0, :, 3, 1] = bad
        dirty = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        (out, dq), (poisoned, poisoned_dq) = (
            (out, *torch.autograd.grad(out.square().sum(), inputs["q"]))
            for inputs, out in ((clean, call(**clean)), (dirty, call(**dirty)))
        )
        assert torch.equal(poisoned[:, :, :3], out[:, :, :3])
        torch.testing.assert_close(poisoned_dq[:, :, :3], dq[:, :, :3])

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    @pytest.mark.parametrize("where", ["k", "v"])
    def test_keys_that_nobody_sees_change_no_gradient_and_get_none(self, call, where, bad):
        visible = torch.ones(5, 5, dtype=torch.bool)
        visible[:, 3] = False
        tensors = dict(zip("qkv", doubles((1, 2, 5, 3), (1, 2, 5, 3), (1, 2, 5, 3)), strict=True))
        clean = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        tensors[where][0, :, 3, 1] = bad
        dirty = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        expected, gradients = (
            torch.autograd.grad(call(**inputs, visible=visible).square().sum(), list(inputs.values()))
            for inputs in (clean, dirty)
        )
        for want, got in zip(expected, gradients, strict=True):
            torch.testing.assert_close(got, want)
        assert not gradients[1][:, :, 3].any()
        assert not gradients[2][:, :, 3].any()

    def test_an_attended_nan_shows_in_output_and_gradients(self, call):
        q, k, v = doubles((1, 1, 5, 3), (1, 1, 5, 3), (1, 1, 5, 3))
        k[0, 0, 2, 0] = NAN
        for tensor in (q, k, v):
            tensor.requires_grad_()
        out = call(q, k, v)
        assert out[0, 0, 2:].isnan().all()
        dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
        assert dq[0, 0, 2:].isnan().all()
        assert dv[0, 0].isnan().all()
        assert dk[0, 0, :2].isnan().all()

    def test_a_nan_gradient_from_above_reaches_only_the_keys_of_its_row(self, call):
        # A poisoned row makes its own gradient NaN; keys that only other rows see must stay clean.
        q, k, v = doubles((1, 1, 5, 3), (1, 1, 5, 3), (1, 1, 5, 3))
        q[0, 0, 1] = NAN
        for tensor in (q, k, v):
            tensor.requires_grad_()
        dq, dk, dv = torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))
        for gradient in (dk, dv):
            assert gradient[0, 0, :2].isnan().all()
            assert gradient[0, 0, 2:].isfinite().all()
        assert dq[0, 0, [0, 2, 3, 4]].isfinite().all()

    def test_poison_leaks_into_no_second_derivative(self, call):
        q, k, v = doubles((1, 1, 5, 3), (1, 1, 5, 3), (1, 1, 5, 3))
        k[0, 0, 4], v[0, 0, 4] = NAN, INF
        for tensor in (q, k, v):
            tensor.requires_grad_()
        visible = torch.ones(5, 5).tril().bool() & (torch.arange(5) != 4)
        first = torch.autograd.grad(call(q, k, v, visible=visible).square().sum(), (q, k, v), create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, v))
        for gradient in (*first, *second):
            assert gradient.isfinite().all()

    def test_an_infinite_value_with_weight_shows_as_itself(self):
        q, k, v = doubles((1, 1, 2, 3), (1, 1, 4, 3), (1, 1, 4, 3))
        v[0, 0, 1, 0], v[0, 0, 2, 1] = INF, -INF
        out = run(q, k, v)[0, 0]
        assert out[:, 0].tolist() == [INF, INF]
        assert out[:, 1].tolist() == [-INF, -INF]
        assert out[:, 2].isfinite().all()


class TestDerivatives:
    def inputs(self):
        q, k, v = doubles((1, 2, 3, 2), (1, 1, 4, 2), (1, 1, 4, 2), grad=True)
        bias, slopes, table, sink, scale = doubles((2, 3, 4), (2,), (2, 3), (2,), (1, 2, 3), grad=True)
        return q, k, v, bias, slopes, table, sink, scale

    def call(self, q, k, v, bias, slopes, table, sink, scale):
        out, packed = reference.run(
            prepare(
                q,
                k,
                v,
                mask=torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]).bool(),  # some, none, one
                bias=poise.alibi(slopes) + bias + poise.relative(table),
                softcap=2.0,
                sink=sink,
                scale=scale,
                q_offset="end",
            ),
            True,
        )
        return out, poise.ScoreStats(packed, sink).entropy

    def test_first_derivatives_of_output_and_statistics(self):
        assert torch.autograd.gradcheck(self.call, self.inputs())

    def test_second_derivatives(self):
        assert torch.autograd.gradgradcheck(self.call, self.inputs())

    def test_forward_mode(self):
        assert torch.autograd.gradcheck(self.call, self.inputs(), check_forward_ad=True, check_backward_ad=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_output_has_the_dtype_of_q_and_statistics_float32_or_float64(dtype):
    x = torch.randn(1, 1, 3, 4).to(dtype)
    out, packed = reference.run(prepare(x, x, x), True)
    assert out.dtype == dtype
    assert packed.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_half_precision_rounds_only_the_inputs_and_the_output():
    x = [torch.randn(1, 2, 9, 8).to(torch.bfloat16) for _ in range(3)]
    expected = run(*(tensor.double() for tensor in x))
    torch.testing.assert_close(run(*x), expected.to(torch.bfloat16), rtol=2**-8, atol=1e-6)
