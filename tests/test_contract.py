import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fx_actcomp
import fx_actcomp.partition as partition
from fx_actcomp.nodes import is_tangent

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
POOL = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
WEIGHT_GRADIENT = {1: nn.grad.conv1d_weight, 2: nn.grad.conv2d_weight, 3: nn.grad.conv3d_weight}
IN, HIDDEN, OUT = 3, 8, 12


class Net(nn.Module):
    """A convolution, and a second one that alone reads what the first makes."""

    def __init__(self, second=None, *, space=2, between=nn.Identity, **how):
        super().__init__()
        self.first = CONV[space](IN, HIDDEN, 3, padding=1)
        self.between = between()
        self.second = second or CONV[space](HIDDEN, OUT, 1, **how)

    def forward(self, x):
        return self.second(self.between(self.first(x)))


@pytest.fixture
def backwards(monkeypatch):
    """The backward graphs as they are compiled."""
    seen, stock = [], partition.compress_boundary

    def keeping(forward, backward, *args, **kwargs):
        plan = stock(forward, backward, *args, **kwargs)
        seen.append(backward.graph)
        return plan

    monkeypatch.setattr(partition, "compress_boundary", keeping)
    return seen


def step(model, x, dy, policy):
    """Gradients by name, under a policy."""
    torch._dynamo.reset()
    model.zero_grad()
    x.grad = None
    call = torch.compile(
        model, backend="actcomp", options={"compiler": "aot_eager", "min_bytes": 0, "strict": True, "policy": policy}
    )
    call(x).backward(dy)
    leaves = {**dict(model.named_parameters()), "x": x}
    return {name: leaf.grad.clone() for name, leaf in leaves.items() if leaf.grad is not None}


def expanded_means(h, side):
    """Means over windows, each window cut at the ends, at each of its places."""
    space = h.dim() - 2
    means = POOL[space](h, side, ceil_mode=True, count_include_pad=False)
    for d in range(2, h.dim()):
        means = means.repeat_interleave(side, d)
    return means[(..., *map(slice, h.shape[2:]))]


def expected_weight_gradient(model, x, dy, side):
    with torch.no_grad():
        h = model.first(x).double()
    weight = model.second.weight
    return WEIGHT_GRADIENT[h.dim() - 2](expanded_means(h, side), weight.shape, dy.double(), groups=model.second.groups)


def restored_sizes(graph):
    """Elements of the largest tensor in backward that is made of saved values alone."""
    gradients = set()
    for node in graph.nodes:
        if is_tangent(node) or gradients.intersection(node.all_input_nodes):
            gradients.add(node)
    saved = [node for node in graph.nodes if node not in gradients and isinstance(node.meta.get("val"), torch.Tensor)]
    parameters_and_inputs = {node for node in graph.find_nodes(op="placeholder") if node.name.startswith("primals")}
    return max((node.meta["val"].numel() for node in saved if node not in parameters_and_inputs), default=0)


def assert_close(got, want, tolerance=1e-6):
    assert (got - want).norm() <= tolerance * want.norm()


def assert_contracted(model, x, dy, policy, side, backwards):
    exact = step(model, x, dy, "none")
    backwards.clear()
    got = step(model, x, dy, policy)
    (graph,) = backwards
    assert restored_sizes(graph) == len(x) * HIDDEN * math.prod(-(-n // side) for n in dy.shape[2:])
    assert got.keys() == exact.keys()
    assert_close(got["second.weight"].double(), expected_weight_gradient(model, x, dy, side), 1e-5)
    assert (got["second.weight"] - exact["second.weight"]).norm() > 0.01 * exact["second.weight"].norm()
    for name in got.keys() - {"second.weight"}:
        assert_close(got[name], exact[name])
        assert got[name].stride() == exact[name].stride()


SHAPES = [(4, IN, 16), (4, IN, 33), (2, IN, 16, 16), (2, IN, 15, 9), (2, IN, 7, 20), (2, IN, 6, 7, 9)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("side", [2, 4])
def test_a_pointwise_convolution_takes_its_weight_gradient_from_the_means(shape, side, backwards):
    x, dy = torch.randn(shape, requires_grad=True), torch.randn(shape[0], OUT, *shape[2:])
    assert_contracted(Net(space=len(shape) - 2), x, dy, f"pool{side}", side, backwards)


@pytest.mark.parametrize("how", [{"groups": 2}, {"groups": 4}, {"bias": False}, {"dilation": 2}], ids=str)
def test_groups_no_bias_and_a_dilation_that_moves_nothing(how, backwards):
    x, dy = torch.randn(2, IN, 13, 16, requires_grad=True), torch.randn(2, OUT, 13, 16)
    assert_contracted(Net(**how), x, dy, "pool2", 2, backwards)


@pytest.mark.parametrize("gradient", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("shape", [(2, IN, 16, 16), (2, IN, 9, 13)], ids=str)
def test_channels_last(shape, gradient, backwards):
    model = Net().to(memory_format=torch.channels_last)
    x = torch.randn(shape).contiguous(memory_format=torch.channels_last).requires_grad_()
    dy = torch.randn(shape[0], OUT, *shape[2:]).contiguous(memory_format=gradient)
    assert_contracted(model, x, dy, "pool2", 2, backwards)


FORMATS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("of_x", FORMATS, ids=str)
@pytest.mark.parametrize("of_weights", FORMATS, ids=str)
@pytest.mark.parametrize("of_gradient", FORMATS, ids=str)
def test_the_input_s_gradient_has_the_strides_that_it_has_without_us(of_x, of_weights, of_gradient, backwards):
    model = Net().to(memory_format=of_weights)
    x = torch.randn(2, IN, 16, 9).contiguous(memory_format=of_x).requires_grad_()
    dy = torch.randn(2, OUT, 16, 9).contiguous(memory_format=of_gradient)
    strides = []
    for policy in ("none", "pool2"):
        backwards.clear()
        step(model, x, dy, policy)
        of_first = [
            node.args[0]
            for node in backwards[0].find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default)
            if tuple(node.args[1].meta["val"].shape) == tuple(x.shape)
        ]
        strides.append([node.meta["val"].stride() for node in of_first])
    assert len(strides[0]) == 1
    assert strides[0] == strides[1]


def test_without_an_input_gradient_none_is_computed(backwards):
    model, x, dy = Net(), torch.randn(2, IN, 16, 16), torch.randn(2, OUT, 16, 16)
    model.first.requires_grad_(False)
    assert_contracted(model, x, dy, "pool2", 2, backwards)
    hidden = (2, HIDDEN, 16, 16)
    assert not [n for n in backwards[0].nodes if getattr(n.meta.get("val"), "shape", ()) == hidden]


def test_with_a_frozen_weight_nothing_is_restored_for_it(backwards):
    model, x, dy = Net(), torch.randn(2, IN, 16, 16, requires_grad=True), torch.randn(2, OUT, 16, 16)
    model.second.weight.requires_grad_(False)
    exact, got = step(model, x, dy, "none"), step(model, x, dy, "pool2")
    assert exact.keys() == got.keys() == {"first.weight", "first.bias", "second.bias", "x"}
    assert all(torch.equal(exact[name], got[name]) for name in got)
    assert restored_sizes(backwards[-1]) <= 2 * HIDDEN * 8 * 8


def test_a_frozen_bias_has_no_gradient(backwards):
    model, x, dy = Net(), torch.randn(2, IN, 16, 16, requires_grad=True), torch.randn(2, OUT, 16, 16)
    model.second.bias.requires_grad_(False)
    assert_contracted(model, x, dy, "pool2", 2, backwards)


def test_means_in_8_bits_contract_too(backwards):
    model, x, dy = Net(), torch.randn(2, IN, 16, 16, requires_grad=True), torch.randn(2, OUT, 16, 16)
    exact, got = step(model, x, dy, "pool2"), step(model, x, dy, "pool2:means=int8")
    assert restored_sizes(backwards[-1]) <= 2 * HIDDEN * 8 * 8
    assert 0 < (got["second.weight"] - exact["second.weight"]).norm() < 0.02 * exact["second.weight"].norm()
    for name in got.keys() - {"second.weight"}:
        assert torch.equal(got[name], exact[name])


class Heads(nn.Module):
    """Two convolutions that read the same."""

    def __init__(self, kernel):
        super().__init__()
        self.first = nn.Conv2d(IN, HIDDEN, 3, padding=1)
        self.second, self.third = nn.Conv2d(HIDDEN, OUT, 1), nn.Conv2d(HIDDEN, OUT, kernel, padding=kernel // 2)

    def forward(self, x):
        h = self.first(x)
        return self.second(h) + 2 * self.third(h)


@pytest.mark.parametrize("kernel", [1, 3])
def test_two_readers_contract_where_both_are_pointwise(kernel, backwards):
    model, x, dy = Heads(kernel), torch.randn(2, IN, 16, 16, requires_grad=True), torch.randn(2, OUT, 16, 16)
    exact, got = step(model, x, dy, "none"), step(model, x, dy, "pool2")
    hidden = 2 * HIDDEN * 16 * 16
    assert restored_sizes(backwards[-1]) == hidden // 4 if kernel == 1 else restored_sizes(backwards[-1]) >= hidden
    assert_close(got["second.weight"].double(), expected_weight_gradient(model, x, dy, 2), 1e-5)
    with torch.no_grad():
        pooled = expanded_means(model.first(x).double(), 2)
    third = nn.grad.conv2d_weight(pooled, model.third.weight.shape, 2 * dy.double(), padding=kernel // 2)
    assert_close(got["third.weight"].double(), third, 1e-5)
    for name in got.keys() - {"second.weight", "third.weight"}:
        assert_close(got[name], exact[name])


class Watched(Net):
    """A second reader of the hidden tensor, which takes no value of it into a gradient."""

    def __init__(self, watch):
        super().__init__()
        self.watch = watch

    def forward(self, x):
        h = self.first(x)
        return self.second(h) + self.watch(h).mean()


WATCHES = {
    "clamp": lambda h: h.clamp(-1, 1),
    "leaky_relu": F.leaky_relu,
    "relu": F.relu,
    "abs": torch.abs,
    "where": lambda h: torch.where(h > 0.3, h, 0.0),
    "max_pool": lambda h: F.max_pool2d(h, 2),
    "avg_pool": lambda h: F.avg_pool2d(h, 2),
    "adaptive_avg_pool": lambda h: F.adaptive_avg_pool2d(h, 3),
    "reflection_pad": lambda h: F.pad(h, (1, 1, 1, 1), mode="reflect"),
    "upsample": lambda h: F.interpolate(h, scale_factor=2),
    "zeros_like": lambda h: h + torch.zeros_like(h),
}


@pytest.mark.parametrize("name", WATCHES)
def test_readers_that_only_decide_or_only_ask_for_the_size_are_no_obstacle(name):
    model, x, dy = Watched(WATCHES[name]), torch.randn(2, IN, 16, 16, requires_grad=True), torch.randn(2, OUT, 16, 16)
    exact, got = step(model, x, dy, "none"), step(model, x, dy, "pool2")
    assert_close(got["second.weight"].double(), expected_weight_gradient(model, x, dy, 2), 1e-5)
    for key in got.keys() - {"second.weight"}:
        assert_close(got[key], exact[key])


def test_bf16_contracts(backwards):
    model, x = Net().bfloat16(), torch.randn(2, IN, 16, 16).bfloat16().requires_grad_()
    dy = torch.randn(2, OUT, 16, 16).bfloat16()
    exact, got = step(model, x, dy, "none"), step(model, x, dy, "pool2")
    assert restored_sizes(backwards[-1]) <= 2 * HIDDEN * 8 * 8
    assert all(got[name].dtype is torch.bfloat16 for name in got)
    assert_close(got["second.weight"].double(), expected_weight_gradient(model, x, dy, 2), 0.02)
    for name in got.keys() - {"second.weight"}:
        assert_close(got[name].double(), exact[name].double(), 0.02)


def test_autocast_contracts(backwards):
    model, x, dy = Net(), torch.randn(2, IN, 16, 16, requires_grad=True), torch.randn(2, OUT, 16, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        got = step(model, x, dy, "pool2")
        h = model.first(x).detach().double()
    assert restored_sizes(backwards[-1]) == 2 * IN * 16 * 16  # the cast of x
    want = nn.grad.conv2d_weight(expanded_means(h, 2), model.second.weight.shape, dy.double())
    assert_close(got["second.weight"].double(), want, 0.02)


NOT = {
    "stride": lambda: Net(stride=2),
    "padding": lambda: Net(padding=1),
    "3x3": lambda: Net(nn.Conv2d(HIDDEN, OUT, 3, padding=1)),
    "1x3": lambda: Net(nn.Conv2d(HIDDEN, OUT, (1, 3), padding=(0, 1))),
    "transposed": lambda: Net(nn.ConvTranspose2d(HIDDEN, OUT, 1)),
    "masked": lambda: Net(between=nn.ReLU),
}


@pytest.mark.parametrize("name", NOT)
def test_other_convolutions_and_masked_inputs_are_restored(name, backwards):
    model, x = NOT[name](), torch.randn(2, IN, 16, 16, requires_grad=True)
    dy = torch.randn_like(model(x))
    exact, got = step(model, x, dy, "none"), step(model, x, dy, "pool2")
    assert restored_sizes(backwards[-1]) >= 2 * HIDDEN * 16 * 16
    with torch.no_grad():
        h = model.between(model.first(x)).double()
    pooled = expanded_means(h, 2)
    if name == "masked":
        pooled = torch.where(h > 0, pooled / expanded_means((h > 0).double(), 2).clamp_min(1e-9), 0.0)
    second = model.second.double()
    (want,) = torch.autograd.grad(second(pooled), second.weight, dy.double())
    assert_close(got["second.weight"].double(), want, 1e-5)
    for key in got.keys() - {"second.weight"}:
        assert_close(got[key], exact[key])


def test_other_codecs_restore(backwards):
    model, x, dy = Net(), torch.randn(2, IN, 16, 16, requires_grad=True), torch.randn(2, OUT, 16, 16)
    for policy in ("int8", "division"):
        step(model, x, dy, policy)
        assert restored_sizes(backwards[-1]) >= 2 * HIDDEN * 16 * 16


def test_the_report_shows_the_means():
    found = fx_actcomp.explain(Net(), torch.randn(2, IN, 16, 16), policy="pool2", compiler="aot_eager", min_bytes=0)
    (row,) = [row for row in found.saved if row.kind == "activation"]
    assert (row.codec, row.bytes_before, row.bytes_after) == ("pool2", 2 * HIDDEN * 256 * 4, 2 * HIDDEN * 64 * 4)
