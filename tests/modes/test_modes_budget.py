"""torch's own recomputation (``activation_memory_budget``) beside ours, and what it does to random numbers."""

import types

import pytest
import torch
from mode_cases import ALL, Outcome, differing, error, gradients, reference, run
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import inductor_prims  # noqa: F401 - registers prims.inductor_random

import fx_actcomp
from fx_actcomp import draws

WIDTH = 32


class Noisy(nn.Module):
    """Draws a dropout's mask, noise that multiplies, and the mask of one dropout on top of another."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        for layer in self.layers:
            x = self.dropout(nn.functional.gelu(layer(x)))
        return self.dropout(x) * torch.randn_like(x)


def noisy(compiled):
    model, x = Noisy(), torch.randn(16, WIDTH, requires_grad=True)
    y = compiled(model)(x)
    y.sum().backward()
    zeros = (x.grad == 0).all(dim=1)
    return Outcome(model, {"output": y.detach(), "zeros": zeros, "next draw": torch.rand(3)}, gradients(model, x=x))


CASES = [*((policy, 0.0) for policy in ("none", *ALL)), ("none", 0.5), ("int8", 0.5)]


@pytest.mark.parametrize(("policy", "budget"), CASES)
def test_random_numbers_are_drawn_once(policy, budget):
    expected = reference(noisy)
    with functorch_config.patch(activation_memory_budget=budget):
        got = run(noisy, policy)
    assert differing(expected.exact, got.exact) == []
    if policy in ("none", "lossless"):
        assert differing(expected.lossy, got.lossy) == []
    else:
        assert error(expected.lossy, got.lossy) <= 0.05
    assert got.report.draws
    assert "torch would draw them again in backward" in str(got.report)
    assert got.report.failures == ()


def test_torch_draws_them_twice():
    """Where this fails, torch is mended, and ``draws.py`` has nothing left to do."""
    found = []
    for budget in (1.0, 0.0):
        torch._dynamo.reset()
        torch.manual_seed(0)
        with functorch_config.patch(activation_memory_budget=budget):
            found.append(noisy(lambda model: torch.compile(model, backend="aot_eager_decomp_partition")))
    assert error(found[0].lossy, found[1].lossy) > 0.3


def test_a_budget_saves_less_and_what_is_left_is_compressed():
    kept = reference(noisy).report.bytes_after
    with functorch_config.patch(activation_memory_budget=0.0):
        recomputed, compressed = (run(noisy, policy).report.bytes_after for policy in ("none", "lossless"))
    assert compressed < recomputed < kept


def test_masks_that_are_handed_over_take_a_bit():
    with functorch_config.patch(activation_memory_budget=0.0):
        found = run(noisy, "lossless")
    assert {row.codec for row in found.report.saved if row.name in found.report.draws and row.op != "aten.randn_like"} == {"drop"}
    masks = found.rows(kind="decision")
    assert {(row.codec, row.bytes_after) for row in masks} == {("bits", 16 * WIDTH // 8)}


def test_without_a_budget_nothing_is_handed_over():
    assert run(noisy, "int8").report.draws == ()


def graph_of(*calls):
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    for target, args, kwargs in calls:
        node = graph.call_function(target, (x, *args), kwargs)
        node.meta["val"] = torch.empty(4)
    graph.output(node)
    return [n for n in graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ((torch.ops.aten.rand_like.default, (), {}), True),
        ((torch.ops.aten.sin.default, (), {}), False),
        ((torch.ops.aten._scaled_dot_product_flash_attention.default, (1, 2, 0.0), {}), False),
        ((torch.ops.aten._scaled_dot_product_flash_attention.default, (1, 2, 0.1), {}), True),
        ((torch.ops.aten._scaled_dot_product_flash_attention.default, (1, 2), {"dropout_p": 0.1}), True),
        ((torch.ops.aten._scaled_dot_product_flash_attention.default, (1, 2), {}), False),
    ],
)
def test_what_draws(call, expected):
    assert draws.is_draw(graph_of(call)[0]) is expected


@pytest.mark.parametrize(("kind", "aligned", "expected"), [("cuda", False, True), ("cuda", True, False), ("cpu", False, False)])
def test_inductor_s_draws_on_cuda_depend_on_the_kernel(kind, aligned, expected):
    (node,) = graph_of((torch.ops.prims.inductor_random.default, (), {}))
    node.meta["val"] = types.SimpleNamespace(device=torch.device(kind))
    with inductor_config.patch(align_random_eager=aligned):
        assert draws.is_draw(node) is expected


@pytest.mark.parametrize("affected", [False, True])
def test_repeated_numbers_of_torch_s_kernels_are_told(affected, monkeypatch):
    monkeypatch.setattr(draws, "random_by_kernel", lambda _: affected)
    report = fx_actcomp.explain(Noisy(), torch.randn(16, WIDTH))
    assert (len(report.repeating) > 0) is affected
    assert ("pytorch #198333" in str(report)) is affected
