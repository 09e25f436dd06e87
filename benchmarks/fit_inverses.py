"""Fit the inverses of GELU, SiLU and Mish, and write the table that the package reads.

    python benchmarks/fit_inverses.py [fx_actcomp/invert/tables.py]

Right of the minimum (xm, ym), x - xm = t p(t) with t = sqrt(y - ym), in two pieces; left of it, x - xm = u p(u) with
u = sqrt(log(ym / y)). Both variables are analytic through the minimum, where the inverse itself has infinite slope. Chebyshev
fits of degree 12, in 30 digits; prints the largest error of each in x.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from mpmath import diff, erf, exp, findroot, log, mp, mpf, pi, sqrt, tanh

DEGREE, NODES = 12, 200
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], float]] = {  # and the y from which on x = y
    "gelu": (lambda x: x * (1 + erf(x / sqrt(2))) / 2, 5.6),
    "gelu_tanh": (lambda x: x * (1 + tanh(sqrt(2 / pi) * (x + mpf("0.044715") * x**3))) / 2, 5.6),
    "silu": (lambda x: x / (1 + exp(-x)), 19.0),
    "mish": (lambda x: x * tanh(log(1 + exp(x))), 10.5),
}
LEFT_END = 4.4
"""u at the last y of the left branch, 4e-9 times ym; beyond it the derivative is below 1e-7."""


def inverse(function: Callable[[Any], Any], y: Any, low: Any, high: Any) -> Any:
    """Bisect a function that is monotone between two points."""
    rises = function(high) > function(low)
    for _ in range(70):
        middle = (low + high) / 2
        if (function(middle) < y) == rises:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def fit(sample: Callable[[Any], Any], low: float, high: float) -> tuple[list[float], float]:
    """Coefficients of p, in powers of ``(v - middle) / half``, with ``v p(v)`` near ``sample(v)``; and the largest error."""
    places = np.cos((2 * np.arange(NODES) + 1) * np.pi / (2 * NODES))
    v = (low + high) / 2 + (high - low) / 2 * places
    wanted = np.array([float(sample(mpf(float(x)))) for x in v])
    series = np.polynomial.chebyshev.Chebyshev.fit(v, wanted / v, DEGREE, domain=[low, high])
    powers = np.polynomial.chebyshev.cheb2poly(series.coef)
    return [float(c) for c in powers], float(np.abs(series(v) * v - wanted).max())


def table(name: str) -> str:
    function, end = FUNCTIONS[name]
    xm = findroot(lambda x: diff(function, x), -0.8 if "gelu" in name else -1.2)
    ym = function(xm)
    top = float(sqrt(end - ym))
    pieces = [
        ("right", lambda t: inverse(function, ym + t * t, xm, mpf(40)) - xm, 0.0, top / 2),
        ("right", lambda t: inverse(function, ym + t * t, xm, mpf(40)) - xm, top / 2, top),
        ("left", lambda u: inverse(function, ym * exp(-u * u), mpf(-9 if "gelu" in name else -60), xm) - xm, 0.0, LEFT_END),
    ]
    lines = []
    for side, sample, low, high in pieces:
        powers, error = fit(sample, low, high)
        print(f"{name}, {side} [{low:.3f}, {high:.3f}]: largest error {error:.1e}")
        body = "".join(f"            {c!r},\n" for c in powers)
        lines.append(f"        Piece({low!r}, {high!r}, (\n{body}        )),\n")
    head = f'    "{name}": Table(\n        {mp.nstr(xm, 20)}, {mp.nstr(ym, 20)},\n'
    return head + "".join(lines) + "    ),\n"


def main() -> None:
    mp.dps = 30
    text = (
        '"""Inverses of functions with one minimum, fitted by benchmarks/fit_inverses.py: don\'t edit.\n\n'
        "x - xm = v p(v), with p in powers of (v - middle) / half of the piece's interval; see ``smooth.py`` for v.\n"
        '"""\n\nfrom __future__ import annotations\n\nfrom dataclasses import dataclass\n\n\n'
        "@dataclass(frozen=True)\nclass Piece:\n"
        '    """A polynomial on an interval: ends, and coefficients from the constant one up."""\n\n'
        "    low: float\n    high: float\n    powers: tuple[float, ...]\n\n\n"
        "@dataclass(frozen=True)\nclass Table:\n"
        '    """The minimum, and the inverse on both sides of it: two pieces on the right, one on the left."""\n\n'
        "    x: float\n    y: float\n    near: Piece\n    far: Piece\n    left: Piece\n\n\n"
        "# fmt: off\nTABLES = {\n" + "".join(map(table, FUNCTIONS)) + "}\n"
    )
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
