"""ONNX's own Attention node cases, all outputs, on every implementation: a conformance suite that nobody here wrote.

The adapter below says what the operator's attributes and inputs mean in this package's words; it computes no scores.
"""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import poise

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # making the cases of unrelated operators overflows on purpose
    from onnx.backend.test.loader import load_model_tests

    CASES = {
        case.name: case
        for case in load_model_tests(kind="node")
        if case.name.startswith("test_attention") and not case.name.endswith("_expanded")
    }

STAGES = ("raw", "capped", "biased", "prob")  # by qk_matmul_output_mode
INPUTS = ("q", "k", "v", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("y", "present_key", "present_value", "qk_matmul_output")


def tensor(array: np.ndarray) -> Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


@cache
def case(name: str) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    """Inputs, attributes and expected outputs by name."""
    (inputs, outputs), *more = CASES[name].data_sets
    assert not more
    node = CASES[name].model.graph.node[0]
    attributes = {a.name: a.f if a.type == a.FLOAT else a.i for a in node.attribute}

    def named(names, wired, arrays):
        present = [name for name, wire in zip(names, wired, strict=False) if wire]
        return {name: tensor(array) for name, array in zip(present, arrays, strict=True)}

    return named(INPUTS, node.input, inputs), attributes, named(OUTPUTS, node.output, outputs)


def attention(inputs: dict[str, Tensor], attributes: dict[str, Any], impl: str, wanted: set[str]) -> dict[str, Tensor]:
    """ONNX Attention by poise.attention and poise.scores."""
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    three_dims = q.dim() == 3
    if three_dims:  # [B, N, H * D]
        q, k, v = (
            x.unflatten(2, (attributes[heads], -1)).transpose(1, 2)
            for x, heads in ((q, "q_num_heads"), (k, "kv_num_heads"), (v, "kv_num_heads"))
        )
    offset: int | Tensor = 0
    if "past_key" in inputs:
        offset = inputs["past_key"].shape[2]
        k, v = torch.cat([inputs["past_key"], k], 2), torch.cat([inputs["past_value"], v], 2)
    length, nonpad = k.shape[2], inputs.get("nonpad_kv_seqlen")

    masks: list[poise.Mask] = []
    if nonpad is not None:
        masks.append(poise.lengths(nonpad))
        offset = nonpad - q.shape[2]
    if attributes.get("is_causal"):
        masks.append(poise.causal())
    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    if max(left, right) >= 0:
        masks.append(poise.window(left if left >= 0 else None, right if right >= 0 else None))

    bias, given = None, inputs.get("attn_mask")
    if given is not None:
        given = given if given.dim() > 1 else given[None]
        hidden = False if given.dtype == torch.bool else -math.inf  # a short mask hides the keys it does not reach
        given = torch.nn.functional.pad(given, (0, length - given.shape[-1]), value=hidden)
        if given.dtype == torch.bool:
            masks.append(poise.keep(given))
        else:
            bias = given
    mask = None
    for part in masks:
        mask = part if mask is None else mask & part

    scoring = {
        "mask": mask,
        "bias": bias,
        "scale": attributes.get("scale"),
        "softcap": attributes.get("softcap") or None,
        "q_offset": offset,
    }
    y = poise.attention(q, k, v, impl=impl, **scoring)
    results = {"y": y.transpose(1, 2).flatten(2) if three_dims else y, "present_key": k, "present_value": v}
    if "qk_matmul_output" in wanted:
        stage = STAGES[attributes.get("qk_matmul_output_mode", 0)]
        results["qk_matmul_output"] = poise.scores(q, k, stage=stage, **scoring).to(q.dtype)
    return results


def test_there_are_93_cases():
    assert len(CASES) == 93


@pytest.mark.parametrize("name", CASES)
def test_onnx_case(name, impl):
    inputs, attributes, expected = case(name)
    results = attention(inputs, attributes, impl, set(expected))
    for output, want in expected.items():
        got = results[output]
        assert got.dtype == want.dtype, output
        # As onnx's own runner compares: the case's tolerances, but a few ulp for bfloat16.
        rtol = 2.0**-6 if want.dtype == torch.bfloat16 else CASES[name].rtol
        np.testing.assert_allclose(
            got.float().numpy(), want.float().numpy(), rtol=rtol, atol=CASES[name].atol, err_msg=output
        )
