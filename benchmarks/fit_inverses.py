"""Fit the inverses of GELU, SiLU and Mish, and write the table that the package reads.

    python benchmarks/fit_inverses.py [fx_actcomp/invert/tables.py]

Right of the minimum (xm, ym), x - xm = t p(t) with t = sqrt(y - ym), in two pieces; left of it, x - xm = u p(u) with
u = sqrt(log(ym / y)). Both variables are analytic through the minimum, where the inverse itself has infinite slope. Chebyshev
fits of degree 12, in 30 digits; prints the largest error of each in x.

The derivative itself needs no logarithm: f'(x) = t p(t) / q(t) on the right, and on the left t (y / ym) p(t) / q(t), which is
0 where y is. Rational fits, by least squares with the denominator linearized (Sanathanan and Koerner, 1963) and Lawson's weights
(1961), which even the error out; prints the largest one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import comb
from typing import Any

import numpy as np
import numpy.typing as npt
from mpmath import diff, erf, exp, findroot, log, mp, mpf, pi, sqrt, tanh

Floats = npt.NDArray[np.float64]
DEGREE, NODES = 12, 200
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], float]] = {  # and the y from which on x = y
    "gelu": (lambda x: x * (1 + erf(x / sqrt(2))) / 2, 5.6),
    "gelu_tanh": (lambda x: x * (1 + tanh(sqrt(2 / pi) * (x + mpf("0.044715") * x**3))) / 2, 5.6),
    "silu": (lambda x: x / (1 + exp(-x)), 19.0),
    "mish": (lambda x: x * tanh(log(1 + exp(x))), 10.5),
}
LEFT_DEGREE, RIGHT_DEGREE, SAMPLES, ROUNDS = 6, 7, 300, 120
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


def fit_ratio(t: Floats, wanted: Floats, weight: Floats, degree: int, top: float) -> tuple[Floats, Floats, float]:
    """Chebyshev coefficients on [0, top] of p and q, with ``p(t) / q(t)`` near ``wanted``; and the largest weighted error."""
    basis = np.polynomial.chebyshev.chebvander(2 * t / top - 1, degree)
    lawson, q = np.ones_like(t), np.ones_like(t)
    best: tuple[Floats, Floats, float] = (q, q, np.inf)
    for _ in range(ROUNDS):
        scale = np.sqrt(lawson) * weight / np.abs(q)
        system = np.hstack([basis, -wanted[:, None] * basis[:, 1:]]) * scale[:, None]  # q starts with 1
        size = np.abs(system).max(0)
        found = np.linalg.lstsq(system / size, wanted * scale, rcond=None)[0] / size
        above, below = found[: degree + 1], np.concatenate([[1.0], found[degree + 1 :]])
        q = basis @ below
        error = np.abs(basis @ above / q - wanted) * weight
        if q.min() > 0 and error.max() < best[2]:
            best = above, below, float(error.max())
        lawson = lawson * (error / error.max() + 1e-3) ** 0.5
        lawson /= lawson.max()
    return best


def at_the_end(chebyshev: Floats) -> list[float]:
    """Powers of ``1 - t / top``: the poles of the left side crowd near y = 0, and only differences from there are exact."""
    powers = np.polynomial.chebyshev.cheb2poly(chebyshev)
    return [float(sum(mpf(float(c)) * comb(k, j) * (-2) ** j for k, c in enumerate(powers))) for j in range(len(powers))]


def slopes(function: Callable[[Any], Any], end: float, xm: Any, ym: Any, far_left: float) -> tuple[str, float, float]:
    """Both fits of the derivative, as text, and their errors."""

    def samples(side: int, reach: float) -> tuple[Floats, Floats]:
        k = (np.arange(SAMPLES) + 0.5) * np.pi / SAMPLES
        distances = np.unique(np.concatenate([(1 - np.cos(k)) / 2 * reach, np.logspace(-4, np.log10(reach), SAMPLES)]))
        places = [xm + side * mpf(float(d)) for d in distances]
        return np.array([float(sqrt(function(x) - ym)) for x in places]), np.array([float(diff(function, x)) for x in places])

    t, slope = samples(1, end - float(xm))
    top = float(t.max())
    above, below, right = fit_ratio(t, slope / t, t, RIGHT_DEGREE, top)
    rise = (top / 2, top / 2, *(list(map(float, np.polynomial.chebyshev.cheb2poly(c))) for c in (above, below)))
    t, slope = samples(-1, float(xm) - far_left)
    top = float(sqrt(-ym))
    share = 1 - t * t / top**2
    kept = share > 1e-12
    t, slope, weight = t[kept], slope[kept], (t * share)[kept]
    above, below, left = fit_ratio(t, slope / weight, weight, LEFT_DEGREE, top)
    fall = (top, -top, at_the_end(above), at_the_end(below))
    return "".join(map(ratio_text, (rise, fall))), right, left


def ratio_text(ratio: tuple[float, float, list[float], list[float]]) -> str:
    middle, half, above, below = ratio
    return f"        Ratio({middle!r}, {half!r}, (\n{powers_text(above)}        ), (\n{powers_text(below)}        )),\n"


def powers_text(powers: list[float]) -> str:
    return "".join(f"            {c!r},\n" for c in powers)


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
        lines.append(f"        Piece({low!r}, {high!r}, (\n{powers_text(powers)}        )),\n")
    text, right, left = slopes(function, end, xm, ym, -9 if "gelu" in name else -40)
    print(f"{name}, derivative: largest error {right:.1e} on the right, {left:.1e} on the left")
    lines.append(text)
    head = f'    "{name}": Table(\n        {mp.nstr(xm, 20)}, {mp.nstr(ym, 20)},\n'
    return head + "".join(lines) + "    ),\n"


def main() -> None:
    mp.dps = 30
    text = (
        '"""Inverses of functions with one minimum, fitted by benchmarks/fit_inverses.py: don\'t edit.\n\n'
        "x - xm = v p(v), with p in powers of (v - middle) / half of the piece's interval; for the rest see ``smooth.py``.\n"
        '"""\n\nfrom __future__ import annotations\n\nfrom dataclasses import dataclass\n\n\n'
        "@dataclass(frozen=True)\nclass Piece:\n"
        '    """A polynomial on an interval: ends, and coefficients from the constant one up."""\n\n'
        "    low: float\n    high: float\n    powers: tuple[float, ...]\n\n\n"
        "@dataclass(frozen=True)\nclass Ratio:\n"
        '    """A rational function, of ``(t - middle) / half``: coefficients above and below, from the constant ones up."""\n\n'
        "    middle: float\n    half: float\n    above: tuple[float, ...]\n    below: tuple[float, ...]\n\n\n"
        "@dataclass(frozen=True)\nclass Table:\n"
        '    """The minimum; the inverse, in two pieces on its right and one on its left; the derivative on both sides."""\n\n'
        "    x: float\n    y: float\n    near: Piece\n    far: Piece\n    left: Piece\n    rise: Ratio\n    fall: Ratio\n\n\n"
        "# fmt: off\nTABLES = {\n" + "".join(map(table, FUNCTIONS)) + "}\n"
    )
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
