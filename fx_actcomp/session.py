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

from ._torch import compile_id, compile_lock
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
        parameters: The graph's inputs, weakly.
        frame: Which frame of Python it is of, and which compilation of that frame.
        awaits_inputs: Whether only fake inputs are known so far (DDP compiles its pieces on these).
    """

    settings: Settings
    plans: list[Plan] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    rederive: Callable[[], Session] | None = None
    rederived: bool = False
    parameters: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    frame: tuple[int, int] | None = field(default_factory=compile_id)
    awaits_inputs: bool = False

    def adopt(self, inputs: Sequence[Any]) -> None:
        """Remember the graph's inputs, weakly."""
        self.parameters = [weakref.ref(x) for x in inputs if isinstance(x, torch.Tensor)]

    def belongs_to(self, ids: set[int]) -> bool:
        """Whether one of the graph's inputs is one of these tensors."""
        return any(id(held) in ids for ref in self.parameters if (held := ref()) is not None)

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
    session = Session(settings)
    session.adopt(inputs)
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
        _sessions[:] = [s for s in _sessions if s.awaits_inputs or any(ref() is not None for ref in s.parameters)]
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
    """The sessions whose graphs read a parameter or buffer of ``model``, in the order of compilation.

    Of a frame that was compiled several times (other sizes, another policy), only the last compilation that trains counts:
    they are alternatives. Pieces of one compilation (DDP buckets) and other frames (graph breaks) add up.
    """
    ids = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    with _lock:
        mine = [session for session in _sessions if session.belongs_to(ids)]
    latest: dict[int, tuple[int, int]] = {}
    for session in mine:
        if session.frame is not None and (session.all_plans() or session.failures):
            latest[session.frame[0]] = session.frame
    return [s for s in mine if s.frame is None or latest.get(s.frame[0], s.frame) == s.frame]
