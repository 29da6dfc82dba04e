"""The public operator: what it accepts and returns, which implementation runs, and what surrounds it.

How exact each implementation is, is tested by the case table; here are the paths to it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import poise
from poise import dispatch
from poise.kernels import ops
from poise.testing import check_out, check_stats, truth

ROOT = Path(poise.__file__).parents[1]


def qkv(*, b: int = 2, h: int = 4, g: int = 2, n: int = 9, m: int = 9, d: int = 16, dv: int = 24) -> tuple[Tensor, ...]:
    return torch.randn(b, h, n, d), torch.randn(b, g, m, d), torch.randn(b, g, m, dv)


def swapped(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, H, N, D] tensors as contiguous [B, N, H, D]."""
    return tuple(tensor.transpose(-3, -2).contiguous() for tensor in tensors)


# --- inputs and outputs -----------------------------------------------------------------------------------------------

PLAIN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"mask": poise.causal()},
    "window": {"mask": poise.window(3, 1)},
    "half open window": {"mask": poise.window(None, 2)},
    "scale": {"scale": 0.4},
    "integer scale": {"scale": 1},
    "causal from the start": {"mask": poise.causal(), "q_offset": "start"},
    "causal at the end": {"mask": poise.causal(), "q_offset": "end"},
    "causal further on": {"mask": poise.causal(), "q_offset": 3},
    "causal before": {"mask": poise.causal(), "q_offset": -4},
    "offset without a mask": {"q_offset": 2},
}
RICH: dict[str, dict[str, Any]] = {
    "bool tensor": {"mask": torch.arange(9) < 5},
    "joined": {"mask": poise.causal() & ~poise.window(2)},
    "bias": {"bias": torch.linspace(-1, 1, 9).expand(9, 9)},
    "softcap": {"softcap": 2.0},
    "sink": {"sink": torch.linspace(-1, 1, 4)},
    "scale per head": {"scale": torch.linspace(0.1, 1, 4)},
    "offsets": {"mask": poise.causal(), "q_offset": torch.tensor([0, 2])},
}
RICH["bool tensor"]["mask"] = RICH["bool tensor"]["mask"].expand(9, 9)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("options", [*PLAIN.values(), *RICH.values()], ids=[*PLAIN, *RICH])
def test_every_path_computes_what_was_asked(options: dict[str, Any], layout: str, impl: str) -> None:
    tensors = qkv() if layout == "bhsd" else swapped(*qkv())
    call = {**dict(zip("qkv", tensors, strict=True)), **options, "layout": layout}
    expected = truth(**call, sink_keys=(0,))
    check_out(poise.attention(**call, impl=impl), expected)
    out, stats = poise.observe(**call, impl=impl)
    check_out(out, expected)
    check_stats(stats.packed, expected)


@pytest.mark.parametrize("rank", [2, 3])
def test_leading_dims_may_be_left_out(rank: int, impl: str) -> None:
    whole = qkv(b=1, h=4, g=2) if rank == 3 else qkv(b=1, h=1, g=1)
    out, stats = poise.observe(*whole, mask=poise.causal(), impl=impl)
    part = tuple(tensor[(0,) * (4 - rank)] for tensor in whole)
    part_out, part_stats = poise.observe(*part, mask=poise.causal(), impl=impl)
    assert torch.equal(part_out, out[(0,) * (4 - rank)])
    assert torch.equal(part_stats.entropy, stats.entropy[(0,) * (4 - rank)])
    assert torch.equal(poise.attention(*part, mask=poise.causal(), impl=impl), part_out)


def test_a_sink_goes_with_any_rank(impl: str) -> None:
    q, k, v = qkv(b=1, h=1, g=1)
    sink = torch.tensor([0.5])
    _, stats = poise.observe(q, k, v, sink=sink, impl=impl)
    _, flat = poise.observe(q[0, 0], k[0, 0], v[0, 0], sink=sink, impl=impl)
    assert torch.equal(flat.lse, stats.lse[0, 0])


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_bshd_is_the_same_call_with_axes_swapped(rank: int, impl: str) -> None:
    whole = qkv(b=1 if rank < 4 else 2, h=1 if rank == 2 else 4, g=1 if rank == 2 else 2)
    part = tuple(tensor[(0,) * (4 - rank)] for tensor in whole)
    other = part if rank == 2 else swapped(*part)
    out, stats = poise.observe(*part, mask=poise.causal(), impl=impl)
    other_out, other_stats = poise.observe(*other, mask=poise.causal(), layout="bshd", impl=impl)
    torch.testing.assert_close(other_out if rank == 2 else other_out.transpose(-3, -2), out)
    assert other_stats.lse.shape == stats.lse.shape
    torch.testing.assert_close(other_stats.lse, stats.lse)


@pytest.mark.parametrize("options", [PLAIN["causal"], RICH["bias"]], ids=["plain", "rich"])
def test_a_bshd_output_lies_in_memory_as_its_inputs(options: dict[str, Any], impl: str) -> None:
    out = poise.attention(*swapped(*qkv()), layout="bshd", impl=impl, **options)
    assert out.shape == (2, 9, 4, 24)
    assert out.is_contiguous()


def test_a_bhsd_output_is_contiguous(impl: str) -> None:
    assert poise.attention(*qkv(), impl=impl).is_contiguous()


def test_any_strides_are_read_as_they_are(impl: str) -> None:
    q, k, v = qkv(g=4, dv=16)
    fused = torch.stack([q, k, v], dim=-2).flatten(-2)  # [B, H, N, 3 D]
    sliced = fused.split(16, -1)
    torch.testing.assert_close(poise.attention(*sliced, impl=impl), poise.attention(q, k, v, impl=impl))
    turned = tuple(tensor.mT.contiguous().mT for tensor in (q, k, v))  # the last dim is not contiguous
    torch.testing.assert_close(poise.attention(*turned, impl=impl), poise.attention(q, k, v, impl=impl))


def test_inputs_are_not_written_to(impl: str) -> None:
    tensors = qkv()
    before = [tensor.clone() for tensor in tensors]
    poise.observe(*tensors, mask=poise.causal(), softcap=3.0, impl=impl)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


@pytest.mark.parametrize(("b", "h", "n", "m"), [(0, 4, 3, 3), (2, 0, 3, 3), (2, 4, 0, 3), (2, 4, 3, 0), (0, 0, 0, 0)])
def test_empty_tensors_are_fine(b: int, h: int, n: int, m: int, impl: str) -> None:
    out, stats = poise.observe(*qkv(b=b, h=h, g=h // 2, n=n, m=m), impl=impl)
    assert out.shape == (b, h, n, 24)
    assert (out == 0).all()
    assert stats.lse.shape == (b, h, n)
    assert (stats.count == m).all()


@pytest.mark.parametrize(
    "options",
    [{"scale": 0.5}, {"scale": 2}, {"softcap": 3.0}, {"dropout": 0.25}, {"q_offset": 2, "mask": poise.causal()}],
    ids=str,
)
def test_numbers_of_numpy_are_numbers(options: dict[str, Any], impl: str) -> None:
    tensors = qkv(n=4)
    name, number = next(iter(options.items()))
    kinds = (np.int64, np.int32) if isinstance(number, int) else (np.float64, np.float32, np.float16)
    torch.manual_seed(1)
    expected = poise.attention(*tensors, **options, impl=impl)
    for kind in kinds:
        torch.manual_seed(1)
        assert torch.equal(poise.attention(*tensors, **{**options, name: kind(number)}, impl=impl), expected)


def test_sink_keys_may_be_integers_of_numpy(impl: str) -> None:
    _, stats = poise.observe(*qkv(), sink_keys=np.array([0, 3]), impl=impl)
    _, plain = poise.observe(*qkv(), sink_keys=(0, 3), impl=impl)
    assert stats.sink_keys == plain.sink_keys == (0, 3)


@pytest.mark.parametrize("shape", [(), (1,), (9,), (9, 1), (4, 1, 9), (2, 1, 1, 9)], ids=str)
def test_a_bool_mask_of_any_rank_broadcasts(shape: tuple[int, ...], impl: str) -> None:
    q, k, v = qkv()
    seen = torch.rand(shape) < 0.7
    out = poise.attention(q, k, v, mask=seen, impl=impl)
    assert torch.equal(out, poise.attention(q, k, v, mask=seen.expand(2, 4, 9, 9).contiguous(), impl=impl))


def test_the_default_device_plays_no_part(impl: str) -> None:
    tensors = qkv()

    def call() -> tuple[Tensor, Tensor]:
        mask = poise.documents(cu_seqlens=[0, 4, 9]) & (poise.window(3) | poise.global_tokens([0])) | poise.lengths(
            [3, 5]
        )
        mask |= poise.blocks([[True, False], [False, True]], 5)
        torch.manual_seed(0)
        out, stats = poise.observe(*tensors, mask=mask, dropout=0.2, sink_keys=(0, 1), impl=impl)
        return out, stats.sink_mass

    expected = call()
    with torch.device("meta"):
        got = call()
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


# --- q_offset ---------------------------------------------------------------------------------------------------------


def test_the_last_queries_of_a_causal_call_are_a_call_at_the_end(impl: str) -> None:
    q, k, v = qkv()
    whole = poise.attention(q, k, v, mask=poise.causal(), impl=impl)
    tail = poise.attention(q[:, :, 5:], k, v, mask=poise.causal(), q_offset="end", impl=impl)
    torch.testing.assert_close(tail, whole[:, :, 5:])


def test_start_is_offset_zero_and_a_number_is_itself(impl: str) -> None:
    q, k, v = qkv(n=4)
    for word, number in (("start", 0), ("end", 5)):
        by_word = poise.attention(q, k, v, mask=poise.causal(), q_offset=word, impl=impl)
        assert torch.equal(by_word, poise.attention(q, k, v, mask=poise.causal(), q_offset=number, impl=impl))


def test_each_sequence_may_have_its_own_offset(impl: str) -> None:
    q, k, v = qkv(n=4)
    out = poise.attention(q, k, v, mask=poise.causal(), q_offset=torch.tensor([1, 5]), impl=impl)
    for index, offset in enumerate((1, 5)):
        one = (tensor[index : index + 1] for tensor in (q, k, v))
        alone = poise.attention(*one, mask=poise.causal(), q_offset=offset, impl=impl)
        torch.testing.assert_close(out[index : index + 1], alone)


def test_a_lowered_mask_brings_its_offset(impl: str) -> None:
    q, k, v = qkv(n=4)
    mask = poise.causal() | poise.prefix(2)
    lowered = mask.lower(4, 9, q_offset="end")
    out = poise.attention(q, k, v, mask=lowered, impl=impl)
    torch.testing.assert_close(out, poise.attention(q, k, v, mask=mask, q_offset="end", impl=impl))


# --- statistics -------------------------------------------------------------------------------------------------------


def test_observe_gives_the_output_of_attention(impl: str) -> None:
    tensors = qkv()
    out, _ = poise.observe(*tensors, mask=poise.causal(), impl=impl)
    torch.testing.assert_close(out, poise.attention(*tensors, mask=poise.causal(), impl=impl))


@pytest.mark.parametrize("sink_keys", [(0,), (1, 4), (4, 1, 1), [0, 100], (100,), ()], ids=str)
def test_sink_mass_is_the_weight_on_the_sink_keys(sink_keys: Any, impl: str) -> None:
    q, k, v = qkv()
    _, stats = poise.observe(q, k, v, sink_keys=sink_keys, impl=impl)
    weights = poise.scores(q, k, stage="prob")
    inside = sorted({key for key in sink_keys if key < 9})
    torch.testing.assert_close(stats.sink_mass, weights[..., inside].sum(-1))


def test_merging_halves_of_the_keys_gives_the_whole(impl: str) -> None:
    q, k, v = qkv()
    parts = [poise.observe(q, k[:, :, part], v[:, :, part], impl=impl) for part in (slice(0, 4), slice(4, 9))]
    out, stats = poise.merge(*parts)
    whole, whole_stats = poise.observe(q, k, v, impl=impl)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(stats.entropy, whole_stats.entropy)


def test_merge_knows_the_layout(impl: str) -> None:
    q, k, v = swapped(*qkv())
    halves = (slice(0, 4), slice(4, 9))
    parts = [poise.observe(q, k[:, part], v[:, part], layout="bshd", impl=impl) for part in halves]
    out, _ = poise.merge(*parts)
    torch.testing.assert_close(out, poise.attention(q, k, v, layout="bshd", impl=impl))


# --- which implementation runs ----------------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the validated implementations that ran, in order; the direct way appears as "direct"."""
    names: list[str] = []

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            return function(*args, **kwargs)

        return call

    for name, module in (("cpu", ops), ("blockwise", dispatch.blockwise), ("reference", dispatch.reference)):
        monkeypatch.setattr(module, "run", counted(name, module.run))
    if ops.available():
        monkeypatch.setattr("poise.op.attend", counted("direct", ops.attend))
        monkeypatch.setattr("poise.op.attend_observed", counted("direct", ops.attend_observed))
    return names


@pytest.mark.parametrize("name", ["blockwise", "reference"])
@pytest.mark.parametrize("function", [poise.attention, poise.observe])
def test_the_implementation_asked_for_is_the_one_that_runs(function: Any, name: Any, ran: list[str]) -> None:
    function(*qkv(), impl=name)
    assert ran == [name]


@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("function", [poise.attention, poise.observe])
@pytest.mark.usefixtures("native")
def test_plain_calls_go_straight_to_the_kernels(function: Any, options: dict[str, Any], ran: list[str]) -> None:
    function(*qkv(), **{**options, "scale": float(options.get("scale", 1.0))})
    assert ran == ["direct"]


@pytest.mark.parametrize("options", RICH.values(), ids=RICH)
@pytest.mark.usefixtures("native")
def test_other_calls_reach_the_kernels_validated(options: dict[str, Any], ran: list[str]) -> None:
    poise.attention(*qkv(), **options)
    assert ran == ["cpu"]


def test_float64_runs_blockwise(ran: list[str]) -> None:
    poise.attention(*(tensor.double() for tensor in qkv()))
    assert ran[-1] == "blockwise"
    assert "cpu" not in ran


def test_dropout_runs_on_the_kernels(ran: list[str]) -> None:
    poise.attention(*qkv(), dropout=0.5)
    assert ran == ["cpu"]


def grown(name: str) -> dict[str, Any]:
    """A call one of whose tensors requires grad."""
    call: dict[str, Any] = dict(zip("qkv", qkv(), strict=True))
    if name in call:
        call[name].requires_grad_()
        return call
    tensor = torch.rand({"bias": (9, 9), "table": (4, 5)}.get(name, (4,)), requires_grad=True)
    wrapped = {"slopes": ("bias", poise.alibi), "table": ("bias", poise.relative)}
    argument, wrap = wrapped.get(name, (name, lambda tensor: tensor))
    return {**call, argument: wrap(tensor)}


GROWN = ["q", "k", "v", "bias", "slopes", "table", "scale", "sink"]


@pytest.mark.parametrize("name", GROWN)
@pytest.mark.parametrize("function", [poise.attention, poise.observe])
def test_whatever_requires_grad_keeps_its_graph(function: Any, name: str, impl: str) -> None:
    result = function(**grown(name), impl=impl)
    out = result if isinstance(result, Tensor) else result[0]
    assert out.requires_grad


@pytest.mark.parametrize("name", GROWN)
@pytest.mark.usefixtures("native")
def test_under_no_grad_the_kernels_run(name: str, ran: list[str]) -> None:
    with torch.no_grad():
        out = poise.attention(**grown(name), impl="cpu")
    assert not out.requires_grad
    assert ran == (["direct"] if name in "qkv" else ["cpu"])


def test_impl_cpu_does_not_run_anything_else(ran: list[str]) -> None:
    with pytest.raises(ValueError, match="float64"):
        poise.attention(*(tensor.double() for tensor in qkv()), impl="cpu")
    assert ran == []


@pytest.mark.parametrize("name", ["max_logit", "max_score", "max_prob", "min_score", "count"])
def test_extremes_and_counts_have_no_gradient(name: str, impl: str) -> None:
    _, stats = poise.observe(**grown("q"), impl=impl)  # type: ignore[arg-type]
    assert not getattr(stats, name).requires_grad


def test_statistics_are_differentiable() -> None:
    q, k, v = qkv()
    q.requires_grad_()
    _, stats = poise.observe(q, k, v, mask=poise.causal())
    stats.entropy.sum().backward()
    assert q.grad is not None
    assert q.grad.abs().sum() > 0


def test_forward_mode_is_not_cut_off(impl: str) -> None:
    q, k, v = qkv()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.randn_like(q))
        if impl == "cpu":
            with pytest.raises(ValueError, match="forward mode"):
                poise.attention(dual, k, v, impl="cpu")
        else:
            out = poise.attention(dual, k, v, impl=impl)  # type: ignore[arg-type]
            assert forward_ad.unpack_dual(out).tangent is not None
        assert forward_ad.unpack_dual(poise.attention(dual, k, v)).tangent is not None


def test_torch_func_sees_every_step() -> None:
    q, k, v = qkv()
    by_func = torch.func.grad(lambda query: poise.attention(query, k, v, mask=poise.causal()).square().sum())(q)
    leaf = q.clone().requires_grad_()
    poise.attention(leaf, k, v, mask=poise.causal()).square().sum().backward()
    torch.testing.assert_close(by_func, leaf.grad)


def test_vmap_adds_a_batch() -> None:
    q, k, v = (torch.stack([tensor, tensor + 1]) for tensor in qkv())
    got = torch.func.vmap(lambda q, k, v: poise.attention(q, k, v, mask=poise.causal()))(q, k, v)
    for index in range(2):
        torch.testing.assert_close(got[index], poise.attention(q[index], k[index], v[index], mask=poise.causal()))


@pytest.mark.parametrize(
    "options", [{}, PLAIN["causal"], RICH["softcap"], RICH["bias"]], ids=["nothing", "causal", "softcap", "bias"]
)
def test_compiled_whole_it_gives_the_same(options: dict[str, Any]) -> None:
    tensors = qkv()

    def call(*tensors: Tensor) -> Tensor:
        return poise.attention(*tensors, **options)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), call(*tensors))


def test_compiled_around_a_mask_that_must_be_lowered_it_gives_the_same() -> None:
    tensors = qkv()

    def call(*tensors: Tensor) -> Tensor:
        return poise.attention(*tensors, mask=poise.causal() | poise.prefix(3)) + 1

    torch.testing.assert_close(torch.compile(call, backend="aot_eager")(*tensors), call(*tensors))


# --- dropout and torch's generator ------------------------------------------------------------------------------------


def test_dropout_repeats_with_the_seed() -> None:
    tensors = qkv()
    outs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outs.append(poise.attention(*tensors, dropout=0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_every_implementation_drops_the_same_weights(impl: str) -> None:
    tensors = qkv()
    outs = []
    for name in (impl, "reference"):
        torch.manual_seed(3)
        outs.append(poise.attention(*tensors, dropout=0.5, impl=name))  # type: ignore[arg-type]
    torch.testing.assert_close(outs[0], outs[1])


@pytest.mark.parametrize("call", ["attention", "explain", "raises"])
def test_the_generator_advances_for_dropout_alone(call: str) -> None:
    tensors = qkv()
    before = torch.random.get_rng_state()
    if call == "attention":
        poise.attention(*tensors)
    elif call == "explain":
        poise.explain(*tensors, dropout=0.5)
    else:
        with pytest.raises(ValueError, match="softcap"):
            poise.attention(*tensors, dropout=0.5, softcap=-1.0)
    assert torch.equal(torch.random.get_rng_state(), before)


# --- scores and received ----------------------------------------------------------------------------------------------


def test_scores_shows_each_stage_of_the_definition() -> None:
    q, k, _ = qkv(g=4)
    bias = torch.randn(9, 9)
    call: dict[str, Any] = {"scale": 0.7, "softcap": 2.0, "bias": bias, "mask": poise.causal()}
    raw = 0.7 * q @ k.mT
    capped = 2 * torch.tanh(raw / 2)
    biased = (capped + bias).masked_fill(~torch.ones(9, 9).bool().tril(), -torch.inf)
    for stage, want in (("raw", raw), ("capped", capped), ("biased", biased), ("prob", biased.softmax(-1))):
        torch.testing.assert_close(poise.scores(q, k, stage=stage, **call), want)  # type: ignore[arg-type]
    torch.testing.assert_close(poise.scores(q, k, **call), biased)


@pytest.mark.parametrize(
    "part", [slice(2, 5), slice(-3, None), slice(None, None, 2), slice(20, 30), slice(5, 2)], ids=str
)
@pytest.mark.parametrize("stage", ["raw", "biased", "prob"])
def test_a_tile_of_scores_is_a_part_of_them_all(part: slice, stage: Any) -> None:
    q, k, _ = qkv(m=12)
    call: dict[str, Any] = {"mask": poise.causal(), "q_offset": "end", "stage": stage}
    whole = poise.scores(q, k, **call)
    torch.testing.assert_close(poise.scores(q, k, rows=part, **call), whole[:, :, part])
    torch.testing.assert_close(poise.scores(q, k, keys=part, **call), whole[..., part])


def test_probabilities_by_a_known_lse_are_the_same() -> None:
    q, k, v = qkv()
    sink = torch.randn(4)
    _, stats = poise.observe(q, k, v, sink=sink, mask=poise.causal())
    want = poise.scores(q, k, sink=sink, mask=poise.causal(), stage="prob", rows=slice(3, 6), keys=slice(1, 4))
    got = poise.scores(q, k, lse=stats.lse, mask=poise.causal(), stage="prob", rows=slice(3, 6), keys=slice(1, 4))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "options",
    [{}, PLAIN["causal"], RICH["softcap"], RICH["bias"], {"sink": torch.ones(4)}],
    ids=["nothing", "causal", "softcap", "bias", "sink"],
)
def test_received_is_the_sum_of_the_weights_over_queries(options: dict[str, Any]) -> None:
    q, k, v = qkv()
    _, stats = poise.observe(q, k, v, **options)
    want = poise.scores(q, k, stage="prob", **options).sum(-2)
    rest = {name: value for name, value in options.items() if name != "sink"}
    torch.testing.assert_close(poise.received(q, k, stats.lse, **rest), want)


@pytest.mark.parametrize("rank", [2, 3])
def test_scores_and_received_leave_out_the_dims_that_q_left_out(rank: int) -> None:
    q, k, v = (tensor[(0,) * (4 - rank)] for tensor in qkv(b=1, h=1, g=1))
    _, stats = poise.observe(q, k, v)
    assert poise.scores(q, k).shape == (1,) * (rank - 2) + (9, 9)
    assert poise.received(q, k, stats.lse).shape == (1,) * (rank - 2) + (9,)
    torch.testing.assert_close(poise.received(q, k, stats.lse), poise.scores(q, k, stage="prob").sum(-2))


def test_received_and_scores_know_the_layout() -> None:
    q, k, v = qkv()
    _, stats = poise.observe(q, k, v)
    other_q, other_k = swapped(q, k)
    torch.testing.assert_close(
        poise.received(other_q, other_k, stats.lse, layout="bshd"), poise.received(q, k, stats.lse)
    )
    torch.testing.assert_close(poise.scores(other_q, other_k, layout="bshd"), poise.scores(q, k))


# --- explain ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("native")
def test_explain_names_the_kernels_and_their_instruction_set() -> None:
    told = poise.explain(*qkv(), mask=poise.causal())
    assert told.impl == "cpu"
    assert told.isa == ops.isa()
    assert f"cpu ({ops.isa()})" in str(told)


def test_explain_gives_the_reason_for_blockwise() -> None:
    told = poise.explain(*(tensor.double() for tensor in qkv()))
    assert told.impl == "blockwise"
    assert "float64" in told.why
    assert "float64" in str(told)


def test_explain_tells_what_was_asked_for() -> None:
    told = poise.explain(*qkv(), impl="reference")
    assert told.impl == "reference"
    assert told.isa is None
    assert 'impl="reference"' in told.why


def test_explain_raises_what_the_call_would_raise() -> None:
    with pytest.raises(ValueError, match="float64"):
        poise.explain(*(tensor.double() for tensor in qkv()), impl="cpu")


def test_explain_counts_what_is_visible() -> None:
    told = poise.explain(*qkv(), mask=poise.causal())
    assert told.visible == 2 * 4 * 9 * 10 // 2
    assert told.pairs == 2 * 4 * 81
    later = poise.explain(*qkv(n=2), mask=poise.causal(), q_offset="end")
    assert later.visible == 2 * 4 * (8 + 9)


def test_explain_speaks_of_tensors_elsewhere_too() -> None:
    told = poise.explain(*(tensor.to("meta") for tensor in qkv()), mask=poise.causal())
    assert told.impl == "blockwise"
    assert "q is on meta" in str(told)
    assert told.plan is None


# --- without the native library ---------------------------------------------------------------------------------------


def without_native(script: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a Python that can't find the library."""
    source = f"import os; os.environ['POISE_LIBRARY'] = '/nowhere/libpoise.so'\nimport torch, poise\n{script}"
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, cwd=ROOT)


def test_without_the_library_import_is_silent() -> None:
    assert without_native("").stderr == ""


def test_without_the_library_the_first_call_says_so_once() -> None:
    stderr = without_native("for _ in range(3): poise.attention(*torch.randn(3, 1, 1, 4, 8))").stderr
    assert stderr.count("RuntimeWarning") == 1
    assert "many times slower" in stderr


def test_without_the_library_what_was_asked_for_by_name_is_no_news() -> None:
    script = "q = torch.randn(1, 1, 4, 8)\nfor name in ('blockwise', 'reference'): poise.attention(q, q, q, impl=name)"
    assert without_native(script).stderr == ""


def test_without_the_library_impl_cpu_raises_the_reason() -> None:
    script = (
        "q = torch.randn(1, 1, 4, 8)\n"
        "try: poise.attention(q, q, q, impl='cpu')\n"
        "except RuntimeError as error: print(error)"
    )
    printed = without_native(script).stdout
    assert "/nowhere/libpoise.so" in printed
    assert 'impl="blockwise"' in printed
