"""scaled_dot_product_attention means what torch's means, on torch's own samples and on the corners between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_methods_invocations import op_db

import poise
from poise import scaled_dot_product_attention as sdpa

OPERATOR = next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def samples(dtype: torch.dtype) -> list[tuple[tuple[Tensor, ...], dict[str, Any]]]:
    """Arguments of torch's OpInfo samples."""
    return [
        ((sample.input, *sample.args), sample.kwargs)
        for sample in OPERATOR.sample_inputs("cpu", dtype, requires_grad=False)
    ]


def in_math(*tensors: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*tensors, **options)


def cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def cast_all(options: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: cast(value, dtype) for name, value in options.items()}


def assert_agrees(got: Tensor, *tensors: Tensor, **options: Any) -> None:
    """Within twice torch's own error plus 4 eps of the exact result.

    Exact is what torch computes in float64. For float64 itself, torch's own error is that of float32 times the ratio of
    their eps, and counts once more because the "exact" result has it.
    """
    theirs = in_math(*tensors, **options)
    exact = in_math(*(cast(x, torch.float64) for x in tensors), **cast_all(options, torch.float64))
    assert got.shape == theirs.shape
    assert got.dtype == theirs.dtype
    allowed, eps = 2 * (theirs.double() - exact).abs().amax(), torch.finfo(got.dtype).eps
    if got.dtype == torch.float64:
        single = in_math(*(cast(x, torch.float32) for x in tensors), **cast_all(options, torch.float32))
        allowed = 3 * (single.double() - exact).abs().amax() * eps / torch.finfo(torch.float32).eps
    assert (got.double() - exact).abs().amax() <= allowed + 4 * eps * exact.abs().amax()


def qkv(*lead: int, n: int = 5, m: int = 7, d: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(*lead, n, d), torch.randn(*lead, m, d), torch.randn(*lead, m, d)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_torch_on_its_own_samples(dtype: torch.dtype) -> None:
    compared = [(tensors, options) for tensors, options in samples(dtype) if not options["dropout_p"]]
    assert len(compared) > 10
    for tensors, options in compared:
        assert_agrees(sdpa(*tensors, **options), *tensors, **options)


def test_dropout_on_torchs_samples_keeps_weights_doubled_or_drops_them() -> None:
    compared = [(tensors, options) for tensors, options in samples(torch.float32) if options["dropout_p"]]
    assert compared
    for (query, key, _), options in compared:
        identity = torch.eye(key.shape[-2]).expand(*key.shape[:-1], -1)  # the output is the weights
        weights = sdpa(query, key, identity, **{**options, "dropout_p": 0.0})
        dropped = sdpa(query, key, identity, **options)
        factor = 1 / (1 - options["dropout_p"])
        assert ((dropped == 0) | torch.isclose(dropped, weights * factor)).all()
        assert ((dropped == 0) & (weights > 0)).any()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3), (1, 2, 2, 3)], ids=lambda lead: f"{len(lead) + 2}d")
def test_any_number_of_leading_dims(lead: tuple[int, ...], is_causal: bool) -> None:
    tensors = qkv(*lead)
    assert_agrees(sdpa(*tensors, is_causal=is_causal), *tensors, is_causal=is_causal)


@pytest.mark.parametrize(("n", "m"), [(5, 7), (7, 5), (1, 6), (6, 1)])
def test_is_causal_starts_at_the_top_left(n: int, m: int) -> None:
    tensors = qkv(2, 3, n=n, m=m)
    assert_agrees(sdpa(*tensors, is_causal=True), *tensors, is_causal=True)


@pytest.mark.parametrize(
    "shape",
    [(), (1,), (7,), (5, 7), (1, 7), (5, 1), (3, 5, 7), (1, 1, 7), (2, 3, 5, 7), (2, 1, 1, 7), (1, 1, 5, 7)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_broadcast_from_the_right(shape: tuple[int, ...], kind: str) -> None:
    tensors = qkv(2, 3)
    mask = torch.randn(shape)
    if kind == "bool":
        mask = (mask > -1) | (torch.arange(mask.shape[-1] if shape else 1) == 0).view(shape and -1)  # no row is empty
    assert_agrees(sdpa(*tensors, attn_mask=mask), *tensors, attn_mask=mask)


def test_true_means_may_attend() -> None:
    query, key, value = qkv(1, 1)
    only_third = torch.zeros(5, 7, dtype=torch.bool)
    only_third[:, 2] = True
    torch.testing.assert_close(sdpa(query, key, value, attn_mask=only_third), value[:, :, 2:3].expand(1, 1, 5, 8))


def test_masks_of_five_dims_broadcast_with_five_dim_queries() -> None:
    tensors = qkv(2, 2, 3)
    for shape in [(2, 2, 3, 5, 7), (2, 1, 1, 5, 7), (1, 2, 1, 1, 7), (2, 3, 5, 7), (3, 5, 7)]:
        mask = torch.randn(shape)
        assert_agrees(sdpa(*tensors, attn_mask=mask), *tensors, attn_mask=mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_takes_float32_masks(dtype: torch.dtype) -> None:
    tensors = tuple(tensor.to(dtype) for tensor in qkv(2, 3))
    mask = torch.randn(5, 7)
    assert_agrees(sdpa(*tensors, attn_mask=mask), *tensors, attn_mask=mask.to(dtype).float())


def test_leading_dims_broadcast_as_in_a_matmul() -> None:
    query, key, value = torch.randn(4, 3, 5, 8), torch.randn(1, 3, 7, 8), torch.randn(3, 7, 8)
    assert_agrees(sdpa(query, key, value), query, key, value)


def test_a_single_key_head_broadcasts_without_enable_gqa() -> None:
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 1, 7, 8), torch.randn(2, 1, 7, 8)
    assert_agrees(sdpa(query, key, value), query, key, value)


@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 2), (1, 1), (4, 4), (2, 1), (1, 4)])
@pytest.mark.parametrize("lead", [(), (2,), (2, 2)], ids=lambda lead: f"{len(lead) + 3}d")
def test_enable_gqa_shares_heads_in_order(lead: tuple[int, ...], key_heads: int, value_heads: int) -> None:
    tensors = torch.randn(*lead, 4, 5, 8), torch.randn(*lead, key_heads, 7, 8), torch.randn(*lead, value_heads, 7, 8)
    assert_agrees(sdpa(*tensors, enable_gqa=True), *tensors, enable_gqa=True)


def test_value_dim_may_differ_from_the_key_dim() -> None:
    query, key, _ = qkv(2, 3)
    value = torch.randn(2, 3, 7, 20)
    assert_agrees(sdpa(query, key, value), query, key, value)


@pytest.mark.parametrize("scale", [0.3, 2.0, -1.0, 0.0, 1])
def test_scale_replaces_the_square_root(scale: float) -> None:
    tensors = qkv(2, 3)
    assert_agrees(sdpa(*tensors, scale=scale), *tensors, scale=scale)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [torch.nan, torch.inf])
def test_a_scale_that_is_not_finite_gives_nan_as_in_torchs_unfused_path(scale: float, masked: bool) -> None:
    leaves = [tensor.requires_grad_() for tensor in qkv(2, 3)]
    mask = torch.randn(5, 7) if masked else None
    got = sdpa(*leaves, attn_mask=mask, scale=scale)
    assert got.isnan().all()
    assert in_math(*leaves, attn_mask=mask, scale=scale).isnan().all()
    assert all(grad.isnan().all() for grad in torch.autograd.grad(got.sum(), leaves))


def test_a_scale_of_nan_leaves_rows_that_see_nothing_at_zero() -> None:
    seen = torch.ones(5, 7, dtype=torch.bool)
    seen[2] = False
    got = sdpa(*qkv(2, 3), attn_mask=seen, scale=torch.nan)
    assert (got[:, :, 2] == 0).all()
    assert got[:, :, [0, 1, 3, 4]].isnan().all()


NUMBERS = [2, True, np.float32(0.5), np.float64(0.5), np.float16(0.5), np.int64(2), torch.tensor(0.5), torch.tensor(2)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", NUMBERS, ids=repr)
def test_scale_is_any_number_that_torch_takes(scale: Any, masked: bool) -> None:
    tensors, mask = qkv(2, 3), torch.randn(5, 7) if masked else None
    got = sdpa(*tensors, attn_mask=mask, scale=scale)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(*tensors, attn_mask=mask, scale=scale))


@pytest.mark.parametrize("name", ["scale", "dropout_p"])
@pytest.mark.parametrize("value", [torch.ones(1), torch.ones(3), torch.tensor(0.5, requires_grad=True), "0.5", 1j])
def test_what_torch_takes_for_no_number_is_refused(name: str, value: Any) -> None:
    tensors = qkv(2, 3)
    for function in (sdpa, F.scaled_dot_product_attention):
        with pytest.raises(TypeError, match=name):
            function(*tensors, **{name: value})


@pytest.mark.parametrize("name", ["is_causal", "enable_gqa"])
@pytest.mark.parametrize("value", [1, 0, None, "no", np.True_, torch.tensor(True)], ids=repr)
def test_flags_are_bools_as_in_torch(name: str, value: Any) -> None:
    tensors = qkv(2, 3)
    for function in (sdpa, F.scaled_dot_product_attention):
        with pytest.raises(TypeError, match=name):
            function(*tensors, **{name: value})


def test_arguments_have_torchs_order() -> None:
    tensors = qkv(2, 3)
    mask = torch.randn(5, 7)
    torch.testing.assert_close(
        sdpa(*tensors, mask, 0.0, False), F.scaled_dot_product_attention(*tensors, mask, 0.0, False)
    )
    with pytest.raises(TypeError):
        sdpa(*tensors, None, 0.0, False, 0.5)  # type: ignore[misc]  # scale is keyword-only, as in torch


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_mask_and_is_causal_hold_both(kind: str) -> None:
    query, key, value = qkv(2, 3)
    mask = torch.randn(5, 7)
    seen = torch.ones(5, 7, dtype=torch.bool).tril()
    if kind == "bool":
        mask = (mask > 0) | (torch.arange(7) == 0)
        both = mask & seen
    else:
        both = mask.masked_fill(~seen, -torch.inf)
    got = sdpa(query, key, value, attn_mask=mask, is_causal=True)
    assert_agrees(got, query, key, value, attn_mask=both)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=True))


@pytest.mark.parametrize(
    "mask", [torch.zeros(5, 7, dtype=torch.bool), torch.full((5, 7), -torch.inf)], ids=["bool", "-inf"]
)
def test_rows_that_see_nothing_give_zero(mask: Tensor) -> None:
    tensors = qkv(2, 3)
    assert (sdpa(*tensors, attn_mask=mask) == 0).all()
    assert (in_math(*tensors, attn_mask=mask) == 0).all()


def test_rows_of_finfo_min_give_the_mean_of_the_values() -> None:
    query, key, value = qkv(2, 3)
    mask = torch.full((5, 7), torch.finfo(torch.float32).min)
    got = sdpa(query, key, value, attn_mask=mask)
    torch.testing.assert_close(got, value.mean(-2, keepdim=True).expand(2, 3, 5, 8))
    torch.testing.assert_close(got, in_math(query, key, value, attn_mask=mask))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["key", "value"])
def test_poison_in_masked_keys_and_values_is_kept_out(where: str, poison: float) -> None:
    query, key, value = qkv(2, 3, n=7)
    clean = sdpa(query, key[:, :, :4], value[:, :, :4], attn_mask=torch.ones(7, 4).bool())
    (key if where == "key" else value)[:, :, 4:] = poison
    got = sdpa(query, key, value, attn_mask=(torch.arange(7) < 4).expand(7, 7))
    torch.testing.assert_close(got, clean)


def test_poison_in_the_future_leaves_causal_rows_alone() -> None:
    query, key, value = qkv(2, 3, m=5)
    clean = sdpa(query, key, value, is_causal=True)
    value[:, :, -1] = torch.nan
    got = sdpa(query, key, value, is_causal=True)
    torch.testing.assert_close(got[:, :, :-1], clean[:, :, :-1])
    assert got[:, :, -1].isnan().all()


def test_poison_that_is_attended_shows() -> None:
    query, key, value = qkv(2, 3)
    key[0, 0, 3, 0] = torch.nan
    got = sdpa(query, key, value)
    assert got[0, 0].isnan().all()
    assert not got[0, 1:].isnan().any()


@pytest.mark.parametrize(("n", "m", "b"), [(0, 4, 2), (4, 0, 2), (4, 4, 0)])
def test_empty_tensors_have_torchs_results(n: int, m: int, b: int) -> None:
    tensors = qkv(b, 3, n=n, m=m)
    torch.testing.assert_close(sdpa(*tensors), in_math(*tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_autocast_casts_what_torchs_own_operator_casts(dtype: torch.dtype) -> None:
    query, key, value = (tensor.to(dtype) for tensor in qkv(2, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sdpa(query, key, value).dtype == F.scaled_dot_product_attention(query, key, value).dtype


def test_tensors_on_a_device_without_autocast_are_fine() -> None:
    query, key, value = (tensor.to("meta") for tensor in qkv(2, 3))
    assert sdpa(query, key, value, is_causal=True).shape == (2, 3, 5, 8)


def test_autocast_joins_mixed_dtypes() -> None:
    query, key, value = qkv(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = sdpa(query, key.bfloat16(), value, attn_mask=torch.zeros(5, 7))
    torch.testing.assert_close(got, sdpa(query.bfloat16(), key.bfloat16(), value.bfloat16()))


def test_gradients_are_torchs() -> None:
    ours = [tensor.double().requires_grad_() for tensor in qkv(2, 3)]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    mask = torch.randn(5, 7, dtype=torch.float64)
    sdpa(*ours, attn_mask=mask).square().sum().backward()
    in_math(*theirs, attn_mask=mask).square().sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_the_gradient_reaches_an_additive_mask() -> None:
    tensors = qkv(2, 3)
    mask = torch.randn(3, 5, 7, requires_grad=True)
    sdpa(*tensors, attn_mask=mask).sum().backward()
    assert mask.grad is not None
    assert mask.grad.shape == mask.shape


def test_dropout_is_repeated_by_the_same_seed() -> None:
    tensors = qkv(2, 3)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(sdpa(*tensors, dropout_p=0.5))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.arange(35.0).view(5, 7)}], ids=str)
@pytest.mark.parametrize("p", [1.0, 1, True, np.float32(1), torch.tensor(1.0)], ids=repr)
def test_dropping_everything_gives_zeros_and_draws_nothing(p: Any, options: dict[str, Any]) -> None:
    leaves = [tensor.requires_grad_() for tensor in qkv(2, 3)]
    for function in (sdpa, F.scaled_dot_product_attention):
        before = torch.get_rng_state()
        out = function(*leaves, dropout_p=p, **options)
        assert torch.equal(torch.get_rng_state(), before)
        assert (out == 0).all()
        assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), leaves))


def test_an_attended_nan_shows_even_if_everything_is_dropped() -> None:
    query, key, value = qkv(2, 3)
    key[0, 0, 3, 0] = torch.nan
    for function in (sdpa, F.scaled_dot_product_attention):
        got = function(query, key, value, dropout_p=1.0)
        assert got[0, 0].isnan().all()
        assert (got[0, 1:] == 0).all()


@pytest.mark.parametrize("p", [0, 0.0, False, np.float32(0), torch.tensor(0.0)], ids=repr)
def test_any_zero_is_no_dropout(p: Any) -> None:
    tensors = qkv(2, 3)
    assert torch.equal(sdpa(*tensors, dropout_p=p), sdpa(*tensors))


@pytest.mark.parametrize("p", [-0.1, 1.5, torch.nan])
def test_a_dropout_that_is_no_probability_is_refused_by_its_name(p: float) -> None:
    with pytest.raises(ValueError, match="dropout_p must be a probability, 0 <= dropout_p <= 1; got"):
        sdpa(*qkv(2, 3), dropout_p=p)


def test_it_replaces_torchs_function_inside_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True, dropout=0.0)
    x = torch.randn(2, 6, 16)
    want = layer(x)
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return poise.scaled_dot_product_attention(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    torch.testing.assert_close(layer(x), want)
    assert calls
