"""Autograd functions and operators of the user's own, functional transforms, and gradients of gradients."""

import pytest
import torch
import torch.nn.functional as F
from mode_cases import BOTH, Block, Outcome, gradients, hold, reference, run, under
from torch import nn

WIDTH = 24

pytestmark = [
    # Dynamo makes an object of an autograd.Function's class, and forward-mode differentiation scripts its decompositions
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning"),
]


class Gate(torch.autograd.Function):
    """A product that saves an input, an output, a mask and a number; one of its inputs has no gradient."""

    @staticmethod
    def forward(ctx, x, gate, temperature):
        opened = torch.sigmoid(gate / temperature)
        ctx.save_for_backward(x, opened, opened > 0.5)
        ctx.temperature = temperature
        return x * opened, opened.detach() > 0.5

    @staticmethod
    def backward(ctx, grad, _):
        x, opened, mask = ctx.saved_tensors
        slope = opened * (1 - opened) / ctx.temperature
        return grad * opened, torch.where(mask, grad * x * slope, 0.5 * grad * x * slope), None


class Round(torch.autograd.Function):
    """Straight through: the gradient passes where the value was in range, which backward decides."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


class Functions(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.gate = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden, opened = Gate.apply(self.block(x), self.gate(x), 0.7)
        return Round.apply(hidden * 3) + torch.where(opened, hidden, 0)


def step(model, call, x):
    y = call(x)
    y.square().mean().backward()
    return Outcome(model, {"output": y.detach()}, gradients(model, x=x))


def data():
    return torch.randn(16, WIDTH, requires_grad=True)


def autograd_functions(compiled):
    model = Functions()
    return step(model, compiled(model, fullgraph=True), data())


@torch.library.custom_op("actcomp_tests::squash", mutates_args=())
def squash(x: torch.Tensor, limit: float) -> torch.Tensor:
    return limit * torch.tanh(x / limit)


@squash.register_fake
def _(x, limit):  # noqa: ARG001 - the operator's signature
    return torch.empty_like(x)


@torch.library.custom_op("actcomp_tests::squash_backward", mutates_args=())
def squash_backward(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.where(x.abs() < 3 * limit, grad * (1 - (y / limit) ** 2), 0)


@squash_backward.register_fake
def _(grad, x, y, limit):  # noqa: ARG001 - the operator's signature
    return torch.empty_like(grad)


def setup_context(ctx, inputs, output):
    ctx.limit = inputs[1]
    ctx.save_for_backward(inputs[0], output)


squash.register_autograd(
    lambda ctx, grad: (squash_backward(grad, *ctx.saved_tensors, ctx.limit), None), setup_context=setup_context
)


class Operators(nn.Module):
    """What a custom operator reads in backward is read by nobody knows what: exact. What is around it isn't."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        return self.second(squash(self.first(x) * 2, 1.5) * 2)


def custom_operators(compiled):
    model = Operators()
    return step(model, compiled(model, fullgraph=True), data())


class PerSample(nn.Module):
    """A loss on gradients that functional transforms take inside: of each sample, of the input, along a direction."""

    def __init__(self):
        super().__init__()
        self.block, self.weight = Block(dropout=0.0), nn.Parameter(torch.randn(WIDTH, WIDTH) / 5)
        self.dropout = nn.Dropout(0.3)

    def energy(self, weight, x):
        return F.softplus(x @ weight).sum()

    def forward(self, x):
        x = self.dropout(torch.relu(self.block(x)))
        each = torch.func.vmap(torch.func.grad(self.energy), in_dims=(None, 0))(self.weight, x)
        force = torch.func.grad(self.energy, argnums=1)(self.weight, x)
        _, slope = torch.func.jvp(lambda x: torch.tanh(x @ self.weight), (x,), (torch.ones_like(x),))
        return x + force + slope + each.mean(1)


def functional_transforms(compiled):
    model = PerSample()
    return step(model, compiled(model, fullgraph=True), data())


@under(BOTH, autograd_functions, custom_operators, functional_transforms)
def test_own_gradients(program, policy):
    hold(program, policy)


def test_the_mask_of_an_autograd_function_is_packed():
    assert {row.codec for row in hold(autograd_functions, "lossless").rows(kind="mask")} == {"bits"}


def test_what_a_custom_operator_reads_is_exact():
    rows = [row for row in hold(custom_operators, "int8").report.saved if "::actcomp_tests.squash_backward" in row.used_by]
    assert rows
    assert all(row.codec == "keep" and row.reason for row in rows)


def complaint(program, policy):
    """What a program raises; empty where it raises nothing."""
    try:
        run(program, policy)
    except RuntimeError as error:
        return str(error)
    return ""


def twice_differentiated(compiled):
    model, x = Block(), data()
    (grad,) = torch.autograd.grad(compiled(model)(x).sum(), x, create_graph=True)
    grad.sum().backward()


def forward_mode(compiled):
    model, x = Block(), data()
    call = compiled(model)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(call(dual)).tangent
    if tangent is None:
        raise RuntimeError("no tangent")
    return Outcome(model, {"tangent": tangent.detach()})


@pytest.mark.parametrize("policy", BOTH)
def test_double_backward_is_refused_in_torch_s_words(policy):
    words = complaint(twice_differentiated, policy)
    assert "double backward" in words
    assert words == complaint(twice_differentiated, "none")


@pytest.mark.parametrize("policy", BOTH)
def test_forward_mode_does_what_it_does_under_none(policy):
    words = complaint(forward_mode, "none")
    assert complaint(forward_mode, policy) == words
    if not words:
        assert torch.equal(run(forward_mode, policy).exact["tangent"], reference(forward_mode).exact["tangent"])


def vmapped_over(compiled):
    """A transform around a compiled function: Dynamo lets the transform have the plain one."""
    model, x = Block(dropout=0.0), data()
    call = compiled(model)
    y = torch.func.vmap(call)(x)
    y.sum().backward()
    return Outcome(model, {"output": y.detach()}, gradients(model, x=x))


@pytest.mark.parametrize("policy", BOTH)
def test_a_transform_around_does_what_it_does_under_none(policy):
    expected, got = reference(vmapped_over), run(vmapped_over, policy)
    assert torch.equal(expected.exact["output"], got.exact["output"])
    assert all(torch.allclose(grad, got.lossy[name], rtol=0.1, atol=1e-2) for name, grad in expected.lossy.items())
