"""Ways to train: mixed precision, accumulation, several forwards, frozen parts, optimizers, eval in between."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from mode_cases import BOTH, Block, Outcome, gradients, hold, under
from torch import nn

WIDTH = 24

# Dynamo asks tensors that aren't leaves for .grad
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def batches(number=3):
    return [torch.randn(12, WIDTH) for _ in range(number)]


def outcome(model, outputs, **extra):
    exact = {f"output {number}": y.detach() for number, y in enumerate(outputs)}
    return Outcome(model, exact | {name: buffer.clone() for name, buffer in model.named_buffers()}, gradients(model) | extra)


def autocast_around(compiled):
    model = Block()
    call, x = compiled(model), torch.randn(12, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        y = call(x)
    y.float().square().mean().backward()
    return outcome(model, [y])


class Casting(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.block(x)
        return self.head(x.float())


def autocast_inside(compiled):
    model = Casting()
    y = compiled(model)(torch.randn(12, WIDTH))
    y.square().mean().backward()
    return outcome(model, [y])


def fp16_with_a_scaler(compiled):
    """Four steps, of which the first overflows: the scaler must see it, skip it and halve its scale."""
    model = Block()
    call, optimizer = compiled(model), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26, backoff_factor=2.0**-14)
    outputs, scales, steps = [], [], {}
    for number, x in enumerate(batches(4)):
        before = model.up.weight.detach().clone()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            y = call(x)
        scaler.scale(y.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        outputs.append(y)
        scales.append(scaler.get_scale())
        steps[f"step {number}"] = model.up.weight.detach() - before
    assert not steps.pop("step 0").any()
    assert all(step.any() for step in steps.values())
    exact = {"first output": outputs[0].detach(), "second output": outputs[1].detach(), "scales": torch.tensor(scales)}
    return Outcome(model, exact, gradients(model) | steps)


def accumulated(compiled):
    model, outputs = Block(), []
    call = compiled(model)
    for x in batches():
        outputs.append(call(x))
        (outputs[-1].square().mean() / 3).backward()
    return outcome(model, outputs)


def two_forwards_before_one_backward(compiled):
    model = Block()
    call = compiled(model)
    first, second = (call(x) for x in batches(2))
    (first * second).mean().backward()
    return outcome(model, [first, second])


def backwards_in_another_order(compiled):
    model = Block()
    call = compiled(model)
    outputs = [call(x) for x in batches()]
    for number in (1, 0, 2):
        outputs[number].square().mean().backward()
    return outcome(model, outputs)


def recurrent(compiled):
    """The output of one call is the input of the next."""
    model = Block()
    call, x = compiled(model), torch.randn(12, WIDTH)
    outputs = []
    for _ in range(3):
        x = call(x)
        outputs.append(x)
    x.square().mean().backward()
    return outcome(model, outputs)


def one_forward_for_three_backwards(compiled):
    model = Block()
    y = compiled(model)(torch.randn(12, WIDTH))
    for _ in range(3):
        y.square().mean().backward(retain_graph=True)
    return outcome(model, [y])


def parts_of_a_gradient(compiled):
    """One graph, asked for gradients of its outputs one by one, of some inputs only."""
    model = Block()
    y = compiled(model)(torch.randn(12, WIDTH))
    leaves = [model.up.weight, model.down.bias]
    grads = [torch.autograd.grad(y[number].sum(), leaves, retain_graph=True) for number in (0, 5)]
    lossy = {f"gradient {i} {j}": grad for i, pair in enumerate(grads) for j, grad in enumerate(pair)}
    return outcome(model, [y], **lossy)


class Adapter(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base, self.dropout = base.requires_grad_(False), nn.Dropout(0.2)
        self.down, self.up = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(self.dropout(x)))


def adapters(compiled):
    model = Block().requires_grad_(False)
    model.up = Adapter(model.up)
    model.add_module("last", Adapter(nn.Linear(WIDTH, WIDTH)))
    model.forward = lambda x: model.last(Block.forward(model, x))
    y = compiled(model)(torch.randn(12, WIDTH))
    y.square().mean().backward()
    return outcome(model, [y])


def thawed(compiled):
    """Frozen at first, then trained: the second compilation is another graph."""
    model = nn.Sequential(Block(), Block())
    model[0].requires_grad_(False)
    call, outputs = compiled(model), []
    for x in batches(2):
        outputs.append(call(x))
        outputs[-1].square().mean().backward()
        model[0].requires_grad_(True)
    return outcome(model, outputs)


def in_turns(compiled):
    """Training, evaluation with and without gradients, inference mode, on one compiled model."""
    model = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    call, outputs = compiled(model), []
    for x in batches(2):
        model.eval()
        for mode in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
            with mode():
                outputs.append(call(x).clone())
        model.train()
        outputs.append(call(x))
        outputs[-1].square().mean().backward()
    return outcome(model, outputs)


class Tied(nn.Module):
    def __init__(self, vocabulary=30):
        super().__init__()
        self.embedding, self.block = nn.Embedding(vocabulary, WIDTH), Block()
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.block(self.block(self.embedding(ids))))


def tied(compiled):
    model = Tied()
    y = compiled(model)(torch.randint(30, (3, 7)))
    y.square().mean().backward()
    return outcome(model, [y])


def with_a_compiled_optimizer(compiled):
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), weight_decay=0.1)
    call, step = compiled(model), torch.compile(optimizer.step, backend="aot_eager")
    outputs = []
    for x in batches():
        optimizer.zero_grad()
        outputs.append(call(x))
        F.mse_loss(outputs[-1], x).backward()
        step()
    moved = torch.cat([p.detach().flatten() for p in model.parameters()])
    return Outcome(model, {"first output": outputs[0].detach()}, gradients(model) | {"moved": moved})


def hooks_on_tensors_and_modules(compiled):
    model, seen = nn.Sequential(Block(), Block()), {}
    model[1].register_forward_hook(lambda _module, _given, made: made * 2)
    model[0].up.weight.register_hook(lambda grad: grad * 0.5)
    model[1].down.weight.register_post_accumulate_grad_hook(lambda p: seen.update(after=p.grad.clone()))
    x = torch.randn(12, WIDTH, requires_grad=True)
    x.register_hook(lambda grad: seen.update(input=grad.clone()))
    y = compiled(model)(x)
    y.register_hook(lambda grad: grad * 3)
    y.square().mean().backward()
    assert set(seen) == {"after", "input"}
    return outcome(model, [y], **seen)


PROGRAMS = [
    autocast_around, autocast_inside, fp16_with_a_scaler, accumulated, two_forwards_before_one_backward,
    backwards_in_another_order, recurrent, one_forward_for_three_backwards, parts_of_a_gradient, adapters, thawed, in_turns,
    tied, with_a_compiled_optimizer, hooks_on_tensors_and_modules,
]  # fmt: skip


@under(BOTH, *PROGRAMS)
def test_training(program, policy):
    hold(program, policy)


def test_three_backwards_add_up_to_three_times_one():
    def once(compiled):
        model = Block()
        y = compiled(model)(torch.randn(12, WIDTH))
        y.square().mean().backward()
        return outcome(model, [y])

    one, three = (hold(program, "int8").lossy for program in (once, one_forward_for_three_backwards))
    assert all(torch.allclose(3 * grad, three[name], rtol=1e-5) for name, grad in one.items())


def test_nothing_is_saved_for_frozen_layers():
    rows = hold(adapters, "int8").report.saved
    assert not [row for row in rows if row.compressible and row.used_by and all("base" in use for use in row.used_by)]
    assert {row.module for row in rows if row.codec == "int8"}
