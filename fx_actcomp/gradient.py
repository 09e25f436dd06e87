"""How far a policy moves a model's gradient: measured against policy ``"none"`` on the same compiler and seed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .backend import actcomp
from .explain import compile_apart, untouched
from .options import parse_options
from .report import printable

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class TensorError:
    """Error of one gradient: ``relative`` is ``|g - g0| / |g0|``, ``cosine`` that of the angle between the two."""

    relative: float
    cosine: float


@dataclass(frozen=True)
class GradientError:
    """Error of a model's gradient.

    Attributes:
        relative: ``|g - g0| / |g0|`` over all parameters together, g0 the gradient under policy ``"none"``.
        cosine: Cosine of the angle between g and g0.
        per_parameter: The same for each parameter, by name.
        loss_equal: Whether the two forward passes gave the same numbers, to the last bit.
    """

    relative: float
    cosine: float
    per_parameter: Mapping[str, TensorError]
    loss_equal: bool

    def __str__(self) -> str:
        worst = max(self.per_parameter.items(), key=lambda item: item[1].relative, default=None)
        tail = f"; worst {printable(worst[0])}: {worst[1].relative:.2e}" if worst else ""
        return f"relative {self.relative:.3e}, cosine {self.cosine:.6f}{tail}"


def gradient_error(
    model: nn.Module,
    *inputs: Any,
    policy: Any = None,
    overrides: Mapping[str, str | None] | None = None,
    min_bytes: int | None = None,
    compiler: str | None = None,
    loss: Loss | None = None,
    seed: int = 0,
    **model_kwargs: Any,
) -> GradientError:
    """Run one step under ``"none"`` and one under ``policy``, with the same seed, and compare the gradients.

    The model is left as it was: ``.grad``, buffers (running statistics), random state, train or eval mode. Gradients are
    taken with ``torch.autograd.grad``, so no hook on a parameter and no optimizer sees them.

    Args:
        model: The model, in the mode to measure.
        *inputs: Its inputs; they are copied, so a model that writes into them can't change them.
        policy: As in ``options``; the default is ``"int8"``.
        overrides: As in ``options``.
        min_bytes: As in ``options``.
        compiler: As in ``options``.
        loss: Makes a scalar of the model's output. Without it: the output's ``loss``, where it has one; else its sum
            weighted with fixed random numbers, so that no gradient vanishes by symmetry.
        seed: Seed of both runs.
        **model_kwargs: Keyword arguments of the model.

    Returns:
        The error.

    Raises:
        ValueError: Nothing of the model takes a gradient, or an argument is unknown.
    """
    given = {"overrides": overrides, "min_bytes": min_bytes, "compiler": compiler}
    options: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    arms = [{**options, "policy": "none", "overrides": None}, options if policy is None else {**options, "policy": policy}]
    for arm in arms:
        parse_options(arm)
    results = []
    for arm in arms:
        with untouched(model), _buffers_kept(model), torch.enable_grad():
            results.append(_gradients(model, inputs, model_kwargs, arm, loss, seed))
    (exact_loss, exact), (lossy_loss, lossy) = results
    total = _compare(torch.cat([g.flatten() for g in exact.values()]), torch.cat([g.flatten() for g in lossy.values()]))
    each = {name: _compare(exact[name], lossy[name]) for name in exact}
    return GradientError(total.relative, total.cosine, each, torch.equal(exact_loss, lossy_loss))


def _gradients(
    model: nn.Module,
    inputs: tuple[Any, ...],
    model_kwargs: dict[str, Any],
    options: dict[str, Any],
    loss: Loss | None,
    seed: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    args, kwargs = copies((inputs, model_kwargs))
    wanted = {name: p for name, p in getattr(model, "_orig_mod", model).named_parameters() if p.requires_grad}
    if not wanted:
        leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        wanted = {f"inputs[{i}]": x for i, x in enumerate(leaves)}
    if not wanted:
        raise ValueError("no parameter and no input of the model requires a gradient: there is no gradient to compare")
    torch.manual_seed(seed)
    step = compile_apart(model, actcomp, options=options)
    scalar = (loss or _default_loss)(step(*args, **kwargs))
    found = torch.autograd.grad(scalar, list(wanted.values()), allow_unused=True)
    pairs = zip(wanted.items(), found, strict=True)
    gradients = {name: (torch.zeros_like(p) if g is None else g).detach().double().cpu() for (name, p), g in pairs}
    return scalar.detach(), gradients


def copies(tree: Any, copy: Callable[[Tensor], Tensor] = torch.clone) -> Any:
    """Copies of the tensors in a tree, leaves of autograd; a tensor that stands in it twice does so in the copy."""
    made: dict[int, Tensor] = {}

    def one(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in made:
            made[id(x)] = copy(x.detach()).requires_grad_(x.requires_grad)
        return made[id(x)]

    return pytree.tree_map(one, tree)


def _default_loss(output: Any) -> Tensor:
    held = getattr(output, "loss", None)
    if isinstance(held, Tensor) and held.dim() == 0:
        return held
    tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad and x.numel()]
    if not tensors:
        raise ValueError("no output of the model requires a gradient: there is no gradient to compare")
    if len(tensors) == 1 and tensors[0].dim() == 0:
        return tensors[0]
    draw = torch.Generator().manual_seed(0)
    weighted = [(x * torch.randn(x.shape, generator=draw).to(x.device, x.dtype)).sum() / math.sqrt(x.numel()) for x in tensors]
    return torch.stack(weighted).sum()


def _compare(exact: Tensor, lossy: Tensor) -> TensorError:
    norm, distance = exact.norm().item(), (lossy - exact).norm().item()
    if distance == 0:
        return TensorError(0.0, 1.0)
    product = norm * lossy.norm().item()
    relative = distance / norm if norm and math.isfinite(distance) else math.inf
    cosine = (exact.flatten() @ lossy.flatten()).item() / product if product and math.isfinite(product) else 0.0
    return TensorError(relative, cosine)


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put buffers back as they were: the same objects with the same numbers."""
    held = [(module, dict(module._buffers)) for module in model.modules()]
    values = [(b, b.detach().clone()) for _, buffers in held for b in buffers.values() if b is not None]
    try:
        yield
    finally:
        for module, buffers in held:
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
