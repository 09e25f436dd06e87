"""PyTorch's own operator and module data bases, as programs that save for backward what the operator reads and makes.

Alone, an operator would save its inputs and outputs, which the caller holds anyway, so that nothing would be left to compress.
Here it stands between two opaque copies, as it would in a model: what it reads was just made, and what it makes is read on.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

import fx_actcomp
from fx_actcomp.gradient import copies


@torch.library.custom_op("sweep::fresh", mutates_args=())
def fresh(x: Tensor) -> Tensor:
    """A copy with the same strides, gaps included, that the partitioner can't see through and won't make again."""
    return _copied(x)


@fresh.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) if _apart(x) else x.clone()


fresh.register_autograd(lambda _, gradient: gradient)


def _apart(x: Tensor) -> bool:
    """Whether no two elements share memory, as far as strides tell."""
    steps = sorted((step, size) for size, step in zip(x.shape, x.stride(), strict=True) if size > 1)
    reach = 0
    for step, size in steps:
        if step <= reach:
            return False
        reach += step * (size - 1)
    return True


def _copied(x: Tensor) -> Tensor:
    if x.layout is not torch.strided or not _apart(x):
        return x.clone()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


@dataclass(frozen=True)
class Kind:
    """How samples are asked for: the type, and whether they are made non-contiguous or are not copied around the operator."""

    name: str
    dtype: torch.dtype = torch.float32
    noncontiguous: bool = False
    bare: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        Kind("float32"),
        Kind("bfloat16", torch.bfloat16),
        Kind("complex64", torch.complex64),
        Kind("noncontiguous", noncontiguous=True),
        Kind("bare", bare=True),
    )
}


@dataclass(frozen=True)
class Case:
    """One sample: a call that takes gradients.

    Attributes:
        name: Entry, kind and number in the data base.
        function: What is called; a module brings its parameters.
        args: Its arguments.
        kwargs: Its keyword arguments.
        finish: What the data base does with the output before it takes a gradient; None for nothing.
        bare: Whether nothing is copied around it.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Callable[[Any], Any] | None = None
    bare: bool = False


@dataclass(frozen=True)
class Entry:
    """One entry of a data base."""

    name: str
    info: OpInfo | ModuleInfo

    def takes(self, kind: Kind) -> bool:
        """Whether it has gradients in that type, on CPUs."""
        if isinstance(self.info, OpInfo):
            return kind.dtype in self.info.supported_backward_dtypes("cpu")
        return kind.dtype in self.info.supported_dtypes("cpu") and kind.dtype.is_floating_point and not kind.noncontiguous

    def cases(self, kind: Kind, most: int, seed: int) -> list[Case]:
        """At most so many of its samples, drawn at random, in their order."""
        torch.manual_seed(seed)
        every = list(_op_cases(self, kind) if isinstance(self.info, OpInfo) else _module_cases(self, kind))
        drawn = random.Random(f"{seed} {self.name} {kind.name}").sample(range(len(every)), min(most, len(every)))
        return [every[number] for number in sorted(drawn)]


def entries() -> dict[str, Entry]:
    """Every entry that supports autograd, by name: ``add``, ``norm.fro``, ``nn.Conv2d``."""
    found: dict[str, Entry] = {}
    for info in [*(op for op in op_db if op.supports_autograd), *module_db]:
        variant = getattr(info, "variant_test_name", "")
        name = f"{info.name}.{variant}" if variant else str(info.name)
        assert name not in found, name
        found[name] = Entry(name, info)
    return found


def _op_cases(entry: Entry, kind: Kind) -> Iterator[Case]:
    for number, sample in enumerate(entry.info.sample_inputs("cpu", kind.dtype, requires_grad=True)):
        given: SampleInput = _noncontiguous(sample) if kind.noncontiguous else sample
        args, finish = (given.input, *given.args), given.output_process_fn_grad
        name = f"{entry.name}[{kind.name} {number}]"
        yield Case(name, entry.info.op, args, given.kwargs, None if _is_identity(finish) else finish, kind.bare)


def _noncontiguous(sample: SampleInput) -> SampleInput:
    tensors = [x for x in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, Tensor)]
    return sample.noncontiguous() if all(x.layout is torch.strided for x in tensors) else sample


def _is_identity(function: Callable[..., Any]) -> bool:
    return getattr(function, "__code__", None) is not None and function.__code__.co_code == (lambda x: x).__code__.co_code


def _module_cases(entry: Entry, kind: Kind) -> Iterator[Case]:
    info = entry.info
    for training in (True, False) if info.train_and_eval_differ else (True,):
        samples = info.module_inputs_func(info, device="cpu", dtype=kind.dtype, requires_grad=True, training=training)
        for number, sample in enumerate(samples):
            built, given = sample.constructor_input, sample.forward_input
            module = info.module_cls(*built.args, **built.kwargs).to(kind.dtype).train(training)
            if info.is_lazy:
                module(*given.args, **given.kwargs)
            name = f"{entry.name}[{kind.name} {'train' if training else 'eval'} {number}]"
            yield Case(name, module, tuple(given.args), dict(given.kwargs), bare=kind.bare)


@dataclass(frozen=True)
class Outcome:
    """What one forward and backward gave: outputs, gradients of every input and parameter, and what was compiled."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    report: fx_actcomp.Report | None


class NoGradientError(Exception):
    """No output takes a gradient."""


def run(case: Case, backend: str | None = "actcomp", seed: int = 0, **options: Any) -> Outcome:
    """Compile a case afresh, run it forward and backward with fixed random tangents.

    Args:
        case: The case; its tensors and module are copied.
        backend: torch.compile's; None runs it eagerly.
        seed: Of the draws that the operator makes.
        **options: The backend's.

    Raises:
        NoGradientError: There is nothing to run backward.
    """
    torch._dynamo.reset()
    function = copy.deepcopy(case.function) if isinstance(case.function, nn.Module) else case.function
    args, kwargs = copies((case.args, case.kwargs), _copied)
    pass_on = (lambda x: x) if case.bare else _freshly
    finish = case.finish

    def program(args: Any, kwargs: Any) -> Any:
        output = function(*pass_on(args), **pass_on(kwargs))
        return pass_on(output if finish is None else finish(output))

    inputs = [x for x in dict.fromkeys(pytree.tree_leaves((args, kwargs))) if isinstance(x, Tensor)]
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    compiled = program if backend is None else torch.compile(program, backend=backend, dynamic=False, options=options or None)
    torch.manual_seed(seed)
    outputs = [x for x in pytree.tree_leaves(compiled(args, kwargs)) if isinstance(x, Tensor)]
    taken = [x for x in outputs if x.requires_grad]
    if not taken:
        raise NoGradientError(case.name)
    wanted = [x for x in (*inputs, *parameters) if x.requires_grad]
    gradients = torch.autograd.grad(taken, wanted, _tangents(taken, seed), allow_unused=True)
    made = [x.detach() for x in outputs] + [b.detach() for b in _buffers(function)]
    return Outcome(made, list(gradients), _report([*inputs, *parameters]) if backend == "actcomp" else None)


def _freshly(tree: Any) -> Any:
    """The tensors in nested lists, tuples and dicts copied; plain recursion costs Dynamo less than pytree does."""
    if isinstance(tree, Tensor):
        return fresh(tree) if tree.layout is torch.strided and (tree.is_floating_point() or tree.is_complex()) else tree
    if type(tree) is list:
        return [_freshly(item) for item in tree]
    if type(tree) is dict:
        return {key: _freshly(item) for key, item in tree.items()}
    return tuple([_freshly(item) for item in tree]) if isinstance(tree, tuple) else tree


def _buffers(function: Callable[..., Any]) -> Iterable[Tensor]:
    return function.buffers() if isinstance(function, nn.Module) else ()


def _tangents(outputs: Sequence[Tensor], seed: int) -> list[Tensor]:
    """One or minus one: a small tangent would hide the error of the element beside it, or show it too large."""
    draw = torch.Generator().manual_seed(seed)

    def signs(x: Tensor) -> Tensor:
        return 2.0 * torch.randint(2, x.shape, generator=draw) - 1

    return [(torch.complex(signs(x), signs(x)) if x.is_complex() else signs(x)).to(x.dtype) for x in outputs]


def _report(inputs: Sequence[Tensor]) -> fx_actcomp.Report | None:
    """What was compiled of a program that reads these; None where nothing was."""
    holder = nn.Module()
    for number, x in enumerate(inputs):
        holder.register_buffer(str(number), x)
    try:
        return fx_actcomp.report(holder)
    except ValueError:
        return None
