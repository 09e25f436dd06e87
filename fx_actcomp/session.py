"""What was compiled, beside the compiler: plans of the graphs of a model, held by weak references to its parameters.

The partitioner can't hold a plan (it is pickled into a cache key) and the compiled callable can't either (a cache hit
makes it without us), so the backend opens a session around the compiler, and the partitioner notes its plan in it.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ._torch import compile_id, compile_lock, is_fake, unsharded_parameters
from .choice import Plan
from .options import Settings


@dataclass
class Session:
    """One call of the backend: one graph of Dynamo's.

    Attributes:
        settings: What it was compiled with.
        plans: One for each partition: one where the graph trains, none where it doesn't, more with nested regions.
        failures: Errors of ours after which the stock partition was used.
        rederive: Compiles once more by tracing alone, where a cache hit kept the partitioner from being called.
        rederived: Whether ``plans`` and ``failures`` were made that way.
        place: Position of the first parameter among the graph's inputs; None where it has none.
        groups: The parameters that a call brought, weakly, by the first one's identity: equal layers run one graph, each with
            its own. Of a graph without parameters the tensors that it was compiled with.
        frame: Which frame of Python it is of, and which compilation of that frame.
    """

    settings: Settings
    plans: list[Plan] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    rederive: Callable[[], Session] | None = None
    rederived: bool = False
    place: int | None = None
    groups: dict[int, list[weakref.ref[torch.Tensor]]] = field(default_factory=dict)
    frame: tuple[int, int] | None = field(default_factory=compile_id)

    def note(self, inputs: Sequence[Any]) -> None:
        """Remember whose parameters a call brings; fake ones (DDP compiles its pieces on these, and runs them once) are none."""
        first = inputs[self.place] if self.place is not None else None
        held = self.groups.get(id(first))
        if (held is None or (first is not None and held[0]() is not first)) and not any(map(is_fake, inputs)):
            kind = torch.Tensor if first is None else torch.nn.Parameter
            self.groups = {key: group for key, group in self.groups.items() if _alive(group)}
            self.groups[id(first)] = [weakref.ref(x) for x in inputs if isinstance(x, kind)]

    def owners(self, ids: set[int]) -> list[set[int]]:
        """Of each group that has some of these tensors, which."""
        mine = [{id(held) for ref in group if (held := ref()) is not None} & ids for group in self.groups.values()]
        return [owned for owned in mine if owned]

    @property
    def alive(self) -> bool:
        """Whether a tensor lives that it belongs to; one without any belongs to nothing and stays."""
        return not self.groups or any(map(_alive, self.groups.values()))

    @property
    def trains(self) -> bool:
        """Whether its graph has a backward."""
        return bool(self.all_plans() or self.failures)

    def all_plans(self) -> list[Plan]:
        """The plans, made again where a cache hit left none."""
        with compile_lock():  # two threads may ask, and another one may be compiling
            if self.rederive is not None:
                again, self.rederive = self.rederive(), None
                self.plans, self.failures = again.plans, again.failures
                self.rederived = bool(self.plans or self.failures)
        return self.plans


_current: contextvars.ContextVar[Session | None] = contextvars.ContextVar("actcomp_session", default=None)
_apart: contextvars.ContextVar[bool] = contextvars.ContextVar("actcomp_apart", default=False)
_sessions: list[Session] = []
_lock = threading.Lock()


@contextlib.contextmanager
def open_session(settings: Settings, inputs: Sequence[Any]) -> Iterator[Session]:
    """A session around one compilation; it is kept as long as one of its parameters lives."""
    session = Session(settings, place=next((i for i, x in enumerate(inputs) if isinstance(x, torch.nn.Parameter)), None))
    session.note(inputs)
    token = _current.set(session)
    try:
        yield session
    finally:
        _current.reset(token)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """What is compiled inside is not remembered: it is for measuring, not for the user's training."""
    token = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(token)


def keep(session: Session) -> None:
    """Remember a session whose graph was compiled; forget those whose model is gone."""
    if _apart.get():
        return
    with _lock:
        _sessions[:] = [s for s in _sessions if s.alive]
        _sessions.append(session)


def note_plan(plan: Plan) -> None:
    """Called by the partitioner."""
    if (session := _current.get()) is not None:
        session.plans.append(plan)


def note_failure(cause: str) -> None:
    """Called by the partitioner after an error of ours."""
    if (session := _current.get()) is not None:
        session.failures.append(cause)


def sessions_of(model: torch.nn.Module) -> list[Session]:
    """The sessions whose graphs read a parameter or buffer of ``model``, in the order of compilation; one for each layer.

    Where a frame was compiled several times for the same parameters (other sizes, another policy), only the last compilation
    that trains counts: they are alternatives. Pieces of one compilation (DDP buckets), other frames (graph breaks) and layers
    that run one graph with parameters of their own add up.
    """
    ids = {id(tensor) for tensor in (*model.parameters(), *model.buffers(), *unsharded_parameters(model))}
    with _lock:
        sessions = list(_sessions)
    mine = [(session, owned) for session in sessions for owned in session.owners(ids)]
    kept: list[Session] = []
    for i, (session, owned) in enumerate(mine):
        rivals = mine if not session.trains else mine[i + 1 :]
        if not any(_replaces(rival, session) and owned & theirs for rival, theirs in rivals):
            kept.append(session)
    return kept


def _replaces(rival: Session, session: Session) -> bool:
    """Whether one is another compilation of the other's frame, and trains."""
    if session.frame is None or rival.frame is None:
        return False
    return rival.frame[0] == session.frame[0] and rival.frame != session.frame and rival.trains


def _alive(group: Sequence[weakref.ref[torch.Tensor]]) -> bool:
    return any(ref() is not None for ref in group)
