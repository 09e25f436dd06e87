"""What each codec costs and gives, on the ResNet-18 and the GPT: bits, error of the gradient, time of a step.

    python benchmarks/errors.py [--compiler inductor] [--policies int8 int4:rounding=stochastic] [--pairs 11] [resnet18] [gpt]

Bits an element as really stored, metadata counted, over the values that are compressed; whole-gradient relative error and
cosine against policy "none" (random weights, seed 0); bytes saved for backward, and the same over what is compressed. With
--pairs, the median ratio of a step's time to policy "none"'s, over so many pairs of steps in turn, both through Inductor.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import models
import torch
from tabulate import tabulate

import fx_actcomp

MODELS = {"resnet18": models.resnet18, "gpt": models.gpt}
WIDTHS = {"float32": 32, "float64": 64, "float16": 16, "bfloat16": 16}


def bits_per_element(report: fx_actcomp.Report) -> float:
    """Stored bits over elements, of the values that are compressed; a shared base counts once."""
    rows = [row for row in report.saved if row.kind == "activation" and row.codec not in ("keep", "drop")]
    stored = sum(row.bytes_after for row in rows) * 8
    elements = sum(row.bytes_before * 8 / WIDTHS[row.dtype] for row in rows)
    return stored / elements if elements else math.nan


POLICIES = ["lossless", "int8", "fp8", "int4", "int2", "pool2", "pool2:means=int8", "division", "blpa8", "blpa4"]


def fewer(report: fx_actcomp.Report) -> tuple[float, float]:
    """How many times fewer bytes are saved: in all, and of the tensors that are compressed."""
    taken = [row for row in report.saved if row.codec != "keep"]
    before, after = sum(row.bytes_before for row in taken), sum(row.bytes_after for row in taken)
    return report.bytes_before / report.bytes_after, before / after if after else math.nan


def stepper(name: str, policy: str) -> Callable[[], float]:
    """A compiled model's step, forward and backward, that says how many seconds it took."""
    model, inputs = MODELS[name]()
    call: Any = torch.compile(model, backend="actcomp", options={"policy": policy})

    def step() -> float:
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        call(*inputs).backward()
        return time.perf_counter() - start

    for _ in range(3):
        step()
    return step


def time_ratio(plain: Callable[[], float], step: Callable[[], float], pairs: int) -> float:
    """Median over pairs of steps, taken in turn: a slow moment of the machine falls on both."""
    return statistics.median(step() / plain() for _ in range(pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="aot_eager")
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # each policy compiles the same code anew
    rows = []
    for name in args.models or MODELS:
        plain = stepper(name, "none") if args.pairs else None
        for policy in args.policies:
            model, inputs = MODELS[name]()
            report = fx_actcomp.explain(model, *inputs, policy=policy, compiler=args.compiler)
            error = fx_actcomp.gradient_error(model, *inputs, policy=policy, compiler=args.compiler)
            ratio = time_ratio(plain, stepper(name, policy), args.pairs) if plain else math.nan
            rows.append([name, policy, bits_per_element(report), error.relative, error.cosine, *fewer(report), ratio])
            print(*rows[-1], flush=True)
    head = ["model", "policy", "bits", "error", "cosine", "times fewer bytes", "over what is compressed", "step time"]
    print(tabulate(rows, head, floatfmt=("", "", ".3f", ".5f", ".6f", ".2f", ".2f", ".2f")))


if __name__ == "__main__":
    main()
