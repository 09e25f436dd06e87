"""The ``options=`` dict, the environment and the defaults -> one frozen record."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ._torch import mode_options
from .overrides import Overrides, parse_overrides
from .policy import POLICIES, Policy, policy_named

COMPILERS = ("inductor", "aot_eager")
REPORT_SUFFIXES = (".txt", ".json")


@dataclass(frozen=True)
class Settings:
    """What the stages read; the only place where defaults stand.

    Attributes:
        policy: How tensors are saved.
        overrides: Exceptions, by module and operator.
        min_bytes: Tensors below this many bytes are left alone.
        compiler: ``"inductor"`` or ``"aot_eager"``.
        inductor: Inductor config patches, its mode's included.
        report: Where to write a report after each compile; None for nowhere.
        strict: Whether an error inside our pass raises, instead of a warning and the stock partition.
    """

    policy: Policy = POLICIES["int8"]
    overrides: Overrides = ()
    min_bytes: int = 65536
    compiler: str = "inductor"
    inductor: Mapping[str, Any] = field(default_factory=dict)
    report: Path | None = None
    strict: bool = False


def parse_options(options: Mapping[str, Any] | None, mode: str | None = None) -> Settings:
    """Check the user's options.

    Args:
        options: The ``options=`` of ``torch.compile``.
        mode: Its ``mode=``; torch refuses both together, so ``options`` has a ``mode`` of its own.

    Raises:
        TypeError: A value is of the wrong type.
        ValueError: A key or a value is unknown; the message lists what there is.
    """
    given = dict(options or {})
    if mode is not None:
        given.setdefault("mode", mode)
    known = ("policy", "overrides", "min_bytes", "compiler", "mode", "inductor", "report", "strict")
    for key in given:
        if key not in known:
            raise ValueError(f"unknown option {key!r}; there are: {', '.join(known)}")
    default = Settings()
    return Settings(
        policy=policy_named(_expect(given, "policy", (str, dict, os.PathLike, Policy), default.policy)),
        overrides=parse_overrides(given["overrides"]) if given.get("overrides") is not None else (),
        min_bytes=_at_least_zero(_expect(given, "min_bytes", (int,), default.min_bytes)),
        compiler=_one_of("compiler", _expect(given, "compiler", (str,), default.compiler), COMPILERS),
        inductor=_inductor(given),
        report=_report(given.get("report")),
        strict=_expect(given, "strict", (bool,), default.strict),
    )


def disabled() -> bool:
    """Whether the environment turns us off: ``ACTCOMP_DISABLE=1``."""
    return os.environ.get("ACTCOMP_DISABLE", "").lower() in {"1", "true", "yes", "on"}


def _expect(given: Mapping[str, Any], key: str, kinds: tuple[type, ...], default: Any) -> Any:
    value = given.get(key, default)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"option {key!r} is {value!r}; expected {' or '.join(kind.__name__ for kind in kinds)}")
    return value


def _one_of(key: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"option {key!r} is {value!r}; there are: {', '.join(known)}")
    return value


def _at_least_zero(min_bytes: int) -> int:
    if min_bytes < 0:
        raise ValueError(f"option 'min_bytes' is {min_bytes}; expected 0 or more")
    return min_bytes


def _inductor(given: Mapping[str, Any]) -> dict[str, Any]:
    patches = _expect(given, "inductor", (dict,), {})
    mode = _expect(given, "mode", (str, type(None)), None)
    modes = mode_options()
    if mode is not None and mode not in modes:
        raise ValueError(f"option 'mode' is {mode!r}; there are: {', '.join(modes)}")
    if "custom_partitioner_fn" in patches:
        raise ValueError("option 'inductor' sets custom_partitioner_fn, which is how this backend works; remove it")
    return {**(modes[mode] if mode else {}), **patches}


def _report(given: object) -> Path | None:
    if given is None:
        return None
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"option 'report' is {given!r}; expected a path")
    path = Path(given)
    _one_of("report", path.suffix, REPORT_SUFFIXES)
    return path
