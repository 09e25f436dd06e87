"""``python -m fx_actcomp demo``: train a small GPT on English text, as torch saves activations and as we do.

The text is the one that every CPython carries, ``pydoc_data.topics``. Each run is a process of its own, so that its peak
memory is its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from . import memory
from .explain import report
from .options import COMPILERS
from .policy import POLICIES

LENGTH, BATCH = 256, 12
MIB = 2**20


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Take and give (batch, length, width)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.proj(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return out


class GPT(nn.Module):
    """A small decoder on bytes."""

    def __init__(self, layers: int = 4, width: int = 256, heads: int = 4, length: int = LENGTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of the next byte; both (batch, length)."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Run:
    """What one process measured.

    Attributes:
        losses: Of every step.
        seconds: A step, the median without the first.
        peak: Most bytes held in a step, above what is held between steps.
        held: Bytes held between steps.
        before: Bytes saved for backward without us.
        after: Bytes saved for backward.
        table: The report.
    """

    losses: list[float]
    seconds: float
    peak: int
    held: int
    before: int
    after: int
    table: str


def english() -> Tensor:
    """The text as bytes."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()


def train(policy: str, compiler: str, steps: int, device: torch.device) -> Run:
    """Train in this process, with a progress line."""
    torch.manual_seed(0)
    text, model = english(), GPT().to(device)
    compiled: nn.Module = torch.compile(model, backend="actcomp", options={"policy": policy, "compiler": compiler})  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(0)
    losses: list[float] = []
    times: list[float] = []
    peak = held = 0
    for step in range(steps):
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=draws)
        window = torch.stack([text[start : start + LENGTH + 1] for start in starts]).to(device)
        optimizer.zero_grad()
        memory.mark(device)
        held = memory.held(device)
        began = time.perf_counter()
        loss = compiled(window[:, :-1], window[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step > 0:
            times.append(time.perf_counter() - began)
            peak = max(peak, memory.peak(device) - held)
        _progress(f"{policy}: step {step + 1}/{steps}, loss {losses[-1]:.3f}", last=step + 1 == steps)
    found = report(compiled)
    return Run(losses, statistics.median(times), peak, held, found.bytes_before, found.bytes_after, str(found))


def _progress(text: str, *, last: bool) -> None:
    if sys.stderr.isatty():
        print(f"\r{text}\033[K", end="\n" if last else "", file=sys.stderr, flush=True)
    elif last or text.split("/")[0].endswith(("0", " 1")):
        print(text, file=sys.stderr, flush=True)


def _in_own_process(policy: str, args: argparse.Namespace) -> Run:
    command = [sys.executable, "-m", "fx_actcomp", "demo", "--arm", "--policy", policy]
    command += ["--steps", str(args.steps), "--compiler", args.compiler]
    print(f"{policy}: compiling, then {args.steps} steps", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=memory.environment(), text=True)
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``demo``."""
    parser.add_argument("--policy", default="int8", choices=list(POLICIES), help="policy to compare with 'none'")
    parser.add_argument("--steps", type=_at_least_two, default=30, help="training steps, 2 or more")
    parser.add_argument("--compiler", default="inductor", choices=COMPILERS)
    parser.add_argument("--arm", action="store_true", help=argparse.SUPPRESS)


def _at_least_two(text: str) -> int:
    if int(text) < 2:
        raise argparse.ArgumentTypeError("the first step compiles; expected 2 or more")
    return int(text)


def main(args: argparse.Namespace) -> None:
    """Run the demo, or one arm of it."""
    if args.arm:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        print(json.dumps(vars(train(args.policy, args.compiler, args.steps, device))))
        return
    plain, ours = _in_own_process("none", args), _in_own_process(args.policy, args)
    print(f"\nSaved activations of the model, and what policy {args.policy!r} makes of them:\n\n{ours.table}\n")
    print(_summary(plain, ours, args.policy))


def _summary(plain: Run, ours: Run, policy: str) -> str:
    def row(name: str, left: Any, right: Any, ratio: float) -> list[Any]:
        return [name, left, right, f"{ratio:.3f}"]

    rows = [
        row("saved for backward, MiB", f"{plain.after / MIB:.1f}", f"{ours.after / MIB:.1f}", ours.after / plain.after),
        row("peak memory of a step, MiB", f"{plain.peak / MIB:.1f}", f"{ours.peak / MIB:.1f}", ours.peak / plain.peak),
        row("held between steps, MiB", f"{plain.held / MIB:.1f}", f"{ours.held / MIB:.1f}", ours.held / plain.held),
        row("time of a step, s", f"{plain.seconds:.3f}", f"{ours.seconds:.3f}", ours.seconds / plain.seconds),
    ]
    last = min(10, len(plain.losses))
    for name, k in (("loss, last step", 1), (f"loss, mean of the last {last} steps", last)):
        left, right = sum(plain.losses[-k:]) / k, sum(ours.losses[-k:]) / k
        rows.append(row(name, f"{left:.4f}", f"{right:.4f}", right / left))
    note = "Peak memory of a step is what forward, backward and the optimizer hold above what is held between steps.\n"
    return tabulate(rows, ["", "none", policy, "ratio"], disable_numparse=True, colalign=("left", *["right"] * 3)) + f"\n\n{note}"
