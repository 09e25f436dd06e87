"""Others who handle saved tensors: the user's hooks, and torch's own offloading of activations."""

import pytest
import torch
from mode_cases import ALL, BOTH, CODECS, Block, Outcome, differing, error, gradients, hold, reference, run, under
from torch import nn
from torch._functorch import config as functorch_config

import fx_actcomp
import fx_actcomp.partition
from fx_actcomp import _torch
from fx_actcomp.nodes import module_path, nbytes, outputs, packet

WIDTH = 24


def step(compiled, hooks, **how):
    """A step in which only forward runs under the hooks."""
    model, x = nn.Sequential(Block(), Block()), torch.randn(16, WIDTH, requires_grad=True)
    call = compiled(model, **how)
    with hooks:
        y = call(x)
    y.square().mean().backward()
    return Outcome(model, {"output": y.detach()}, gradients(model, x=x))


def saved_on_cpu(compiled):
    return step(compiled, torch.autograd.graph.save_on_cpu())


def copied_by_hooks(compiled):
    """Hooks that move what they are given to another place, byte by byte."""
    return step(compiled, torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone().numpy(), torch.from_numpy))


def hooks_are_forbidden(compiled):
    return step(compiled, torch.autograd.graph.disable_saved_tensors_hooks("not here"))


class HooksInside(nn.Module):
    """Hooks on a part of what is compiled: Dynamo refuses to trace them, or inlines them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            x = self.first(x)
        return self.second(x)


def hooks_inside(compiled):
    model, x = HooksInside(), torch.randn(16, WIDTH, requires_grad=True)
    y = compiled(model)(x)
    y.square().mean().backward()
    return Outcome(model, {"output": y.detach()}, gradients(model, x=x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # at the graph break
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@under(BOTH, saved_on_cpu, copied_by_hooks, hooks_are_forbidden, hooks_inside)
def test_hooks(program, policy):
    hold(program, policy)


def test_hooks_are_given_the_compressed_parts():
    given = []

    def program(compiled):
        return step(compiled, torch.autograd.graph.saved_tensors_hooks(lambda x: given.append(x) or x, lambda x: x))

    seen = {}
    for policy in ("none", "int8"):
        given.clear()
        outcome = run(program, policy)
        held = {x.untyped_storage().data_ptr() for x in (*outcome.module.parameters(), outcome.exact["output"])}
        seen[policy] = sum(x.nbytes for x in given if x.untyped_storage().data_ptr() not in held)
        assert seen[policy] >= outcome.report.bytes_after
    assert seen["int8"] < seen["none"] / 2


def plain(compiled):
    model, x = nn.Sequential(Block(), Block()), torch.randn(16, WIDTH, requires_grad=True)
    y = compiled(model)(x)
    y.square().mean().backward()
    return Outcome(model, {"output": y.detach()}, gradients(model, x=x))


def mark(joint, _):
    """A joint pass that asks torch to offload what the first block makes."""
    for node in joint.graph.nodes:
        if node.op == "call_function" and "0" in module_path(node):
            node.meta["should_offload"] = True
    return joint


OFFLOAD = {"joint_custom_pass": mark, "enable_activation_offloading": True}
APART = {**OFFLOAD, "activation_offload_separate_stream": True}


@pytest.mark.parametrize("policy", ["none", *ALL])
def test_codes_are_offloaded_in_the_values_stead(policy):
    expected = reference(plain)
    with functorch_config.patch(**OFFLOAD):
        got = run(plain, policy)
    report = got.report
    assert differing(expected.exact, got.exact) == []
    assert error(expected.lossy, got.lossy) <= (0.0 if policy in ("none", "lossless") else 0.1)
    assert report.bytes_before == expected.report.bytes_before
    assert report.failures == ()
    share = report.offloaded / report.bytes_after
    assert 0.4 < share < 0.7  # what the first of two blocks saves, its output included
    assert f"torch's offloading moves {report.offloaded / 2**20:.3f} MiB" in str(report)


def test_what_is_offloaded_crosses_on_the_other_device_as_codes(monkeypatch):
    graphs = []
    real = fx_actcomp.partition.offload_saved

    def watched(forward, backward, *rest):
        moved = real(forward, backward, *rest)
        graphs.append((forward, backward))
        return moved

    monkeypatch.setattr(fx_actcomp.partition, "offload_saved", watched)
    with functorch_config.patch(**OFFLOAD):
        run(plain, "int8")
    ((forward, backward),) = graphs
    moved = [node for node in outputs(forward.graph) if packet(node) == "prims.device_put"]
    assert {node.meta["val"].dtype for node in moved} == {torch.uint8, torch.float32}  # codes and packed masks, their scales
    assert sum(nbytes(node) for node in moved if node.meta["val"].dtype is torch.float32) < 200
    names = {node.name for node in backward.graph.find_nodes(op="placeholder")}
    assert {node.name for node in moved} <= names
    assert sum(packet(node) == "prims.device_put" for node in backward.graph.nodes) == len(moved)


def test_codes_are_offloaded_on_another_stream():
    """Which only a GPU can run, but anyone can plan."""
    model, x = nn.Sequential(Block(), Block()), torch.randn(16, WIDTH)
    with functorch_config.patch(**APART):
        report = fx_actcomp.explain(model, x, compiler="aot_eager", min_bytes=0)
    assert 0 < report.offloaded < report.bytes_after < report.bytes_before / 2


def test_after_an_error_of_ours_torch_offloads_what_it_saves(monkeypatch):
    def fails(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(fx_actcomp.partition, "compress_boundary", fails)
    expected = reference(plain)
    with functorch_config.patch(**OFFLOAD), pytest.warns(UserWarning, match="planted"):
        got = run(plain, "int8", strict=False)
    assert differing({**expected.exact, **expected.lossy}, {**got.exact, **got.lossy}) == []


@pytest.mark.parametrize("policy", BOTH)
def test_what_is_moved_already_is_left_alone_and_the_rest_compressed(policy, monkeypatch):
    monkeypatch.setattr(_torch, "offloads", lambda: False)  # so that torch's partitioner moves it before the compression
    expected = reference(plain)
    with functorch_config.patch(**OFFLOAD):
        got = run(plain, policy)
    assert_moved(got.report)
    assert {row.codec for row in got.report.saved} & CODECS.get(policy, {policy})
    assert differing(expected.exact, got.exact) == []
    assert error(expected.lossy, got.lossy) <= (0.0 if policy == "lossless" else 0.1)


def test_what_is_moved_already_on_another_stream_is_left_alone(monkeypatch):
    monkeypatch.setattr(_torch, "offloads", lambda: False)
    model, x = nn.Sequential(Block(), Block()), torch.randn(16, WIDTH)
    with functorch_config.patch(**APART):
        assert_moved(fx_actcomp.explain(model, x, compiler="aot_eager", min_bytes=0))


def assert_moved(report):
    moved = [row for row in report.saved if row.name.startswith("cpu_offload_")]
    assert {row.kind for row in moved} == {"activation", "mask"}
    assert {(row.codec, row.reason) for row in moved} == {("keep", "torch offloads it already")}
