"""Every variant as the attention of a stack of blocks: outputs, gradients, state dict, padding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from poise.kernels import blockwise
from poise.nn import BlockConfig, Choice, Encoder, Visible
from poise.variants import BigBird, Linformer, Longformer, Performer

CHOICES: dict[str, Callable[[], Choice]] = {
    "performer": lambda: Performer(8, 32),
    "linformer": lambda: Linformer(64, 16, heads=4),
    "longformer": lambda: Longformer(16, tokens=(0,)),
    "longformer with projections": lambda: Longformer(16, tokens=(0,), width=32, heads=4),
    "bigbird": lambda: BigBird(8, 2),
    "bigbird as in transformers": lambda: BigBird(4, 2, hf_compat=True),
}


def stack(name: str) -> Encoder:
    return Encoder(BlockConfig(32, 4, 64, choice=CHOICES[name]), 2)


@pytest.mark.parametrize("name", CHOICES)
def test_a_stack_trains_with_it(name: str) -> None:
    encoder, x = stack(name), torch.randn(2, 50, 32)
    encoder(x).square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in encoder.parameters())


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.usefixtures("native")
def test_it_trains_on_the_native_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: object, **rest: object) -> None:
        raise AssertionError("a call fell back to torch ops")

    monkeypatch.setattr(blockwise, "run", slow)
    stack(name)(torch.randn(2, 50, 32)).square().mean().backward()


@pytest.mark.parametrize("name", CHOICES)
def test_outputs_with_and_without_gradients_are_the_same(name: str) -> None:
    encoder, x = stack(name), torch.randn(2, 50, 32)
    with_gradients = encoder(x)
    with torch.no_grad():
        torch.testing.assert_close(encoder(x), with_gradients)


@pytest.mark.parametrize("name", CHOICES)
def test_what_is_padded_changes_nothing(name: str) -> None:
    encoder, x = stack(name), torch.randn(2, 50, 32)
    padding = torch.arange(50) < torch.tensor([[50], [33]])
    with torch.no_grad():
        one, other = (
            encoder(torch.where(padding[..., None], x, junk), visible=Visible(padding=padding)) for junk in (0.0, 9.0)
        )
    assert torch.equal(one[padding], other[padding])
    assert bool(one[padding].isfinite().all())


@pytest.mark.parametrize("name", CHOICES)
def test_the_state_dict_restores_it(name: str) -> None:
    encoder, other, x = stack(name), stack(name), torch.randn(2, 50, 32)
    other.load_state_dict(encoder.state_dict())
    with torch.no_grad():
        assert torch.equal(other(x), encoder(x))


def test_performer_and_sparse_forms_are_causal_in_a_causal_stack() -> None:
    x, visible = torch.randn(2, 50, 32), Visible(causal=True)
    changed = torch.cat([x[:, :30], torch.randn(2, 20, 32)], 1)
    for name in ("performer", "longformer", "bigbird"):
        encoder = stack(name)
        with torch.no_grad():
            before, after = encoder(x, visible=visible), encoder(changed, visible=visible)
        torch.testing.assert_close(before[:, :30], after[:, :30])
        assert not torch.equal(before[:, 30:], after[:, 30:])
