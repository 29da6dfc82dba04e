"""Bad calls raise before anything is computed, and the message names the argument, what was got and what to do."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import poise


def tensors(*, b: int = 2, h: int = 4, g: int = 4, n: int = 8, m: int = 8, d: int = 16) -> dict[str, Any]:
    return {"q": torch.randn(b, h, n, d), "k": torch.randn(b, g, m, d), "v": torch.randn(b, g, m, d)}


def refuse(error: type[Exception], *said: str, function: Any = poise.attention, **arguments: Any) -> None:
    """The call raises this error, and its message says each of these."""
    with pytest.raises(error) as caught:
        function(**arguments)
    for part in said:
        assert part in str(caught.value)


# --- q, k, v ----------------------------------------------------------------------------------------------------------


def test_an_array_for_q_names_q_and_its_type() -> None:
    refuse(TypeError, "q must be a torch.Tensor", "ndarray", **{**tensors(), "q": np.zeros((1, 1, 2, 2))})


def test_none_for_v_names_v() -> None:
    refuse(TypeError, "v must be a torch.Tensor", "NoneType", **{**tensors(), "v": None})


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_one_dim_names_the_argument_and_its_shape(name: str) -> None:
    refuse(ValueError, f"{name} must have 2 to 4 dims", "[5]", **{**tensors(), name: torch.zeros(5)})


def test_five_dims_name_the_expected_ones() -> None:
    refuse(
        ValueError,
        "q must have 2 to 4 dims, [batch, heads, sequence, dim]",
        **{**tensors(), "q": torch.zeros(1, 1, 1, 1, 1)},
    )


def test_different_ranks_show_all_three_shapes() -> None:
    call = tensors()
    refuse(ValueError, "same number of dims", "q [4, 8, 16], k [2, 4, 8, 16]", **{**call, "q": call["q"][0]})


def test_integers_name_the_dtype() -> None:
    call = {name: tensor.long() for name, tensor in tensors().items()}
    refuse(TypeError, "q must be float32, bfloat16, float16 or float64", "int64", **call)


def test_a_mix_of_dtypes_shows_each_of_them() -> None:
    call = tensors()
    refuse(TypeError, "one dtype", "k bfloat16", "v float32", "Convert", **{**call, "k": call["k"].bfloat16()})


def test_a_mix_of_devices_shows_each_of_them() -> None:
    refuse(
        ValueError,
        "one device",
        "k on meta",
        ".to(q.device)",
        **{**tensors(), "k": torch.zeros(2, 4, 8, 16, device="meta")},
    )


def test_a_sparse_tensor_points_to_masks() -> None:
    call = tensors()
    refuse(
        TypeError,
        "q must be an ordinary dense tensor",
        "sparse",
        "poise.lengths",
        **{**call, "q": call["q"].to_sparse()},
    )


def test_batch_sizes_that_differ_are_shown() -> None:
    call = tensors()
    refuse(ValueError, "same batch size", "k [1, 4, 8, 16]", **{**call, "k": call["k"][:1]})


def test_heads_of_k_and_v_that_differ_are_shown() -> None:
    call = tensors()
    refuse(ValueError, "k and v must have the same number of heads", "4 and 2", **{**call, "v": call["v"][:, :2]})


def test_heads_that_do_not_divide_show_both_numbers() -> None:
    refuse(ValueError, "heads of q must be a multiple", "got 4 and 3", **tensors(g=3))


def test_no_key_heads_is_an_error_of_heads() -> None:
    refuse(ValueError, "heads of q must be a multiple", "got 4 and 0", **tensors(g=0))


def test_heads_read_from_the_wrong_axis_point_to_layout() -> None:
    call = {name: tensor.transpose(1, 2) for name, tensor in tensors(n=6, m=9).items()}
    refuse(ValueError, "pass layout='bshd'", **call)


def test_numbers_of_keys_and_values_that_differ_are_shown() -> None:
    call = tensors()
    refuse(ValueError, "same number of keys", "8 and 7", **{**call, "v": call["v"][:, :, :7]})


def test_head_dims_of_q_and_k_that_differ_are_shown() -> None:
    call = tensors()
    refuse(ValueError, "q and k must have the same head dim", "16 and 8", **{**call, "k": call["k"][..., :8]})


# --- mask and bias ----------------------------------------------------------------------------------------------------


def test_a_float_mask_points_to_bias() -> None:
    refuse(TypeError, "mask must be a bool tensor", "float32", "as bias=", mask=torch.zeros(8, 8), **tensors())


def test_an_integer_mask_points_to_bool() -> None:
    refuse(TypeError, "mask must be a bool tensor", "int64", "mask.bool()", mask=torch.ones(8, 8).long(), **tensors())


def test_a_mask_constructor_that_was_not_called_says_so() -> None:
    refuse(TypeError, "mask must be a mask object", "Call it: poise.causal(...)", mask=poise.causal, **tensors())


def test_a_word_for_a_mask_names_its_type() -> None:
    refuse(TypeError, "mask must be a mask object such as poise.causal()", "got str", mask="causal", **tensors())


def test_a_bool_mask_that_does_not_broadcast_shows_both_shapes() -> None:
    refuse(ValueError, "mask", "(1, 1, 8, 9)", "8", mask=torch.ones(8, 9, dtype=torch.bool), **tensors())


def test_a_mask_on_another_device_names_the_device() -> None:
    refuse(ValueError, "mask", "meta", "cpu", mask=torch.ones(8, 8, dtype=torch.bool, device="meta"), **tensors())


def test_a_negative_window_names_the_side() -> None:
    refuse(ValueError, "window: left must be at least 0, got -1", function=poise.window, left=-1)


def test_a_negative_right_of_a_window_names_the_side() -> None:
    refuse(ValueError, "window: right must be at least 0, got -2", function=poise.window, left=3, right=-2)


def test_lengths_for_another_batch_show_both_numbers() -> None:
    refuse(ValueError, "lengths", "3 values", "batch of 2", mask=poise.lengths(torch.tensor([1, 2, 3])), **tensors())


def test_a_bool_bias_points_to_mask() -> None:
    refuse(TypeError, "bias must be a floating-point tensor", "mask=", bias=torch.ones(8, 8).bool(), **tensors())


def test_an_integer_bias_names_its_dtype() -> None:
    refuse(TypeError, "bias must be a floating-point", "int64", ".float()", bias=torch.ones(8, 8).long(), **tensors())


def test_floats_for_documents_show_the_way_out() -> None:
    refuse(
        TypeError,
        "documents: ids must hold integers",
        "float32",
        ".long()",
        function=poise.documents,
        ids=torch.ones(8),
    )


def test_integers_for_a_relative_table_show_the_way_out() -> None:
    table = torch.ones(4, 3).long()
    refuse(TypeError, "relative: table must hold floats", "int64", ".float()", function=poise.relative, table=table)


def test_a_number_for_a_bias_names_its_type() -> None:
    refuse(TypeError, "bias must be a tensor, poise.alibi(...)", "got float", bias=0.5, **tensors())


def test_a_bias_that_does_not_broadcast_shows_both_shapes() -> None:
    refuse(ValueError, "bias", "(1, 1, 9, 8)", "(2, 4, 8, 8)", bias=torch.zeros(9, 8), **tensors())


def test_alibi_slopes_for_another_number_of_heads_show_both() -> None:
    refuse(ValueError, "alibi has 3 slopes", "4 heads", bias=poise.alibi(torch.ones(3)), **tensors())


def test_a_relative_table_of_even_width_is_refused() -> None:
    refuse(ValueError, "relative: table", "odd", "(4, 6)", function=poise.relative, table=torch.zeros(4, 6))


# --- scale, softcap, sink, dropout ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")])
def test_a_scale_that_is_not_finite_is_refused(scale: float) -> None:
    refuse(ValueError, "scale must be finite", str(scale), "Pass None", scale=scale, **tensors())


def test_a_word_for_a_scale_names_its_type() -> None:
    refuse(TypeError, "scale must be None, a number or a tensor", "str", scale="auto", **tensors())


def test_an_integer_scale_tensor_names_its_dtype() -> None:
    refuse(TypeError, "scale must be a floating-point tensor", "int64", scale=torch.ones(4).long(), **tensors())


def test_a_scale_of_a_wrong_shape_shows_the_right_ones() -> None:
    refuse(ValueError, "scale must be 0-D", "[2|1, 4|1, 8|1]", "[3]", scale=torch.ones(3), **tensors())


def test_a_scale_on_another_device_names_the_device() -> None:
    refuse(ValueError, "scale must be on the device of q", "meta", scale=torch.ones(4, device="meta"), **tensors())


@pytest.mark.parametrize("softcap", [0, 0.0, -1.0, float("nan"), float("inf")])
def test_a_softcap_that_is_not_positive_and_finite_is_refused(softcap: float) -> None:
    refuse(ValueError, "softcap must be positive and finite", str(softcap), "None", softcap=softcap, **tensors())


def test_a_tensor_for_a_softcap_names_its_type() -> None:
    refuse(TypeError, "softcap must be None or a number", "Tensor", softcap=torch.tensor(30.0), **tensors())


def test_a_number_for_a_sink_shows_how_to_make_the_tensor() -> None:
    refuse(TypeError, "sink must be a tensor", "float", "torch.full((4,), logit)", sink=0.0, **tensors())


def test_a_sink_of_a_wrong_shape_shows_the_right_one() -> None:
    refuse(
        ValueError, "sink must hold one logit per query head, [4]", "got [1, 4]", sink=torch.zeros(1, 4), **tensors()
    )


def test_an_integer_sink_names_its_dtype() -> None:
    refuse(TypeError, "sink must be a floating-point tensor", "int64", sink=torch.zeros(4).long(), **tensors())


def test_a_sink_on_another_device_names_the_device() -> None:
    refuse(ValueError, "sink must be on the device of q", "meta", sink=torch.zeros(4, device="meta"), **tensors())


@pytest.mark.parametrize("dropout", [-0.1, 1.0, 1.5, float("nan")])
def test_a_dropout_that_is_no_probability_below_one_is_refused(dropout: float) -> None:
    refuse(ValueError, "dropout must be a probability", str(dropout), dropout=dropout, **tensors())


@pytest.mark.parametrize("impl", [None, "cpu", "blockwise", "reference"])
def test_dropout_true_is_refused_as_certain_and_false_is_none(impl: Any) -> None:
    call = tensors()
    refuse(ValueError, "dropout must be a probability", "True", dropout=True, impl=impl, **call)
    assert torch.equal(poise.attention(**call, dropout=False, impl=impl), poise.attention(**call, impl=impl))


def test_a_word_for_dropout_names_its_type() -> None:
    refuse(TypeError, "dropout must be a number", "str", dropout="0.1", **tensors())


# --- q_offset, layout, impl, sink_keys --------------------------------------------------------------------------------


def test_a_positional_mask_with_n_not_m_names_both_choices_of_offset() -> None:
    refuse(
        ValueError, "q_offset is needed", "q has 3", "k has 8", '"end"', '"start"', mask=poise.causal(), **tensors(n=3)
    )


def test_a_positional_bias_with_n_not_m_needs_an_offset_as_well() -> None:
    refuse(ValueError, "q_offset is needed", bias=poise.alibi(torch.ones(4)), **tensors(n=3))


def test_a_mask_without_positions_needs_no_offset() -> None:
    assert poise.attention(**tensors(n=3), mask=poise.lengths(4)).shape == (2, 4, 3, 16)


def test_an_unknown_word_for_q_offset_shows_the_known_ones() -> None:
    refuse(ValueError, "q_offset", '"start"', '"end"', "'middle'", q_offset="middle", **tensors())


def test_a_float_q_offset_names_its_type() -> None:
    refuse(TypeError, "q_offset", "float", q_offset=1.0, mask=poise.causal(), **tensors())


def test_a_bool_q_offset_names_its_type() -> None:
    refuse(TypeError, "q_offset", "bool", q_offset=True, mask=poise.causal(), **tensors())


def test_a_float_tensor_for_q_offset_names_its_dtype() -> None:
    refuse(TypeError, "q_offset must hold integers", "float32", q_offset=torch.zeros(2), **tensors())


def test_a_q_offset_for_another_batch_shows_both_sizes() -> None:
    refuse(
        ValueError,
        "q_offset must be one position per sequence, [2]",
        "[3]",
        q_offset=torch.zeros(3).long(),
        **tensors(),
    )


def test_a_q_offset_beyond_32_bits_is_refused() -> None:
    refuse(ValueError, "q_offset must fit 32 bits", q_offset=1 << 40, mask=poise.causal(), **tensors())


@pytest.mark.parametrize("impl", ["cpu", "blockwise", "reference"])
@pytest.mark.parametrize("position", [1 << 31, -(1 << 31), 1 << 62])
def test_a_q_offset_tensor_beyond_32_bits_is_refused_by_its_name(position: int, impl: Any) -> None:
    offset = torch.tensor([0, position])
    refuse(ValueError, "q_offset must fit 32 bits", f"{position}", q_offset=offset, impl=impl, **tensors())


@pytest.mark.parametrize("layout", ["BHSD", "bsdh", None, 3])
def test_an_unknown_layout_shows_the_known_ones(layout: Any) -> None:
    refuse(ValueError, "layout must be 'bhsd'", "'bshd'", repr(layout), layout=layout, **tensors())


@pytest.mark.parametrize("impl", ["fast", "cuda", ""])
def test_an_unknown_impl_shows_the_known_ones(impl: str) -> None:
    refuse(
        ValueError, "impl must be None or one of 'cpu', 'blockwise', 'reference'", repr(impl), impl=impl, **tensors()
    )


def test_a_number_for_sink_keys_shows_the_form() -> None:
    refuse(TypeError, "sink_keys must be a tuple", "(0,)", "int", function=poise.observe, sink_keys=0, **tensors())


def test_a_negative_sink_key_is_refused() -> None:
    refuse(ValueError, "sink_keys must not be negative", "-1", function=poise.observe, sink_keys=(-1,), **tensors())


def test_a_float_sink_key_names_its_type() -> None:
    refuse(TypeError, "sink_keys must hold integers", "float", function=poise.observe, sink_keys=(0.5,), **tensors())


@pytest.mark.parametrize("call", [{"layout": "hsd"}, {"softcap": -1.0}, {"q_offset": "x"}, {"impl": "gpu"}])
def test_observe_refuses_what_attention_refuses(call: dict[str, Any]) -> None:
    refuse(ValueError, next(iter(call)), function=poise.observe, **call, **tensors())


# --- what the native kernels cannot do --------------------------------------------------------------------------------


def test_impl_cpu_with_float64_names_the_way_out() -> None:
    call = {name: tensor.double() for name, tensor in tensors().items()}
    refuse(ValueError, 'impl="cpu" cannot run this call', "float64", 'impl="blockwise"', impl="cpu", **call)


def test_impl_cpu_on_another_device_names_the_device() -> None:
    call = {name: tensor.to("meta") for name, tensor in tensors().items()}
    refuse(ValueError, 'impl="cpu" cannot run this call', "q is on meta", ".cpu()", impl="cpu", **call)


def test_the_kernels_themselves_name_q_offset() -> None:
    """Where nobody can look at its values before: under a transform."""
    call = tensors(b=1)

    def shifted(offset: Tensor) -> Tensor:
        return poise.attention(**call, q_offset=offset[None], mask=poise.causal())

    with pytest.raises(RuntimeError, match="q_offset must lie within"):
        torch.func.vmap(shifted)(torch.tensor([0, 1 << 50]))


def refusals() -> dict[str, dict[str, Any]]:
    """Calls with dropout that raise, each at another place."""
    doubles = {name: tensor.double() for name, tensor in tensors().items()}
    lowered = poise.causal().lower(8, 8, batch=2, heads=4)
    return {
        "dtype": {**doubles, "impl": "cpu"},
        "impl": {**tensors(), "impl": "gpu"},
        "lowered": {**tensors(), "mask": lowered, "q_offset": 3},
        "offset": {**tensors(), "q_offset": torch.tensor([0, 1 << 50])},
        "sink": {**tensors(), "sink": 0.0},
        "width": {**tensors(), "layout": "hsd"},
    }


@pytest.mark.parametrize("function", [poise.attention, poise.observe])
@pytest.mark.parametrize("why", refusals())
def test_a_refused_call_leaves_the_generator_as_it_was(why: str, function: Any) -> None:
    call = refusals()[why]
    before = torch.get_rng_state()
    with pytest.raises(ValueError if why != "sink" else TypeError):
        function(**call, dropout=0.1)
    assert torch.equal(torch.get_rng_state(), before)


# --- scores, received, merge ------------------------------------------------------------------------------------------


def test_an_unknown_stage_shows_the_known_ones() -> None:
    call = tensors()
    refuse(
        ValueError,
        "stage must be one of 'raw', 'capped', 'biased', 'prob'",
        "'softmax'",
        function=poise.scores,
        q=call["q"],
        k=call["k"],
        stage="softmax",
    )


def test_an_lse_for_a_stage_without_one_is_refused() -> None:
    call = tensors()
    refuse(
        ValueError,
        'stage="prob"',
        function=poise.scores,
        q=call["q"],
        k=call["k"],
        stage="raw",
        lse=torch.zeros(2, 4, 8),
    )


def test_a_number_for_rows_shows_the_form() -> None:
    call = tensors()
    refuse(TypeError, "rows must be a slice", "int", function=poise.scores, q=call["q"], k=call["k"], rows=3)


def test_an_lse_of_a_wrong_shape_shows_the_right_one() -> None:
    call = tensors()
    refuse(
        ValueError,
        "lse must hold one value per query row, [2, 4, 8]",
        "[2, 8, 4]",
        function=poise.received,
        q=call["q"],
        k=call["k"],
        lse=torch.zeros(2, 8, 4),
    )


def test_no_lse_names_where_it_comes_from() -> None:
    call = tensors()
    refuse(
        TypeError, "lse must be a tensor such as stats.lse", function=poise.received, q=call["q"], k=call["k"], lse=None
    )


def test_merging_nothing_says_what_to_pass() -> None:
    refuse(ValueError, "merge", "observe", function=poise.merge)


# --- scaled_dot_product_attention -------------------------------------------------------------------------------------


def sdpa(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> None:
    poise.scaled_dot_product_attention(query, key, value, **arguments)


def test_sdpa_with_fewer_key_heads_points_to_enable_gqa() -> None:
    q, k, v = tensors(g=2).values()
    refuse(ValueError, "must broadcast", "enable_gqa=True", function=sdpa, query=q, key=k, value=v)


def test_sdpa_with_heads_that_do_not_divide_shows_the_shapes() -> None:
    q, k, v = tensors(g=3).values()
    refuse(ValueError, "4 and 3", function=sdpa, query=q, key=k, value=v, enable_gqa=True)


def test_sdpa_with_gqa_needs_heads() -> None:
    q = torch.randn(8, 16)
    refuse(ValueError, "at least 3 dims", "enable_gqa", function=sdpa, query=q, key=q, value=q, enable_gqa=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bfloat16])
def test_sdpa_refuses_mask_dtypes_that_torch_refuses(dtype: torch.dtype) -> None:
    q, k, v = tensors().values()
    mask = torch.ones(8, 8, dtype=dtype)
    refuse(
        TypeError,
        "attn_mask must be bool, float32 or of query's dtype",
        str(dtype),
        function=sdpa,
        query=q,
        key=k,
        value=v,
        attn_mask=mask,
    )


def test_sdpa_with_a_mask_that_does_not_broadcast_shows_both_shapes() -> None:
    q, k, v = tensors().values()
    refuse(
        ValueError,
        "attn_mask",
        "[2, 4, 8, 8]",
        "[7, 8]",
        function=sdpa,
        query=q,
        key=k,
        value=v,
        attn_mask=torch.zeros(7, 8),
    )


def test_sdpa_with_a_mask_object_points_to_attention() -> None:
    q, k, v = tensors().values()
    refuse(
        TypeError,
        "attn_mask must be a tensor or None",
        "poise.attention takes it as mask=",
        function=sdpa,
        query=q,
        key=k,
        value=v,
        attn_mask=poise.causal(),
    )


@pytest.mark.parametrize("odd", [np.zeros((2, 4, 8, 16)), None, torch.zeros(2, 4, 8, 16).to_sparse()], ids=type)
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_sdpa_names_what_is_no_ordinary_tensor(name: str, odd: Any) -> None:
    q, k, v = tensors().values()
    refuse(TypeError, f"{name} must be", function=sdpa, **{"query": q, "key": k, "value": v, name: odd})


def test_no_message_mentions_an_address() -> None:
    """A repr that slips into a message tells a user nothing."""
    with pytest.raises(TypeError) as caught:
        poise.attention(**tensors(), mask=object())
    assert not re.search(r"0x[0-9a-f]+", str(caught.value))


@pytest.mark.parametrize(
    ("part", "kind"), [(torch.zeros(2), "Tensor"), ((torch.zeros(2), torch.zeros(2)), "(Tensor, Tensor)")]
)
def test_merging_what_observe_did_not_return_names_what_was_got(part: Any, kind: str) -> None:
    with pytest.raises(TypeError, match="an \\(out, stats\\) pair as returned by observe") as error:
        poise.merge(part, part)
    assert str(error.value).endswith(f"got {kind}")
