"""torch.compile, torch.export and the operators they see: the same results, one graph, no recompilation per length."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import poise
from poise import traced
from poise.kernels.program import written
from poise.problem import prepare, seeded

N, D = 24, 16
Call = Callable[[Tensor, Tensor, Tensor], Tensor]

SLOPES = poise.alibi_slopes(4).requires_grad_()
TABLE = torch.linspace(-1, 1, 36).view(4, 9).requires_grad_()
DENSE = torch.linspace(-1, 1, 4 * N * N).view(4, N, N).sin().requires_grad_()
SCALE = torch.linspace(0.1, 0.4, 4).requires_grad_()
SINK = torch.linspace(-1, 1, 4).requires_grad_()
LEARNED = (SLOPES, TABLE, DENSE, SCALE, SINK)
KEEP = torch.ones(N, N, dtype=torch.bool).tril(3)
LONGFORMER = poise.window(3, 3) | poise.global_tokens([0, 5])
NOT_DILATED = poise.causal() & ~poise.dilated(3, 2)
LOWERED = (poise.causal() | poise.prefix(3)).lower(N, N)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(n: int = N, h: int = 4, g: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, h, n, D), (2, g, n, D), (2, g, n, D))
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v


def check(compiled: Call, eager: Call, tensors: tuple[Tensor, ...], exact: bool = True) -> None:
    """Values and gradients of both, also of the learned tensors."""
    got, expected = compiled(*tensors), eager(*tensors)
    weight = torch.randn_like(expected)
    sources = [*tensors, *LEARNED]
    gradients = [torch.autograd.grad(x, sources, weight, allow_unused=True) for x in (got, expected)]
    compare = torch.testing.assert_close if not exact else lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0)
    compare(got, expected)
    for mine, other in zip(*gradients, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            compare(mine, other)


def penalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, stats = poise.observe(q, k, v, mask=poise.causal(), sink=SINK)
    return out + stats.entropy[..., None] + stats.lse.square()[..., None]


CALLS: dict[str, Call] = {
    "causal": lambda q, k, v: poise.attention(q, k, v, mask=poise.causal()),
    "window and lengths": lambda q, k, v: poise.attention(
        q, k, v, mask=poise.window(5) & poise.lengths(torch.tensor([9, 20]), start=1)
    ),
    "documents": lambda q, k, v: poise.attention(
        q, k, v, mask=poise.documents(torch.arange(q.shape[2]) // 7) & poise.causal()
    ),
    "documents from a list": lambda q, k, v: poise.attention(q, k, v, mask=poise.documents(cu_seqlens=[0, 10, N])),
    "tile map made inside": lambda q, k, v: poise.attention(
        q, k, v, mask=poise.window(3, 3) | poise.global_tokens([0, 5])
    ),
    "tile map made outside": lambda q, k, v: poise.attention(q, k, v, mask=LONGFORMER),
    "blocks": lambda q, k, v: poise.attention(q, k, v, mask=poise.blocks([[True, False], [True, True]], 12)),
    "not": lambda q, k, v: poise.attention(q, k, v, mask=NOT_DILATED),
    "lowered": lambda q, k, v: poise.attention(q, k, v, mask=LOWERED),
    "bool tensor": lambda q, k, v: poise.attention(q, k, v, mask=KEEP),
    "dense and relative": lambda q, k, v: poise.attention(q, k, v, bias=DENSE + poise.relative(TABLE)),
    "alibi": lambda q, k, v: poise.attention(q, k, v, mask=poise.causal(), bias=poise.alibi(SLOPES)),
    "scale, cap and sink": lambda q, k, v: poise.attention(q, k, v, scale=SCALE, softcap=3.0, sink=SINK),
    "at the end": lambda q, k, v: poise.attention(q[:, :, -5:], k, v, mask=poise.causal(), q_offset="end"),
    "offsets": lambda q, k, v: poise.attention(q, k, v, mask=poise.causal(), q_offset=torch.tensor([1, 2])),
    "bshd": lambda q, k, v: poise.attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask=poise.causal(), layout="bshd"
    ),
    "observed": penalised,
    "blockwise": lambda q, k, v: poise.attention(q, k, v, bias=poise.alibi(SLOPES), sink=SINK, impl="blockwise"),
    "float64": lambda q, k, v: poise.attention(q.double(), k.double(), v.double(), mask=poise.causal()),
    "reference": lambda q, k, v: poise.attention(q, k, v, bias=DENSE, impl="reference"),
    "sdpa": lambda q, k, v: poise.scaled_dot_product_attention(
        q, k, v, attn_mask=DENSE, is_causal=True, enable_gqa=True
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("native")
def test_a_compiled_call_and_its_gradients_are_the_eager_ones(name: str) -> None:
    compiled = torch.compile(CALLS[name], fullgraph=True, backend="aot_eager")
    check(compiled, CALLS[name], inputs())


@pytest.mark.usefixtures("native")
def test_inductor_compiles_calls_and_what_surrounds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        local = poise.attention(q * 2, k, v, mask=LONGFORMER, bias=DENSE)
        return penalised(q, k, v) + local.relu()

    check(torch.compile(model, fullgraph=True), model, inputs(), exact=False)


@pytest.mark.usefixtures("native")
def test_without_gradients_nothing_is_kept_for_them() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    q, k, v = inputs()
    with torch.no_grad():
        out = torch.compile(CALLS["alibi"], fullgraph=True, backend=backend)(q, k, v)
        assert torch.equal(out, CALLS["alibi"](q, k, v))
    (call,) = (node for node in graphs[0].graph.nodes if "poise.attention" in str(node.target))
    assert call.args[-1] is False


@pytest.mark.parametrize(
    "name", ["alibi", "documents", "tile map made outside", "observed", "at the end", "from the length", "from a ramp"]
)
@pytest.mark.usefixtures("native")
def test_other_lengths_do_not_compile_again(name: str) -> None:
    more: dict[str, Call] = {
        "from the length": lambda q, k, v: poise.attention(
            q, k, v, mask=poise.causal() | poise.prefix(q.shape[2] // 2)
        ),
        "from a ramp": lambda q, k, v: poise.attention(
            q, k, v, mask=torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril(2)
        ),
    }
    call = {**CALLS, **more}[name]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for n in (40, 72):  # the second length is what makes it dynamic
        check(compiled, call, inputs(n))
    assert counter.frame_count == 2
    for n in (133, 17):
        check(compiled, call, inputs(n))
    assert counter.frame_count == 2


EVERYTHING = {
    "mask": poise.causal() & poise.lengths(torch.tensor([9, 20])) & KEEP & poise.documents(torch.zeros(2, 40).long()),
    "bias": poise.relative(TABLE) + DENSE + poise.alibi(SLOPES),
    "scale": torch.rand(2, 4, N),
    "sink": SINK,
}


@pytest.mark.parametrize("name", ["rich", "sdpa"])
@pytest.mark.usefixtures("native")
def test_every_size_may_be_symbolic_from_the_start(name: str) -> None:
    def rich(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = EVERYTHING["mask"] & (poise.global_tokens(torch.tensor([[0], [1]])) | poise.blocks([[True]], N))
        return poise.attention(q, k, v, **{**EVERYTHING, "mask": mask})

    call = {"rich": rich, "sdpa": CALLS["sdpa"]}[name]
    check(torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True), call, inputs())


@pytest.mark.parametrize("impl", [None, "blockwise", "reference"])
@pytest.mark.usefixtures("native")
def test_dropout_is_drawn_anew_by_every_compiled_call(impl: Any) -> None:
    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return poise.attention(q, k, v, dropout=0.5, impl=impl)

    compiled = torch.compile(dropped, fullgraph=True, backend="aot_eager")
    q, k, v = inputs()
    torch.manual_seed(3)
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    check(compiled, lambda *_: first, (q, k, v))
    torch.manual_seed(3)
    assert torch.equal(dropped(q, k, v), first)


@pytest.mark.usefixtures("native")
def test_numbers_may_change_between_compiled_calls() -> None:
    def scaled(q: Tensor, k: Tensor, v: Tensor, number: float) -> Tensor:
        return poise.attention(q, k, v, scale=number, softcap=10 * number)

    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    q, k, v = inputs()
    for number in (0.1, 0.2, 0.3):
        torch.testing.assert_close(compiled(q, k, v, number), scaled(q, k, v, number), rtol=0, atol=0)


@pytest.mark.usefixtures("native")
def test_autocast_is_compiled_too() -> None:
    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return poise.attention(q, k, v, mask=poise.causal())

    q, k, v = inputs()
    compiled = torch.compile(mixed, fullgraph=True, backend="aot_eager")
    assert compiled(q, k, v).dtype is torch.bfloat16
    check(compiled, mixed, (q, k, v))


@pytest.mark.parametrize("impl", [None, "blockwise"])
@pytest.mark.usefixtures("native")
def test_a_caches_view_is_compiled_too(impl: Any) -> None:
    stored = torch.randint(-127, 128, (5, 2, 8, D), dtype=torch.int8)  # pages of 8 keys
    scales = torch.rand(5, 2, 8)
    lengths, pages = torch.tensor([13, 8], dtype=torch.int32), torch.tensor([[3, 1], [4, -1]], dtype=torch.int32)
    view = poise.KVView(stored, stored, lengths, 13, False, pages, scales, scales)

    def decode(q: Tensor) -> Tensor:
        return poise.attention(q, view, mask=poise.causal(), impl=impl)

    q = torch.randn(2, 4, 3, D)
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), decode(q), rtol=0, atol=0)


@pytest.mark.usefixtures("native")
def test_vmap_inside_a_compiled_function_is_vmap() -> None:
    def batched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.vmap(lambda *x: poise.attention(*x, mask=poise.causal()))(q, k, v)

    compiled = torch.compile(batched, fullgraph=True, backend="aot_eager")
    q, k, v = inputs()
    torch.testing.assert_close(compiled(q, k, v), CALLS["causal"](q, k, v))


# --- export -----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 192)
        self.table = nn.Parameter(torch.randn(4, 9))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = self.inner(x).unflatten(-1, (3, 4, 16)).unbind(2)
        mask = (LONGFORMER | poise.causal()) & poise.lengths(lengths)
        out = poise.attention(q, k, v, mask=mask, bias=poise.relative(self.table), layout="bshd")
        return out.flatten(2)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.usefixtures("native")
def test_an_exported_module_computes_the_same(dynamic: bool) -> None:
    layer, x, lengths = Layer(), torch.randn(2, 30, 64), torch.tensor([30, 11])
    shapes = {"x": {1: torch.export.Dim("n", min=2, max=500)}, "lengths": None} if dynamic else None
    exported = torch.export.export(layer, (x, lengths), dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for n in (30, 71) if dynamic else (30,):
        x = torch.randn(2, n, 64)
        torch.testing.assert_close(loaded(x, lengths), layer(x, lengths), rtol=0, atol=0)


# --- the operators ----------------------------------------------------------------------------------------------------

RICH: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"mask": LONGFORMER & poise.lengths(torch.tensor([9, 20])) & KEEP},
    "biased": {"bias": DENSE + poise.relative(TABLE) + poise.alibi(SLOPES), "mask": poise.causal()},
    "scaled": {"scale": SCALE, "softcap": 3.0, "sink": SINK, "q_offset": torch.tensor([0, 2])},
    "dropped": {"dropout": 0.3},
}


def arguments(call: Sequence[Any], *rest: Any) -> tuple[Any, ...]:
    """What an operator of traced.py is given for a call; operands are leaves, as opcheck wants them."""
    operands, *others = call
    return [x.detach().clone().requires_grad_() for x in operands], *others, *rest


@pytest.mark.parametrize(
    ("impl", "name"), [*(("cpu", name) for name in RICH), ("blockwise", "biased"), ("reference", "dropped")]
)
@pytest.mark.usefixtures("native")
def test_torch_finds_no_fault_in_the_operators_of_whole_calls(impl: str, name: str) -> None:
    bshd = name == "masked"
    problem = seeded(prepare(*inputs(), **RICH[name], sink_keys=(0, 3)))
    call = arguments(written(problem), impl, bshd)
    torch.library.opcheck(torch.ops.poise.attention.default, (*call, True, True))
    with torch.no_grad():
        out, packed, saved = torch.ops.poise.attention.default(*call, True, True)
    operands, *rest = call
    operands = [x.detach() for x in operands]
    d_out, d_packed = torch.randn_like(out), torch.randn_like(packed)
    for wanted in ([True] * len(operands), [False, True, *[False] * (len(operands) - 2)]):
        for incoming in ((d_out, d_packed), (d_out, None), (None, d_packed)):
            if impl != "cpu" and incoming[1] is None:
                continue  # the same code whichever result a gradient comes from
            results = (wanted, out, packed, saved, *incoming)
            torch.library.opcheck(torch.ops.poise.attention_backward.default, (operands, *rest, *results))


def test_a_call_survives_being_taken_apart() -> None:
    problem = prepare(*inputs(), **RICH["masked"], **RICH["scaled"], bias=DENSE)
    again = traced.read(written(problem))
    assert repr(again.mask) == repr(problem.mask)
    assert again.sink is problem.sink
    assert torch.equal(again.bias[0].tensor, DENSE[None])
    assert again.scale is problem.scale
