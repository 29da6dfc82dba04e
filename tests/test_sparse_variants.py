"""Longformer and BigBird: against masks written out, and against the attention of transformers, random weights.

The model assemblies that load whole checkpoints are tested in test_long_models.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import poise
from poise.nn import CAUSAL, Call, Visible
from poise.testing import check_out, truth
from poise.variants import BigBird, Longformer, LongformerVisible
from poise.variants.bigbird import bigbird_map

HF_TOLERANCE = 1e-5  # relative to the largest output


def qkv(n: int = 150, *, b: int = 2, h: int = 4, g: int = 4) -> dict[str, Tensor]:
    return {"q": torch.randn(b, h, n, 16), "k": torch.randn(b, g, n, 16), "v": torch.randn(b, g, n, 24)}


def tokens_at(*positions: list[int], n: int = 150) -> Tensor:
    """bool [B, N]"""
    tokens = torch.zeros(len(positions), n, dtype=torch.bool)
    for row, there in zip(tokens, positions, strict=True):
        row[there] = True
    return tokens


def padding_after(*lengths: int, n: int = 150) -> Tensor:
    """bool [B, N]"""
    return torch.arange(n) < torch.tensor(lengths)[:, None]


def band(n: int, reach: int, step: int = 1) -> Tensor:
    """bool [N, N]: at most reach steps away."""
    distance = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    return (distance <= reach * step) & (distance % step == 0)


# --- Longformer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("tokens", [(), (0,), (0, 77, 149)])
def test_longformer_is_attention_over_window_and_global_tokens(tokens: tuple[int, ...], dilation: int) -> None:
    call = qkv(g=2)
    is_global = tokens_at(list(tokens))[0]
    mask = band(150, 8, dilation) | is_global | is_global[:, None]
    out = Longformer(16, tokens=tokens, dilation=dilation)(**call)
    check_out(out, truth(**call, mask=mask))


def test_longformer_honours_padding_causality_and_masks() -> None:
    call, padding = qkv(), padding_after(150, 99)
    documents = poise.documents([0] * 70 + [1] * 80)
    visible = Visible(causal=True, padding=padding, mask=documents)
    is_global = tokens_at([0, 80])[0]
    together = torch.arange(150) < 70
    mask = (band(150, 8) | is_global | is_global[:, None]).tril() & (together[:, None] == together)
    check_out(
        Longformer(16, tokens=(0, 80))(**call, call=Call(visible=visible)),
        truth(**call, mask=mask & padding[:, None, None]),
    )


def test_longformer_takes_global_tokens_per_sequence() -> None:
    call, tokens, padding = qkv(), tokens_at([0, 3], [120]), padding_after(100, 150)
    tokens[0, 110] = True  # padding among them does not count
    real = tokens & padding
    mask = (band(150, 8) | real[:, None] | real[:, :, None])[:, None] & padding[:, None, None]
    visible = LongformerVisible(padding=padding, tokens=tokens)
    check_out(Longformer(16)(**call, call=Call(visible=visible)), truth(**call, mask=mask))


def test_longformer_passes_scores_on_to_the_operator() -> None:
    call, slopes = qkv(), poise.alibi(poise.alibi_slopes(4))
    options: dict[str, Any] = {"bias": slopes, "scale": 0.3, "softcap": 4.0, "sink": torch.randn(4)}
    check_out(Longformer(16)(**call, call=Call(**options)), truth(**call, mask=band(150, 8), **options))


class SelfAttention(nn.Module):
    """q, k and v from x, a choice between them, in the layout that transformers' modules use."""

    def __init__(self, theirs: nn.Module, choice: Any, heads: int) -> None:
        super().__init__()
        self.theirs, self.choice, self.heads = theirs, choice, heads

    def forward(self, x: Tensor, visible: Visible) -> Tensor:
        q, k, v = (
            getattr(self.theirs, name)(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        out: Tensor = self.choice(q, k, v, Call(visible=visible, hidden=x)).transpose(1, 2).flatten(2)
        return out


def longformer_pair(width: int = 48, heads: int = 4, window: int = 16) -> tuple[nn.Module, SelfAttention]:
    """transformers' module and ours, with the same weights."""
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(
        hidden_size=width, num_attention_heads=heads, attention_window=[window], num_hidden_layers=1
    )
    theirs = LongformerSelfAttention(config, 0).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    choice = Longformer(window, width=width, heads=heads)
    choice.load_state_dict(
        {
            f"{name}.{part}": getattr(getattr(theirs, f"{name}_global"), part)
            for name in ("query", "key", "value")
            for part in ("weight", "bias")
        }
    )
    return theirs, SelfAttention(theirs, choice, heads)


def of_theirs(theirs: nn.Module, x: Tensor, tokens: Tensor, padding: Tensor) -> Tensor:
    code = torch.where(padding, torch.where(tokens, 1e4, 0.0), -1e4)
    out: Tensor = theirs(
        x,
        attention_mask=code,
        is_index_masked=code < 0,
        is_index_global_attn=code > 0,
        is_global_attn=bool((code > 0).any()),
    )[0]
    return out


PATTERNS = {
    "none": ([], []),
    "first": ([0], [0]),
    "some": ([0, 3, 90], [17]),
    "one sequence only": ([], [5, 6, 7]),
    "many": (list(range(0, 144, 5)), list(range(40))),  # more than are cheaper absorbed
}


@pytest.mark.parametrize("lengths", [(144, 144), (144, 101)], ids=["whole", "padded"])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_longformer_equals_that_of_transformers(pattern: tuple[list[int], list[int]], lengths: tuple[int, int]) -> None:
    theirs, ours = longformer_pair()
    x, padding, tokens = torch.randn(2, 144, 48), padding_after(*lengths, n=144), tokens_at(*pattern, n=144)
    with torch.no_grad():
        expected = of_theirs(theirs, x, tokens, padding)[padding]
        got = ours(x, LongformerVisible(padding=padding, tokens=tokens))[padding]
    assert (got - expected).abs().max() <= HF_TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("pattern", ["some", "many"])
def test_gradients_of_longformer_equal_those_of_transformers(pattern: str) -> None:
    theirs, ours = longformer_pair()
    x, padding, tokens = torch.randn(2, 144, 48), padding_after(144, 101, n=144), tokens_at(*PATTERNS[pattern], n=144)
    weight = torch.randn(2, 144, 48) * padding[..., None]
    gradients = []
    for attend in (
        lambda y: of_theirs(theirs, y, tokens, padding),
        lambda y: ours(y, LongformerVisible(padding=padding, tokens=tokens)),
    ):
        y = x.clone().requires_grad_()
        # Not the key's bias: it moves all scores of a row alike, its gradient is rounding and nothing else.
        own = [p for n, p in theirs.named_parameters() if "_global" not in n and n != "key.bias"]
        gradients.append(torch.autograd.grad((attend(y) * weight).sum(), [y, *own]))
    for got, expected in zip(gradients[1], gradients[0], strict=True):
        assert (got - expected).abs().max() <= HF_TOLERANCE * expected.abs().max()


def test_global_projections_learn() -> None:
    _, ours = longformer_pair()
    visible = LongformerVisible(tokens=tokens_at([0], [3], n=144))
    ours(torch.randn(2, 144, 48), visible).square().sum().backward()
    for name, parameter in ours.choice.named_parameters():
        moved = parameter.grad is not None and float(parameter.grad.abs().max()) > 1e-3
        assert moved or name == "key.bias", name  # it moves all scores of a row alike


def test_a_plan_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    from poise.algebra import Mask

    lowered: list[int] = []
    original = Mask.lower
    monkeypatch.setattr(Mask, "lower", lambda self, *a, **k: (lowered.append(1), original(self, *a, **k))[1])
    _, ours = longformer_pair()
    visible = LongformerVisible(tokens=tokens_at([0], [3], n=144))
    for _ in range(3):
        ours(torch.randn(2, 144, 48), visible)
    assert len(lowered) == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Longformer(15), "even and at least 2; got 15"),
        (lambda: Longformer(16, dilation=0), "dilation must be at least 1"),
        (lambda: Longformer(16, width=8), "both width and heads"),
        (lambda: BigBird(0), "block must be at least 1"),
        (lambda: BigBird(random=-1), "random must not be negative"),
    ],
)
def test_impossible_variants_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_global_projections_need_the_hidden_states_and_refuse_causality() -> None:
    call = qkv()
    longformer = Longformer(16, tokens=(0,), width=48, heads=4, head_dim=24)
    with pytest.raises(ValueError, match=r"call\.hidden"):
        longformer(**call)
    with pytest.raises(ValueError, match="cannot honour causal"):
        longformer(**call, call=Call(visible=CAUSAL, hidden=torch.randn(2, 150, 48)))


@pytest.mark.parametrize("variant", [Longformer(16), BigBird(16)])
def test_sparse_variants_are_forms_of_self_attention(variant: Any) -> None:
    call = qkv()
    with pytest.raises(ValueError, match="q has 149 positions, k has 150"):
        variant(call["q"][:, :, 1:], call["k"], call["v"])
    with pytest.raises(ValueError, match="padding must be bool"):
        variant(**call, call=Call(visible=Visible(padding=torch.ones(2, 9, dtype=torch.bool))))


# --- BigBird ----------------------------------------------------------------------------------------------------------


def spread_out(table: Tensor, size: int, n: int) -> Tensor:
    """A map of blocks as a bool mask [.., N, N]."""
    return table.repeat_interleave(size, -1).repeat_interleave(size, -2)[..., :n, :n]


@pytest.mark.parametrize("n", [160, 150, 20, 1])
def test_bigbird_is_attention_over_its_blocks(n: int) -> None:
    call = qkv(n, g=2)
    mask = spread_out(bigbird_map(-(-n // 16), 4, 2, seed=3), 16, n)
    check_out(BigBird(16, 2, seed=3)(**call), truth(**call, mask=mask))


def test_bigbird_honours_padding_and_causality() -> None:
    call, padding = qkv(), padding_after(150, 99)
    mask = spread_out(bigbird_map(10, 4, 2, seed=0), 16, 150).tril() & padding[:, None, None]
    visible = Visible(causal=True, padding=padding)
    check_out(BigBird(16, 2)(**call, call=Call(visible=visible)), truth(**call, mask=mask))


def test_a_row_of_blocks_sees_window_ends_and_r_others() -> None:
    table = bigbird_map(20, 8, 3, seed=0)
    place = torch.arange(20)
    assert bool((table[:, (place[:, None] - place).abs() <= 1]).all())
    assert bool(table[:, :, [0, -1]].all())
    assert bool(table[:, [0, -1]].all())
    assert bool((table.sum(-1)[:, 3:-3] == 3 + 2 + 3).all())


def test_random_blocks_differ_by_head_and_seed_only() -> None:
    table = bigbird_map(20, 8, 3, seed=0)
    assert torch.equal(table, bigbird_map(20, 8, 3, seed=0))
    assert not torch.equal(table, bigbird_map(20, 8, 3, seed=1))
    assert len({row.numpy().tobytes() for row in table}) == 8


def test_few_blocks_are_all_seen() -> None:
    assert bool(bigbird_map(5, 2, 9, seed=0).all())


def bigbird_pair(width: int = 48, heads: int = 4, block: int = 8, random: int = 2) -> tuple[nn.Module, SelfAttention]:
    """transformers' module in eval mode and ours, with the same weights."""
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

    config = BigBirdConfig(hidden_size=width, num_attention_heads=heads, block_size=block, num_random_blocks=random)
    theirs = BigBirdBlockSparseAttention(config).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    return theirs, SelfAttention(theirs, BigBird(block, random, hf_compat=True), heads)


def of_their_bigbird(theirs: nn.Module, x: Tensor, padding: Tensor, block: int = 8) -> Tensor:
    from transformers import BigBirdModel

    blocked, band_mask, from_mask, to_mask = BigBirdModel.create_masks_for_block_sparse_attn(padding.float(), block)
    out: Tensor = theirs(
        x,
        band_mask=band_mask,
        from_mask=from_mask,
        to_mask=to_mask,
        from_blocked_mask=blocked,
        to_blocked_mask=blocked,
    )[0]
    return out


@pytest.mark.parametrize("lengths", [(128, 128), (128, 93)], ids=["whole", "padded"])
@pytest.mark.parametrize("random", [1, 3])
def test_bigbird_equals_that_of_transformers_in_eval(random: int, lengths: tuple[int, int]) -> None:
    theirs, ours = bigbird_pair(random=random)
    x, padding = torch.randn(2, 128, 48), padding_after(*lengths, n=128)
    with torch.no_grad():
        expected = of_their_bigbird(theirs, x, padding)[padding]
        got = ours(x, Visible(padding=padding))[padding]
    assert (got - expected).abs().max() <= HF_TOLERANCE * expected.abs().max()


def test_gradients_of_bigbird_equal_those_of_transformers() -> None:
    theirs, ours = bigbird_pair()
    x, padding = torch.randn(2, 128, 48), padding_after(128, 93, n=128)
    weight = torch.randn(2, 128, 48) * padding[..., None]
    gradients = []
    for attend in (lambda y: of_their_bigbird(theirs, y, padding), lambda y: ours(y, Visible(padding=padding))):
        y = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad((attend(y) * weight).sum(), y)[0])
    assert (gradients[1] - gradients[0]).abs().max() <= HF_TOLERANCE * gradients[0].abs().max()


def test_set_semantics_count_a_key_once() -> None:
    """Where transformers counts block 0 1 + r times, ours differs from it by just that."""
    call = qkv(128)
    once, often = BigBird(8, 0)(**call), BigBird(8, 3, hf_compat=True)(**call)
    bias = torch.zeros(128, 128)
    bias[8:120, :8] = math.log(4)
    mask = spread_out(bigbird_map(16, 1, 0, seed=0), 8, 128)
    check_out(often, truth(**call, mask=mask, bias=bias))
    check_out(once, truth(**call, mask=mask))
    assert (once - often).abs().max() > 1e-2


def test_short_sequences_are_attended_fully_as_transformers_does() -> None:
    call = qkv(88)
    check_out(BigBird(8, 3, hf_compat=True)(**call), truth(**call))
