"""Sizes that change, that are 1, and that nobody knows before the graph runs."""

import torch
from mode_cases import BOTH, Block, Outcome, differing, gradients, hold, reference, run, under
from torch import nn

SIZES = [(4, 7), (3, 11), (1, 11), (4, 1)]


def steps(call, model, inputs):
    """A step on each input, and what it gave."""
    exact, lossy = {}, {}
    for number, x in enumerate(inputs):
        model.zero_grad()
        y = call(x)
        y.square().mean().backward()
        exact[f"output {number}"] = y.detach()
        lossy |= {f"{name} {number}": grad for name, grad in gradients(model, x=x).items()}
    return Outcome(model, exact, lossy)


def inputs_of(sizes, width=24):
    return [torch.randn(*size, width, requires_grad=True) for size in sizes]


def dynamic(compiled):
    model = Block()
    return steps(compiled(model, dynamic=True), model, inputs_of(SIZES))


def static(compiled):
    model = Block()
    return steps(compiled(model, dynamic=False), model, inputs_of(SIZES[:2]))


def marked_dynamic(compiled):
    model, inputs = Block(), inputs_of([(4, 7), (6, 7), (2, 7)])
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
    return steps(compiled(model, fullgraph=True), model, inputs)


def marked_unbacked(compiled):
    model, inputs = Block(), inputs_of([(4, 7), (6, 7), (1, 7)])
    for x in inputs:
        torch._dynamo.decorators.mark_unbacked(x, 0)
    return steps(compiled(model, fullgraph=True), model, inputs)


class Selects(nn.Module):
    """Works on the rows that a condition on the data selects."""

    def __init__(self):
        super().__init__()
        self.block, self.out = Block(), nn.Linear(24, 24)

    def forward(self, x):
        flat = x.reshape(-1, 24)
        index = (flat[:, 0] > 0.3).nonzero().squeeze(1)
        return flat.index_add(0, index, self.out(self.block(flat[index])))


class Takes(nn.Module):
    """Works on as many rows as a tensor says."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        count = int((x[..., 0] > 0).sum().item())
        torch._check(count <= x.shape[0] * x.shape[1])
        return self.block(x.reshape(-1, 24)[:count]).sum(0)


def selected_rows(compiled):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        model = Selects()
        return steps(compiled(model, fullgraph=True), model, inputs_of([(4, 7), (4, 7), (4, 7)]))


def a_number_of_rows(compiled):
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        model = Takes()
        return steps(compiled(model, fullgraph=True), model, inputs_of([(4, 7), (4, 7), (5, 7)]))


@under(BOTH, dynamic, static, marked_dynamic)
def test_sizes(program, policy):
    hold(program, policy)


@under(["lossless"], marked_unbacked, selected_rows, a_number_of_rows)
def test_unbacked_sizes(program, policy):
    hold(program, policy)


@under(["int8"], marked_unbacked, selected_rows)
def test_values_of_a_size_that_may_be_zero_stay_exact(program, policy):
    expected, got = reference(program), run(program, policy)
    assert differing(expected.exact | expected.lossy, got.exact | got.lossy) == []
    assert got.graphs == expected.graphs
    assert {row.reason for row in got.rows(kind="activation")} == {"a size that is only known at run time may be 0"}
    assert {row.codec for row in got.rows(kind="mask")} == {"bits"}
