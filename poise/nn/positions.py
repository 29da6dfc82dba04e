"""Where tokens stand, told to the model: added to embeddings, turned into queries and keys, or added to the scores.

`Sinusoidal` and `Learned` give vectors to add to embeddings. `Rotary`, `Alibi` and `RelativeBuckets` are schemes: asked
once per forward pass, they answer with a `Placement` that every layer applies. A scheme never builds an [N, M] matrix.

Letters: B batch, H heads, N queries, M keys, C width, D head dim, R the furthest distance that is told apart.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from poise.score import Bias, alibi, alibi_slopes, relative


class Placement(NamedTuple):
    """What one forward pass needs of a scheme."""

    rotate: Callable[[Tensor], Tensor] | None = None  # for queries and keys [B, N, heads, D]
    bias: Bias | None = None  # for the scores


class Scheme(nn.Module, ABC):
    """A way of telling positions inside attention."""

    @abstractmethod
    def place(self, places: Tensor) -> Placement:
        """For tokens that stand at `places`, int64 [N] or [B, N]."""


class Sinusoidal(nn.Module):
    """Vaswani et al. (2017): sines and cosines of geometric wavelengths, nothing learned. places [...] -> [..., C].

    layout "interleaved" is the paper's, sin and cos in turn; "half" has all sines first.
    """

    def __init__(self, width: int, *, base: float = 10000.0, layout: Literal["interleaved", "half"] = "interleaved"):
        super().__init__()
        if width % 2:
            raise ValueError(f"width must be even; got {width}")
        self.width, self.base, self.layout = width, base, _layout(layout)

    def forward(self, places: Tensor) -> Tensor:
        angles = places[..., None] * _frequencies(self.width, self.base, places.device)
        waves = torch.stack((angles.sin(), angles.cos()), -1)
        return (waves if self.layout == "interleaved" else waves.transpose(-1, -2)).flatten(-2)


class Learned(nn.Module):
    """A vector per position, up to `count` of them. places [...] -> [..., C]."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width).normal_(std=0.02))

    def forward(self, places: Tensor) -> Tensor:
        if places.numel() and int(places.max()) >= self.weight.shape[0]:
            raise ValueError(
                f"the model knows {self.weight.shape[0]} positions; got a token at position {int(places.max())}. "
                "Shorten or split the input"
            )
        return nn.functional.embedding(places, self.weight)


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023)."""

    factor: float

    def frequencies(self, dim: int, base: float, furthest: int) -> tuple[Tensor, float]:
        return _frequencies(dim, base) / self.factor, 1.0


@dataclass(frozen=True)
class NTKScaling:
    """A larger base, so that fast waves stay and slow ones stretch.

    With `original`, the length trained on, the base grows with the input only once that is longer ("dynamic NTK").
    """

    factor: float
    original: int | None = None

    def frequencies(self, dim: int, base: float, furthest: int) -> tuple[Tensor, float]:
        stretch = self.factor
        if self.original is not None:
            stretch = self.factor * max(furthest + 1, self.original) / self.original - (self.factor - 1)
        return _frequencies(dim, base * stretch ** (dim / (dim - 2))), 1.0


@dataclass(frozen=True)
class YaRNScaling:
    """Peng et al. (2023): fast waves stay, slow ones stretch, a ramp between; scores are sharpened by `attention`²."""

    factor: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    attention: float | None = None  # None: sharpening(factor), 0.1 ln(factor) + 1
    truncate: bool = True  # the ramp's ends at whole dims

    def frequencies(self, dim: int, base: float, furthest: int) -> tuple[Tensor, float]:
        def turning(turns: float) -> float:
            """The pair of dims whose wave turns so often within the original length."""
            return dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = turning(self.fast), turning(self.slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high = high + 0.001 if low == high else high
        stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        plain = _frequencies(dim, base)
        frequencies = plain / self.factor * stretched + plain * (1 - stretched)
        return frequencies, self.sharpening(self.factor) if self.attention is None else self.attention

    @staticmethod
    def sharpening(factor: float, strength: float = 1.0) -> float:
        return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: waves longer than original / low are stretched, those shorter than original / high are not."""

    factor: float
    original: int
    low: float = 1.0
    high: float = 4.0

    def frequencies(self, dim: int, base: float, furthest: int) -> tuple[Tensor, float]:
        plain = _frequencies(dim, base)
        turns = self.original * plain / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return plain * kept + plain / self.factor * (1 - kept), 1.0


Scaling = LinearScaling | NTKScaling | YaRNScaling | Llama3Scaling


class Rotary(Scheme):
    """Su et al. (2021): pairs of dims of queries and keys turn with their position, so that scores see differences.

    layout "half" pairs dim d with d + dim/2 (Hugging Face's Llama), "interleaved" dims 2d and 2d + 1 (the paper's).
    dim: how many of the head's dims turn, None for all; the others are left alone.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        dim: int | None = None,
        layout: Literal["half", "interleaved"] = "half",
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.dim = head_dim, head_dim if dim is None else dim
        if self.dim % 2 or not 0 < self.dim <= head_dim:
            raise ValueError(f"dim must be even, and at most head_dim = {head_dim}; got {self.dim}")
        self.base, self.layout, self.scaling = base, _layout(layout), scaling
        self._frequencies: tuple[Tensor, float] | None = None

    def extra_repr(self) -> str:
        return f"{self.head_dim}, base={self.base}, dim={self.dim}, layout={self.layout!r}, scaling={self.scaling}"

    def place(self, places: Tensor) -> Placement:
        cos, sin = self.angles(places)
        cos, sin = cos[..., None, :], sin[..., None, :]  # [N, 1, dim/2] or [B, N, 1, dim/2]
        return Placement(rotate=lambda x: rotate(x, cos, sin, self.layout))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """x [B, N, heads, D] turned to its places, [N] or [B, N]."""
        placement = self.place(places)
        assert placement.rotate is not None
        return placement.rotate(x)

    def angles(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of every turn, float32 [..., dim/2]."""
        if self._frequencies is None or self._frequencies[0].device != places.device or self._grows():
            furthest = int(places.max()) if self._grows() and places.numel() else 0
            frequencies, factor = (
                (_frequencies(self.dim, self.base), 1.0)
                if self.scaling is None
                else self.scaling.frequencies(self.dim, self.base, furthest)
            )
            self._frequencies = frequencies.to(places.device), factor
        frequencies, factor = self._frequencies
        turns = places[..., None] * frequencies
        cos, sin = turns.cos(), turns.sin()
        return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)

    def _grows(self) -> bool:
        return isinstance(self.scaling, NTKScaling) and self.scaling.original is not None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str = "half") -> Tensor:
    """x [..., D] with the pairs among its first 2 · cos.shape[-1] dims turned."""
    half = cos.shape[-1]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = _pairs(x, half, layout)
    if not torch.is_grad_enabled():  # written where it belongs, without what cat and stack would copy
        turned = torch.empty_like(x)
        first, second = _pairs(turned, half, layout)
        torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=second).addcmul_(a, sin)
        turned[..., 2 * half :] = x[..., 2 * half :]
        return turned
    first, second = a * cos - b * sin, b * cos + a * sin
    turned = torch.cat((first, second), -1) if layout == "half" else torch.stack((first, second), -1).flatten(-2)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), -1)


def _pairs(x: Tensor, half: int, layout: str) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second dims of all pairs."""
    if layout == "half":
        return x[..., :half], x[..., half : 2 * half]
    return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]


class Alibi(Scheme):
    """Press et al. (2022): scores fall with distance, by a fixed slope per head."""

    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", alibi_slopes(heads), persistent=False)

    def place(self, places: Tensor) -> Placement:
        return Placement(bias=alibi(self.slopes))


class RelativeBuckets(Scheme):
    """T5's learned bias per bucket of distances: near ones singly, further ones by logarithm, none beyond `furthest`.

    `weight` [buckets, H]. The bias reaches the kernels as a table [H, 2R + 1] with R = furthest, whatever N and M are.
    """

    def __init__(self, heads: int, *, buckets: int = 32, furthest: int = 128, bidirectional: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(buckets, heads).normal_(std=0.02))
        self.furthest, self.bidirectional = furthest, bidirectional

    def extra_repr(self) -> str:
        return f"buckets={self.weight.shape[0]}, furthest={self.furthest}, bidirectional={self.bidirectional}"

    def table(self) -> Tensor:
        """[H, 2R + 1], entry R for a query's own key."""
        distances = torch.arange(-self.furthest, self.furthest + 1, device=self.weight.device)
        return self.weight[relative_buckets(distances, self.weight.shape[0], self.furthest, self.bidirectional)].t()

    def place(self, places: Tensor) -> Placement:
        return Placement(bias=relative(self.table()))


def relative_buckets(distance: Tensor, buckets: int, furthest: int, bidirectional: bool) -> Tensor:
    """The bucket of each distance, key minus query."""
    first = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        first = (distance > 0) * buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    single = buckets // 2
    # float32 and this order of operations decide which side of a bucket's edge a distance falls on
    share = torch.log(distance.clamp(min=1).float() / single) / math.log(furthest / single)
    far = (single + (share * (buckets - single)).long()).clamp(max=buckets - 1)
    return first + torch.where(distance < single, distance, far)


def _frequencies(dim: int, base: float, device: torch.device | None = None) -> Tensor:
    """Radians per position of each pair of dims, float32 [dim / 2]."""
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim)


def _layout(layout: str) -> str:
    if layout not in ("half", "interleaved"):
        raise ValueError(f"layout must be 'half' or 'interleaved'; got {layout!r}")
    return layout
