"""Overrides: ``{pattern: codec}``, where a pattern names what a report prints as ``module::aten.op``."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping

from .codecs import CODECS, codec_spec
from .policy import POLICIES
from .records import SavedActivation

Overrides = tuple[tuple[str, str], ...]
"""Pairs of pattern and codec or policy, in the user's order; ``"none"`` leaves alone."""

_EXAMPLE = "{'codec': 'int4', 'group': 128}"
_KINDS = ("exact", "re", "glob")


def parse_overrides(given: object) -> Overrides:
    """Check the ``overrides`` option.

    Raises:
        TypeError: It isn't a mapping of patterns to codecs or None.
        ValueError: A codec or a parameter isn't known (the message lists them), or a regular expression can't be compiled.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"overrides is {given!r}; expected a dict such as {{'layers.*': 'int4', 'head': None}}")
    pairs: list[tuple[str, str]] = []
    for pattern, codec in given.items():
        if not isinstance(pattern, str) or not pattern:
            raise TypeError(f"override {pattern!r}: expected a module name, a glob, 're:...' or 'module::aten.op'")
        pairs.append((pattern, check_codec(codec, f"override {pattern!r}")))
        if _kind(pattern) == "re":
            try:
                re.compile(_split(pattern)[0].removeprefix("re:"))
            except re.error as error:
                raise ValueError(f"override {pattern!r}: not a regular expression ({error})") from error
    return tuple(pairs)


def check_codec(codec: object, where: str) -> str:
    """A codec or policy name, with or without parameters, a dict of these, or None for ``"none"`` -> its one spelling.

    Raises:
        TypeError: It is none of these.
        ValueError: There is none of that name, or with such parameters; the message lists what there is.
    """
    if codec is None:
        return "none"
    if not isinstance(codec, (str, Mapping)):
        raise TypeError(f"{where} is {codec!r}; expected a codec's name, a dict such as {_EXAMPLE}, or None to leave alone")
    if isinstance(codec, str) and codec in POLICIES:
        return codec
    name = codec.partition(":")[0] if isinstance(codec, str) else codec.get("codec")
    if isinstance(name, str) and name not in CODECS:
        raise ValueError(f"{where}: unknown codec {name!r}; there are: {', '.join(sorted({*CODECS, *POLICIES}))}, None")
    try:
        return codec_spec(codec)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from error


def find_override(overrides: Overrides, saved: SavedActivation) -> tuple[str, str] | None:
    """The pair that applies to a saved tensor; None where none does.

    Exact names come first, then regular expressions, then globs; within a kind the first in the dict wins. An exact name
    covers the modules inside it as well (users who name ``head`` mean all of it), and among exact names the innermost wins.
    """
    matching = [pair for pair in overrides if _matches(pair[0], saved)]

    def rank(pair: tuple[str, str]) -> tuple[int, int]:
        kind = _kind(pair[0])
        return _KINDS.index(kind), -len(_split(pair[0])[0]) if kind == "exact" else 0

    return min(matching, key=rank, default=None)


def _split(pattern: str) -> tuple[str, str | None]:
    module, found, op = pattern.partition("::")
    return module, op if found else None


def _kind(pattern: str) -> str:
    module = _split(pattern)[0]
    if module.startswith("re:"):
        return "re"
    return "glob" if any(sign in module for sign in "*?[") else "exact"


def _matches(pattern: str, saved: SavedActivation) -> bool:
    module, op = _split(pattern)
    if op is not None and op != saved.op and op != saved.op.removeprefix("aten."):
        return False
    kind = _kind(pattern)
    if kind == "re":
        return re.search(module.removeprefix("re:"), saved.module) is not None
    if kind == "glob":
        return fnmatch.fnmatchcase(saved.module, module)
    return saved.module == module or saved.module.startswith(module + ".")
