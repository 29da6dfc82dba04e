"""How other people's models reach the op: who is running, and what attention does it call?

While a listener listens, two global module hooks keep the path of running modules and, inside a listener's model, a
TorchFunctionMode meets `F.scaled_dot_product_attention` and `F.multi_head_attention_forward` (with which
`nn.MultiheadAttention` leaves its fast path). Where poise means exactly what torch means, poise takes the call and its
statistics come from the same pass; elsewhere (dropout, float64, other devices, checkpointed regions, returned weights)
the call runs untouched and a second pass, without gradients and random numbers, makes the statistics. Calls of
`poise.attention` arrive by the op's observer. Attention that a module computes itself, from a product of two
activations and a softmax, is reported as not seen.

Calls during a backward pass are a checkpoint's repetitions: they are left alone. Nothing is registered on a module, and
nothing at all is registered while nobody listens. torch.compile cannot trace through here, on purpose: compiled code
falls into pieces around attention while somebody listens, or raises where it was promised to be whole.
Summaries, steps and records are not made here (monitor/).
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from poise.dispatch import NATIVE_DTYPES
from poise.mask import causal
from poise.op import Scored, attention, set_observer
from poise.sdpa import scaled_dot_product_attention
from poise.stats import ScoreStats


class Listener(Protocol):
    """What a watch is to this file."""

    def name_of(self, module: nn.Module) -> str | None:
        """The module's path in the listener's model; None for a stranger."""

    def wants(self, name: str) -> bool:
        """Whether the statistics of this module's attention are wanted."""

    def receive(self, name: str, stats: ScoreStats, scored: Scored) -> None:
        """One call's statistics, and what they are of."""

    def miss(self, name: str, why: str) -> None:
        """This module computed attention that could not be seen."""


@dataclass
class _Frame:
    """A running module of some listener's model."""

    module: nn.Module
    names: dict[int, tuple[Listener, str]]  # by the listener's id
    mode: TorchFunctionMode | None = None
    multiplied: bool = field(default=False)  # two activations with each other: a softmax next would be attention


class _Path(threading.local):
    """The running modules, outermost first."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []


_path = _Path()
_listeners: list[Listener] = []
_handles: list[Any] = []


def listen(listener: Listener) -> None:
    """Begins to report to this listener; a second time changes nothing."""
    global _deliver
    if listener in _listeners:
        return
    _listeners.append(listener)
    if "torch._dynamo" in sys.modules and not hasattr(_deliver, "_torchdynamo_disable"):
        # Where compiled code falls into pieces, summaries need not be among them.
        _deliver = torch.compiler.disable(_deliver)  # type: ignore[no-untyped-call]
    if not _handles:
        _handles.append(register_module_forward_pre_hook(_enter))
        _handles.append(register_module_forward_hook(_leave, always_call=True))
        set_observer(_receiver)


def stop_listening(listener: Listener) -> None:
    """Ends it, also in the middle of a forward pass, and leaves nothing behind after the last."""
    if listener not in _listeners:
        return
    _listeners.remove(listener)
    if _listeners:
        return
    for handle in _handles:
        handle.remove()
    _handles.clear()
    set_observer(None)
    while _path.frames:
        _pop()


def refuse_compiled(what: str) -> None:
    """Stops torch.compile from tracing: statistics would be lost or counted wrongly inside its graphs."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"poise.watch cannot see into compiled code, and {what} is being compiled. "
            "Compile without fullgraph=True, or run such a model unwatched"
        )


def _in_backward() -> bool:
    """Whether autograd is at work: attention computed now was computed before."""
    return torch._C._current_graph_task_id() != -1


def _enter(module: nn.Module, _: Any) -> None:
    refuse_compiled(type(module).__name__)
    if _in_backward():
        return
    names = {id(x): (x, name) for x in _listeners if (name := x.name_of(module)) is not None}
    if not names:
        return
    frames = _path.frames
    # What an outer module is called stays true for a listener who does not know the inner one.
    known = {**frames[-1].names, **names} if frames else names
    frame = _Frame(module, known)
    if not any(outer.mode for outer in frames):
        frame.mode = _Calls()
        frame.mode.__enter__()  # type: ignore[no-untyped-call]
    frames.append(frame)


def _leave(module: nn.Module, *_: Any) -> None:
    frames = _path.frames
    if not any(frame.module is module for frame in frames):
        return
    while frames[-1].module is not module:  # modules whose end was never announced
        _pop()
    _pop()


def _pop() -> None:
    frame = _path.frames.pop()
    if frame.mode is not None:
        frame.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _audience() -> list[tuple[Listener, str]]:
    """Who wants the call that is about to run, and the path of the module it belongs to."""
    if not _path.frames or _in_backward():
        return []
    present = {id(listener) for listener in _listeners}
    known = _path.frames[-1].names
    return [(x, name) for key, (x, name) in known.items() if key in present and x.wants(name)]


def _receiver() -> Callable[[ScoreStats, Scored], None] | None:
    """The op's observer."""
    if not _path.frames:
        return None
    refuse_compiled("attention")
    audience = _audience()
    if not audience:
        return None

    return partial(_deliver, audience)


def _deliver(audience: list[tuple[Listener, str]], stats: ScoreStats, scored: Scored) -> None:
    for listener, name in audience:
        listener.receive(name, stats, scored)


def _miss(why: str) -> None:
    for listener, name in _audience():
        listener.miss(name, why)


class _Calls(TorchFunctionMode):
    """Meets every torch function called inside a listener's model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            refuse_compiled("attention")
            return _scaled_dot_product(args, kwargs) if _audience() else func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            refuse_compiled("attention")
            return _multi_head(func, args, kwargs) if _audience() else func(*args, **kwargs)
        out = func(*args, **kwargs)
        if func in _PRODUCTS:
            operands = [x for x in args if isinstance(x, Tensor)]
            if out.dim() >= 3 and not any(isinstance(x, nn.Parameter) for x in operands) and _path.frames:
                _path.frames[-1].multiplied = True
        elif func in _SOFTMAXES and isinstance(out, Tensor) and out.dim() >= 3:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if not caller.startswith("poise.kernels."):  # the implementation in torch ops, whose call was seen
                _softmax_was_called()
        return out


_PRODUCTS = {
    torch.matmul,
    torch.bmm,
    torch.baddbmm,
    torch.einsum,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.bmm,
    Tensor.baddbmm,
}
_SOFTMAXES = {F.softmax, torch.softmax, Tensor.softmax}


def _softmax_was_called() -> None:
    """By the innermost module that multiplied two activations, if any: softmax may be a module of its own."""
    for frame in reversed(_path.frames):
        if frame.multiplied:
            frame.multiplied = False
            for listener, name in frame.names.values():
                if listener in _listeners and not _in_backward():
                    listener.miss(name, "it multiplies queries with keys and takes the softmax itself")
            return


def _alike(*tensors: Tensor | None) -> bool:
    """Whether poise may take a call with these tensors in torch's place: as fast, and exactly the same graph."""
    return (
        all(x is None or (type(x) in (Tensor, nn.Parameter) and x.is_cpu) for x in tensors)
        and (tensors[0] is not None and tensors[0].dtype in NATIVE_DTYPES)
        and not torch._C._are_functorch_transforms_active()
        and (not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(False) is None)
    )


def _strangers(*tensors: Tensor | None) -> str:
    """Why not even statistics can be had of these tensors; empty if they can."""
    for x in tensors:
        if x is not None and (type(x) not in (Tensor, nn.Parameter) or x.is_nested):
            return f"it attends over {type(x).__name__}s that are not ordinary tensors"
    return "it runs inside a torch.func transform" if torch._C._are_functorch_transforms_active() else ""


_SDPA = inspect.signature(scaled_dot_product_attention)


def _scaled_dot_product(args: Any, kwargs: Any) -> Tensor:
    call = _SDPA.bind(*args, **kwargs).arguments
    query, key, value, mask = call["query"], call["key"], call["value"], call.get("attn_mask")
    both = mask is not None and call.get("is_causal", False)  # torch's backends disagree about it
    if not call.get("dropout_p") and not both and _alike(query, key, value, mask):
        return scaled_dot_product_attention(**call)
    out = F.scaled_dot_product_attention(*args, **kwargs)
    if why := _strangers(query, key, value, mask):
        _miss(why)
    else:
        with torch.no_grad():
            scaled_dot_product_attention(**{**call, "value": value[..., :1], "dropout_p": 0.0})
    return out


_MultiHead: TypeAlias = Callable[..., tuple[Tensor, Tensor | None]]
_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


def _multi_head(
    func: Callable[..., tuple[Tensor, Tensor | None]], args: Any, kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    call = bound.arguments
    masks = call["attn_mask"], call["key_padding_mask"]
    tensors = call["query"], call["key"], call["value"], *masks
    why = _strangers(*tensors)
    if not why and (call["bias_k"] is not None or call["add_zero_attn"] or call["static_k"] is not None):
        why = "it adds keys of its own (bias_k, add_zero_attn or static_k)"
    if why:
        _miss(why)
        return func(*args, **kwargs)
    drops = call["dropout_p"] > 0 and call["training"]
    if not call["need_weights"] and not drops and not torch.is_autocast_enabled("cpu") and _alike(*tensors):
        return _projected_out(call, _attend_heads(call)), None
    out = func(*args, **kwargs)
    with torch.no_grad():
        _attend_heads(call)
    return out


def _attend_heads(call: dict[str, Any]) -> Tensor:
    """Projection and attention of multi_head_attention_forward: [B, H, N, D]; reported on the way."""
    query, key, value, heads = call["query"], call["key"], call["value"], call["num_heads"]
    weights = [call["q_proj_weight"], call["k_proj_weight"], call["v_proj_weight"]]
    if not call["use_separate_proj_weight"]:
        weights = list(call["in_proj_weight"].chunk(3))
    biases = [None] * 3 if call["in_proj_bias"] is None else list(call["in_proj_bias"].chunk(3))
    q, k, v = (
        _heads(F.linear(x, weight, bias), heads)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    if call["is_causal"] and call["key_padding_mask"] is None and not call["need_weights"]:
        return attention(q, k, v, mask=causal(), q_offset="start")
    mask, bias = _masks(call, q.shape[0], heads)
    return attention(q, k, v, mask=mask, bias=bias)


def _heads(x: Tensor, heads: int) -> Tensor:
    """[B, H, N, D] of [N, B, E] or [N, E]."""
    x = x if x.dim() == 3 else x[:, None]
    length, batch, width = x.shape
    return x.view(length, batch, heads, width // heads).permute(1, 2, 0, 3)


def _masks(call: dict[str, Any], batch: int, heads: int) -> tuple[Tensor | None, Tensor | None]:
    """What may be attended to, and what is added to the scores. In this function of torch True means: hide."""
    mask: Tensor | None = None
    bias: Tensor | None = None
    for name in ("attn_mask", "key_padding_mask"):
        given: Tensor | None = call[name]
        if given is None:
            continue
        if name == "key_padding_mask":
            given = given.reshape(batch, 1, 1, -1)
        elif given.dim() == 3 and given.shape[0] != 1:
            given = given.view(batch, heads, *given.shape[1:])
        if given.dtype is torch.bool:
            mask = ~given if mask is None else mask & ~given
        else:
            bias = given if bias is None else bias + given
    return mask, bias


def _projected_out(call: dict[str, Any], out: Tensor) -> Tensor:
    """[N, B, E], or [N, E] as the query came, through the output projection."""
    joined = F.linear(out.permute(2, 0, 1, 3).flatten(2), call["out_proj_weight"], call["out_proj_bias"])
    return joined if call["query"].dim() == 3 else joined[:, 0]
