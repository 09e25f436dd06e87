"""Does memory really fall? Memory after forward and peak over a step, each policy in a process of its own.

    python benchmarks/memory.py [--compiler inductor] [--policies none int8 int4] [resnet18] [gpt]

On a CPU the figures are the process's resident size above what it holds between steps, with glibc set so that freed blocks
leave the process at once; on CUDA they are the allocator's. Prints one row a model and policy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

import models
import torch
from tabulate import tabulate

import fx_actcomp
from fx_actcomp import memory

MIB = 2**20
MODELS = {
    "resnet18": lambda: models.resnet18(width=64, batch=128),
    "gpt": lambda: models.gpt(batch=16, length=256, width=512),
}


def measure(name: str, policy: str, compiler: str, steps: int) -> dict[str, Any]:
    """Run in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, inputs = MODELS[name]()
    model, inputs = model.to(device), tuple(x.to(device) for x in inputs)
    call = torch.compile(model, backend="actcomp", options={"policy": policy, "compiler": compiler})
    after_forward, peaks = [], []
    for step in range(steps + 1):
        model.zero_grad(set_to_none=False)
        memory.mark(device)
        held = memory.held(device)
        loss = call(*inputs)
        forward = memory.held(device) - held
        loss.backward()
        peak = memory.peak(device) - held
        del loss
        if step:  # the first one compiles
            after_forward.append(forward)
            peaks.append(peak)
    report = fx_actcomp.report(call)
    return {"forward": statistics.median(after_forward), "peak": statistics.median(peaks), "saved": report.bytes_after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--policies", nargs="*", default=["none", "int8", "int4"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--arm", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    args = parser.parse_args()
    if args.arm:
        print(json.dumps(measure(*args.arm, args.compiler, args.steps)))
        return
    rows = []
    for name in args.models or MODELS:
        for policy in args.policies:
            command = [sys.executable, __file__, "--arm", name, policy, "--compiler", args.compiler, "--steps", str(args.steps)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=memory.environment())
            found = json.loads(done.stdout.splitlines()[-1])
            rows.append([name, policy, *(found[key] / MIB for key in ("saved", "forward", "peak"))])
            print(*rows[-1], file=sys.stderr, flush=True)
    head = ["model", "policy", "saved, MiB", "after forward, MiB", "peak of the step, MiB"]
    print(tabulate(rows, head, floatfmt=".1f"))


if __name__ == "__main__":
    main()
