"""Copies of a compiled model, what is stored of it, and models that are compiled block by block."""

import copy
import io
import pickle

import pytest
import torch
from mode_cases import BOTH, Block, Outcome, differing, error, gradients, hold, options, reference, run, under
from torch import nn

import fx_actcomp

WIDTH = 24

# Dynamo asks inputs that aren't leaves for .grad
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def compiled_in_place(policy):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Block(dropout=0.0), Block(dropout=0.0))
    model.compile(backend="actcomp", options=options(policy))
    return model


def compiled_model(policy):
    return torch.compile(compiled_in_place("none"), backend="actcomp", options=options(policy))


def step(model, seed=1):
    torch.manual_seed(seed)
    x = torch.randn(16, WIDTH, requires_grad=True)
    y = model(x)
    y.square().mean().backward()
    return {"output": y.detach(), **gradients(model, x=x)}


def stored(model):
    """Through torch.save, as a whole."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), stored]


@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("make", [compiled_in_place, compiled_model])
def test_a_copy_of_a_trained_model_does_what_the_original_does(make, copied):
    """torch drops what ``Module.compile`` compiled; a copy of what ``torch.compile`` returned compiles anew."""
    model = make("int8")
    step(model)
    other = copied(model)
    model.zero_grad()
    other.zero_grad()
    first, second = step(model), step(other)
    assert first.keys() == second.keys()
    assert torch.allclose(first.pop("output"), second.pop("output"), atol=1e-6)
    assert error(first, second) <= 0.05
    assert {id(p) for p in model.parameters()}.isdisjoint(map(id, other.parameters()))


def test_weights_go_from_a_compiled_model_to_a_plain_one_and_back():
    model = compiled_in_place("int8")
    step(model)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "step": 1}, file)
    file.seek(0)
    plain, again = nn.Sequential(Block(), Block()), compiled_in_place("int8")
    weights = torch.load(file, weights_only=True)["model"]
    plain.load_state_dict(weights)
    nn.init.zeros_(again[0].up.weight)
    again.load_state_dict(plain.state_dict())
    model.zero_grad()
    assert differing(step(model), step(again)) == []
    assert set(weights) == set(plain.state_dict())


def test_weights_loaded_into_a_compiled_model_need_no_other_graph():
    model = compiled_in_place("int8")
    step(model)
    other = {name: torch.randn_like(x) / 5 for name, x in model.state_dict().items()}
    with torch.compiler.set_stance("fail_on_recompile"):
        model.load_state_dict(other)
        model.zero_grad()
        first = step(model)
    assert differing(first, step(compiled_with(other))) == []


def compiled_with(weights):
    model = compiled_in_place("int8")
    model.load_state_dict(weights)
    return model


class Stack(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(depth)), nn.Linear(WIDTH, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def block_by_block(compiled):
    model, x = Stack(), torch.randn(16, WIDTH, requires_grad=True)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = compiled(block, fullgraph=True)
    y = model(x)
    y.square().mean().backward()
    return Outcome(model, {"output": y.detach()}, gradients(model, x=x))


def block_by_block_in_place(compiled):
    model, x = Stack(), torch.randn(16, WIDTH, requires_grad=True)
    for block in model.blocks:
        block.forward = compiled(block.forward, fullgraph=True)
    y = model(x)
    y.square().mean().backward()
    return Outcome(model, {"output": y.detach()}, gradients(model, x=x))


@under(BOTH, block_by_block, block_by_block_in_place)
def test_regional_compilation(program, policy):
    assert hold(program, policy).graphs == 1


def test_equal_blocks_are_compiled_once_and_each_is_reported():
    one = fx_actcomp.explain(Block(), torch.randn(16, WIDTH), compiler="aot_eager", min_bytes=0)
    found = hold(block_by_block, "int8")
    assert len(found.rows(codec="int8")) == len(Stack().blocks) * sum(row.codec == "int8" for row in one.saved)


def two_policies(compiled):
    """Models side by side: each keeps the policy that it was compiled with."""
    x, models = torch.randn(16, WIDTH, requires_grad=True), nn.ModuleList([Block(), Block()])
    first = compiled(models[0])
    second = torch.compile(lambda x: models[1](x), backend="actcomp", options=options("none"))
    y = second(first(x))
    y.square().mean().backward()
    return Outcome(models[0], {"output": y.detach()}, gradients(models, x=x))


@pytest.mark.parametrize("policy", BOTH)
def test_a_neighbour_s_policy_is_its_own(policy):
    expected, got = reference(two_policies), run(two_policies, policy)
    assert differing(expected.exact, got.exact) == []
    second = {name: x for name, x in expected.lossy.items() if name.startswith("1.")}
    assert second
    assert differing(second, got.lossy) == []
