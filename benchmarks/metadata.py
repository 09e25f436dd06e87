"""bf16 or fp32 metadata? The bound and the gradient of both, where codes and metadata cross from one compiled graph to another.

    python benchmarks/metadata.py [--compiler inductor]

The same codes with scales and minima in bf16 (groups of 128) and in fp32 (groups of 256): the same bits an element. The
largest error of a round trip, in steps of its group, where half a step is what rounding to the nearest needs; and the
whole-gradient error on the ResNet-18.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import models
import torch
from tabulate import tabulate
from torch import Tensor

import fx_actcomp
from fx_actcomp import Layout, Parts, Traits
from fx_actcomp.codecs import codec_named
from fx_actcomp.codecs.quantize import Quantize


@fx_actcomp.register_codec
@dataclass(frozen=True)
class Bf16Metadata(Quantize):
    """``Quantize``, its scales and minima rounded to bf16 before they are used, and saved as such."""

    name: str = "bf16"
    bits: int = 8
    group: int = 128

    def compress(self, x: Tensor, traits: Traits) -> Parts:
        codes, *metadata = super().compress(x, traits)
        return (codes, *(number.to(torch.bfloat16) for number in metadata))

    def decompress(self, parts: Parts, layout: Layout, traits: Traits) -> Tensor:
        return super().decompress((parts[0], *(number.float() for number in parts[1:])), layout, traits)

    def _encode(self, x: Tensor, dims: list[int], divisions: int) -> tuple[Tensor, Tensor, Tensor]:
        _, scale, low = super()._encode(x, dims, divisions)
        scale, low = scale.bfloat16().float(), low.bfloat16().float()
        return (x - low) / scale.clamp_min(torch.finfo(x.dtype).tiny), scale, low

    def _encode_sign_exact(self, x: Tensor, dims: list[int], divisions: int) -> tuple[Tensor, Tensor]:
        _, scale = super()._encode_sign_exact(x, dims, divisions)
        scale = scale.bfloat16().float()
        return x / scale, scale


def largest_error(policy: str, compiler: str) -> float:
    """In steps of each row's group (its range over 255), through the weight gradient of a product with one column a row."""
    torch.manual_seed(0)
    rows, width = 256, 4096
    x = torch.randn(rows, width) * torch.logspace(-3, 3, rows).unsqueeze(1)
    w = torch.zeros(width, 1, requires_grad=True)
    call = torch.compile(
        lambda x, w: (x * 2) @ w, backend="actcomp", options={"policy": policy, "compiler": compiler, "min_bytes": 0}
    )
    group = codec_named(policy).group  # type: ignore[attr-defined] # both are Quantize
    worst = 0.0
    for row in range(0, rows, 16):
        (got,) = torch.autograd.grad(call(x, w)[row], w)
        parts = (x[row] * 2).view(-1, group)
        step = (parts.amax(1) - parts.amin(1)) / 255
        worst = max(worst, ((got.flatten() - x[row] * 2).abs().view(-1, group).amax(1) / step).max().item())
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="inductor")
    args = parser.parse_args()
    rows = []
    for policy in ("int8", "bf16"):
        model, inputs = models.resnet18()
        error = fx_actcomp.gradient_error(model, *inputs, policy=policy, compiler=args.compiler)
        rows.append([policy if policy == "bf16" else "fp32", largest_error(policy, args.compiler), error.relative])
        print(*rows[-1], flush=True)
    print(tabulate(rows, ["metadata", "largest error, steps", "gradient error, ResNet-18"], floatfmt=("", ".3f", ".5f")))


if __name__ == "__main__":
    main()
