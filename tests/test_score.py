"""Every bias against its one-line definition, how biases add, their gradients, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from poise.score import Alibi, Bias, Dense, Relative, alibi, alibi_slopes, relative, terms

SHAPE = (2, 3, 5, 7)  # B, H, N, M
CPU = torch.device("cpu")
SLOPES = torch.tensor([0.5, 0.25, 2.0], dtype=torch.float64)
TABLE = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DENSE = torch.randn(2, 1, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

# The definition, for sequence b, head h, row i at position p = i', key j.
DEFINITIONS: dict[str, tuple[Bias, Callable[[int, int, int, int, int], Tensor]]] = {
    "dense": (Dense(DENSE), lambda b, h, i, p, j: DENSE[b, 0, i, j]),
    "dense per key": (Dense(DENSE[0, 0, 0]), lambda b, h, i, p, j: DENSE[0, 0, 0, j]),
    "dense per row": (Dense(DENSE[..., :1]), lambda b, h, i, p, j: DENSE[b, 0, i, 0]),
    "alibi": (alibi(SLOPES), lambda b, h, i, p, j: -SLOPES[h] * abs(p - j)),
    "relative": (relative(TABLE), lambda b, h, i, p, j: TABLE[h, min(max(j - p, -2), 2) + 2]),
    "relative for all heads": (relative(TABLE[0]), lambda b, h, i, p, j: TABLE[0, min(max(j - p, -2), 2) + 2]),
}


def evaluate(bias: Bias, offset: int | Tensor = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    bias.validate(SHAPE, CPU)
    return bias.evaluate(torch.arange(5), torch.arange(7), offset, SHAPE, dtype).expand(SHAPE)


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("offset", [0, 2, -9, torch.tensor([1, 3])])
def test_bias_is_its_definition(name: str, offset: int | Tensor) -> None:
    bias, value = DEFINITIONS[name]
    offsets = offset.tolist() if isinstance(offset, Tensor) else [offset] * 2
    found = evaluate(bias, offset)
    for b, h, i, j in ((b, h, i, j) for b in range(2) for h in range(3) for i in range(5) for j in range(7)):
        assert found[b, h, i, j] == value(b, h, i, i + offsets[b], j)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_part_of_a_bias_is_that_part_of_the_whole(name: str) -> None:
    bias, offset = DEFINITIONS[name][0], torch.tensor([2, 1])
    rows, keys = torch.tensor([4, 0, 2]), torch.tensor([6, 3])
    part = bias.evaluate(rows, keys, offset, SHAPE, torch.float64).expand(2, 3, 3, 2)
    assert torch.equal(part, evaluate(bias, offset)[:, :, rows][..., keys])


@pytest.mark.parametrize("name", DEFINITIONS)
def test_bias_comes_in_the_dtype_asked_for(name: str) -> None:
    assert evaluate(DEFINITIONS[name][0], dtype=torch.float32).dtype == torch.float32


def test_biases_and_tensors_add_in_any_order() -> None:
    a, r = alibi(SLOPES), relative(TABLE)
    want = evaluate(Dense(DENSE)) + evaluate(a) + evaluate(r)
    for total in (DENSE + a + r, a + DENSE + r, a + (r + DENSE), DENSE + (a + r), torch.add(DENSE, a) + r):
        assert torch.allclose(evaluate(total), want, rtol=1e-15, atol=0)


def test_sum_lists_its_terms_in_order() -> None:
    kinds = [type(term) for term in terms(DENSE + (alibi(SLOPES) + relative(TABLE)) + DENSE)]
    assert kinds == [Dense, Alibi, Relative, Dense]


def test_terms_of_nothing_a_tensor_and_a_bias() -> None:
    (only,) = terms(DENSE)
    a = alibi(SLOPES)
    assert terms(None) == ()
    assert isinstance(only, Dense)
    assert terms(a) == (a,)


def test_only_biases_about_positions_are_positional() -> None:
    assert not Dense(DENSE).positional
    assert alibi(SLOPES).positional
    assert relative(TABLE).positional
    assert (DENSE + alibi(SLOPES)).positional


@pytest.mark.parametrize("name", ["alibi", "relative", "dense"])
def test_gradients_reach_the_tensors(name: str) -> None:
    source = {"alibi": SLOPES, "relative": TABLE, "dense": DENSE}[name].clone().requires_grad_()
    make = {"alibi": alibi, "relative": relative, "dense": Dense}[name]

    def value(x: Tensor) -> Tensor:
        return evaluate(make(x), torch.tensor([1, 0])).square()

    assert torch.autograd.gradcheck(value, (source,))
    assert torch.autograd.gradgradcheck(value, (source,))


def test_slopes_of_eight_heads_are_the_published_ones() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]


def test_slopes_of_twelve_heads_interleave_those_of_sixteen() -> None:
    assert alibi_slopes(12)[:8].tolist() == alibi_slopes(8).tolist()
    assert torch.allclose(alibi_slopes(12)[8:], 2.0 ** -torch.tensor([0.5, 1.5, 2.5, 3.5]))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: alibi(torch.ones(2, 2)), ValueError, "alibi: slopes must be 1-D, one per head"),
        (lambda: alibi(torch.ones(2).long()), TypeError, "alibi: slopes must hold floats, got torch.int64"),
        (lambda: relative(torch.ones(2, 4)), ValueError, r"\[H, 2R \+ 1\] or \[2R \+ 1\], an odd number"),
        (lambda: relative(torch.ones(2, 2, 3)), ValueError, r"\[H, 2R \+ 1\] or \[2R \+ 1\]"),
        (lambda: alibi_slopes(0), ValueError, "alibi_slopes: heads must be at least 1, got 0"),
        (lambda: terms(torch.ones(2, 2).bool()), TypeError, "got bool. Pass it as mask="),
        (lambda: terms(torch.ones(1, 1, 1, 1, 1)), ValueError, "bias must broadcast to .* at most 4 dims"),
        (lambda: terms(3.0), TypeError, "bias must be a tensor, poise.alibi"),  # type: ignore[arg-type]
        (lambda: alibi(SLOPES) + 3, TypeError, "got int"),  # type: ignore[operator]
    ],
)
def test_wrong_arguments_are_named(build: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (alibi(SLOPES[:2]), "alibi has 2 slopes, q has 3 heads"),
        (relative(TABLE[:2]), "relative has a table of 2 rows, q has 3 heads"),
        (Dense(DENSE[..., :3]), r"shape \(2, 1, 5, 3\) does not broadcast to \[B, H, N, M\] = \(2, 3, 5, 7\)"),
        (DENSE[:, :, :2] + alibi(SLOPES), r"shape \(2, 1, 2, 7\) does not broadcast"),
        (alibi(SLOPES.to("meta")), "bias: alibi is on meta, q on cpu: move it there"),
    ],
)
def test_biases_refuse_calls_they_do_not_fit(bias: Bias, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bias.validate(SHAPE, CPU)
