"""Codecs by name, with their parameters; and the door for a user's own."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
import re
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from .base import Codec
from .bits import Bits, Narrow, Ternary
from .blpa import Blpa
from .float8 import Float8
from .inverse import Invert
from .pool import Division, Pool
from .quantize import Quantize

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        *(Bits(), Ternary(), Narrow()),
        *(Quantize("int8", 8), Quantize("int4", 4), Quantize("int2", 2), Quantize("int1", 1)),
        Float8(),
        *(Pool("pool2", 2), Pool("pool4", 4), Division()),
        *(Blpa("blpa8", 8), Blpa("blpa4", 4, sigmas=3.0)),
        Invert(),
    )
}
"""Every codec with its default parameters; the ones with ``bits`` are lossy."""

_OURS = frozenset(CODECS)
_PACKAGE = __name__.partition(".")[0]

CodecClass = TypeVar("CodecClass", bound=type[Codec])
Spec = str | Mapping[str, object]
"""A codec and its parameters: ``"int4"``, ``"int4:group=128,rounding=stochastic"``, or a dict with the key ``"codec"``."""


def codec_named(spec: str) -> Codec:
    """Look up a codec, its parameters set: ``"int4"`` or ``"int4:group=128,rounding=stochastic"``.

    Raises:
        ValueError: There is none of that name, it has no such parameter, or the value doesn't suit; the message lists what
            there is.
    """
    name = spec.partition(":")[0]
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}; there are: {', '.join(sorted(CODECS))}")
    return _with_parameters(CODECS[name], spec)


def codec_spec(given: Spec) -> str:
    """The one spelling of a codec and its parameters, in which defaults are left out.

    Raises:
        TypeError: A dict has no ``"codec"``, or a parameter isn't a number or a string.
        ValueError: As :func:`codec_named`.
    """
    if isinstance(given, str):
        return codec_named(given).name
    name = given.get("codec")
    if not isinstance(name, str):
        raise TypeError(f"codec {dict(given)!r}: expected a dict with the key 'codec', as in {{'codec': 'int4', 'group': 128}}")
    parameters = {key: value for key, value in given.items() if key != "codec"}
    for key, value in parameters.items():
        if not isinstance(value, (str, int, float)):
            raise TypeError(f"codec {name!r}: parameter {key!r} is {value!r}; expected a number or a string")
        if isinstance(value, str) and set(value) & set(",:="):
            raise ValueError(f"codec {name!r}: parameter {key!r} is {value!r}; expected a word without ',', ':' and '='")
    listed = ",".join(f"{key}={value}" for key, value in parameters.items())
    return codec_named(f"{name}:{listed}" if listed else name).name


def parameters_of(codec: object) -> dict[str, int | float | str]:
    """A codec's parameters and their values."""
    if not dataclasses.is_dataclass(codec):
        return {}
    fields = [field for field in dataclasses.fields(codec) if field.name not in ("name", "bits")]
    return {field.name: getattr(codec, field.name) for field in fields if field.default is not dataclasses.MISSING}


def _with_parameters(codec: Codec, spec: str) -> Codec:
    known = parameters_of(codec)
    given: dict[str, int | float | str] = {}
    for item in filter(None, spec.partition(":")[2].split(",")):
        key, _, text = (part.strip() for part in item.partition("="))
        if key not in known:
            there = ", ".join(f"{name}={value}" for name, value in known.items()) or "none"
            raise ValueError(f"codec {codec.name!r} has no parameter {key!r}; there are (with their defaults): {there}")
        try:
            kind = type(known[key])
            given[key] = _bool(text) if kind is bool else kind(text)
        except (ValueError, KeyError):
            expected = type(known[key]).__name__
            raise ValueError(f"codec {codec.name!r}: parameter {key!r} is {text!r}; expected {expected}") from None
    changed = {key: given[key] for key in known if key in given and given[key] != known[key]}
    if not changed:
        return codec
    name = f"{codec.name}:{','.join(f'{key}={value}' for key, value in changed.items())}"
    made = copy.copy(codec)
    for key, value in {**changed, "name": name}.items():  # a user's name may be no field, so not dataclasses.replace
        object.__setattr__(made, key, value)
    try:
        getattr(made, "__post_init__", lambda: None)()
    except ValueError as error:
        raise ValueError(f"codec {spec!r}: {error}") from error
    return made


def _bool(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


def register_codec(codec: CodecClass) -> CodecClass:
    """Add a codec of one's own, by its ``name``; from then on it is a name like any other, in policies and overrides.

    As a decorator of a class with the three methods of :class:`~fx_actcomp.codecs.base.Codec`, made without arguments. A
    dataclass's fields (``name`` and ``bits`` apart) are its parameters. Registering a name again replaces the former codec,
    as on reloading a module.

    Args:
        codec: The class.

    Returns:
        The class.

    Raises:
        TypeError: It isn't a codec, or can't be made without arguments.
        ValueError: The name is taken by one of ours, or can't be told from a parameter's or a pattern's.
    """
    if not (isinstance(codec, type) and issubclass(codec, Codec)):
        raise TypeError(f"register_codec takes a class that inherits from fx_actcomp.Codec, not {codec!r}")
    made = codec()
    name, bits = getattr(made, "name", None), getattr(made, "bits", "missing")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][\w.-]*", name):
        raise ValueError(f"{codec.__name__}.name is {name!r}; expected a word of letters, digits, '_', '-' and '.'")
    if bits is not None and (not isinstance(bits, int) or bits < 1):
        raise ValueError(f"{codec.__name__}.bits is {bits!r}; expected the bits of precision it keeps, or None where lossless")
    if name in _OURS or name in ("none", "lossless"):
        raise ValueError(f"the name {name!r} is taken; there are: {', '.join(sorted(CODECS))}")
    CODECS[name] = made
    return codec


def codec_sources(specs: Iterable[str]) -> tuple[str, ...]:
    """What distinguishes the users' codecs among ``specs``, for a cache key: a hash of the file that defines each one."""
    users = sorted({spec.partition(":")[0] for spec in specs} & (CODECS.keys() - _OURS))
    return tuple(f"{name}:{_source(type(CODECS[name]))}" for name in users)


def _source(kind: type) -> str:
    try:
        said = Path(inspect.getfile(kind)).read_text(encoding="utf-8")
    except (TypeError, OSError):  # typed into a prompt: its code and its attributes are all there is
        mine = [
            cls for cls in kind.__mro__ if cls.__module__ not in ("builtins", "abc") and not cls.__module__.startswith(_PACKAGE)
        ]
        said = repr([(cls.__qualname__, key, _said(value)) for cls in mine for key, value in vars(cls).items()])
    return hashlib.sha256(f"{kind.__qualname__} {said}".encode()).hexdigest()


def _said(value: object) -> object:
    """What tells one function or attribute from another, the same in every process."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    code = value if isinstance(value, types.CodeType) else getattr(value, "__code__", None)
    if isinstance(code, types.CodeType):
        defaults = (getattr(value, "__defaults__", None), getattr(value, "__kwdefaults__", None))
        return code.co_code, code.co_names, code.co_varnames, [_said(const) for const in code.co_consts], _said(defaults)
    if isinstance(value, (list, tuple)):
        return [_said(inner) for inner in value]
    if isinstance(value, (set, frozenset)):  # in no order, which the process's hash seed decides
        return sorted(repr(_said(inner)) for inner in value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
