"""What follows attention in a block: two matrices and an activation, or three where one gates.

Letters: B batch, N positions, C width, F hidden width.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from poise.nn.linear import ACTIVATIONS, Linear, linear


class FeedForward(nn.Module):
    """down(act(up x)), or down(act(gate x) · up x) if gated: x [B, N, C] to [B, N, C].

    `up` is [F, C], or [2 F, C] if gated: rows of the gate first, so that both are one product.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "gelu",
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}; got {activation!r}")
        self.up = Linear(width, 2 * hidden if gated else hidden, bias=bias)
        self.down = Linear(hidden, width, bias=bias)
        self.activation, self.gated, self.dropout = activation, gated, dropout

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, gated={self.gated}"

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            gate, up = self.up(x).chunk(2, -1)
            inner = ACTIVATIONS[self.activation](gate) * up
        else:
            inner = linear(x, self.up.weight, self.up.bias, self.activation)
        out: Tensor = self.down(F.dropout(inner, self.dropout, self.training))
        return out
