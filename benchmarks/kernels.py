"""Identical layers share their kernels: how many Inductor generates for a model of 50, with and without compression.

    python benchmarks/kernels.py [--layers 50] [--policies none int8 int4]

Counts the distinct kernels in the generated code of the forward and the backward graph, and the calls of them.
"""

from __future__ import annotations

import argparse
import re

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch._inductor.utils import run_fw_bw_and_get_code  # what torch's own tests read generated code with


class Layer(nn.Module):
    """What transformers are made of: a norm, two linear layers and a nonlinearity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def count(code: str) -> tuple[int, int]:
    """Kernels that are defined, and calls of kernels, in Inductor's output for CPUs or GPUs."""
    defined = set(re.findall(r"^(\w+) = async_compile\.\w+\(", code, re.MULTILINE))
    calls = re.findall(r"^\s+(\w+)(?:\.run)?\(", code, re.MULTILINE)
    return len(defined), sum(1 for name in calls if name in defined)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--policies", nargs="*", default=["none", "int8", "int4"])
    args = parser.parse_args()
    rows = []
    for policy in args.policies:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model, x = nn.Sequential(*(Layer(128) for _ in range(args.layers))), torch.randn(8, 64, 128)
        call = torch.compile(model, backend="actcomp", options={"policy": policy})
        _, codes = run_fw_bw_and_get_code(lambda call=call, x=x: call(x))
        forward, backward = (count(code) for code in codes)
        rows.append([policy, *forward, *backward])
        print(*rows[-1], flush=True)
    head = ["policy", "kernels, forward", "calls, forward", "kernels, backward", "calls, backward"]
    print(tabulate(rows, head))


if __name__ == "__main__":
    main()
