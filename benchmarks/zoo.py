"""A zoo of architectures under lossless, int8 and int4: two training steps each against policy "none".

    python benchmarks/zoo.py [--results zoo.jsonl] [--family torchvision] [--only bert ...] [--dtype float32]

67 architectures of transformers, 27 of torchvision and 28 of timm (``zoo_models.py``) with small sizes and random
weights, dropout active, in fp32 and under bf16 autocast, compiled with ``aot_eager``. Of each it asks:

* losses and gradients of both steps under ``lossless``: those of ``none`` to the last bit,
* the first step's loss under ``int8`` and ``int4`` too, and its whole gradient near that of ``none`` (``BOUNDS``),
* nothing that isn't finite where ``none`` is.

What ``none`` can't compile, or does otherwise when it is run again, isn't ours and is listed with the reason. Prints a row for
each architecture and a summary; the exit status is 1 where something failed. ``--results`` keeps each row as a line of JSON; a
further run goes on from there.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import signal
import statistics
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm
from zoo_models import architectures, loss_of

import fx_actcomp

POLICIES = ("lossless", "int8", "int4")
BOUNDS = {("float32", "int8"): 0.03, ("float32", "int4"): 0.3, ("bfloat16", "int8"): 0.05, ("bfloat16", "int4"): 0.3}
"""Most that the whole gradient's relative error may be; under autocast the exact gradient is itself rounded to 8 bits."""

EXCEPTIONS: dict[str, float] = {}
"""Architectures whose bounds are wider by a factor, each with the cause."""

SECONDS = 600
"""An architecture that takes more processor time has failed."""


@dataclass
class Outcome:
    """What one policy did to one architecture.

    Attributes:
        before: Bytes saved for backward without us.
        after: Bytes saved now.
        error: Relative error of the first step's whole gradient.
        cosine: Cosine of the angle between that gradient and the exact one.
        worst: The parameter whose gradient is farthest off, of those with a thousandth of the gradient's norm.
        worst_error: That error.
    """

    before: int
    after: int
    error: float
    cosine: float
    worst: str = ""
    worst_error: float = 0.0


@dataclass
class Row:
    """One architecture in one type.

    Attributes:
        status: ``"passed"``, ``"failed"``, or ``"not ours"`` where policy ``"none"`` fails too.
        reasons: Why it isn't passed.
        outcomes: By policy.
    """

    name: str
    family: str
    kind: str
    dtype: str
    status: str
    reasons: list[str] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Steps:
    """Two training steps: each one's loss and gradients, and the report of what was compiled."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor]]
    report: fx_actcomp.Report

    def flat(self, step: int = 0) -> Tensor:
        """The whole gradient of a step."""
        return torch.cat([gradient.flatten().float() for gradient in self.gradients[step].values()])


def seed() -> None:
    """Of everything that a model may draw from."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def train(name: str, dtype: str, policy: str) -> Steps:
    """Two steps of a freshly built model."""
    torch._dynamo.reset()
    seed()
    model, args, kwargs = architectures()[name].build()
    options = {"policy": policy, "compiler": "aot_eager", "min_bytes": 1024, "strict": True}
    compiled: Any = torch.compile(model, backend="actcomp", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses, gradients = [], []
    seed()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = loss_of(compiled(*args, **kwargs))
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        gradients.append({path: p.grad.clone() for path, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return Steps(losses, gradients, fx_actcomp.report(compiled))


def error_of(exact: Tensor, given: Tensor) -> tuple[float, float]:
    """Relative error and cosine, in double precision, where the exact one is finite."""
    finite = exact.isfinite()
    exact, given = exact[finite].double(), given[finite].double()
    norm, distance = exact.norm().item(), (given - exact).norm().item()
    if distance == 0:
        return 0.0, 1.0
    return distance / (norm or 1e-30), (exact @ given).item() / ((norm * given.norm().item()) or 1e-30)


def identical(a: Tensor, b: Tensor) -> bool:
    """The same numbers; a NaN is one."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def compare(exact: Steps, given: Steps, policy: str, dtype: str, slack: float) -> tuple[Outcome, list[str]]:
    """What a policy did, and what is wrong with it."""
    names = list(exact.gradients[0])
    if any(list(gradients) != names for gradients in (*exact.gradients, *given.gradients)):
        return Outcome(0, 0, 1.0, 0.0), [f"{policy}: other parameters have gradients"]
    relative, cosine = error_of(exact.flat(), given.flat())
    single = {n: error_of(exact.gradients[0][n].flatten(), given.gradients[0][n].flatten())[0] for n in names}
    least = 1e-3 * exact.flat().nan_to_num(0, 0, 0).norm()
    large = [n for n in names if exact.gradients[0][n].norm() >= least] or names
    worst = max(large, key=single.__getitem__)
    report = given.report
    wrong = list(report.failures)
    if not identical(exact.losses[0], given.losses[0]):
        wrong.append(f"the first loss is {given.losses[0].item()} instead of {exact.losses[0].item()}")
    pairs = [(name, a[name], b[name]) for a, b in zip(exact.gradients, given.gradients, strict=True) for name in names]
    pairs += [("the loss", a, b) for a, b in zip(exact.losses, given.losses, strict=True)]
    wrong += [f"{name} isn't finite" for name, a, b in pairs if (a.isfinite() & ~b.isfinite()).any()][:1]
    if policy == "lossless":
        wrong += [f"not the same to the last bit: {name}" for name, a, b in pairs if not identical(a, b)][:1]
    elif not relative <= slack * BOUNDS[dtype, policy]:
        wrong.append(f"error {relative:.3g} of the gradient, of {worst} {single[worst]:.3g}")
    outcome = Outcome(report.bytes_before, report.bytes_after, relative, cosine, worst, single[worst])
    return outcome, [f"{policy}: {said}" for said in wrong]


def measure(name: str, dtype: str) -> Row:
    """One architecture in one type, all policies against one run of ``none``."""
    entry = architectures()[name]
    row = Row(name, entry.family, entry.kind, dtype, "passed")
    start = time.process_time()
    try:
        exact = train(name, dtype, "none")
        row.losses = [loss.item() for loss in exact.losses]
    except Exception as error:
        row.status, row.reasons = "not ours", [brief(error)]
    else:
        for policy in POLICIES:
            try:
                given = train(name, dtype, policy)
                row.outcomes[policy], wrong = compare(exact, given, policy, dtype, EXCEPTIONS.get(name, 1.0))
                row.reasons += wrong
            except Exception as error:
                row.reasons.append(f"{policy}: {brief(error)}")
        row.status = "failed" if row.reasons else "passed"
        if row.reasons and (moved := restless(name, dtype, exact)):
            row.status, row.reasons = "not ours", [f"'none' differs from itself: {moved}", *row.reasons]
    row.seconds = time.process_time() - start
    return row


def restless(name: str, dtype: str, exact: Steps) -> str:
    """What of ``none`` comes out otherwise when it is run again: some kernels read memory that nobody wrote."""
    for _ in range(2):
        _, wrong = compare(exact, train(name, dtype, "none"), "lossless", dtype, 1.0)
        if wrong:
            return wrong[0].removeprefix("lossless: ")
    return ""


def measure_alone(name: str, dtype: str) -> Row:
    """The same in a process that may end with it."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # ends the process
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.use_deterministic_algorithms(True)
    row = measure(name, dtype)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return row


def brief(error: Exception) -> str:
    """An error in a line, with the place it came from."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    said = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {said[:200]} ({Path(where.filename).name}:{where.lineno})"


def end_with_parent() -> None:
    """A worker whose parent was killed would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


class Worker:
    """Runs measurements in a process of their own, a new one after a crash and now and then: compiled code adds up."""

    def __init__(self) -> None:
        self.pool = self._fresh()

    @staticmethod
    def _fresh() -> ProcessPoolExecutor:
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, spawn, end_with_parent, max_tasks_per_child=24)

    def __call__(self, name: str, dtype: str) -> Row:
        try:
            return self.pool.submit(measure_alone, name, dtype).result()
        except BrokenProcessPool:
            self.pool = self._fresh()
            entry = architectures()[name]
            said = f"the process died, or took over {SECONDS} s"
            return Row(name, entry.family, entry.kind, dtype, "failed", [said])


def read(path: Path) -> list[Row]:
    """The rows of an earlier run."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return [Row(**{**line, "outcomes": {p: Outcome(**o) for p, o in line["outcomes"].items()}}) for line in lines]


def table(rows: Sequence[Row]) -> str:
    """A row for each architecture and type."""
    cells = []
    for row in rows:
        errors = [row.outcomes[p].error if p in row.outcomes else None for p in POLICIES]
        ratios = [o.before / o.after if (o := row.outcomes.get(p)) and o.after else None for p in POLICIES]
        cells.append([row.name, row.kind, row.dtype, row.status, *errors[1:], *ratios, row.seconds])
    head = ["architecture", "kind", "dtype", "status", "error int8", "error int4"]
    head += [f"times fewer bytes, {policy}" for policy in POLICIES] + ["s"]
    return tabulate(cells, head, floatfmt=("", "", "", "", ".2g", ".2g", ".2f", ".2f", ".2f", ".0f"), missingval="-")


def summary(rows: Sequence[Row]) -> str:
    """Counts, and median and largest error and median ratio of bytes, by library and type."""
    cells = []
    for family, dtype in dict.fromkeys((row.family, row.dtype) for row in rows):
        mine = [row for row in rows if (row.family, row.dtype) == (family, dtype)]
        counts = [sum(row.status == status for row in mine) for status in ("passed", "failed", "not ours")]
        line: list[Any] = [family, dtype, *counts]
        for policy in POLICIES[1:]:
            found = [o for row in mine if (o := row.outcomes.get(policy)) and o.after]
            errors = [o.error for o in found]
            line += (
                [statistics.median(errors), max(errors), statistics.median(o.before / o.after for o in found)] if found else []
            )
        cells.append(line)
    head = ["library", "dtype", "passed", "failed", "not ours"]
    head += [f"{what} {policy}" for policy in POLICIES[1:] for what in ("median error", "largest error", "times fewer bytes")]
    return tabulate(cells, head, floatfmt=("", "", "", "", "", ".2g", ".2g", ".2f", ".2g", ".2g", ".2f"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="names, with or without the library before them")
    parser.add_argument("--family", nargs="*", choices=["transformers", "torchvision", "timm"])
    parser.add_argument("--dtype", nargs="*", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--results", type=Path, help="file of JSON lines; what it holds isn't measured again")
    args = parser.parse_args(arguments)
    chosen = [
        name
        for name, entry in architectures().items()
        if (not args.family or entry.family in args.family)
        and (not args.only or {name, name.partition("/")[2]}.intersection(args.only))
    ]
    asked = {(name, dtype) for name in chosen for dtype in args.dtype}
    rows = [row for row in read(args.results) if (row.name, row.dtype) in asked] if args.results else []
    left = [(n, d) for n in chosen for d in args.dtype if (n, d) not in {(row.name, row.dtype) for row in rows}]
    run = Worker()
    progress = tqdm(left, unit="model")
    for name, dtype in progress:
        progress.set_postfix_str(f"{name} {dtype}")
        row = run(name, dtype)
        rows.append(row)
        if args.results:
            with args.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        if row.status != "passed":
            progress.write(f"{row.status}: {name} {dtype}: {'; '.join(row.reasons)}")
    print(table(rows), summary(rows), sep="\n\n")
    for row in rows:
        if row.status != "passed":
            print(f"{row.status}: {row.name} {row.dtype}: {'; '.join(row.reasons)}")
    return int(any(row.status == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
