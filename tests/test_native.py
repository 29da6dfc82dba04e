"""The boundary to torch: what the native operators refuse, return and register. Their numbers are tested elsewhere."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from poise import testing
from poise.kernels import ops

pytestmark = pytest.mark.usefixtures("native")

U = ops.UNBOUNDED
B, H, G, N, M, D = 2, 4, 2, 5, 70, 8


def _qkv(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((B, H, N, D), (B, G, M, D), (B, G, M, D + 1))
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)  # type: ignore[return-value]


def _forward(**changed: Any) -> tuple[Tensor, Tensor, Tensor]:
    """poise::forward with nothing optional, but for what is changed."""
    q, k, v = _qkv()
    plain = {
        "q": q,
        "k": k,
        "v": v,
        "scale": 0.3,
        "softcap": 0.0,
        "dropout": 0.0,
        "seed": 0,
        "left": U,
        "right": U,
        "offset": 0,
    }
    names = [argument.name for argument in torch.ops.poise.forward.default._schema.arguments]
    given = {**dict.fromkeys(names), **plain, "stats": True, "save": False, "bshd": False, **changed}
    return torch.ops.poise.forward.default(**given)  # type: ignore[no-any-return]


def _int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _tiles(runs: list[list[int]], patterns: int = 0, ptr: list[int] | None = None) -> dict[str, Tensor]:
    return {
        "tile_ptr": torch.tensor(ptr or [0, len(runs)], dtype=torch.int32).reshape(1, 1, -1),
        "tile_runs": torch.tensor(runs, dtype=torch.int32).reshape(-1, 3),
        "patterns": torch.full((patterns, 64), -1),
    }


def _int8(**scales: Tensor) -> dict[str, Tensor]:
    return {name: torch.zeros(B, G, M, D, dtype=torch.int8) for name in ("k", "v")} | scales


def test_the_isa_is_one_this_machine_has() -> None:
    assert ops.isa() in testing.isas()


WRONG: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "rank of q": (lambda: {"q": torch.zeros(H, N, D)}, "q must have 4 dims; got float32 [4, 5, 8]"),
    "dtype of q": (lambda: {"q": torch.zeros(B, H, N, D, dtype=torch.float64)}, "q must be float32"),
    "dtype of k": (lambda: {"k": torch.zeros(B, G, M, D).half()}, "v must have k's dtype, float16; got float32"),
    "batch of k": (lambda: {"k": torch.zeros(1, G, M, D)}, "k must have size 2 in dim 0"),
    "head dim of k": (lambda: {"k": torch.zeros(B, G, M, D + 1)}, "k must have size 8 in dim 3"),
    "length of v": (lambda: {"v": torch.zeros(B, G, M + 1, D)}, "v must have size 70 in dim 2"),
    "head ratio": (
        lambda: {"k": torch.zeros(B, 3, M, D), "v": torch.zeros(B, 3, M, D)},
        "k must have a head count that divides q's 4",
    ),
    "no heads of k": (
        lambda: {"k": torch.zeros(B, 0, M, D), "v": torch.zeros(B, 0, M, D)},
        "k must have a head count that divides q's 4",
    ),
    "strided last dim": (lambda: {"q": torch.zeros(B, H, D, N).mT}, "q must have a contiguous last dim"),
    "left": (lambda: {"left": 2 * U}, "left must lie within"),
    "offset": (lambda: {"offset": -2 * U}, "offset must lie within"),
    "offsets": (lambda: {"offsets": torch.tensor([0, 2 * U])}, "q_offset must lie within"),
    "offsets' dtype": (lambda: {"offsets": _int32(0, 0)}, "offsets must be int64"),
    "start": (lambda: {"start": _int32(0)}, "start must have size 2"),
    "end, strided": (lambda: {"end": _int32(1).expand(B)}, "end must be contiguous"),
    "rows": (lambda: {"rows": torch.zeros(1, 1, N + 1, 2, dtype=torch.int32)}, "rows must have size 5 in dim 2"),
    "mask": (lambda: {"mask0": torch.ones(B, H, N, M - 1, dtype=torch.bool)}, "mask0 must have size 70 or 1 in dim 3"),
    "mask's dtype": (lambda: {"mask1": torch.ones(B, H, N, M)}, "mask1 must be bool"),
    "bias": (lambda: {"bias0": torch.zeros(N, M)}, "bias0 must have 4 dims"),
    "bias' dtype": (lambda: {"bias1": torch.zeros(1, 1, N, M).double()}, "bias1 must be float32, bfloat16 or float16"),
    "scale_rows": (lambda: {"scale_rows": torch.zeros(B, H, N, 1)}, "scale_rows must have 3 dims"),
    "softcap": (lambda: {"softcap": float("nan")}, "softcap must be positive"),
    "sink": (lambda: {"sink": torch.zeros(G)}, "sink must have size 4"),
    "table": (lambda: {"table": torch.zeros(H, 4)}, "table must have an odd number of columns"),
    "slopes": (lambda: {"slopes": torch.zeros(H).bfloat16()}, "slopes must be float32"),
    "sink key": (lambda: {"sink_keys": _int32(M)}, "sink_keys must lie within the 70 keys"),
    "tiles alone": (lambda: {"tile_ptr": torch.zeros(1, 1, 2, dtype=torch.int32)}, "must be given together"),
    "tile_ptr": (lambda: _tiles([[0, 1, -1]], ptr=[0, 2]), "tile_ptr must not decrease"),
    "tile_ptr's length": (lambda: _tiles([[0, 1, -1]], ptr=[0, 1, 1]), "tile_ptr must have size 2 in dim 2"),
    "run outside": (lambda: _tiles([[1, 2, -1]]), "within 2 key tiles"),
    "run before": (lambda: _tiles([[-1, 1, -1]]), "got (-1, 1, -1)"),
    "runs unordered": (lambda: _tiles([[1, 1, -1], [0, 1, -1]]), "ascending order"),
    "no such pattern": (lambda: _tiles([[0, 1, 1]], patterns=1), "1 patterns"),
    "long patterned run": (lambda: _tiles([[0, 2, 0]], patterns=1), "patterned runs one tile long"),
    "too many keys": (lambda: {"keys": M + 1}, "keys must be at most the 70 that k has room for, got 71"),
    "pages' dtype": (lambda: {"pages": torch.zeros(B, 1), "keys": 1}, "pages must be int32"),
    "pages' batch": (lambda: {"pages": _int32([0]), "keys": 1}, "pages must have size 2 in dim 0"),
    "pages without keys": (
        lambda: {"pages": _int32([0], [1])},
        "keys, the length of the longest sequence, must be given",
    ),
    "keys beyond pages": (lambda: {"pages": _int32([0], [1]), "keys": M + 1}, "keys must be at most the 70"),
    "no such page": (lambda: {"pages": _int32([0], [2]), "keys": M}, "pages[1, 0] must name one of k's 2 pages"),
    "negative page": (
        lambda: {"pages": _int32([0, 1], [1, -1]), "keys": M + 1, "end": _int32(M, M + 1)},
        "pages[1, 1] must name one of k's 2 pages, for sequence 1 has 71 keys; got -1",
    ),
    "int8 without factors": (lambda: _int8(), "k_scale must be given with int8 k"),
    "factors of other keys": (lambda: _int8(k_scale=torch.zeros(B, G, M - 1)), "k_scale must have size 70 in dim 2"),
    "factors' dtype": (lambda: _int8(k_scale=torch.zeros(B, G, M).half()), "k_scale must be float32"),
    "factors of floats": (lambda: {"v_scale": torch.zeros(B, G, M)}, "k_scale and v_scale belong to int8"),
    "dtype of a cache": (lambda: {"k": torch.zeros(B, G, M, D).int()}, "k must be float32, bfloat16, float16 or int8"),
}


@pytest.mark.parametrize("what", WRONG)
def test_forward_refuses_and_says_why(what: str) -> None:
    changed, message = WRONG[what]
    with pytest.raises(RuntimeError) as error:
        _forward(**changed())
    assert message in str(error.value)


def test_attend_refuses_other_ranks() -> None:
    q, k, v = _qkv()
    with pytest.raises(RuntimeError, match="q must have 4 dims"):
        ops.attend(q[0], k[0], v[0], None, U, U, 0, False)


def test_attend_refuses_keys_of_another_dtype() -> None:
    q, k, v = _qkv()
    with pytest.raises(RuntimeError, match="k must have q's dtype, float32; got float16"):
        ops.attend(q, k.half(), v.half(), None, U, U, 0, False)


def test_there_are_no_gradients_of_a_cache() -> None:
    q, k, v = _qkv()
    out, _, saved = _forward(q=q, k=k, v=v, stats=False, save=True)
    call = (q, k, v, 0.3, None, 0.0, None, 0.0, 0, U, U, 0, *(None,) * 17, M - 1, 7)
    with pytest.raises(RuntimeError, match="gradients of a cache"):
        torch.ops.poise.backward.default(torch.ones_like(out), out, saved, None, None, *call)


def test_a_refused_call_frees_its_inputs() -> None:
    array = np.zeros((H, N, D), dtype=np.float32)
    alive = weakref.ref(array)
    q = torch.from_numpy(array)
    del array
    with pytest.raises(RuntimeError):
        _forward(q=q, sink=torch.zeros(H), table=torch.zeros(1, 3))
    del q
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("bshd", [False, True])
def test_the_output_has_the_layout_asked_for(bshd: bool) -> None:
    out, packed, _ = _forward(bshd=bshd)
    assert out.shape == (B, H, N, D + 1)
    assert (out.transpose(1, 2) if bshd else out).is_contiguous()
    assert packed.shape == (ops.FIELDS, B, H, N)


def test_without_stats_the_second_output_is_empty() -> None:
    assert _forward(stats=False)[1].numel() == 0


def test_attend_and_forward_agree_to_the_bit() -> None:
    q, k, v = _qkv()
    out, packed, _ = _forward(q=q, k=k, v=v, scale=D**-0.5, left=9, right=3, offset=60, sink_keys=_int32(0))
    fast, fast_packed = ops.attend_observed(q, k, v, None, 9, 3, 60, False)
    assert torch.equal(fast, out)
    assert torch.equal(fast_packed, packed)
    plain, _, _ = _forward(q=q, k=k, v=v, scale=D**-0.5, left=9, right=3, offset=60, stats=False)
    assert torch.equal(ops.attend(q, k, v, None, 9, 3, 60, False), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bshd", [False, True])
def test_torch_finds_no_fault_in_the_operators(dtype: torch.dtype, bshd: bool) -> None:
    q, k, v = _qkv(dtype)
    nothing = (None,) * 18
    call = (q, k, v, 0.3, None, 0.0, None, 0.0, 0, U, U, 0, *nothing)
    for stats in (False, True):
        torch.library.opcheck(torch.ops.poise.forward.default, (*call, stats, True, bshd))
        out, packed, saved = torch.ops.poise.forward.default(*call, stats, True, bshd)
        d_out, d_packed = torch.randn_like(out), torch.randn_like(packed) if stats else None
        results = (d_out, out, saved, packed if stats else None, d_packed)
        for wanted in (7, 2):
            torch.library.opcheck(torch.ops.poise.backward.default, (*results, *call, wanted))
        torch.library.opcheck(torch.ops.poise.bias_gradient.default, (*results, *call, 1, H, N, 1))
    plain = (q, k, v, None, U, 0, 3)
    for fast in (ops.attend, ops.attend_observed, ops.attend_saved):
        torch.library.opcheck(fast, (*plain, bshd))
    out, saved = ops.attend_saved(*plain, bshd)
    for wanted in (7, 2):
        torch.library.opcheck(ops.attend_backward, (torch.randn_like(out), out, saved, *plain, wanted))


def test_the_operators_compile_into_one_graph() -> None:
    q, k, v = _qkv()

    def model(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, packed = ops.attend_observed(q + 1, k, v, None, U, 0, 3, True)
        return out * 2, packed

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(q, k, v), model(q, k, v), strict=True):
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()
