"""Positions: every scheme against its published formula, and ONNX's own RotaryEmbedding cases."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import poise
from poise.nn import (
    Alibi,
    Learned,
    LinearScaling,
    Llama3Scaling,
    MultiHeadAttention,
    NTKScaling,
    RelativeBuckets,
    Rotary,
    Sinusoidal,
    YaRNScaling,
)
from poise.nn.positions import rotate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # making the cases of unrelated operators overflows on purpose
    from onnx.backend.test.loader import load_model_tests

    CASES = {
        case.name: case
        for case in load_model_tests(kind="node")
        if case.name.startswith("test_rotary_embedding") and not case.name.endswith("_expanded")
    }


def test_there_are_eight_onnx_cases() -> None:
    assert len(CASES) == 8


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_onnx_case(name: str, grad: bool) -> None:
    case = CASES[name]
    ([x, cos, sin, *places], [want]) = case.data_sets[0]
    node = case.model.graph.node[0]
    attributes = {a.name: a.i for a in node.attribute}
    data, heads = torch.from_numpy(np.array(x)), attributes.get("num_heads", 0)
    data = data.unflatten(2, (heads, -1)) if data.dim() == 3 else data.transpose(1, 2)  # [B, N, H, D]
    tables = [torch.from_numpy(np.array(table)) for table in (cos, sin)]
    if places:
        tables = [table[torch.from_numpy(np.array(places[0]))] for table in tables]
    layout = "interleaved" if attributes.get("interleaved") else "half"
    with torch.set_grad_enabled(grad):
        out = rotate(data.clone(), *(table[:, :, None] for table in tables), layout)
    out = out.flatten(2) if np.array(x).ndim == 3 else out.transpose(1, 2)
    np.testing.assert_allclose(out.numpy(), np.array(want), rtol=case.rtol, atol=case.atol)


@pytest.mark.parametrize("dim", [None, 4])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotary_turns_pairs_as_complex_numbers(layout: Any, dim: int | None) -> None:
    rotary, x = Rotary(10 if dim else 8, dim=dim, layout=layout, base=100.0), torch.randn(2, 5, 3, 10 if dim else 8)
    places, turning = torch.tensor([0, 1, 7, 30, 2]), dim or 8
    part = x[..., :turning]
    pairs = part.unflatten(-1, (2, -1)).transpose(-1, -2) if layout == "half" else part.unflatten(-1, (-1, 2))
    angle = places[:, None] * 100.0 ** (-torch.arange(0, turning, 2) / turning)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(()), angle)[:, None])
    turned = (turned.transpose(-1, -2) if layout == "half" else turned).flatten(-2)
    want = torch.cat((turned, x[..., turning:]), -1)
    before = x.clone()
    torch.testing.assert_close(rotary(x, places), want, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(rotary(x, places), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, before)


def test_rotary_scores_depend_on_differences_alone() -> None:
    rotary, q, k = Rotary(16), torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    scores = [float((rotary(q, torch.tensor([i])) * rotary(k, torch.tensor([i - 5]))).sum()) for i in (5, 50, 500)]
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-4)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
@pytest.mark.parametrize("length", [50, 300])
def test_scalings_have_transformers_frequencies(kind: str, length: int) -> None:
    told = {
        "rope_type": kind, "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    }  # fmt: skip
    scaling = {
        "linear": LinearScaling(4.0),
        "dynamic": NTKScaling(4.0, 64),
        "yarn": YaRNScaling(4.0, 64),
        "llama3": Llama3Scaling(4.0, 64),
    }[kind]
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=64, rope_parameters=dict(told))
    want, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    cos, sin = Rotary(32, base=5000.0, scaling=scaling).angles(torch.arange(length))
    angles = torch.arange(length)[:, None] * want
    torch.testing.assert_close(cos, angles.cos() * factor, rtol=0, atol=2e-5)
    torch.testing.assert_close(sin, angles.sin() * factor, rtol=0, atol=2e-5)


def test_fixed_ntk_scaling_keeps_the_fastest_wave_and_divides_the_slowest() -> None:
    plain, scaled = (Rotary(32, scaling=scaling).angles(torch.tensor([1]))[1] for scaling in (None, NTKScaling(4.0)))
    assert float(scaled[0, 0]) == float(plain[0, 0])
    assert float(scaled[0, -1]) == pytest.approx(float(plain[0, -1]) / 4, rel=1e-3)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_sinusoids_are_their_formula(layout: Any) -> None:
    got = Sinusoidal(8, layout=layout)(torch.arange(6))
    for place in range(6):
        for pair in range(4):
            angle = place / 10000 ** (2 * pair / 8)
            sin, cos = (2 * pair, 2 * pair + 1) if layout == "interleaved" else (pair, pair + 4)
            assert float(got[place, sin]) == pytest.approx(math.sin(angle), abs=1e-6)
            assert float(got[place, cos]) == pytest.approx(math.cos(angle), abs=1e-6)


def test_learned_positions_are_rows_and_end_somewhere() -> None:
    learned = Learned(5, 8)
    assert torch.equal(learned(torch.tensor([[4, 0]]))[0, 0], learned.weight[4])
    with pytest.raises(ValueError, match="the model knows 5 positions; got a token at position 5"):
        learned(torch.tensor([5]))


def dense(bias: poise.Bias | None, heads: int, size: int) -> Tensor:
    """What the bias adds to each score."""
    zeros = torch.zeros(1, heads, size, 4)
    return poise.scores(zeros, zeros, bias=bias)[0]


def test_alibi_is_its_formula() -> None:
    got = dense(Alibi(4).place(torch.arange(6)).bias, 4, 6)
    distance = (torch.arange(6)[:, None] - torch.arange(6)).abs()
    torch.testing.assert_close(got, -torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[:, None, None] * distance)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 12)])
def test_buckets_are_those_of_t5(bidirectional: bool, buckets: int, furthest: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    scheme, size = RelativeBuckets(2, buckets=buckets, furthest=furthest, bidirectional=bidirectional), 300
    distance = torch.arange(size) - torch.arange(size)[:, None]
    theirs = T5Attention._relative_position_bucket(distance, bidirectional, buckets, furthest)
    torch.testing.assert_close(
        dense(scheme.place(torch.arange(size)).bias, 2, size), scheme.weight[theirs].permute(2, 0, 1)
    )


@pytest.mark.parametrize("scheme", [Rotary(8), Alibi(4), RelativeBuckets(4)], ids=lambda scheme: type(scheme).__name__)
def test_attention_alone_applies_its_scheme(scheme: Any) -> None:
    module, x = MultiHeadAttention(32, 4, positions=scheme), torch.randn(1, 7, 32)
    placed = module(x)
    module.positions = None
    assert not torch.allclose(module(x), placed)
    torch.testing.assert_close(module(x, placement=scheme.place(torch.arange(7))), placed)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Sinusoidal(7), "width must be even"),
        (lambda: Rotary(8, dim=10), "dim must be even, and at most head_dim = 8"),
        (lambda: Rotary(8, layout="full"), "layout must be 'half' or 'interleaved'"),  # type: ignore[arg-type]
    ],
)
def test_impossible_schemes_are_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()
