"""Look before you train: what a model saves, what a policy would make of it, and what that does to the gradient."""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ._torch import dynamo_patch
from .backend import annotations_of
from .compile import trace_graph
from .nodes import OWN_FILE
from .options import parse_options
from .partition import ActcompPartitioner
from .report import Report
from .session import Session, apart, open_session, sessions_of


def report(compiled_model: nn.Module) -> Report:
    """What was really compiled for a model, all its graphs added up.

    Args:
        compiled_model: What ``torch.compile(model, backend="actcomp")`` returned, or the model itself. It must have run
            forward once, since torch compiles then.

    Returns:
        The report. Where a compiler cache answered in our stead, the plan is made again by tracing, and marked so.

    Raises:
        ValueError: Nothing of the model was compiled by this backend.
    """
    sessions = sessions_of(compiled_model)
    if not sessions:
        raise ValueError(
            "nothing of this model was compiled with backend='actcomp'; run its forward once, with gradients, before asking"
        )
    return Report.of(sessions)


def explain(
    model: nn.Module,
    *inputs: Any,
    policy: Any = None,
    overrides: Mapping[str, str | None] | None = None,
    min_bytes: int | None = None,
    compiler: str | None = None,
    **model_kwargs: Any,
) -> Report:
    """The plan for a model, without training: no operator of the model runs and no activation is allocated.

    The model is captured as ``torch.compile`` captures it, up to and including the partitioner, on fake tensors. After a
    graph break the rest of forward goes on with outputs that are all zero, each backed by a single element.

    Args:
        model: The model, in the mode (train or eval) to look at.
        *inputs: Its inputs.
        policy: As in ``options``; the default is ``"int8"``.
        overrides: As in ``options``.
        min_bytes: As in ``options``.
        compiler: As in ``options``. Inductor fuses attention before the partition, so the two save different sets.
        **model_kwargs: Keyword arguments of the model.

    Returns:
        The report: ``saved``, ``bytes_before``, ``bytes_after``; printable.

    Raises:
        ValueError: An argument is unknown; the message lists what there is.
    """
    given = {"policy": policy, "overrides": overrides, "min_bytes": min_bytes, "compiler": compiler}
    settings = parse_options({key: value for key, value in given.items() if value is not None})
    sessions: list[Session] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        partitioner = ActcompPartitioner(settings, annotations_of(gm))
        stand_ins = _stand_ins(gm)
        with open_session(settings, example_inputs) as session:
            trace_graph(gm, example_inputs, settings, partitioner)
        sessions.append(session)
        return lambda *_: stand_ins()

    with untouched(model), torch.enable_grad():
        compile_apart(model, backend)(*inputs, **model_kwargs)
    return Report.of(sessions) if sessions else Report(settings.policy.name, (), 0)


def print_saved_activations(model: nn.Module, *inputs: Any, compiler: str | None = None, **model_kwargs: Any) -> None:
    """Print what ``torch.compile`` saves of a model for backward today: number, module, operator, shape, bytes, used by.

    Args:
        model: The model, in the mode to look at.
        *inputs: Its inputs.
        compiler: As in ``options``.
        **model_kwargs: Keyword arguments of the model.
    """
    found = explain(model, *inputs, policy="none", compiler=compiler, **model_kwargs)
    print(found.table(plan=False))
    print(f"\nsaved for backward: {found.bytes_before / 2**20:.3f} MiB (parameters, inputs and outputs not counted)")


def _stand_ins(gm: fx.GraphModule) -> Callable[[], Any]:
    """Makes a graph's outputs with the right shapes and types, all zero, without running it."""
    (output,) = gm.graph.find_nodes(op="output")
    values = pytree.tree_map(lambda n: n.meta.get("example_value") if isinstance(n, fx.Node) else n, output.args[0])

    def stand_in(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return int(value) if isinstance(value, torch.SymInt) else value
        sizes = [int(size) for size in value.shape]
        zero = torch.zeros((), dtype=value.dtype, device=value.device).expand(sizes)
        return zero.requires_grad_() if value.requires_grad and zero.is_floating_point() else zero

    return lambda: pytree.tree_map(stand_in, values)


_numbers = itertools.count()


def compile_apart(model: nn.Module, backend: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a model under a code object of its own, so that the user's compiled entries and recompile limit stay apart."""

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    # Dynamo remembers sizes by a code object's name, and makes those dynamic that change: so each name is new
    own = types.FunctionType(call.__code__.replace(co_name=f"actcomp_{next(_numbers)}", co_filename=OWN_FILE), globals())
    original = getattr(model, "_orig_mod", model)
    compiled = torch.compile(own, backend=backend, **options)

    def run(*args: Any, **kwargs: Any) -> Any:
        with dynamo_patch(recompile_limit=64), apart():
            return compiled(original, *args, **kwargs)

    return run


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Leave random state and the modules' modes as they were."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda" and p.device.index is not None})
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module, training in modes.items():
            module.training = training
