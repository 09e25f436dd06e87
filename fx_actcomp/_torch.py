"""Every private torch name that we touch, and nothing else of ours depends on one.

Checked on torch 2.13.0 and 2.14.1; ``tests/test_torch.py`` names each one and fails where a version lacks it. What differs
between versions is asked of the object that differs, not of the version.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import SymInt, fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn

Size = int | SymInt
"""A size: a number, or a symbol whose value compile time may not ask for."""

TESTED = ("2.13", "2.14")
"""Versions on which the whole test suite passes."""

PRIVATE_NAMES = (
    "torch._inductor.custom_graph_pass.CustomPartitionerFn",
    "torch._inductor.compile_fx.compile_fx",
    "torch._inductor.compile_fx.select_decomp_table",
    "torch._inductor.config",
    "torch._inductor.codegen.triton.TritonOverrides",
    "torch._inductor.list_mode_options",
    "torch._dynamo.backends.common.aot_autograd",
    "torch._dynamo.backends.debugging.boxed_nop",
    "torch._dynamo.config.patch",
    "torch._dynamo.convert_frame.compile_lock",
    "torch._dynamo.source.ConstantSource",
    "torch._functorch.config",
    "torch._functorch.config.patch",
    "torch._functorch._activation_offloading.activation_offloading.enable_activation_offloading",
    "torch._functorch._aot_autograd.descriptors.SavedForBackwardsAOTOutput",
    "torch._functorch._aot_autograd.descriptors.SavedForBackwardsNoVcCheckAOTOutput",
    "torch._functorch.partitioners.min_cut_rematerialization_partition",
    "torch._guards.CompileContext",
    "torch._guards.TracingContext",
    "torch._logging.trace_structured",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.unset_fake_temporarily",
    "torch.distributed.fsdp._fully_shard._fsdp_state._get_module_fsdp_state",
    "torch.fx.experimental.proxy_tensor.make_fx",
    "torch.fx.experimental.symbolic_shapes.optimization_hint",
    "torch.fx.traceback.annotate",
)
"""Each name by its full path, for the test."""

Partitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def private(path: str) -> Any:
    """Import one of :data:`PRIVATE_NAMES`; late, since Inductor takes seconds to import and eval needs none of it."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def size_hint(size: Size) -> int | None:
    """The value seen at compile time, adding no guard; None for an unbacked symbol."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() and size.node.hint is not None else None


def size_guess(size: Size) -> int:
    """:func:`size_hint`, and for an unbacked symbol the size that torch's partitioner reckons with."""
    hint = size_hint(size)
    if hint is not None:
        return hint
    return int(private("torch.fx.experimental.symbolic_shapes.optimization_hint")(size, fallback=4096))


def annotate_nodes(marks: dict[str, str]) -> AbstractContextManager[None]:
    """Mark the nodes traced inside, in their ``meta["custom"]``."""
    marked: AbstractContextManager[None] = torch.fx.traceback.annotate(marks)
    return marked


def mode_options() -> dict[str, dict[str, Any]]:
    """Inductor's modes and the config patches that each one stands for."""
    listed: dict[str, dict[str, Any]] = private("torch._inductor.list_mode_options")()
    return listed


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's decomposition table; by way of ``compile_fx``, whose import loads what the decompositions need."""
    table: dict[Any, Callable[..., Any]] = private("torch._inductor.compile_fx.select_decomp_table")()
    return table


def random_by_kernel(device: torch.device) -> bool:
    """Whether Inductor's random numbers depend on the kernel that draws them, not on seed and position alone.

    Since 2.13 it draws four at once in kernels of one dimension on CUDA, and others in any other kernel; where the positions
    don't follow each other in such a kernel, neighbours are given the same numbers (pytorch #198333).
    """
    if device.type != "cuda" or private("torch._inductor.config").align_random_eager:
        return False
    return hasattr(private("torch._inductor.codegen.triton.TritonOverrides"), "_can_use_4x_random")


def make_fx(function: Callable[..., Any]) -> Callable[..., fx.GraphModule]:
    """Trace a function to the operators that are left by Inductor's decompositions."""
    traced: Callable[..., fx.GraphModule] = private("torch.fx.experimental.proxy_tensor.make_fx")(
        function, decomposition_table=inductor_decompositions()
    )
    return traced


def stock_partition(
    joint: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """What plain ``torch.compile`` does: the min-cut partitioner with Inductor's view of what is cheap to recompute.

    Only the offloading is left out: :func:`enable_offloading` does it later.
    """
    partition = private("torch._functorch.partitioners.min_cut_rematerialization_partition")
    later = private("torch._functorch.config.patch")(enable_activation_offloading=False)
    with later if offloads() else contextlib.nullcontext():
        forward, backward = partition(joint, joint_inputs, **{**kwargs, "compiler": "inductor"})
    return forward, backward


def offloads() -> bool:
    """Whether torch is asked to move marked activations to host memory."""
    return bool(getattr(private("torch._functorch.config"), "enable_activation_offloading", False))


def offload_mark(node: fx.Node) -> dict[str, Any]:
    """The mark of a tensor that is to be moved to host memory; empty where it isn't."""
    return {"should_offload": True} if node.meta.get("should_offload") else {}


def enable_offloading(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, static_inputs: set[fx.Node]) -> None:
    """Move the marked ones among the saved tensors to host memory and back; the two graphs' nodes are paired by name."""
    enable = private("torch._functorch._activation_offloading.activation_offloading.enable_activation_offloading")
    enable(forward, backward, num_outputs, static_inputs)


def saved_without_version_check(node: fx.Node) -> dict[str, Any]:
    """The mark of a saved tensor that is kept beside autograd's version counter; empty where it isn't."""
    key = "saved_tensor_with_no_vc_check"
    return {key: True} if node.meta.get(key) else {}


def saved_output_descriptor(position: int, unchecked: bool) -> object:
    """What AOTAutograd calls a saved output of forward."""
    kind = "SavedForBackwardsNoVcCheckAOTOutput" if unchecked else "SavedForBackwardsAOTOutput"
    return private(f"torch._functorch._aot_autograd.descriptors.{kind}")(position)


def is_whole_graph(gm: fx.GraphModule) -> bool:
    """Whether Dynamo's graph ends its frame: it wasn't cut by a graph break, nor by DDP into buckets."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and not reason.graph_break


def is_fake(x: object) -> bool:
    """Whether a tensor is fake, standing for one whose memory isn't looked at."""
    return isinstance(x, private("torch._subclasses.fake_tensor.FakeTensor"))


def copy_dynamo_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph that Dynamo made, nodes' metadata and the names of its parameters' sources included."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(gm.graph, copies))
    copied = fx.GraphModule(gm, graph)
    copied.meta.update(gm.meta)
    for original, copy in [(gm, copied), *copies.items()]:
        for source in ("_param_name_to_source", "_dynamo_source"):  # by which AOTAutograd tells parameters from inputs
            if hasattr(original, source):
                setattr(copy, source, getattr(original, source))
    return copied


def add_input(gm: fx.GraphModule, name: str) -> None:
    """Append an input to a Dynamo graph; AOTAutograd asks every input where it comes from."""
    with gm.graph.inserting_after(gm.graph.find_nodes(op="placeholder")[-1]):
        node = gm.graph.placeholder(name)
    node._dynamo_source = private("torch._dynamo.source.ConstantSource")(name)
    gm.recompile()


def compile_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any], inner: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor.

    Args:
        gm: The graph; Inductor takes ownership.
        inputs: Example inputs.
        patches: Inductor config.
        inner: Compiles one graph in Inductor's stead, with no cache; for looking without generating code.
    """
    compile_fx = private("torch._inductor.compile_fx.compile_fx")
    if inner is None:
        return compile_fx(gm, inputs, config_patches=patches)  # type: ignore[no-any-return]
    with private("torch._functorch.config.patch")(enable_autograd_cache=False):
        return compile_fx(gm, inputs, config_patches=patches, inner_compile=inner)  # type: ignore[no-any-return]


def compile_aot(
    gm: fx.GraphModule, inputs: Sequence[Any], partition: Partitioner, run: Callable[[fx.GraphModule, Any], Any]
) -> Callable[..., Any]:
    """Compile a Dynamo graph with AOTAutograd alone, on Inductor's decompositions.

    Args:
        gm: The graph.
        inputs: Example inputs.
        partition: The partitioner.
        run: Makes a boxed callable of a forward, backward or inference graph.
    """
    aot_autograd = private("torch._dynamo.backends.common.aot_autograd")
    backend = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition, decompositions=inductor_decompositions())
    return backend(gm, inputs)  # type: ignore[no-any-return]


def boxed_nop(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Run a graph as it is; each value is freed after its last use, inputs too.

    An :class:`torch.fx.Interpreter` would note each node that it runs in the state of the tracer, which threads share: one
    that traces at the same time would take it for a node of its own.
    """
    run: Callable[..., Any] = private("torch._dynamo.backends.debugging.boxed_nop")(gm, example_inputs)
    return run


def unsharded_parameters(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """What FSDP2 hands to forward in its parameters' stead; between steps the model itself shows the shards alone."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    state_of = private("torch.distributed.fsdp._fully_shard._fsdp_state._get_module_fsdp_state")
    for state in filter(None, map(state_of, model.modules())):
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):  # from the first gathering on
                    yield parameter._unsharded_param


_compilations = itertools.count()


def compile_id() -> tuple[int, int] | None:
    """Number of the frame that Dynamo compiles now, and a number of this compilation of it; None outside of one.

    Dynamo's own second number starts anew with ``torch._dynamo.reset``, so the compilation's context is numbered instead.
    """
    current = private("torch._guards.CompileContext").current_compile_id()
    context = private("torch._guards.TracingContext").try_get()
    if current is None or current.frame_id is None or context is None:
        return None
    if not hasattr(context, "actcomp_compilation"):
        context.actcomp_compilation = next(_compilations)
    return int(current.frame_id), int(context.actcomp_compilation)


def compile_lock() -> AbstractContextManager[object]:
    """What Dynamo holds while it compiles: one thread at a time traces."""
    return private("torch._dynamo.convert_frame.compile_lock")  # type: ignore[no-any-return]


def dynamo_patch(**values: Any) -> AbstractContextManager[None]:
    """Dynamo's configuration, changed inside."""
    patch: AbstractContextManager[None] = private("torch._dynamo.config.patch")(**values)
    return patch


def log_artifact(name: str, text: Callable[[], str]) -> None:
    """Put a text into ``TORCH_TRACE``, where tlparse shows it; ``text`` is called only when tracing is on."""
    trace_structured = private("torch._logging.trace_structured")
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


@contextlib.contextmanager
def fake_mode() -> Iterator[None]:
    """Tensors made inside have no memory."""
    with private("torch._subclasses.fake_tensor.FakeTensorMode")(allow_non_fake_inputs=True):
        yield


def fake_mode_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """The fake mode in which a traced graph's tensor was made.

    Raises:
        ValueError: It is no fake tensor.
    """
    mode = getattr(x, "fake_mode", None)
    if mode is None:
        raise ValueError(f"expected a fake tensor, got a {type(x).__name__}: the graph was traced without values")
    return mode  # type: ignore[no-any-return]


def no_fake() -> AbstractContextManager[object]:
    """Tensors made inside are real, whatever fake mode is active."""
    return private("torch._subclasses.fake_tensor.unset_fake_temporarily")()  # type: ignore[no-any-return]


@functools.cache
def warn_untested() -> None:
    """Warn, once a process, on a torch that the tests haven't passed on."""
    version = torch.__version__
    if not version.startswith(tuple(f"{tested}." for tested in TESTED)):
        warnings.warn(
            f"fx_actcomp is tested on torch {' and '.join(TESTED)}, not on {version}: run fx_actcomp.gradient_error on your "
            "model before you trust its gradients",
            stacklevel=2,
        )
