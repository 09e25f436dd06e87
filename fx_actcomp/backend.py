"""The backend that ``torch.compile(model, backend="actcomp")`` finds by its entry point: the stages in a few lines."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ._torch import compile_inductor, copy_dynamo_graph, is_whole_graph, warn_untested
from .annotate import annotation
from .compile import compile_graph, trace_graph
from .options import Settings, disabled, parse_options
from .overrides import Overrides, check_codec
from .partition import ActcompPartitioner
from .report import Report
from .session import Session, keep, open_session


def actcomp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph so that what it saves for backward is compressed.

    Args:
        gm: The graph that Dynamo captured.
        example_inputs: Its inputs.
        options: See :func:`fx_actcomp.options.parse_options`.
        mode: Inductor's mode.

    Returns:
        A callable in the graph's stead. Its forward is exact.

    Raises:
        TypeError: An option is of the wrong type.
        ValueError: An option is unknown.
    """
    settings = parse_options(options, mode)
    if disabled():
        return compile_inductor(gm, example_inputs, dict(settings.inductor))
    warn_untested()
    partitioner = ActcompPartitioner(settings, annotations_of(gm))
    again = copy_dynamo_graph(gm) if torch.is_grad_enabled() else None
    with open_session(settings, example_inputs) as session:
        compiled = compile_graph(gm, example_inputs, settings, partitioner)
    if again is not None and not session.plans and not session.failures:
        session.rederive = _rederive(again, settings, partitioner)
    keep(session)
    _tell(session, whole=is_whole_graph(gm))
    return _noting(compiled, session)


def _noting(compiled: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Show the session whose parameters each call brings: equal layers share a graph, and DDP compiles on fake inputs."""

    def run(*args: Any) -> Any:
        session.note(args)
        return compiled(*args)

    return run


def annotations_of(gm: fx.GraphModule) -> tuple[str, ...]:
    """The annotations in a graph, in order: part of the cache key, since Inductor's key doesn't hold node metadata.

    Raises:
        ValueError: One names no codec; the message lists what there is.
    """
    graphs = [part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)]  # with those of checkpoints and the like
    marks = [(i, annotation(node)) for i, node in enumerate(node for graph in graphs for node in graph.nodes)]
    return tuple(f"{i}:{check_codec(mark, 'fx_actcomp.annotate')}" for i, mark in marks if mark is not None)


def _rederive(gm: fx.GraphModule, settings: Settings, partitioner: ActcompPartitioner) -> Callable[[], Session]:
    """Plan again what a cache hit compiled without us, on the fake tensors that Dynamo left on the graph."""

    def trace() -> Session:
        fakes = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        with open_session(settings, fakes) as session:
            trace_graph(gm, fakes, settings, partitioner)
        return session

    return trace


_matched: dict[Overrides, set[str]] = {}
"""Patterns that matched in some graph so far; a model of several graphs has its matches in any of them."""


def _tell(session: Session, *, whole: bool) -> None:
    """Warn of overrides that matched nothing, and write the report that was asked for.

    A piece of a model (before a graph break, a DDP bucket) can't tell whether another piece will match: only a graph that
    ends its frame warns, once. ``fx_actcomp.report`` lists what matched nothing at any time.
    """
    settings = session.settings
    if session.plans and settings.overrides:
        matched = _matched.setdefault(settings.overrides, set())
        matched.update(pattern for plan in session.plans for pattern in plan.matched)
        missing = [pattern for pattern, _ in settings.overrides if pattern not in matched]
        if missing and whole:
            matched.update(missing)
            warnings.warn(
                f"overrides matched no saved activation of the graph just compiled: {', '.join(map(repr, missing))}. "
                "They name what a report prints as module::aten.op; fx_actcomp.report(model) shows it",
                stacklevel=2,
            )
    if settings.report is not None and session.all_plans():
        try:
            Report.of([session]).save(settings.report)
        except OSError as error:
            if settings.strict:
                raise
            warnings.warn(f"fx_actcomp could not write its report: {error}", stacklevel=2)
