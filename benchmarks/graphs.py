"""Random small programs for fuzzing: chains of operators over tensors of several shapes, types and strides.

Each statement is drawn as Python source and run at once, so the next one knows the shapes that there are; one that torch
refuses, or whose values are not finite or far from 1, is left out. What is left is a well-conditioned program that anybody
can run. :func:`programs` is the hypothesis strategy.
"""

from __future__ import annotations

import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import graph_operators as operators
import torch
from hypothesis import strategies as st
from torch import Tensor

T = TypeVar("T")
FLOATS = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = ((16, 24), (4, 16, 24), (2, 8, 12, 12), (33, 17), (2, 9, 7), (64,), (1, 40), (2, 6, 5, 5), (8, 256))
LARGEST, MOST = 30.0, 20_000
"""Largest magnitude of a value, and most elements of a tensor, that a program goes on with."""

NAMES = re.compile(r"\b[xv]\d+\b")
HEAD = """import math

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def randn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
"""


@dataclass(frozen=True)
class Program:
    """A model and its inputs.

    Attributes:
        leaves: Source of each input and then of each parameter; they are called x0, x1, ...
        inputs: How many of them are inputs.
        body: Statements, each of which makes one value; v0, v1, ...
        returned: Names of what it returns.
        dynamic: Whether its sizes are compiled as symbols.
    """

    leaves: tuple[str, ...]
    inputs: int
    body: tuple[str, ...]
    returned: tuple[str, ...]
    dynamic: bool = False

    @property
    def source(self) -> str:
        """Python that defines ``Model`` and ``inputs()``; what nothing reads is left out."""
        needed, kept = set(self.returned), list[str]()
        for statement in reversed(self.body):
            if made_by(statement) in needed:
                needed.update(NAMES.findall(statement))
                kept.append(statement)
        names = [f"x{i}" for i in range(len(self.leaves)) if f"x{i}" in needed]
        given = [name for name in names if int(name[1:]) < self.inputs]
        text = "\n".join([*reversed(kept), f"return {', '.join(self.returned)},"])
        text = NAMES.sub(lambda name: name[0] if name[0] in given or name[0][0] == "v" else f"self.{name[0]}", text)
        made = [f"self.{name} = torch.nn.Parameter({self.leaves[int(name[1:])]})" for name in names if name not in given]
        return "\n".join([
            HEAD,
            "\nclass Model(torch.nn.Module):",
            "    def __init__(self):",
            textwrap.indent("\n".join(["super().__init__()", *made]), " " * 8),
            f"\n    def forward({', '.join(['self', *given])}):",
            textwrap.indent(text, " " * 8),
            "\n\ndef inputs():",
            f"    return [{', '.join(self.leaves[int(name[1:])] for name in given)}]\n",
        ])  # fmt: skip

    def load(self) -> tuple[Callable[[], torch.nn.Module], Callable[[], list[Tensor]]]:
        """``Model`` and ``inputs``."""
        names: dict[str, Any] = {"__name__": "fuzzed"}
        exec(compile(self.source, "<fuzzed>", "exec"), names)
        return names["Model"], names["inputs"]

    def smaller(self) -> Iterator[Program]:
        """This program with one output less, with fixed sizes, or with a value in place of one that is computed from it."""
        for name in self.returned if len(self.returned) > 1 else ():
            yield replace(self, returned=tuple(other for other in self.returned if other != name))
        if self.dynamic:
            yield replace(self, dynamic=False)
        for number, statement in reversed(list(enumerate(self.body))):
            made = made_by(statement)
            for name in dict.fromkeys(other for other in NAMES.findall(statement) if other != made):
                later = (re.sub(rf"\b{made}\b", name, other) for other in self.body[number + 1 :])
                returned = dict.fromkeys(name if other == made else other for other in self.returned)
                yield replace(self, body=(*self.body[:number], *later), returned=tuple(returned))


def made_by(statement: str) -> str:
    """The value that a statement makes: the first name that it assigns to."""
    found = re.search(r"\b(v\d+) = ", statement)
    assert found
    return found[1]


class _Builder:
    """A program as it grows, with the values that its statements made."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        self.leaves: list[str] = []
        self.body: list[str] = []
        self.env: dict[str, Any] = {}
        exec(HEAD, self.env)

    def pick(self, among: Sequence[T]) -> T:
        """One of several; hypothesis shrinks towards the first."""
        return among[self.draw(st.integers(0, len(among) - 1))]

    def leaf(
        self, shape: Sequence[int], dtype: torch.dtype, scale: float = 1, shift: float = 0, layout: str = "{}", grad: bool = True
    ) -> str:
        """Add an argument: normal numbers times ``scale`` plus ``shift``."""
        source = f"randn({', '.join(map(str, (len(self.leaves), *shape)))})"
        source = f"({source} * {scale:.3f} + {shift})" if scale != 1 else source
        source = layout.format(f"{source}.to({dtype})") + ".requires_grad_()" * grad
        name = f"x{len(self.leaves)}"
        self.env[name] = eval(source, self.env).detach()
        self.leaves.append(source)
        return name

    def add(self, statement: str) -> None:
        """Add a statement, in which ``$`` is the value that it makes, if torch takes it and its values are good."""
        name = f"v{len(self.body)}"
        statement, trial = statement.replace("$", name), dict(self.env)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("error")
                exec(statement, trial)
        except (RuntimeError, IndexError, ValueError, TypeError, AttributeError, NotImplementedError, UserWarning):
            return
        if _is_good(trial[name]):
            self.env = trial
            self.body.append(statement)

    def values(self) -> list[str]:
        """Floating-point arguments and values, the newest first."""
        names = [*(f"v{i}" for i in reversed(range(len(self.body)))), *(f"x{i}" for i in range(len(self.leaves)))]
        return [name for name in names if self.env[name].is_floating_point()]

    def step(self) -> None:
        """Draw one statement."""
        x = self.pick([*self.values()[:3], *self.values()])
        held = self.env[x]
        n, c = (held.shape[-1], held.shape[1 % held.dim()]) if held.dim() else (1, 1)
        fill: dict[str, Any] = {"x": x, "n": n}
        plain = [operators.UNARY, operators.BINARY, operators.ALONG, operators.SHAPED, operators.IN_PLACE]
        tables = [*plain, operators.TIMES, operators.OTHERS]
        if held.dim() in (3, 4):
            tables += [operators.SEQUENCES if held.dim() == 3 else operators.IMAGES] * 3
        template = self.pick(self.pick(tables))
        if "{y}" in template:
            fill["y"] = self.pick([name for name in self.values() if _broadcasts(self.env[name].shape, held.shape)])
        if "{d}" in template:
            fill["d"] = self.pick(range(-1, max(held.dim() - 1, 0)))
        kernel = (3,) * max(held.dim() - 2, 1)
        weights: dict[str, tuple[tuple[int, ...], float, float]] = {
            "w": ((n, 12), n**-0.5, 0), "v": ((12, n), n**-0.5, 0), "b": ((12,), 0.1, 0), "s": ((1,), 0.1, 0.25),
            "g": ((n,), 0.1, 1), "q": ((4, n, n), 1 / n, 0),
            "k": ((c, c, *kernel), (c * 3 ** len(kernel)) ** -0.5, 0), "a": ((c,), 0.1, 0),
            "p": ((8, c, 1, 1), c**-0.5, 0), "c": ((c,), 0.1, 1), "t": ((12, 24), 1.01, 0),
        }  # fmt: skip
        for key, (shape, scale, shift) in weights.items():
            if f"{{{key}}}" in template:
                fill[key] = self.leaf(shape, held.dtype, scale, shift, grad=False)  # a parameter takes one anyway
        self.add(template.format(**fill) if "$" in template else f"$ = {template.format(**fill)}")


def _is_good(x: Any) -> bool:
    plain = isinstance(x, Tensor) and not x.is_complex()
    return plain and 0 < x.numel() <= MOST and bool(x.double().abs().max() <= LARGEST)


def _broadcasts(one: Sequence[int], other: Sequence[int]) -> bool:
    try:
        return math.prod(torch.broadcast_shapes(one, other)) <= MOST
    except RuntimeError:
        return False


@st.composite
def programs(draw: Callable[[st.SearchStrategy[Any]], Any], most: int = 16) -> Program:
    """Programs of up to ``most`` statements."""
    builder = _Builder(draw)
    torch.manual_seed(0)
    dtype, shape = builder.pick(FLOATS), builder.pick(SHAPES)
    layouts = ["{}", "{}", "{}", "torch.stack([{}] * 2, -1)[..., 0]", "{}.mT.contiguous().mT"][: 4 + (len(shape) > 1)]
    builder.leaf(shape, dtype, layout=builder.pick(layouts))
    for _ in range(draw(st.integers(0, 2))):
        builder.leaf(builder.pick([shape, shape[-1:]]), dtype, grad=draw(st.booleans()))
    inputs = len(builder.leaves)
    for _ in range(draw(st.integers(1, most))):
        builder.step()
    names = builder.values()
    returned = dict.fromkeys([names[0], *(builder.pick(names) for _ in range(draw(st.integers(0, 2))))])
    return Program(tuple(builder.leaves), inputs, tuple(builder.body), tuple(returned), builder.pick([False, False, False, True]))
