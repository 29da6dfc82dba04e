"""Trains a small GPT, byte by byte, on the source text of the running Python's standard library: `make train`.

The same model is trained twice, once with poise.attention and once with torch's, from the same seed on the same data,
in alternating segments, so that both see the same machine: their losses agree to rounding, and their times can be
compared. Ends with the state of the scores, layer by layer, which is what only poise tells.

Ctrl-C saves a checkpoint; `--resume` goes on from it to bitwise the losses of an uninterrupted run. An ordinary GPT
(Radford et al., 2019) on CPU only: no tokenizer, no cache for sampling, no second process.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import poise

BYTES = 256
CAUSAL = poise.causal()
WARMUP = 20  # steps until the learning rate is reached
SEGMENT = 5  # steps that one contestant runs before it is the other's turn
SAVE_EVERY = 30.0  # seconds
LONGEST = 65536  # bytes in a stretch of text; what is held out has several times as many
HELD_OUT = 20  # one file of so many is kept from training

Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # q, k, v [B, N, H, D] and dropout -> [B, N, H, D]


def by_poise(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    return poise.attention(q, k, v, mask=CAUSAL, dropout=dropout, layout="bshd")


def by_torch(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout).transpose(1, 2)


CONTESTANTS: dict[str, Attention] = {"poise": by_poise, "torch": by_torch}


class Block(nn.Module):
    """Attention, then two layers with GELU, each behind a norm and added to what comes in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)  # [B, N, H, D] each, no copy
        p = self.dropout if self.training else 0.0
        x = x + F.dropout(self.mix(attention(q, k, v, p).flatten(2)), p)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), p)


class GPT(nn.Module):
    """Logits of the next byte, [B, N, 256], from bytes [B, N]. Whoever calls it says what computes attention."""

    def __init__(self, length: int, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, width)  # also the output layer
        self.positions = nn.Parameter(0.3 * waves(length, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.1)
        for block in self.blocks:
            for reads in (block.qkv, block.up):
                nn.init.normal_(reads.weight, std=width**-0.5)
            for adds in (block.mix, block.down):
                nn.init.normal_(adds.weight, std=0.02 * (2 * layers) ** -0.5)

    def forward(self, tokens: Tensor, attention: Attention) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, attention)
        return F.linear(self.norm(x), self.tokens.weight)


def waves(length: int, width: int) -> Tensor:
    """Sinusoids (Vaswani et al., 2017), [N, width]: started so, learned positions tell neighbours apart much sooner."""
    angles = torch.arange(length)[:, None] * 1e-4 ** (torch.arange(0, width, 2) / width)
    return torch.cat([angles.sin(), angles.cos()], 1)[:, :width]


def corpus() -> tuple[Tensor, Tensor]:
    """Bytes to learn from and bytes held out: Python's own library, file by file, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [path for path in sorted(root.rglob("*.py")) if not left_out & set(path.relative_to(root).parts)]
    parts = ([path for i, path in enumerate(files) if (i % HELD_OUT == 0) == held_out] for held_out in (False, True))
    learn, held_out = (bytearray(b"".join(path.read_bytes() for path in part)) for part in parts)
    if not held_out:
        raise SystemExit(f"there are no source files of the standard library in {root}: nothing to train on")
    return torch.frombuffer(learn, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def windows(text: Tensor, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random stretches of the text, [B, N], and the byte that follows each of their bytes."""
    starts = torch.randint(len(text) - length, (batch, 1), generator=generator)
    taken = text[starts + torch.arange(length + 1)].long()
    return taken[:, :-1], taken[:, 1:]


def loss_of(model: GPT, attention: Attention, pair: tuple[Tensor, Tensor], dtype: str) -> Tensor:
    """Mean surprise per byte, in nats."""
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16-autocast"):
        logits = model(pair[0], attention)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), pair[1].flatten())


@dataclass
class Run:
    """One contestant's training, and everything that its next step depends on."""

    name: str
    model: GPT
    optimizer: torch.optim.Optimizer
    order: torch.Generator  # draws the data
    draws: Tensor  # state of torch's generator, which dropout draws from
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @staticmethod
    def start(name: str, options: argparse.Namespace) -> Run:
        torch.manual_seed(options.seed)
        model = GPT(options.length, options.layers, options.width, options.heads, options.dropout)
        optimizer = torch.optim.AdamW(model.parameters(), options.lr, (0.9, 0.95), weight_decay=0.1, fused=True)
        return Run(name, model, optimizer, torch.Generator().manual_seed(options.seed), torch.get_rng_state())

    @property
    def step(self) -> int:
        return len(self.losses)

    def advance(self, until: int, text: Tensor, options: argparse.Namespace, stop: Stop) -> None:
        """Trains up to a step, or until told to stop."""
        began = time.perf_counter()
        torch.set_rng_state(self.draws)
        while self.step < until and not stop.asked:
            pair = windows(text, options.batch, options.length, self.order)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.step, options)
            loss = loss_of(self.model, CONTESTANTS[self.name], pair, options.dtype)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.losses.append(loss.item())
        self.draws = torch.get_rng_state()
        self.seconds += time.perf_counter() - began

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "order": self.order.get_state(),
            "draws": self.draws,
            "losses": self.losses,
            "seconds": self.seconds,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.order.set_state(state["order"])
        self.draws, self.losses, self.seconds = state["draws"], state["losses"], state["seconds"]


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Up linearly, then down to a tenth along a cosine."""
    if step < WARMUP:
        return float(options.lr * (step + 1) / WARMUP)
    done = (step - WARMUP) / max(1, options.steps - WARMUP)
    return float(options.lr * (0.55 + 0.45 * math.cos(math.pi * done)))


class Stop:
    """Whether Ctrl-C was pressed. A second one ends the process at once; the last checkpoint stays whole."""

    asked = False

    def __enter__(self) -> Stop:
        self.before = signal.signal(signal.SIGINT, self.ask)
        return self

    def ask(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)


def train(runs: list[Run], text: Tensor, options: argparse.Namespace) -> bool:
    """Trains all runs to the end, in turns; False if interrupted. Leaves a checkpoint either way."""
    saved = time.monotonic()
    with Stop() as stop, progress(options.steps) as show:
        while (behind := min(run.step for run in runs)) < options.steps and not stop.asked:
            until = min(options.steps, (behind // SEGMENT + 1) * SEGMENT)
            turn = until // SEGMENT % 2  # who goes first alternates
            for run in runs[turn:] + runs[:turn]:
                run.advance(until, text, options, stop)
            show(min(run.step for run in runs), runs)
            if time.monotonic() - saved > SAVE_EVERY:
                save(runs, options)
                saved = time.monotonic()
        save(runs, options)
    return not stop.asked


def checkpoint(options: argparse.Namespace) -> Path:
    return Path(options.out) / "checkpoint.pt"


def save(runs: list[Run], options: argparse.Namespace) -> None:
    """Replaces the checkpoint as a whole or not at all."""
    path = checkpoint(options)
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in vars(options).items() if name in DETERMINING}
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        torch.save({"options": kept, "runs": {run.name: run.state() for run in runs}}, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


@contextmanager
def progress(steps: int) -> Iterator[Callable[[int, list[Run]], None]]:
    """How far training is, on stderr: a bar on a terminal, where rich is installed; else ten lines in all."""

    def losses(runs: list[Run]) -> str:
        return "  ".join(f"{run.name} {run.losses[-1]:.3f}" for run in runs if run.losses)

    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError:
            print("pip install rich shows a progress bar here", file=sys.stderr)
        else:
            text = TextColumn("{task.description}")
            columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            with Progress(*columns, console=Console(stderr=True)) as bar:
                task = bar.add_task("loss", total=steps)
                yield lambda step, runs: bar.update(task, completed=step, description="loss  " + losses(runs))
            return
    shown = 0

    def line(step: int, runs: list[Run]) -> None:
        nonlocal shown
        if 10 * step // steps > shown:
            shown = 10 * step // steps
            print(f"step {step} of {steps}   loss  {losses(runs)}", file=sys.stderr, flush=True)

    yield line


@torch.no_grad()
def report(runs: list[Run], held_out: Tensor, options: argparse.Namespace) -> None:
    """The loss curves side by side, both times, and the state of the scores."""
    print(
        f"\n{'to step':>8}" + "".join(f"{run.name:>10}" for run in runs) + "   nats per byte, mean since the line above"
    )
    ends = sorted({0, 1, *(options.steps * tenth // 10 for tenth in range(1, 11))})
    for before, end in pairwise(ends):
        means = (sum(run.losses[before:end]) / (end - before) for run in runs)
        print(f"{end:8}" + "".join(f"{mean:10.4f}" for mean in means))
    generator = torch.Generator().manual_seed(options.seed)
    batches = [windows(held_out, options.batch, options.length, generator) for _ in range(8)]
    print(f"{'held out':>8}", end="")
    for run in runs:
        run.model.eval()
        values = [loss_of(run.model, CONTESTANTS[run.name], pair, options.dtype).item() for pair in batches]
        print(f"{sum(values) / len(values):10.4f}", end="")
    print("\n")
    for run in runs:
        speed = options.batch * options.length * run.step / run.seconds
        print(f"{run.name}  {run.seconds:6.1f} s   {speed:8,.0f} tokens/s")
    if len(runs) == 2:
        ours, theirs = runs
        apart = max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True))
        print(f"poise trains {theirs.seconds / ours.seconds:.2f} times as fast, end to end")
        print(f"largest difference between the loss curves: {apart:.1e} nats")
        if options.dropout:
            print("(with dropout the two draw different masks: their curves are not meant to agree)")
    show_scores(runs[0], batches[0], options)


def show_scores(run: Run, pair: tuple[Tensor, Tensor], options: argparse.Namespace) -> None:
    """What the attention scores of a held-out batch are like, layer by layer."""
    layers: list[poise.ScoreSummary] = []

    def watching(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        out, stats = poise.observe(q, k, v, mask=CAUSAL, dropout=dropout, layout="bshd")
        layers.append(stats.reduce("head"))
        return out

    loss_of(run.model, watching, pair, options.dtype)
    print(f"\nstate of the scores after {run.step} steps with {run.name}, over the rows of a held-out batch")
    print("layer   largest logit   entropy, nats   of log n   responsiveness   of the least head")
    for number, heads in enumerate(layers):
        gain = heads.mean("responsiveness")
        values = (heads.mean("entropy").mean(), heads.mean("normalized_entropy").mean(), gain.mean(), gain.min())
        print(f"{number:5}{heads.max('max_logit').max():16.2f}" + "{:16.2f}{:11.2f}{:17.3f}{:20.3f}".format(*values))


@torch.no_grad()
def sample(run: Run, count: int, options: argparse.Namespace) -> str:
    """Bytes drawn one after the other, as text that is safe to print."""
    run.model.eval()
    generator = torch.Generator().manual_seed(options.seed)
    text = torch.tensor([[ord("\n")]])
    for _ in range(count):
        with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bf16-autocast"):
            logits = run.model(text[:, -options.length :], CONTESTANTS[run.name])[:, -1].float()
        text = torch.cat([text, torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)], 1)
    drawn = bytes(text[0, 1:].tolist()).decode("utf-8", errors="replace")
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in drawn)


# What the losses depend on: a checkpoint can only be continued with these as they were.
DETERMINING = ("attention", "steps", "batch", "length", "layers", "width", "heads", "dropout", "lr", "seed", "threads")
DETERMINING += ("dtype",)


def arguments(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, Any] | None]:
    """The options, and the checkpoint to resume from, whose options are the defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--attention", choices=("poise", "torch", "both"), default="both", help="whose attention to train with")
    add("--steps", type=int, default=600)
    add("--batch", type=int, default=4, help="stretches of text per step")
    add("--length", type=int, default=512, help="bytes in each")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=192)
    add("--heads", type=int, default=3)
    add("--dropout", type=float, default=0.0, help="of attention weights and of what each layer adds")
    add("--lr", type=float, default=2e-3, help="the highest learning rate")
    add("--dtype", choices=("fp32", "bf16-autocast"), default="fp32")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=torch.get_num_threads(), help="threads of torch and poise (default: torch's)")
    add("--out", metavar="DIR", default="runs/char_lm", help="where the checkpoint goes (default: runs/char_lm)")
    add("--resume", action="store_true", help="go on from the checkpoint in --out, with its options")
    add("--sample", type=int, default=0, metavar="N", help="let the trained model write N bytes")
    options = parser.parse_args(argv)
    state = None
    if options.resume:
        path = checkpoint(options)
        if not path.exists():
            parser.error(f"--resume found no checkpoint at {path}: start without --resume, or name its folder by --out")
        state = torch.load(path, weights_only=True)
        options = parser.parse_args(argv, argparse.Namespace(**state["options"]))
        for name, before in state["options"].items():
            if getattr(options, name) != before:
                parser.error(
                    f"--{name} {getattr(options, name)} would change the run in {path}, which has --{name} {before}: "
                    f"leave --{name} out, or start anew without --resume"
                )
    for name in ("steps", "batch", "length", "layers", "width", "heads", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1; got {getattr(options, name)}")
    if options.length > LONGEST:
        parser.error(f"--length must be at most {LONGEST}; got {options.length}")
    if options.width % options.heads:
        parser.error(
            f"--width must be a multiple of --heads; got {options.width} and {options.heads}: "
            f"--width {options.heads * math.ceil(options.width / options.heads)} would do"
        )
    if not 0 <= options.dropout < 1:
        parser.error(f"--dropout is a probability below 1; got {options.dropout}")
    if not (options.lr > 0 and math.isfinite(options.lr)):
        parser.error(f"--lr must be a positive number; got {options.lr}")
    if options.sample < 0:
        parser.error(f"--sample must be at least 0; got {options.sample}")
    return options, state


def main(argv: list[str] | None = None) -> int:
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    options, state = arguments(argv)
    torch.set_num_threads(options.threads)
    text, held_out = corpus()
    names = list(CONTESTANTS) if options.attention == "both" else [options.attention]
    runs = [Run.start(name, options) for name in names]
    if state is not None:
        for run in runs:
            run.load(state["runs"][run.name])
    parameters = sum(parameter.numel() for parameter in runs[0].model.parameters())
    print(f"{len(text):,} bytes of Python's standard library; {parameters:,} parameters; {options.threads} threads")
    if not train(runs, text, options):
        print(f"interrupted at step {runs[0].step}: go on by --resume --out {options.out}", file=sys.stderr)
        return 130
    report(runs, held_out, options)
    if options.sample:
        print("\n" + sample(runs[0], options.sample, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
