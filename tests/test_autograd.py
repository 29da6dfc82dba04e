"""The operator under torch's autograd and torch.func. Whether gradients are right is tested elsewhere.

Checkpointing, autocast, inference mode, threads, hooks, partial gradients, higher derivatives, torch.func.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

import poise

pytestmark = pytest.mark.usefixtures("native")

Call = Callable[..., Tensor]


def qkv(*lead: int, h: int = 4, g: int = 2, n: int = 9, d: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    b = lead or (2,)
    return torch.randn(*b, h, n, d), torch.randn(*b, g, n, d), torch.randn(*b, g, n, d)


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().clone().requires_grad_() for tensor in tensors)


def same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


# The direct way, the validated way with the kernels, and the portable one.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"mask": poise.causal()},
    "rich": {"mask": poise.window(3, 3) | poise.global_tokens([0]), "softcap": 5.0},
    "dropout": {"dropout": 0.4},
    "blockwise": {"mask": poise.causal(), "impl": "blockwise"},
}


@pytest.fixture(params=WAYS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


# --- autograd ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("mask", [None, poise.causal(), poise.window(2, 1)], ids=["all", "causal", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_direct_way_has_the_gradients_of_the_validated_one(layout: Any, mask: Any, dtype: torch.dtype) -> None:
    tensors = [x.to(dtype) for x in qkv()]
    if layout == "bshd":
        tensors = [x.transpose(1, 2).contiguous() for x in tensors]
    direct, validated = leaves(*tensors), leaves(*tensors)
    call = {"mask": mask, "scale": 0.3, "layout": layout}
    out = poise.attention(*direct, **call)
    other, _ = poise.observe(*validated, **call)  # never takes the direct way with gradients
    same(out, other)
    weight = torch.randn_like(out)
    for result, inputs in ((out, direct), (other, validated)):
        (result * weight).sum().backward()
        assert all(x.grad is not None and x.grad.dtype is dtype for x in inputs)
    same([x.grad for x in direct], [x.grad for x in validated])


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("observed", [False, True])
def test_only_what_requires_a_gradient_gets_one(which: int, observed: bool, options: dict[str, Any]) -> None:
    tensors = qkv()
    torch.manual_seed(1)
    everything = leaves(*tensors)
    one = [x.clone().requires_grad_(index == which) for index, x in enumerate(tensors)]
    for inputs in (everything, one):
        torch.manual_seed(1)
        if observed:
            out, stats = poise.observe(*inputs, **options)
            (out.sum() + stats.lse.sum()).backward()
        else:
            poise.attention(*inputs, **options).sum().backward()
    for index, (x, expected) in enumerate(zip(one, everything, strict=True)):
        assert (x.grad is None) == (index != which)
        if x.grad is not None:
            same(x.grad, expected.grad)


@pytest.mark.parametrize("name", ["bias", "table", "slopes", "scale", "sink"])
def test_a_parameter_alone_may_require_a_gradient(name: str) -> None:
    q, k, v = qkv()
    tensor = torch.rand({"bias": (9, 9), "table": (4, 5)}.get(name, (4,)), requires_grad=True)
    wrapped = {"slopes": ("bias", poise.alibi), "table": ("bias", poise.relative)}
    argument, wrap = wrapped.get(name, (name, lambda tensor: tensor))
    results = [poise.attention(q, k, v, **{argument: wrap(tensor)}, impl=impl) for impl in ("cpu", "blockwise")]
    mine, other = (torch.autograd.grad(out.square().sum(), tensor)[0] for out in results)
    assert (mine - other).abs().max() <= 1e-5 * other.abs().max()  # sums over thousands of pairs


@pytest.mark.parametrize("used", ["out", "stats", "neither"])
def test_results_may_be_left_unused(used: str, options: dict[str, Any]) -> None:
    inputs = leaves(*qkv())
    out, stats = poise.observe(*inputs, **options)
    loss = {"out": out, "stats": stats.entropy, "neither": sum(x.sum() for x in inputs)}[used]
    loss.sum().backward()
    assert all(x.grad is not None for x in inputs[:2])


def test_a_retained_graph_gives_the_same_gradients_again(options: dict[str, Any]) -> None:
    inputs = leaves(*qkv())
    out = poise.attention(*inputs, **options)
    weight = torch.randn_like(out)
    first = torch.autograd.grad(out, inputs, weight, retain_graph=True)
    same(torch.autograd.grad(out, inputs, weight), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, inputs, weight)


def test_a_gradient_with_odd_strides_is_read_right(options: dict[str, Any]) -> None:
    inputs = leaves(*qkv())
    for make in (lambda x: x.mT.contiguous().mT, lambda x: x.sum().expand(x.shape), lambda x: x[..., ::1].double()):
        torch.manual_seed(0)
        out = poise.attention(*inputs, **options)
        weight = make(torch.randn_like(out)).to(out.dtype)
        plain = torch.autograd.grad(out, inputs, weight.contiguous(), retain_graph=True)
        same(torch.autograd.grad(out, inputs, weight), plain)


def test_hooks_see_and_may_change_gradients(options: dict[str, Any]) -> None:
    q, k, v = leaves(*qkv())
    q.register_hook(lambda g: 2 * g)
    torch.manual_seed(0)
    out = poise.attention(q, k, v, **options)
    seen: list[Tensor] = []
    out.register_hook(seen.append)
    out.sum().backward()
    assert torch.equal(seen[0], torch.ones_like(out))
    other = leaves(q, k, v)
    torch.manual_seed(0)
    poise.attention(*other, **options).sum().backward()
    assert other[0].grad is not None
    same(q.grad, 2 * other[0].grad)


def test_saved_tensors_can_be_packed_away(options: dict[str, Any]) -> None:
    inputs = leaves(*qkv())
    torch.manual_seed(0)
    poise.attention(*inputs, **options).sum().backward()
    others = leaves(*inputs)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.clone())
        return len(packed) - 1

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: packed[index]):
        out = poise.attention(*others, **options)
    out.sum().backward()
    assert len(packed) >= 3
    same([x.grad for x in others], [x.grad for x in inputs])


def test_an_input_changed_in_place_before_backward_is_noticed(options: dict[str, Any]) -> None:
    inputs = leaves(*qkv())
    doubled = [2 * x for x in inputs]
    out = poise.attention(*doubled, **options)
    doubled[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("impl", ["cpu", "blockwise", "reference"])
@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("empty", ["b", "h", "n", "m"])
def test_an_empty_call_has_gradients_of_zero(empty: str, statistics: bool, impl: Any) -> None:
    sizes = {"b": 2, "h": 4, "n": 3, "m": 5, empty: 0}
    b, h, n, m = sizes.values()
    inputs = leaves(torch.randn(b, h, n, 8), torch.randn(b, h // 2, m, 8), torch.randn(b, h // 2, m, 8))
    table, shared, slopes, dense, scale, sink = others = leaves(
        torch.randn(h, 9), torch.randn(9), torch.rand(h), torch.randn(h, 1, 1), torch.rand(b, h, n), torch.randn(h)
    )
    for bias in (poise.relative(table), poise.relative(shared) + dense, poise.alibi(slopes)):
        out, stats = poise.observe(*inputs, bias=bias, scale=scale, sink=sink, q_offset=0, impl=impl)
        (out.sum() + (stats.var_p.sum() if statistics else 0.0)).backward()
    assert all(x.grad is not None and x.grad.shape == x.shape and not x.grad.any() for x in (*inputs, *others))


def test_inference_mode_gives_the_same_output(options: dict[str, Any]) -> None:
    inputs = leaves(*qkv())
    torch.manual_seed(0)
    expected = poise.attention(*inputs, **options)
    torch.manual_seed(0)
    with torch.inference_mode():
        out = poise.attention(*inputs, **options)
        assert out.is_inference()
        _, stats = poise.observe(*inputs, **options)
        assert stats.entropy.is_inference()
    same(out, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_changes_nothing(use_reentrant: bool, options: dict[str, Any]) -> None:
    inputs = leaves(*qkv())
    others = leaves(*inputs)

    def block(*tensors: Tensor) -> Tensor:
        out, stats = poise.observe(*tensors, **options)
        return out + stats.lse[..., None]

    torch.manual_seed(0)
    expected = block(*inputs)
    torch.manual_seed(0)
    out = checkpoint(block, *others, use_reentrant=use_reentrant)
    torch.rand(3)  # the generator has moved on when the block runs again
    same(out, expected)
    expected.square().sum().backward()
    out.square().sum().backward()
    same([x.grad for x in others], [x.grad for x in inputs])


@pytest.mark.parametrize("options", [{"mask": poise.causal()}, WAYS["rich"]], ids=["plain", "rich"])
def test_threads_calling_at_once_get_what_one_alone_gets(options: dict[str, Any]) -> None:
    sizes = (5, 64, 130, 257)
    inputs = {n: qkv(n=n) for n in sizes}

    def train(n: int) -> list[Tensor]:
        tensors = leaves(*inputs[n])
        out, stats = poise.observe(*tensors, **options)
        (out.square().sum() + stats.entropy.sum()).backward()
        return [out.detach(), *(x.grad for x in tensors if x.grad is not None)]

    expected = {n: train(n) for n in sizes}
    wrong: list[int] = []

    def work(order: tuple[int, ...]) -> None:
        for _ in range(25):
            for n in order:
                got = train(n)
                if len(got) != 4 or not all(map(torch.equal, got, expected[n])):
                    wrong.append(n)

    threads = [threading.Thread(target=work, args=(order,)) for order in (sizes, sizes[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", [None, "cpu", "blockwise", "reference"])
def test_autocast_casts_and_gradients_arrive_in_the_leaves_dtype(impl: Any) -> None:
    inputs, others, theirs = (leaves(*qkv(g=4)) for _ in range(3))
    for x, y, z in zip(inputs, others, theirs, strict=True):
        y.data, z.data = x.data, x.data
    with torch.autocast("cpu", torch.bfloat16):
        out = poise.attention(*inputs, mask=poise.causal(), impl=impl)
        peer = F.scaled_dot_product_attention(*theirs, is_causal=True)
    assert out.dtype is peer.dtype is torch.bfloat16
    by_hand = poise.attention(*(x.bfloat16() for x in others), mask=poise.causal(), impl=impl)
    same(out, by_hand)
    for result in (out, by_hand, peer):
        result.float().square().sum().backward()
    assert all(x.grad is not None and x.grad.dtype is torch.float32 for x in inputs)
    same([x.grad for x in inputs], [x.grad for x in others])
    torch.testing.assert_close([x.grad for x in inputs], [x.grad for x in theirs], rtol=0.05, atol=0.05)


def test_autocast_leaves_float64_alone_and_joins_mixed_dtypes() -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        assert poise.attention(q.double(), k.double(), v.double()).dtype is torch.float64
        out, _ = poise.observe(q, k.bfloat16(), v.half(), mask=poise.causal())
    assert out.dtype is torch.bfloat16


def test_nothing_is_cast_where_autocast_is_off() -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert poise.attention(*qkv()).dtype is torch.float32


# --- higher derivatives -----------------------------------------------------------------------------------------------


def second_derivative(options: dict[str, Any]) -> None:
    inputs = leaves(*qkv())
    out = poise.attention(*inputs, **options)
    first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    sum(x.square().sum() for x in first).backward()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["plain", "rich"])
def test_the_kernels_refuse_a_second_derivative_and_name_the_way_out(name: str) -> None:
    with pytest.raises(RuntimeError, match='impl="blockwise"'):
        second_derivative(WAYS[name])


def test_blockwise_takes_a_second_derivative() -> None:
    second_derivative(WAYS["blockwise"])


def test_forward_mode_works_by_itself() -> None:
    q, k, v = qkv()
    tangents = tuple(torch.randn_like(x) for x in (q, k, v))
    out, tangent = jvp(lambda *x: poise.attention(*x, mask=poise.causal()), (q, k, v), tangents)
    same(out, poise.attention(q, k, v, mask=poise.causal(), impl="blockwise"))
    step = 1e-6
    moved = [
        poise.attention(
            *(x.double() + s * step * t.double() for x, t in zip((q, k, v), tangents, strict=True)), mask=poise.causal()
        )
        for s in (1, -1)
    ]
    torch.testing.assert_close(tangent, ((moved[0] - moved[1]) / (2 * step)).float(), rtol=1e-4, atol=1e-5)


# --- torch.func -------------------------------------------------------------------------------------------------------


def loop(call: Call, in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...], size: int) -> Tensor:
    """What vmap is to give."""
    parts = [
        call(*(x if dim is None else x.select(dim, index) for x, dim in zip(tensors, in_dims, strict=True)))
        for index in range(size)
    ]
    return torch.stack(parts)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, 0, 2), (0, None, None), (None, 0, 0), (-1, None, 0)], ids=str)
@pytest.mark.parametrize("impl", [None, "cpu", "blockwise"])
@pytest.mark.parametrize("rank", [3, 4])
def test_vmap_is_a_loop(in_dims: tuple[int | None, ...], impl: Any, rank: int) -> None:
    shapes = {3: ((4, 9, 16), (2, 9, 16), (2, 9, 16)), 4: ((2, 4, 9, 16), (2, 2, 9, 16), (2, 2, 9, 16))}[rank]
    tensors = tuple(
        torch.randn(shape) if dim is None else torch.randn(3, *shape).movedim(0, dim)
        for shape, dim in zip(shapes, in_dims, strict=True)
    )

    def call(*x: Tensor) -> Tensor:
        return poise.attention(*x, mask=poise.causal(), impl=impl)

    got = vmap(call, in_dims=in_dims)(*tensors)
    torch.testing.assert_close(got, loop(call, in_dims, tensors, 3))


def test_vmap_goes_to_the_kernels_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from poise.kernels import ops

    calls: list[torch.Size] = []
    forward = ops.forward
    monkeypatch.setattr(
        ops, "forward", lambda problem, *rest: (calls.append(problem.q.shape), forward(problem, *rest))[1]
    )
    vmap(lambda q, k, v: poise.attention(q, k, v))(*qkv(3, 2))
    assert calls == [torch.Size([6, 4, 9, 16])]


def test_vmap_over_what_masks_hold() -> None:
    tensors = (*qkv(), torch.tensor([[3, 9], [5, 1], [9, 9]]), torch.rand(3, 9, 9) < 0.7)
    in_dims = (None, None, None, 0, 0)

    def call(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, keep: Tensor) -> Tensor:
        mask = (poise.lengths(lengths) | poise.global_tokens([0])) & keep
        return poise.attention(q, k, v, mask=mask, impl="cpu")

    torch.testing.assert_close(vmap(call, in_dims=in_dims)(*tensors), loop(call, in_dims, tensors, 3))


@pytest.mark.parametrize("name", ["bias", "table", "slopes", "scale", "sink"])
@pytest.mark.parametrize("batched", [True, False])
def test_vmap_over_parameters(name: str, batched: bool) -> None:
    shape = {"bias": (9, 9), "table": (4, 5)}.get(name, (4,))
    wrapped = {"slopes": ("bias", poise.alibi), "table": ("bias", poise.relative)}
    argument, wrap = wrapped.get(name, (name, lambda tensor: tensor))
    tensors = (*qkv(3, 2), torch.rand(3, *shape) if batched else torch.rand(shape))
    in_dims = (0, 0, 0, 0 if batched else None)

    def call(q: Tensor, k: Tensor, v: Tensor, parameter: Tensor) -> Tensor:
        return poise.attention(q, k, v, **{argument: wrap(parameter)}, impl="cpu")

    torch.testing.assert_close(vmap(call, in_dims=in_dims)(*tensors), loop(call, in_dims, tensors, 3))
    each = vmap(grad(lambda *x: call(*x).square().sum(), argnums=(0, 3)), in_dims=in_dims)(*tensors)
    for index in range(3):
        one = leaves(*(x if dim is None else x[index] for x, dim in zip(tensors, in_dims, strict=True)))
        expected = torch.autograd.grad(call(*one).square().sum(), (one[0], one[3]))
        torch.testing.assert_close(tuple(x[index] for x in each), expected)


def test_nested_vmap_is_a_loop_of_loops() -> None:
    tensors = qkv(2, 3)
    got = vmap(vmap(lambda *x: poise.attention(*x, impl="cpu")))(*tensors)
    torch.testing.assert_close(got, poise.attention(*(x.flatten(0, 1) for x in tensors)).unflatten(0, (2, 3)))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_draws_dropout_as_it_is_told(randomness: str) -> None:
    tensors = tuple(x.expand(3, *x.shape) for x in qkv())
    out = vmap(lambda *x: poise.attention(*x, dropout=0.5), randomness=randomness)(*tensors)
    assert torch.equal(out[0], out[1]) == (randomness == "same")


def test_vmap_with_dropout_asks_for_the_randomness() -> None:
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda *x: poise.attention(*x, dropout=0.5))(*qkv(3, 2))


def test_func_grad_is_autograd() -> None:
    tensors = qkv()

    def loss(*x: Tensor) -> Tensor:
        out, stats = poise.observe(*x, mask=poise.causal(), impl="cpu")
        return out.square().sum() + stats.entropy.sum()

    inputs = leaves(*tensors)
    same(grad(loss, argnums=(0, 1, 2))(*tensors), torch.autograd.grad(loss(*inputs), inputs))


def test_gradients_per_example_of_a_module() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(16, 48)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.inner(x).unflatten(-1, (3, 2, 8)).unbind(-3)
            return poise.attention(q, k, v, mask=poise.causal(), layout="bshd").flatten(-2)

    layer, x = Layer(), torch.randn(4, 7, 16)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(layer, parameters, (x[None],))
        return out.square().sum()

    each = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for index in range(4):
        expected = torch.autograd.grad(layer(x[index : index + 1]).square().sum(), list(layer.parameters()))
        for mine, other in zip(each.values(), expected, strict=True):
            torch.testing.assert_close(mine[index], other)


def test_a_jacobian_is_the_gradients_row_by_row() -> None:
    q, k, v = qkv(h=1, g=1, n=3, d=4)
    jacobian = jacrev(lambda q: poise.attention(q, k, v).sum((0, 1)))(q)  # [N, D, B, H, N, D]
    (leaf,) = leaves(q)
    (row,) = torch.autograd.grad(poise.attention(leaf, k, v).sum((0, 1))[1, 2], leaf)
    torch.testing.assert_close(jacobian[1, 2], row)


def test_batched_gradients_are_the_gradients_one_by_one() -> None:
    inputs = leaves(*qkv())
    out = poise.attention(*inputs, mask=poise.causal())
    weights = torch.randn(3, *out.shape)
    batched = torch.autograd.grad(out, inputs, weights, is_grads_batched=True, retain_graph=True)
    for index, weight in enumerate(weights):
        one = torch.autograd.grad(out, inputs, weight, retain_graph=True)
        torch.testing.assert_close(tuple(x[index] for x in batched), one)


def test_a_hessian_comes_by_blockwise_and_impl_cpu_says_so() -> None:
    q, k, v = qkv(h=1, g=1, n=3, d=4)
    got = hessian(lambda q: poise.attention(q, k, v).square().sum())(q)
    expected = hessian(lambda q: poise.attention(q, k, v, impl="reference").square().sum())(q)
    torch.testing.assert_close(got, expected)
    with pytest.raises(ValueError, match='impl="blockwise"'):
        hessian(lambda q: poise.attention(q, k, v, impl="cpu").square().sum())(q)


@pytest.mark.parametrize("changed", ["mask", "offset"])
@pytest.mark.parametrize("impl", ["cpu", "blockwise"])
def test_a_mask_or_offset_changed_in_place_before_the_backward_pass_is_noticed(impl: Any, changed: str) -> None:
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    seen, offset = torch.rand(16, 16) < 0.5, torch.tensor([0, 3])
    mask = poise.keep(seen) & poise.causal()
    out = poise.attention(q, k, v, mask=mask, q_offset=offset, impl=impl)
    if changed == "mask":
        seen.logical_not_()
    else:
        offset.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
