"""Fuzzing: random small programs, each policy against policy "none" on the same compiler.

    python benchmarks/fuzz.py [--examples 3000] [--seed 0] [--policies lossless int8 fine]

Of every program: outputs are the same to the last bit under every policy; so is every decision that backward takes (masks,
predicates, indices and what else is piecewise constant, as each operator of the graph really receives them); "lossless"
gradients are the same to the last bit; "invert" gradients are within the rounding of what is restored; and lossy gradients
are off by no more than the number of compressed tensors times the codec's step times a constant. The last holds for
"int8" and again for "fine", a codec of 16 bits that claims 8: a lossy value in a use that doesn't bear it shows
as an error that doesn't shrink with the step.

Prints how many passed, and of each kind of failure the smallest program, as Python.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import hypothesis
import torch
from graphs import Program, programs
from hypothesis import HealthCheck, Phase
from tabulate import tabulate
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from tqdm import tqdm

import fx_actcomp
from fx_actcomp import Layout, Parts, Traits
from fx_actcomp.codecs.quantize import refusal
from fx_actcomp.uses import is_decision

Key = tuple[int, str, str, int]
STEPS = {"int8": 2.0**-8, "fine": 2.0**-16, "fp8": 2.0**-4, "blpa8": 2.0**-6, "invert": 2e-5}
"""Size of an error of a value, relative to the largest values around it, of policies whose gradients are bounded."""
FACTOR = 32.0
"""Of the bound: most of what is measured lies below 1."""


LAST = 2**15 - 4
"""The largest code of a finite value."""


@fx_actcomp.register_codec
@dataclass(frozen=True)
class Fine(fx_actcomp.Codec):
    """16-bit codes between a tensor's minimum and maximum, taken wherever 8 bits would do; the last three aren't finite."""

    name: str = "fine"
    bits: int = 8

    def fits(self, layout: Layout, traits: Traits) -> str | None:  # noqa: ARG002 - the signature
        return refusal(self.name, layout) or (None if layout.dtype.itemsize > 2 else "16 bits are no fewer")

    def compress(self, x: Tensor, traits: Traits) -> Parts:  # noqa: ARG002
        finite, most = x.isfinite(), torch.finfo(x.dtype).max
        low, high = torch.where(finite, x, most).amin(), torch.where(finite, x, -most).amax()
        scale = ((high - low) / (LAST + 2**15)).clamp_min(torch.finfo(x.dtype).tiny)
        marks = torch.where(x.isnan(), LAST + 3, torch.where(x > 0, LAST + 2, LAST + 1))
        return torch.where(finite, ((x - low) / scale - 2**15).round(), marks).to(torch.int16), low, scale

    def decompress(self, parts: Parts, layout: Layout, traits: Traits) -> Tensor:  # noqa: ARG002
        codes = parts[0]
        marked = torch.where(codes == LAST + 1, -torch.inf, torch.where(codes == LAST + 2, torch.inf, torch.nan))
        return layout.restore(torch.where(codes > LAST, marked, (codes.to(layout.dtype) + 2**15) * parts[2] + parts[1]))


def policy(name: str) -> Any:
    """What to give as option ``policy``."""
    return fx_actcomp.Policy("fine", "fine", fallbacks=()) if name == "fine" else name


@dataclass(frozen=True)
class Run:
    """What a program gave under a policy."""

    outputs: tuple[Tensor, ...]
    gradients: list[Tensor | None]
    decisions: dict[Key, Tensor]
    lossy: int
    coarsest: float


class Failure(AssertionError):  # noqa: N818 - what a test says
    """A policy did what it may not do; ``kind`` is the same for all failures alike."""

    def __init__(self, kind: str, told: str = "") -> None:
        super().__init__(f"{kind}: {told}" if told else kind)
        self.kind = kind


class Refused(Exception):  # noqa: N818 - no error
    """torch can't compile the program, or it has no gradient."""


class _Watching(fx.Interpreter):
    """Runs a graph and notes the decisions that each operator receives.

    With ``wanted`` it notes these, whatever they are by now: a rewritten graph receives a decision from somewhere else.
    """

    def __init__(self, gm: fx.GraphModule, number: int, seen: dict[Key, Tensor], wanted: Collection[Key] | None) -> None:
        super().__init__(gm)
        self.number, self.seen, self.wanted, self.coarsest = number, seen, wanted, 0.0

    def run_node(self, n: fx.Node) -> Any:
        for position, arg in enumerate(pytree.tree_leaves((n.args, n.kwargs)) if n.op == "call_function" else ()):
            held = self.env.get(arg) if isinstance(arg, fx.Node) else None
            if isinstance(held, Tensor):
                key = (self.number, n.name, str(n.target), position)
                exact = not held.is_floating_point() or (arg.op == "call_function" and is_decision(arg))
                if exact if self.wanted is None else key in self.wanted:
                    self.seen[key] = held
        made = super().run_node(n)
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.coarsest = max(self.coarsest, torch.finfo(x.dtype).eps)
        return made


def run(program: Program, name: str, wanted: Collection[Key] | None = None) -> Run:
    """One step of a program under a policy, with the decisions that were taken on the way."""
    torch._dynamo.reset()
    make, inputs = program.load()
    model, given = make(), inputs()
    seen: dict[Key, Tensor] = {}
    graphs: list[_Watching] = []

    def boxed(gm: fx.GraphModule, example_inputs: object) -> Callable[[list[Any]], Any]:  # noqa: ARG001 - the signature
        number = len(graphs)
        graphs.append(_Watching(gm, number, seen, wanted))

        def call(args: list[Any]) -> Any:
            watching = graphs[number] = _Watching(gm, number, seen, wanted)
            return watching.boxed_run(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    options = {"policy": policy(name), "min_bytes": 0, "compiler": "aot_eager", "strict": True}
    with mock.patch("fx_actcomp.compile.boxed_nop", boxed):
        torch.manual_seed(0)
        outputs = torch.compile(model, backend="actcomp", options=options, dynamic=bool(program.dynamic))(*given)
        followed = [out for out in outputs if out.requires_grad]
        leaves = [leaf for leaf in (*model.parameters(), *given) if leaf.requires_grad]
        if not followed or not leaves:
            raise Refused("no gradient")
        draw = torch.Generator().manual_seed(0)
        weights = [torch.randn(out.shape, generator=draw, dtype=torch.float64).to(out.dtype) for out in followed]
        gradients = torch.autograd.grad(followed, leaves, weights, allow_unused=True)
    for number, x in enumerate(given):
        model.register_buffer(f"given{number}", x)  # by which the report finds the graph of a model without parameters
    lossy = sum(row.lossy for row in fx_actcomp.report(model).saved)
    return Run(tuple(out.detach() for out in outputs), list(gradients), seen, lossy, max(graph.coarsest for graph in graphs))


def check(program: Program, policies: Sequence[str]) -> dict[str, float]:
    """Hold a program's policies against ``"none"``.

    Returns:
        The error of each bounded policy over its bound.

    Raises:
        Failure: One did what it may not do.
        Refused: There is nothing to compare.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exact = run(program, "none")
        except Refused:
            raise
        except Exception as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        found = {}
        for name in policies:
            try:
                got = run(program, name, exact.decisions.keys())
            except Exception as error:
                raise Failure(f"{name}: {_first_line(error)}", traceback.format_exc()) from error
            found[name] = _compare(name, exact, got)
    return found


def _first_line(error: BaseException) -> str:
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    return re.sub(r"\d+", "#", f"{type(error).__name__}: {error}".partition("\n")[0])


def _compare(name: str, exact: Run, got: Run) -> float:
    for number, (x, y) in enumerate(zip(exact.outputs, got.outputs, strict=True)):
        if not _same(x, y):
            raise Failure(f"{name}: an output differs", f"number {number}")
    for key, x in exact.decisions.items():
        if key in got.decisions and not _same(x, got.decisions[key]):
            raise Failure(
                f"{name}: a decision that {key[2]} receives differs", f"graph {key[0]}, node {key[1]}, argument {key[3]}"
            )
    for x, y in zip(exact.gradients, got.gradients, strict=True):
        if (x is None) != (y is None):
            raise Failure(f"{name}: a gradient is missing, or there is one too many")
        if x is not None and y is not None and ((x.shape, x.dtype, x.stride()) != (y.shape, y.dtype, y.stride())):
            raise Failure(
                f"{name}: a gradient has another shape, type or strides", f"{x.shape} {x.stride()}, {y.shape} {y.stride()}"
            )
    pairs = [(x, y) for x, y in zip(exact.gradients, got.gradients, strict=True) if x is not None and y is not None]
    if not got.lossy:
        if not all(_same(x, y) for x, y in pairs):
            raise Failure(f"{name}: nothing is lossy, and a gradient differs")
        return 0.0
    x, y = (torch.cat([pair[side].double().flatten() for pair in pairs]) for side in (0, 1))
    finite = x.isfinite()
    if not torch.equal(finite, y.isfinite()):
        raise Failure(f"{name}: a gradient is finite under one policy alone")
    if name not in STEPS:
        return 0.0
    bound = FACTOR * (got.lossy * STEPS[name] + exact.coarsest) * x[finite].norm().item()
    error = (y - x)[finite].norm().item()
    if error > bound:
        raise Failure(f"{name}: a gradient is off by more than its bound", f"{error} > {bound}, {got.lossy} are compressed")
    return error / bound if bound else 0.0


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same to the last bit; NaN equals NaN."""
    return (
        x.shape == y.shape
        and x.dtype == y.dtype
        and torch.equal(x.nan_to_num(), y.nan_to_num())
        and torch.equal(x.isnan(), y.isnan())
    )


def shrink(program: Program, policies: Sequence[str], kind: str) -> Program:
    """The smallest program, one step after the other, that fails in the same way."""
    for other in program.smaller():
        try:
            check(other, policies)
        except Failure as failure:
            if failure.kind == kind:
                return shrink(other, policies, kind)
        except Exception:  # what is left of a program needn't be one
            continue
    return program


def drawn(examples: int, seed: int) -> Iterator[Program]:
    """So many different programs."""
    seen: set[str] = set()
    for batch in itertools.count():
        for program in _batch(seed * 1_000_003 + batch):
            if program.source not in seen and len(seen) < examples:
                seen.add(program.source)
                yield program
        if len(seen) == examples:
            return


def _batch(seed: int) -> list[Program]:
    made: list[Program] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=100, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(program=programs())
    def collect(program: Program) -> None:
        made.append(program)

    collect()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies", nargs="+", default=["lossless", "int8", "fine"])
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    counts: collections.Counter[str] = collections.Counter()
    ratios: dict[str, list[float]] = {name: [] for name in args.policies}
    failed: dict[str, Program] = {}
    for program in tqdm(drawn(args.examples, args.seed), total=args.examples, smoothing=0):
        try:
            for name, ratio in check(program, args.policies).items():
                ratios[name].append(ratio)
            counts["passed"] += 1
        except Refused:
            counts["torch refuses it, or it has no gradient"] += 1
        except Failure as failure:
            counts["failed"] += 1
            if failure.kind not in failed:
                failed[failure.kind] = shrink(program, args.policies, failure.kind)
                tqdm.write(f"# {failure}\n{failed[failure.kind].source}# dynamic={failed[failure.kind].dynamic}\n")
    print(tabulate(counts.items(), ["programs", "number"]))
    kept = [(name, sum(r > 0 for r in found), max(found, default=0.0)) for name, found in ratios.items()]
    print(tabulate(kept, ["policy", "programs with an error", "largest error over its bound"], floatfmt=".4f"))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
