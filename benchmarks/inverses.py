"""The derivative of an activation function from its saved output: ours beside the original's, and beside 8-bit codes.

    python benchmarks/inverses.py

The error of f'(x), largest over [-30, 30] and root mean square over N(0, 1), where forward saved y = f(x) in fp32 or bf16 and
one bit: ours, and by the formulas of "Inverted Activations" (arXiv 2407.15545, constants as published
with its code). Then the same with y in 8-bit codes, beside x in 8-bit codes: why the planner doesn't invert what is compressed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from fx_actcomp import Layout, Traits
from fx_actcomp.codecs import codec_named
from fx_actcomp.invert import Inverse, recognize

Function = Callable[[Tensor], Tensor]
FUNCTIONS: dict[str, Function] = {
    "GELU": F.gelu,
    "GELU, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "SiLU": F.silu,
    "quick-GELU": lambda x: x * torch.sigmoid(1.702 * x),
    "Mish": F.mish,
    "Hardswish": F.hardswish,
    "Softplus": F.softplus,
    "ELU": F.elu,
    "SELU": F.selu,
    "LogSigmoid": F.logsigmoid,
    "Softsign": F.softsign,
}


def original_gelu(y: Tensor, left: Tensor) -> Tensor:
    """f'(x) from y = GELU(x)."""
    low = -0.16997120747990369
    u, t = ((y - low) / -low).clamp(0, 1), (y - low).clamp_min(0)
    on_left = 0.0012176597919768537 - 0.2964121012745849 * u**0.44236329315571304 * (1 - u) ** 0.8312705290392689
    factor = -1.383717971214795 + 1.5584201843500274 * t.sqrt() + 0.04404574801811055 * t
    return torch.where(left, on_left, 1 + factor * ((-2.1198850898439496 - t) ** 3 * 0.03214673676937606).exp())


def original_silu(y: Tensor, left: Tensor) -> Tensor:
    """f'(x) from y = SiLU(x); without a clamp, so that a y rounded below the minimum gives NaN."""
    t = y + 0.2784645427610738
    on_left = -0.5076843705082636 * t.sqrt() + (0.3574942048593756 * t + 0.07963139766917564) * t + 0.21717700759576886
    factor = -1.3108564021309803 + 0.8485896470316523 * t.sqrt() - 0.16299051259510922 * t
    sigmoid = torch.where(left, on_left, 1 + factor * ((-5.770613302664509 - t) ** 3 * 0.0026961639850448835).exp())
    return sigmoid * (1 - y) + y


ORIGINALS = {"GELU": original_gelu, "SiLU": original_silu}


def derivative(function: Function, x: Tensor) -> Tensor:
    """f'(x) in float64."""
    x = x.double().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)[0]


def slope(function: Function, inverse: Inverse, y: Tensor, left: Tensor | None) -> Tensor:
    """f'(x) as backward takes it: from y, or at the x that is restored from it."""
    return inverse.derivative(y, left).double() if inverse.differentiates else derivative(function, inverse.restore(y, left))


def errors(name: str, dtype: torch.dtype, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Error of ours and of the original's, at points that are numbers of ``dtype``."""
    function = FUNCTIONS[name]
    inverse = recognize(function)
    assert inverse is not None
    x = x.to(dtype)
    y, exact = function(x).float(), derivative(function, x)
    left = inverse.branch(x)
    ours = slope(function, inverse, y, left) - exact
    theirs = ORIGINALS[name](y, left) - exact if name in ORIGINALS and left is not None else None
    return ours, theirs


def coded(name: str, x: Tensor) -> tuple[float, float]:
    """Root mean square error of f' from y in 8-bit codes and the exact branch, and from x in 8-bit codes."""
    function, codec = FUNCTIONS[name], codec_named("int8")
    inverse = recognize(function)
    assert inverse is not None

    def round_trip(v: Tensor) -> Tensor:
        return codec.decompress(codec.compress(v, Traits()), Layout.of(v), Traits())

    exact = derivative(function, x)
    ours = slope(function, inverse, round_trip(function(x)), inverse.branch(x))
    return rms(ours - exact), rms(derivative(function, round_trip(x)) - exact)


def rms(error: Tensor) -> float:
    return float(error.square().mean().sqrt())


def main() -> None:
    torch.manual_seed(0)
    grid, normal = torch.linspace(-30, 30, 1_000_001), torch.randn(1 << 20)
    rows = []
    for name in FUNCTIONS:
        for dtype in (torch.float32, torch.bfloat16):
            (ours, theirs), (our_rms, their_rms) = errors(name, dtype, grid), errors(name, dtype, normal)
            row = [name, str(dtype).removeprefix("torch."), float(ours.abs().max()), rms(our_rms)]
            if theirs is not None and their_rms is not None:
                known = their_rms[~their_rms.isnan()]
                row += [float(theirs[~theirs.isnan()].abs().max()), rms(known), int(their_rms.isnan().sum())]
            rows.append(row)
    head = ["function", "y in", "largest error", "rms over N(0, 1)", "original's largest", "original's rms", "original's NaN"]
    print(tabulate(rows, head, floatfmt=".1e"))
    print()
    rows = [[name, *coded(name, normal.view(-1, 1024))] for name in FUNCTIONS]
    print(tabulate(rows, ["function", "rms, y in 8-bit codes", "rms, x in 8-bit codes"], floatfmt=".1e"))


if __name__ == "__main__":
    main()
