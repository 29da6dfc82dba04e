"""Matrix products of inference: oneDNN's, activation included, where torch has it, else torch's own.

torch hands float32 products to MKL, which on AMD's processors leaves half of their AVX-512 speed unused; the oneDNN
that comes with torch does not. Its op is the one that torch's compiler emits, so it is internal to torch and may go:
then, and under autograd or a transform, on other devices and for other dtypes, this is `torch.nn.functional.linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_grad_enabled = torch.is_grad_enabled
_transforming = torch._C._are_functorch_transforms_active
_compiling = torch.compiler.is_compiling
_FAST = (torch.float32, torch.bfloat16)


def _pointwise() -> Callable[..., Tensor] | None:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    try:
        op: Any = torch.ops.mkldnn._linear_pointwise.default
    except (AttributeError, RuntimeError):
        return None
    return op  # type: ignore[no-any-return]


_onednn = _pointwise()


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,  # by the error function
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
# Those that oneDNN applies while it writes the product: its name, and its algorithm.
_FUSED = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """activation(x Wᵀ + b): x [..., C], W [F, C], b [F] to [..., F]."""
    fused = _FUSED.get(activation)
    if (
        fused is not None
        and _onednn is not None
        and not _grad_enabled()
        and x.is_cpu
        and x.dtype in _FAST
        and x.dtype is weight.dtype
        and x.numel() > 0
        and not _transforming()
        and not _compiling()
    ):
        return _onednn(x, weight, bias, fused[0], [], fused[1])
    out = F.linear(x, weight, bias)
    return out if activation is None else ACTIVATIONS[activation](out)


class Linear(nn.Linear):
    """torch's Linear, computed by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
