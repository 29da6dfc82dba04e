"""The statistics of a row against their formulas, the merge of disjoint keys, and summaries that add."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import poise
from poise.stats import FIELDS, ScoreStats, merge
from poise.summary import EDGES, ScoreSummary

H = 2
SINKS = {
    "none": None,
    "ordinary": torch.tensor([0.3, -1.2], dtype=torch.float64),
    "far above": torch.tensor([900.0, 0.0], dtype=torch.float64),
    "far below": torch.tensor([-900.0, 0.0], dtype=torch.float64),
    "absent": torch.tensor([-math.inf, 0.0], dtype=torch.float64),
}
ONES = torch.ones((), dtype=torch.float64)


def observed(sink=None, keys=slice(0, 40), sink_keys=(0, 3), grad=False):
    """Output and statistics of random scores, -inf where masked, and these; rows are empty, large or of one key too."""
    generator = torch.Generator().manual_seed(4)
    scores = 3 * torch.randn(2, H, 9, 40, generator=generator, dtype=torch.float64)
    scores[1, 1, 5] *= 100
    visible = torch.rand(2, H, 9, 40, generator=generator) < 0.5
    visible[0, 0, 0] = False
    visible[0, 1, 1] = torch.arange(40) == 7
    visible[0, 1, 2, :20] = False
    visible[1, 0, 3, 20:] = False
    scores = scores.masked_fill(~visible, -math.inf)[..., keys].requires_grad_(grad)
    v = torch.randn(2, H, 40, 5, generator=generator, dtype=torch.float64)
    # With q = 0 the scores are the bias.
    q, k = torch.zeros(2, H, 9, 1, dtype=torch.float64), torch.zeros(2, H, 40, 1, dtype=torch.float64)
    out, stats = poise.observe(
        q,
        k[:, :, keys],
        v[:, :, keys],
        bias=scores,
        mask=poise.keep(visible[..., keys]),
        sink=sink,
        sink_keys=sink_keys,
        impl="reference",
    )
    return out, stats, scores


def with_sink(scores, sink):
    """The softmax over keys and sink: its scores and probabilities, 0 in rows with nothing."""
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    return scores, torch.softmax(scores, -1).nan_to_num(0.0)


@pytest.mark.parametrize("sink", SINKS.values(), ids=SINKS)
class TestFormulas:
    def test_lse_is_the_log_of_the_sum_of_exponentials(self, sink):
        _, stats, scores = observed(sink)
        torch.testing.assert_close(stats.lse, torch.logsumexp(with_sink(scores, sink)[0], -1))

    def test_max_prob_is_the_largest_weight_of_a_key(self, sink):
        _, stats, scores = observed(sink)
        torch.testing.assert_close(stats.max_prob, with_sink(scores, sink)[1][..., :40].amax(-1))

    def test_entropy_is_that_of_keys_and_sink(self, sink):
        _, stats, scores = observed(sink)
        torch.testing.assert_close(stats.entropy, torch.special.entr(with_sink(scores, sink)[1]).sum(-1))

    def test_var_p_is_the_variance_of_the_score_under_p(self, sink):
        _, stats, scores = observed(sink)
        scores, p = with_sink(scores, sink)
        expected = (p * scores.masked_fill(p == 0, 0.0)).sum(-1, keepdim=True)
        square = (scores - expected).masked_fill(p == 0, 0.0).square()
        torch.testing.assert_close(stats.var_p, (p * square).sum(-1))

    def test_collision_responsiveness_and_effective_keys_come_from_the_sum_of_squares(self, sink):
        _, stats, scores = observed(sink)
        collision = with_sink(scores, sink)[1].square().sum(-1)
        torch.testing.assert_close(stats.collision, collision)
        torch.testing.assert_close(stats.responsiveness, torch.where(collision == 0, 0.0, 1 - collision))
        torch.testing.assert_close(stats.effective_keys, torch.where(collision == 0, 0.0, 1 / collision))

    def test_responsiveness_is_the_trace_of_the_softmax_jacobian(self, sink):
        _, stats, scores = observed(sink)
        row = with_sink(scores, sink)[0][1, 0, 4]
        jacobian = torch.autograd.functional.jacobian(lambda s: torch.softmax(s, -1), row)
        torch.testing.assert_close(stats.responsiveness[1, 0, 4], jacobian.trace())

    def test_sink_mass_is_the_probability_of_the_sink_keys(self, sink):
        _, stats, scores = observed(sink)
        torch.testing.assert_close(stats.sink_mass, with_sink(scores, sink)[1][..., [0, 3]].sum(-1))

    def test_extremes_mean_std_and_count_leave_the_sink_out(self, sink):
        _, stats, scores = observed(sink)
        visible = scores > -math.inf
        torch.testing.assert_close(stats.max_score, scores.amax(-1))
        torch.testing.assert_close(stats.min_score, scores.masked_fill(~visible, math.inf).amin(-1))
        assert torch.equal(stats.count, visible.sum(-1).double())
        row = scores[1, 0, 4][visible[1, 0, 4]]
        torch.testing.assert_close(stats.mean[1, 0, 4], row.mean())
        torch.testing.assert_close(stats.std[1, 0, 4], row.std(correction=0))

    def test_an_empty_row_has_the_documented_values(self, sink):
        _, stats, _ = observed(sink)
        absent = -math.inf if sink is None else float(sink[0])
        alone = float(absent > -math.inf)  # all probability is the sink's
        values = {name: float(getattr(stats, name)[0, 0, 0]) for name in EDGES}
        assert values.pop("normalized_entropy") != values["entropy"]  # NaN
        assert values == {
            "lse": absent,
            "max_score": -math.inf,
            "max_logit": -math.inf,
            "min_score": math.inf,
            "mean": 0,
            "std": 0,
            "count": 0,
            "max_prob": 0,
            "entropy": 0,
            "var_p": 0,
            "collision": alone,
            "effective_keys": alone,
            "responsiveness": 0,
            "sink_mass": 0,
        }

    def test_every_statistic_has_finite_gradients(self, sink):
        _, stats, scores = observed(sink, grad=True)
        for name in ("lse", "entropy", "std", "var_p", "collision", "effective_keys", "sink_mass"):
            value = getattr(stats, name)
            value = value.masked_fill(~value.isfinite(), 0.0)
            (gradient,) = torch.autograd.grad(value.sum(), scores, retain_graph=True)
            assert gradient.isfinite().all(), name

    def test_merging_two_halves_gives_the_whole(self, sink):
        out, stats, _ = observed(sink)
        left = observed(sink, keys=slice(0, 20))[:2]
        right = observed(sink, keys=slice(20, 40), sink_keys=())[:2]
        for pair in ((left, right), (right, left)):
            merged_out, merged = merge(*pair)
            torch.testing.assert_close(merged_out, out)
            torch.testing.assert_close(merged.packed, stats.packed, rtol=1e-9, atol=1e-12)


def test_entropy_is_differentiable_by_the_textbook_formula():
    _, stats, scores = observed(grad=True)
    (gradient,) = torch.autograd.grad(stats.entropy[1, 0, 4], scores)
    row = scores[1, 0, 4].detach()
    p = torch.softmax(row, -1)
    expected = -p * (p.log().nan_to_num(neginf=0.0) + stats.entropy[1, 0, 4].detach())
    torch.testing.assert_close(gradient[1, 0, 4], expected)


def test_var_p_is_the_second_derivative_of_lse_by_temperature():
    _, stats, scores = observed()
    row = scores[1, 0, 4][scores[1, 0, 4] > -math.inf]
    beta = ONES.clone().requires_grad_()
    (first,) = torch.autograd.grad(torch.logsumexp(beta * row, -1), beta, create_graph=True)
    (second,) = torch.autograd.grad(first, beta)
    torch.testing.assert_close(stats.var_p[1, 0, 4], second)


def test_normalized_entropy_of_equal_scores_is_one_and_of_one_key_nan():
    q = torch.zeros(1, 1, 3, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    k = torch.ones(1, 1, 4, 4)
    for sink in (None, torch.zeros(1)):
        _, stats = poise.observe(q, k, k, mask=mask, sink=sink, impl="reference")
        torch.testing.assert_close(stats.normalized_entropy[0, 0, 0], torch.tensor(1.0))
        assert stats.normalized_entropy[0, 0, 1:].isnan().all()


def test_a_row_that_attended_a_nan_shows_it_in_every_statistic():
    q, k, v = torch.randn(3, 1, 1, 6, 4)
    k[0, 0, 2] = math.nan
    for sink in (None, torch.zeros(1)):
        _, stats = poise.observe(q, k, v, mask=poise.causal(), sink=sink, impl="reference")
        for name in set(EDGES) - {"count"}:
            value = getattr(stats, name)[0, 0]
            assert value[2:].isnan().all(), name
            assert not value[1].isnan(), name


@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4), (3, 2, 5, 4)])
@pytest.mark.parametrize("sink", [False, True])
def test_statistics_have_the_leading_dims_of_the_call(shape, sink):
    x = torch.randn(shape)
    given = torch.zeros(shape[-3] if len(shape) > 2 else 1) if sink else None
    _, stats = poise.observe(x, x, x, sink=given, impl="reference")
    for name in EDGES:
        assert getattr(stats, name).shape == shape[:-1], name
    assert stats.reduce("head").mean("lse").shape == (shape[-3] if len(shape) > 2 else 1,)


class TestMerge:
    def split(self, bounds, sink, layout="bhsd", dtype=torch.float64):
        q, k, v = (torch.randn(2, n, h, 8, dtype=dtype) for n, h in ((5, 4), (40, 2), (40, 2)))
        visible = torch.rand(2, 4, 5, 40) < 0.4
        if layout == "bhsd":
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

        def part(keys):
            taken = (k[:, keys], v[:, keys]) if layout == "bshd" else (k[:, :, keys], v[:, :, keys])
            return poise.observe(
                q, *taken, mask=visible[..., keys], sink=sink, sink_keys=(), layout=layout, impl="reference"
            )

        return part(slice(None)), [part(slice(a, b)) for a, b in zip([0, *bounds], [*bounds, 40], strict=True)]

    @settings(max_examples=40, deadline=None)
    @given(bounds=st.lists(st.integers(0, 40), min_size=1, max_size=6), sink=st.booleans(), data=st.data())
    def test_any_split_in_any_order_and_grouping_gives_the_whole(self, bounds, sink, data):
        torch.manual_seed(len(bounds))
        whole, parts = self.split(sorted(bounds), torch.randn(4, dtype=torch.float64) if sink else None)
        while len(parts) > 1:
            first = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
            second = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
            parts.append(merge(first, second))
        torch.testing.assert_close(parts[0][0], whole[0])
        torch.testing.assert_close(parts[0][1].packed, whole[1].packed, rtol=1e-9, atol=1e-11)

    def test_takes_any_number_of_parts(self):
        whole, parts = self.split([3, 10, 31], None)
        torch.testing.assert_close(merge(*parts)[0], whole[0])
        assert merge(whole)[0] is whole[0]

    def test_follows_the_layout_of_the_output(self):
        whole, parts = self.split([17], torch.randn(4, dtype=torch.float64), layout="bshd")
        assert whole[0].shape == (2, 5, 4, 8)
        torch.testing.assert_close(merge(*parts)[0], whole[0])

    def test_is_differentiable_through_output_and_statistics(self):
        q, k, v = (torch.randn(1, 1, n, 4, dtype=torch.float64) for n in (3, 6, 6))
        sink = torch.zeros(1, dtype=torch.float64)
        mask = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 0, 0, 1, 0, 1], [0] * 6]).bool()  # a half-empty and an empty row

        def merged(q, k, v, sink):
            cuts = (slice(0, 3), slice(3, 6))
            parts = [
                poise.observe(q, k[:, :, c], v[:, :, c], mask=mask[:, c], sink=sink, impl="reference") for c in cuts
            ]
            out, stats = merge(*parts)
            return out, stats.lse, stats.entropy, stats.var_p

        assert torch.autograd.gradcheck(merged, [x.requires_grad_() for x in (q, k, v, sink)])

    def test_a_part_with_no_visible_key_changes_nothing_not_even_by_its_nan(self):
        (out, stats), _ = self.split([20], None)
        nothing = out.new_zeros(2, 4, 20, 8).fill_(math.nan)
        empty = poise.observe(
            torch.randn(2, 4, 5, 8, dtype=out.dtype), nothing, nothing, mask=poise.lengths(0), impl="reference"
        )
        merged_out, merged = merge((out, stats), empty)
        assert torch.equal(merged_out, out)
        torch.testing.assert_close(merged.packed, stats.packed, rtol=0, atol=0)

    def test_different_sinks_are_an_error(self):
        x = torch.randn(1, 2, 3, 4)
        with_sinks = [poise.observe(x, x, x, sink=torch.tensor([0.0, s]), impl="reference") for s in (1.0, 2.0)]
        with pytest.raises(ValueError, match="different sinks"):
            merge(*with_sinks)

    def test_a_sink_in_one_part_only_is_an_error(self):
        x = torch.randn(1, 2, 3, 4)
        parts = [poise.observe(x, x, x, sink=sink, impl="reference") for sink in (torch.zeros(2), None)]
        with pytest.raises(ValueError, match="one part has a sink"):
            merge(*parts)

    def test_different_queries_are_an_error(self):
        x = torch.randn(1, 2, 3, 4)
        parts = [poise.observe(q, x, x, impl="reference") for q in (x, x[:, :, :2])]
        with pytest.raises(ValueError, match="out differs"):
            merge(*parts)

    def test_nothing_to_merge_is_an_error(self):
        with pytest.raises(ValueError, match="no parts"):
            merge()


class TestSummary:
    @pytest.mark.parametrize(("by", "dims"), [("head", (0, 2)), ("batch", (1, 2)), ("layer", (0, 1, 2))])
    def test_mean_and_extremes_are_those_over_the_rows_that_are_not_empty(self, by, dims):
        _, stats, _ = observed(SINKS["ordinary"])
        summary = stats.reduce(by)
        used = stats.count > 0
        for name in set(EDGES) - {"normalized_entropy"}:
            value = getattr(stats, name)
            torch.testing.assert_close(summary.mean(name), (value * used).nan_to_num(0.0).sum(dims) / used.sum(dims))
            torch.testing.assert_close(summary.max(name), value.masked_fill(~used, -math.inf).amax(dims))
            torch.testing.assert_close(summary.min(name), value.masked_fill(~used, math.inf).amin(dims))

    def test_the_nan_of_a_single_visible_key_is_skipped_and_counted(self):
        _, stats, _ = observed()
        summary = stats.reduce("all")
        value = stats.normalized_entropy
        torch.testing.assert_close(summary.mean("normalized_entropy"), value.nanmean())
        assert int(summary.nan_count("normalized_entropy")) == int((stats.count == 1).sum()) == 1

    def test_empty_and_nan_rows_are_counted_apart(self):
        x = torch.randn(1, 2, 6, 4)
        x[0, 1, 4] = math.nan
        _, stats = poise.observe(x, x, x, mask=poise.lengths(6, 1) & poise.causal(), impl="reference")
        summary = stats.reduce("head")
        assert summary.rows.tolist() == [6, 6]
        assert summary.empty_rows.tolist() == [1, 1]
        assert summary.nan_rows.tolist() == [0, 2]
        assert not summary.mean("entropy").isnan().any()

    @pytest.mark.parametrize("by", ["head", "batch", "all"])
    def test_merging_equals_one_call_over_all_rows(self, by):
        _, whole, _ = observed(SINKS["ordinary"])
        parts = [ScoreStats(p, whole.sink) for p in whole.packed.split([4, 5], dim=-1)]
        merged, direct = parts[0].reduce(by).merge(parts[1].reduce(by)), whole.reduce(by)
        for name in EDGES:
            torch.testing.assert_close(merged.moments[name], direct.moments[name])
            assert torch.equal(merged.histograms[name], direct.histograms[name])
        assert torch.equal(merged.row_counts, direct.row_counts)

    def test_crosses_machines_as_json(self):
        _, stats, _ = observed()
        summary = stats.reduce("head")
        restored = ScoreSummary.from_dict(json.loads(json.dumps(summary.to_dict())))
        for name in EDGES:
            assert torch.equal(restored.mean(name).nan_to_num(), summary.mean(name).nan_to_num())
            assert torch.equal(restored.histograms[name], summary.histograms[name])
        assert restored.merge(summary).rows.tolist() == (2 * summary.rows).tolist()

    def test_quantiles_come_within_a_bin_of_the_sorted_rows(self):
        packed = torch.zeros(len(FIELDS), 1, 1, 20001)
        values = torch.linspace(-30, 90, 20001)
        packed[FIELDS.index("max_score")] = values
        packed[FIELDS.index("count")] = 5
        summary = ScoreStats(packed).reduce("all")
        for q in (0.0, 0.01, 0.25, 0.5, 0.9, 0.999, 1.0):
            exact = float(values.quantile(q))
            assert abs(float(summary.quantile("max_score", q)) - exact) <= max(abs(exact) * (2**0.25 - 1), 2**-6)
        assert float(summary.quantile("max_score", 0.0)) == -30.0
        assert float(summary.quantile("max_score", 1.0)) == 90.0

    def test_nothing_summarised_gives_nan_and_not_an_error(self):
        x = torch.randn(1, 2, 0, 4)
        _, stats = poise.observe(x, x, x, impl="reference")
        summary = stats.reduce("head")
        for value in (summary.mean("lse"), summary.max("lse"), summary.min("lse"), summary.quantile("lse", 0.5)):
            assert value.isnan().all()

    def test_sink_share_counts_heads_above_the_threshold(self):
        packed = torch.zeros(len(FIELDS), 1, 4, 3)
        packed[FIELDS.index("count")] = 2
        packed[FIELDS.index("sink_mass")] = torch.tensor([0.1, 0.29, 0.31, 0.9])[None, :, None]
        summary = ScoreStats(packed).reduce("head")
        assert float(summary.sink_share()) == 0.5
        assert float(summary.sink_share(0.05)) == 1.0

    def test_is_cut_off_from_autograd(self):
        _, stats, _ = observed(grad=True)
        assert not stats.reduce("head").mean("entropy").requires_grad

    def test_unknown_words_are_errors_that_name_the_choices(self):
        _, stats, _ = observed()
        with pytest.raises(ValueError, match="head, batch, layer, all"):
            stats.reduce("heads")
        with pytest.raises(ValueError, match="max_logit"):
            stats.reduce("head").mean("maxlogit")
        with pytest.raises(ValueError, match="in \\[0, 1\\]"):
            stats.reduce("head").quantile("lse", 50)

    def test_summaries_of_different_kinds_do_not_add(self):
        _, stats, _ = observed()
        with pytest.raises(ValueError, match="reduce both the same way"):
            stats.reduce("head").merge(stats.reduce("all"))

    def test_a_foreign_format_is_refused(self):
        _, stats, _ = observed()
        with pytest.raises(ValueError, match="format"):
            ScoreSummary.from_dict({**stats.reduce("head").to_dict(), "format": 99})
