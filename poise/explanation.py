"""What a call would do, in words, without doing it: implementation, reason, lowered mask, visible share.

Uses the same validation, choice and lowering as the call itself, so that it can't tell another story.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from poise.arguments import BiasLike, Layout, MaskLike, OffsetLike, ScaleLike
from poise.dispatch import Impl, choose, lowered
from poise.kernels import ops
from poise.kvview import KVView
from poise.plan import visible_area
from poise.problem import prepare


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of `explain`; print it, or read its fields."""

    impl: Impl
    why: str
    isa: str | None  # the instruction set of the native kernels, None when they do not run
    sizes: dict[str, int]  # B, H, G, N, M, Dk, Dv
    dtype: str
    device: str
    plan: str | None  # the mask and bias as the native kernels would read them; None where these can't run at all
    visible: int | None  # query-key pairs this plan does not skip, over all batch elements and heads
    cache: str | None = None  # how keys and values lie in a cache, and whether they are read there

    @property
    def pairs(self) -> int:
        """All query-key pairs, over all batch elements and heads."""
        return self.sizes["B"] * self.sizes["H"] * self.sizes["N"] * self.sizes["M"]

    def __str__(self) -> str:
        isa = f" ({self.isa})" if self.isa else ""
        sizes = "  ".join(f"{name} {size}" for name, size in self.sizes.items())
        lines = [
            f"runs on  {self.impl}{isa}",
            f"because  {self.why}",
            f"sizes    {sizes}  {self.dtype} on {self.device}",
        ]
        if self.cache is not None:
            lines.append(f"cache    {self.cache}")
        if self.plan is not None and self.visible is not None:
            share = self.visible / max(self.pairs, 1)
            lines += [f"plan     {self.plan}", f"visible  {share:.1%} of {self.pairs:,} query-key pairs"]
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor | KVView,
    v: Tensor | None = None,
    *,
    mask: MaskLike | None = None,
    bias: BiasLike | None = None,
    scale: ScaleLike | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    q_offset: OffsetLike | None = None,
    layout: Layout = "bhsd",
    impl: Impl | None = None,
) -> Explanation:
    """Which implementation `attention` with these arguments runs on, and why; raises what the call would raise.

    >>> print(poise.explain(q, k, v, mask=poise.causal() & poise.window(255)))
    runs on  cpu (avx512bf16)
    ...
    """
    problem = prepare(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sink=sink,
        dropout=dropout,
        q_offset=q_offset,
        layout=layout,
    )
    choice = choose(problem, impl)
    # Plans are for kernels that read a CPU's memory.
    plan = lowered(problem) if problem.q.device.type == "cpu" else None
    batch, heads, queries, keys = problem.shape
    cache = None
    if isinstance(k, KVView):
        in_place = problem.view is None or choice.impl == "cpu"
        cache = f"{k.describe()}, " + ("read in place" if in_place else "gathered into ordinary tensors first")
    return Explanation(
        cache=cache,
        impl=choice.impl,
        why=choice.why,
        isa=ops.isa() if choice.impl == "cpu" else None,
        sizes={
            "B": batch,
            "H": heads,
            "G": problem.k.shape[1],
            "N": queries,
            "M": keys,
            "Dk": problem.q.shape[3],
            "Dv": problem.v.shape[3],
        },
        dtype=str(problem.q.dtype).removeprefix("torch."),
        device=str(problem.q.device),
        plan=None if plan is None else plan.describe(),
        visible=None if plan is None else visible_area(plan, problem.shape, problem.offset),
    )
