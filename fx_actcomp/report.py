"""Stage 7: plans -> what a person reads, and the same as data."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tabulate import tabulate

from .choice import Plan
from .codecs import codec_named
from .records import ALIVE_ANYWAY, Kind
from .session import Session

MIB = 2**20
_ALIVE = frozenset(kind.value for kind in ALIVE_ANYWAY)
_NO_CODEC = frozenset({"keep", "drop", "image"})
_NOT_OURS = _ALIVE | {Kind.STATISTIC.value, Kind.RANDOM.value}


@dataclass(frozen=True)
class Row:
    """One saved tensor, or one decision that was moved to forward.

    Attributes:
        number: Position among the saved tensors of its graph; decisions come after them.
        graph: Which graph of the model it is in.
        name: Name of the node.
        module: Path of the module that made it.
        op: Operator that made it.
        source: ``file:line`` of the user's code.
        shape: Sizes; a string is symbolic.
        dtype: Its type.
        kind: What it is; ``"decision"`` for a pinned one.
        bytes_before: Bytes that it would keep alive; 0 where someone else keeps them alive anyway.
        bytes_after: Bytes that it keeps alive now.
        codec: Codec; ``"keep"`` where it is saved as it is, ``"drop"`` where it isn't saved at all, ``"image"``
            where it is made again from one that is saved as it is.
        used_by: What reads it in backward: ``module::op``.
        reason: Why it is left alone, or why it took another codec than asked for.
    """

    number: int
    graph: int
    name: str
    module: str
    op: str
    source: str
    shape: tuple[int | str, ...]
    dtype: str
    kind: str
    bytes_before: int
    bytes_after: int
    codec: str
    used_by: tuple[str, ...]
    reason: str

    @property
    def compressible(self) -> bool:
        """Whether the policy may compress such a tensor: a value, mask or index that nobody else holds."""
        return self.kind not in _NOT_OURS

    @property
    def lossy(self) -> bool:
        """Whether it comes back changed."""
        return self.codec not in _NO_CODEC and codec_named(self.codec).bits is not None

    @property
    def alive_anyway(self) -> bool:
        """Whether someone else holds its memory: a parameter, an input, an output."""
        return self.kind in _ALIVE


@dataclass(frozen=True)
class Report:
    """What a model saves for backward, tensor by tensor.

    Attributes:
        policy: Name of the policy.
        saved: The rows, in the order in which the graphs save them.
        graphs: How many graphs train.
        unmatched: Overrides that matched nothing.
        failures: Errors of ours after which a graph was left as torch compiles it.
        rederived: Whether the plan was made again by tracing, since a compiler cache answered in our stead.
        draws: Random tensors that torch's partitioner would have drawn anew in backward, and that are saved instead.
        copies: Tensors of which a copy is saved, since forward overwrites them.
        repeating: Random tensors among whose numbers torch's kernels may repeat some.
        offloaded: Bytes of what is saved that torch's offloading moves to host memory.
    """

    policy: str
    saved: tuple[Row, ...]
    graphs: int
    unmatched: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    rederived: bool = False
    draws: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    repeating: tuple[str, ...] = ()
    offloaded: int = 0

    @staticmethod
    def of(sessions: Sequence[Session]) -> Report:
        """Add up the graphs of a model."""
        plans = [plan for session in sessions for plan in session.all_plans()]
        rows = [row for graph, plan in enumerate(plans) for row in _rows(plan, graph)]
        asked = dict.fromkeys(pattern for session in sessions for pattern, _ in session.settings.overrides)
        matched = {pattern for plan in plans for pattern in plan.matched}
        return Report(
            policy=", ".join(dict.fromkeys(session.settings.policy.name for session in sessions)),
            saved=tuple(rows),
            graphs=len(plans),
            unmatched=tuple(pattern for pattern in asked if pattern not in matched),
            failures=tuple(failure for session in sessions for failure in session.failures),
            rederived=any(session.rederived for session in sessions),
            draws=tuple(name for plan in plans for name in plan.draws),
            copies=tuple(name for plan in plans for name in plan.copies),
            repeating=tuple(name for plan in plans for name in plan.repeating),
            offloaded=sum(plan.offloaded for plan in plans),
        )

    @property
    def bytes_before(self) -> int:
        """Bytes kept alive between forward and backward without us."""
        return sum(row.bytes_before for row in self.saved)

    @property
    def bytes_after(self) -> int:
        """Bytes kept alive between forward and backward now."""
        return sum(row.bytes_after for row in self.saved)

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        return {**asdict(self), "bytes_before": self.bytes_before, "bytes_after": self.bytes_after}

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_dict` to a file, in one step: a reader sees the old file or the new one."""
        _write(Path(path), json.dumps(self.to_dict(), indent=1))

    @staticmethod
    def from_json(path: str | os.PathLike[str]) -> Report:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: The file is damaged, or no report.
            FileNotFoundError: There is no such file.
        """
        text = Path(path).read_bytes()
        try:
            data = json.loads(text)
            rows = tuple(Row(**{**row, "shape": tuple(row["shape"]), "used_by": tuple(row["used_by"])}) for row in data["saved"])
            listed = {name: tuple(data[name]) for name in ("unmatched", "failures", "draws", "copies", "repeating")}
            others: dict[str, Any] = {**listed, "rederived": data["rederived"], "offloaded": data["offloaded"]}
            read = Report(data["policy"], rows, data["graphs"], **others)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{path} is no report, or a damaged one ({type(error).__name__}: {error})") from error
        if not (_typed(read) and all(map(_typed, rows)) and json.loads(json.dumps(read.to_dict())) == data):
            raise ValueError(f"{path} is no report, or a damaged one: a value is of another type, or one too many")
        return read

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report; the suffix chooses JSON (``.json``) or text."""
        if Path(path).suffix == ".json":
            self.to_json(path)
        else:
            _write(Path(path), f"{self}\n")

    def table(self, *, fold: bool = True, plan: bool = True, alive: bool = False) -> str:
        """The rows as text.

        Args:
            fold: Whether identical layers share one row.
            alive: Whether to show parameters and inputs, which are alive anyway.
            plan: Whether to show the columns that only a plan fills.
        """
        rows = [row for row in self.saved if alive or row.kind not in (Kind.PARAMETER.value, Kind.INPUT.value)]
        groups = _folded(rows) if fold else [[row] for row in rows]
        head = ["#", "name", "module", "op", "shape", "dtype", "MiB"]
        head += ["MiB after", "codec", "used by", "reason"] if plan else ["used by"]
        cells = [[printable(cell) for cell in _cells(group, plan)] for group in groups]
        return tabulate(cells, head, disable_numparse=True, colalign=_align(head))

    def __str__(self) -> str:
        if not self.saved:
            return f"policy {printable(self.policy)}: no graph of the model saves anything for backward" + self._notes()
        return f"{self.table()}\n\n{self._sums()}{self._notes()}"

    def _sums(self) -> str:
        ours = [row for row in self.saved if row.compressible]
        before, after = sum(row.bytes_before for row in ours), sum(row.bytes_after for row in ours)
        lines = [
            f"saved for backward: {_change(self.bytes_before, self.bytes_after)}, "
            f"policy {printable(self.policy)}, {self.graphs} graph{'s' * (self.graphs != 1)}",
            f"of these, values, masks and indices: {_change(before, after)}",
        ]
        if self.offloaded:
            lines.append(f"torch's offloading moves {_mib(self.offloaded)} MiB of what is saved to host memory")
        alive = sum(1 for row in self.saved if row.alive_anyway)
        if alive:
            lines.append(f"{alive} more are parameters, inputs or outputs (or views or casts of them), alive anyway: not counted")
        return "\n".join(lines)

    def _notes(self) -> str:
        notes = [f"override {pattern!r} matched no saved activation" for pattern in self.unmatched]
        notes += [f"left as torch compiles it: {failure}" for failure in self.failures]
        if self.draws:
            notes.append(
                f"saved, since torch would draw them again in backward, otherwise (pytorch #190758): {', '.join(self.draws)}"
            )
        if self.copies:
            notes.append(
                f"saved as a copy, since forward overwrites it and torch would read it afterwards: {', '.join(self.copies)}"
            )
        if self.repeating:
            notes.append(
                "torch's Inductor may give neighbours the same random numbers on CUDA (pytorch #198333), as without fx_actcomp; "
                f"options={{'inductor': {{'align_random_eager': True}}}} draws them as eager does: {', '.join(self.repeating)}"
            )
        notes += ["planned again by tracing: a compiler cache answered in our stead"] * self.rederived
        return "".join(f"\n{printable(note)}" for note in notes)


def printable(text: str) -> str:
    """A text in one line that does nothing to a terminal: line ends, escapes and the like as Python writes them in strings."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def _typed(part: Report | Row) -> bool:
    """Whether each attribute is of the type that is written beside it."""
    kinds = {"int": int, "str": str, "bool": bool, "Row": Row}
    for field in fields(part):
        allowed = [kind for name, kind in kinds.items() if name in str(field.type)]
        held = getattr(part, field.name)
        if not all(type(one) in allowed for one in (held if isinstance(held, tuple) else (held,))):
            return False
    return True


def _rows(plan: Plan, graph: int) -> Iterable[Row]:
    for choice in plan.choices:
        saved = choice.saved
        alive = saved.kind in ALIVE_ANYWAY
        yield Row(
            number=saved.number, graph=graph, name=saved.name, module=saved.module, op=saved.op, source=saved.source,
            shape=saved.shape, dtype=saved.dtype, kind=saved.kind.value,
            bytes_before=0 if alive else saved.nbytes, bytes_after=0 if alive else choice.nbytes,
            codec=choice.codec or ("drop" if choice.dropped else "image" if choice.image else "keep"),
            used_by=tuple(dict.fromkeys(f"{use.module}::{use.op}" for use in saved.uses)), reason=choice.reason,
        )  # fmt: skip
    for number, pin in enumerate(plan.pins, start=len(plan.choices)):
        decision = pin.decision
        yield Row(
            number=number, graph=graph, name=decision.name, module=decision.module, op=decision.op, source="",
            shape=decision.shape, dtype="bool" if decision.bits == 1 else "sign", kind="decision", bytes_before=0,
            bytes_after=decision.nbytes, codec=pin.codec, used_by=(f"{decision.module}::{decision.op}",),
            reason=f"decided in forward, from exact {', '.join(decision.sources)}",
        )  # fmt: skip


def _folded(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that are alike but for the layer's number, together; a group stands where its first row stood."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        key: tuple[object, ...] = (
            re.sub(r"\d+", "#", row.module), row.op, row.shape, row.dtype, row.kind, row.bytes_before > 0, row.codec,
            tuple(re.sub(r"\d+", "#", used) for used in row.used_by),
            re.sub(r"(exact|again from|codes of|restored from|taken from) .*", "", row.reason),
        )  # fmt: skip
        if not re.search(r"\d", row.module):
            key = (*key, row.graph, row.number)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _cells(group: Sequence[Row], plan: bool) -> list[str]:
    first = group[0]
    times = f" x{len(group)}" if len(group) > 1 else ""
    used = ", ".join(itertools.islice((use.removeprefix("::") for use in first.used_by), 3))
    used += ", ..." if len(first.used_by) > 3 else ""
    if len(group) > 1:
        used = re.sub(r"(^|, )[^:]*::", r"\1", used)
    cells = [
        str(first.number), first.name, _folded_name([row.module for row in group]) + times, first.op,
        "x".join(map(str, first.shape)) or "scalar", first.dtype, _mib(sum(row.bytes_before for row in group)),
    ]  # fmt: skip
    return [*cells, _mib(sum(row.bytes_after for row in group)), first.codec, used, first.reason] if plan else [*cells, used]


def _folded_name(modules: Sequence[str]) -> str:
    """``layers.[0-11]`` for ``layers.0`` to ``layers.11``; other numbers that differ become ``*``."""
    distinct = list(dict.fromkeys(modules))
    if len(distinct) == 1:
        return distinct[0]
    columns = zip(*(re.split(r"(\d+)", module) for module in distinct), strict=True)
    return "".join(column[0] if len(set(column)) == 1 else _span({int(number) for number in column}) for column in columns)


def _span(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"[{low}-{high}]" if len(numbers) == high - low + 1 else f"[{','.join(map(str, sorted(numbers)))}]"


def _align(head: Sequence[str]) -> list[str]:
    return ["right" if name in {"#", "MiB", "MiB after"} else "left" for name in head]


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.3f}" if nbytes < 100 * MIB else f"{nbytes / MIB:.0f}"


def _change(before: int, after: int) -> str:
    return f"{_mib(before)} MiB -> {_mib(after)} MiB ({_ratio(before, after)} times fewer)"


def _ratio(before: int, after: int) -> str:
    return f"{before / after:.2f}" if after else "infinitely many" if before else "1.00"


def _write(path: Path, text: str) -> None:
    """Write a file in one step, beside its name, with the permissions of any new file of the user's."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "x", encoding="utf-8") as file:  # "x": never through a link, nor over another's file
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
