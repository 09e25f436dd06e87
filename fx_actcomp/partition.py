"""Stage 5: the partitioner that AOTAutograd calls: stock partition, saved activations, plan, rewrite, check."""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ._torch import CustomPartitionerFn, fake_mode, fake_mode_of, log_artifact, stock_partition
from .choice import Plan
from .codecs import Codec, Layout, Noise, Reference, Traits, codec_named, codec_sources
from .crossing import hand_over
from .draws import find_redrawn, find_repeating
from .nodes import is_symbol, is_tangent, storage_base, stored_bytes, value
from .offload import offload_saved
from .options import Settings
from .overwrites import find_overwritten
from .plan import make_plan
from .policy import policy_of
from .rewrite import apply_plan
from .saved import Boundary, find_saved, saved_nodes
from .session import note_failure, note_plan


class ActcompPartitioner(CustomPartitionerFn):
    """Splits a joint graph as plain torch.compile does, then compresses what crosses from forward to backward.

    Inductor pickles it into its cache key, so it holds plain settings only; what it finds out goes to ``session``.
    """

    def __init__(self, settings: Settings, annotations: tuple[str, ...] = ()) -> None:
        self.settings = replace(settings, inductor={}, report=None)  # neither changes the graphs
        self.annotations = annotations

    @property
    def stochastic(self) -> bool:
        """Whether some codec that may be chosen draws random numbers."""
        return any(codec_named(spec).stochastic for spec in self._codecs())

    def _codecs(self) -> set[str]:
        """Every codec that the settings and annotations name, with its parameters."""
        marks = [annotation.partition(":")[2] for annotation in self.annotations]
        policies = [self.settings.policy, *map(policy_of, [*(name for _, name in self.settings.overrides), *marks])]
        return {codec for policy in policies for codec in (policy.values, *policy.fallbacks) if codec is not None}

    def uuid(self) -> str:
        """The cache key: settings, annotations of the graph and our own sources; the same on every machine."""
        settings = self.settings
        said = {
            "policy": settings.policy.to_dict(),
            "overrides": settings.overrides,
            "min_bytes": settings.min_bytes,
            "annotations": self.annotations,
            "sources": _own_sources(),
            "codecs": codec_sources(self._codecs()),
        }
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition ``gm``; on an error of our own, warn and give the stock partition (``strict``: raise)."""
        try:
            forward, backward = stock_partition(gm, joint_inputs, **kwargs)
        except Exception as error:
            raise RuntimeError(
                "torch's own partitioner can't split this graph into forward and backward, so plain torch.compile fails on it too"
                f" ({type(error).__name__}: {error}). A custom autograd function that writes into a tensor which it saved and"
                " which is also an output is a known cause: clone the tensor, or keep the function out of the compiled region."
            ) from error
        num_outputs, static_inputs = kwargs["num_fwd_outputs"], kwargs.get("static_lifetime_input_indices") or ()
        redrawn = find_redrawn(forward.graph, backward.graph)
        overwritten = find_overwritten(forward.graph, num_outputs)
        if redrawn or overwritten:
            hand_over(forward, backward, redrawn, overwritten, num_outputs)
        plan = self._compress(forward, backward, num_outputs, static_inputs)
        offloaded = offload_saved(forward, backward, num_outputs, static_inputs)
        if plan is not None:
            repeating = find_repeating(forward.graph)
            plan = replace(plan, draws=tuple(redrawn), copies=tuple(overwritten), repeating=tuple(repeating), offloaded=offloaded)
            note_plan(plan)
        return forward, backward

    def _compress(
        self, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, static_inputs: Sequence[int]
    ) -> Plan | None:
        try:
            return compress_boundary(forward, backward, self.settings, num_outputs, static_inputs)
        except Exception as error:
            if self.settings.strict:
                raise
            cause = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"fx_actcomp could not compress this graph and saves what torch.compile saves ({cause}). Please report it; "
                "options={'strict': True} raises the error instead.",
                stacklevel=2,
            )
            note_failure(cause)
            return None


@functools.cache
def _own_sources() -> str:
    """A hash of the sources that decide what is saved."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compress_boundary(
    forward: fx.GraphModule, backward: fx.GraphModule, settings: Settings, num_outputs: int, static_inputs: Sequence[int]
) -> Plan:
    """Run the stages between the stock partition and the compiler, in place.

    Args:
        forward: The stock forward module; rewritten.
        backward: The stock backward module; rewritten.
        settings: What the user asked for.
        num_outputs: How many outputs of forward are the user's.
        static_inputs: Positions of the parameters and buffers among the inputs.

    Returns:
        The plan that was carried out.

    Raises:
        RuntimeError: What the rewritten graphs save is not what the plan says.
    """
    boundary = find_saved(forward.graph, backward.graph, num_outputs=num_outputs, static_inputs=static_inputs)
    plan = plan_boundary(forward.graph, backward.graph, boundary, settings)
    log_artifact("actcomp_plan", lambda: json.dumps(asdict(plan), default=str, indent=1))
    if any(choice.codec or choice.dropped or choice.image for choice in plan.choices) or plan.pins:
        apply_plan(forward, backward, plan, num_outputs)
        check(forward.graph, backward.graph, plan, num_outputs)
    return plan


def plan_boundary(forward: fx.Graph, backward: fx.Graph, boundary: Boundary, settings: Settings) -> Plan:
    """Make the plan; it reads the graphs only through the sizes that codecs make of their nodes."""
    nodes = {node.name: node for node in forward.nodes}

    def measure(name: str, codec: Codec, traits: Traits) -> int | str:
        held = value(nodes[name])
        assert held is not None
        layout = Layout.of(held)
        return codec.fits(layout, traits) or measure_codec(codec, traits, held)

    return make_plan(boundary, settings, measure, _shared_storages(forward, backward, boundary))


def measure_codec(codec: Codec, traits: Traits, x: torch.Tensor) -> int:
    """Bytes of the parts that a codec makes of a fake tensor, symbolic sizes as seen at compile time."""
    if all(isinstance(number, int) for number in (*x.shape, *x.stride())):
        return _measured(codec.name, type(codec), traits, tuple(x.shape), tuple(x.stride()), x.dtype)
    with fake_mode_of(x):
        return _made(codec, traits, x)


@functools.lru_cache(maxsize=4096)
def _measured(
    name: str, kind: type[Codec], traits: Traits, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> int:  # a codec's name and class tell it from every other, and it needn't be hashable
    assert isinstance(codec_named(name), kind)
    with fake_mode():
        return _made(codec_named(name), traits, torch.empty_strided(shape, stride, dtype=dtype))


def _made(codec: Codec, traits: Traits, x: torch.Tensor) -> int:
    noise = Noise(torch.zeros((), dtype=torch.int64, device=x.device), 0)
    reference = Reference(x.new_empty(x.shape[1]), x.new_empty(x.shape[1])) if traits.normed else None
    return sum(stored_bytes(part) for part in codec.compress(x, replace(traits, noise=noise, reference=reference)))


def _shared_storages(forward: fx.Graph, backward: fx.Graph, boundary: Boundary) -> dict[str, str | None]:
    """The bases that several saved tensors view, with why the views can't be made again in backward (None: they can)."""
    members: dict[str, list[str]] = {}
    for saved in boundary.saved:
        members.setdefault(saved.base, []).append(saved.name)
    available = {node.name for node in backward.find_nodes(op="placeholder")}
    nodes = {node.name: node for node in forward.nodes}
    shared: dict[str, str | None] = {}
    for base, names in members.items():
        if len(names) > 1:
            missing = [arg.name for name in names for arg in _view_arguments(nodes[name]) if arg.name not in available]
            shared[base] = f"backward lacks the symbolic size {missing[0]} of a view of it" if missing else None
    return shared


def _view_arguments(node: fx.Node) -> list[fx.Node]:
    """Nodes other than the viewed tensor that the views between a node and its storage's base read."""
    base, arguments = storage_base(node), []
    while node is not base:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        arguments += [arg for arg in node.all_input_nodes if arg is not source]
        node = source
    return arguments


def check(forward: fx.Graph, backward: fx.Graph, plan: Plan, num_outputs: int) -> None:
    """Hold the rewritten graphs against the plan and against each other.

    Raises:
        RuntimeError: They differ.
    """
    saved = [node for node in saved_nodes(forward, num_outputs) if "val" in node.meta]
    taken = [node for node in backward.find_nodes(op="placeholder") if not is_tangent(node)]
    targets = [node.target for node in backward.find_nodes(op="placeholder")]
    if len(set(targets)) != len(targets):
        raise RuntimeError(f"two inputs of backward have the same name: {sorted(map(str, targets))}")
    symbols = [node for node in saved if is_symbol(node)]
    tensors = [node for node in saved if value(node) is not None]
    others = [node for node in saved if value(node) is None and not is_symbol(node)]  # a DTensor's mesh, say
    expected = symbols + tensors + others
    if len(taken) < len(expected):
        raise RuntimeError(f"forward saves {len(expected)} values, backward takes {len(taken)}")
    for given, placeholder in zip(expected, taken, strict=False):
        left, right = given.meta["val"], placeholder.meta["val"]
        if type(left) is not type(right) or getattr(left, "dtype", None) != getattr(right, "dtype", None):
            raise RuntimeError(f"forward saves {given.name} as {left}, backward takes it as {placeholder.name}: {right}")
        if value(given) is not None and [str(s) for s in left.shape] != [str(s) for s in right.shape]:
            raise RuntimeError(f"forward saves {given.name} as {left.shape}, backward takes {right.shape}")
    compressed = sum(c.nbytes for c in plan.choices if c.codec or c.image) + sum(p.decision.nbytes for p in plan.pins)
    kept = {c.saved.name for c in plan.choices if c.codec is None and not c.dropped and not c.image}
    new = [node for node in tensors if node.name not in kept and storage_base(node).op != "placeholder"]
    really = sum(stored_bytes(node.meta["val"]) for node in new)
    if really != compressed:
        raise RuntimeError(f"the plan saves {compressed} compressed bytes, the rewritten graph {really}")
