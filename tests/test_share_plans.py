from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from scenarios.base import Scenario
from scenarios.running import calls_of_backend, options
from share_cases import Net, assert_same_mask, compiled, error, gradients, image, plan, weighed
from torch import nn

import fx_actcomp


def codecs(rows):
    return rows["conv::convolution"].codec, rows["relu::relu"].codec


OVERRIDDEN = [
    ("blpa4", {"relu": None}, ("blpa4", "keep")),
    ("blpa4", {"conv": None}, ("keep", "int4")),
    ("blpa8", {"conv": None}, ("keep", "int8")),
    ("blpa4", {"relu": "int8"}, ("blpa4", "int8")),
    ("blpa4", {"conv": "int8"}, ("int8", "int4")),
    ("blpa4", {"conv": "blpa8"}, ("blpa8", "int4")),
    ("blpa4", {"relu": "blpa8"}, ("blpa4", "int8")),
    ("blpa8", {"relu": "blpa8:sigmas=3.0"}, ("blpa8", "int8")),
    ("int8", {"conv": "blpa4"}, ("blpa4", "int8")),
    ("int8", {"relu": "blpa4"}, ("int8", "int4")),
    ("none", {"conv": "blpa8"}, ("blpa8", "keep")),
    ("lossless", {"conv": "blpa8"}, ("blpa8", "keep")),
]


@pytest.mark.parametrize(("policy", "overrides", "expected"), OVERRIDDEN, ids=str)
def test_an_override_of_one_of_the_two_ends_sharing(policy, overrides, expected):
    net, x = Net(), image()
    rows, report = plan(net, x, policy=policy, overrides=overrides)
    assert codecs(rows) == expected
    assert rows["conv::convolution"].bytes_after > 0
    assert rows["relu::relu"].bytes_after > 0
    assert not report.unmatched
    assert error(net, x, policy=policy, overrides=overrides) < 0.2
    assert_same_mask(net, x, policy, overrides=overrides)


@pytest.mark.parametrize("policy", ["none", "lossless", "int8"])
@pytest.mark.parametrize("overrides", [{"conv": "blpa4", "relu": "blpa4"}, {"*": "blpa4"}], ids=str)
def test_an_override_of_both_shares(policy, overrides):
    net, x = Net(), image()
    rows, _ = plan(net, x, policy=policy, overrides=overrides)
    assert codecs(rows) == ("blpa4", "blpa4")
    assert rows["relu::relu"].bytes_after == 0
    assert_same_mask(net, x, policy, overrides=overrides)


def test_an_override_of_one_pair_shares_there_alone():
    def pairs(net, x):
        return net.other(net.relu(net.norm(net.head(F.relu(net.norm(net.conv(x)))))))

    net, x = Net(pairs), image()
    _, report = plan(net, x, policy="int8", overrides={"head": "blpa4", "relu": "blpa4"})
    after = [(row.codec, row.bytes_after > 0) for row in report.saved if row.op in ("aten.convolution", "aten.relu")]
    assert after == [("int8", True), ("int8", True), ("blpa4", True), ("blpa4", False)]


@pytest.mark.parametrize(("min_bytes", "shared"), [(4 * 8 * 256 * 4, True), (4 * 8 * 256 * 4 + 1, False)])
def test_below_min_bytes_nothing_is_shared(min_bytes, shared):
    rows, report = plan(Net(), image(), min_bytes=min_bytes)
    assert codecs(rows) == (("blpa4", "blpa4") if shared else ("keep", "keep"))
    assert (report.bytes_after < report.bytes_before) == shared


def test_a_smaller_relu_below_min_bytes_stays_beside_the_norms_code():
    net = Net(lambda net, x: net.head(net.relu(net.norm(net.conv(x).float()).bfloat16()))).bfloat16()
    net.norm.float()
    x = image().bfloat16()
    rows, _ = plan(net, x, min_bytes=4 * 8 * 256 * 2 + 1)
    assert codecs(rows) == ("keep", "keep")
    assert not error(net, x, min_bytes=4 * 8 * 256 * 2 + 1)


class Places(NamedTuple):
    """What there is to read."""

    net: Any
    input: Any
    norm: Any
    relu: Any


def used(function):
    """What reads the norm's input, its output and the ReLU, beside the head."""

    def forward(net, x):
        h = net.conv(x)
        normed = net.norm(h)
        relu = net.relu(normed)
        return net.head(relu), function(Places(net, h, normed, relu))

    return Net(forward)


USES = {
    "another convolution of the relu": lambda at: at.net.other(at.relu),
    "exp of the relu": lambda at: torch.exp(at.relu),
    "relu as a divisor": lambda at: 1 / (1 + at.relu),
    "relu returned": lambda at: at.relu,
    "sigmoid of the norm": lambda at: torch.sigmoid(at.norm),
    "silu of the norm": lambda at: F.silu(at.norm),
    "norm returned": lambda at: at.norm,
    "convolution of the norm": lambda at: at.net.other(at.norm),
    "convolution of the input": lambda at: at.net.other(at.input),
    "input returned": lambda at: at.input,
    "gelu of the input": lambda at: F.gelu(at.input),
    "decision on the relu": lambda at: torch.where(at.relu > 0.5, 2 * at.relu, at.relu),
    "decision on the input": lambda at: F.relu(at.input),
    "pooled relu": lambda at: F.max_pool2d(at.relu, 2),
}


@pytest.mark.parametrize("policy", ["blpa8", "blpa4"])
@pytest.mark.parametrize("use", USES)
def test_the_gradient_is_near_whoever_else_reads_them(use, policy):
    net, x = used(USES[use]), image()
    plan(net, x, policy=policy)
    assert error(net, x, policy=policy) < {"blpa8": 0.02, "blpa4": 0.2}[policy]


@pytest.mark.parametrize("use", ["another convolution of the relu", "sigmoid of the norm", "convolution of the norm"])
def test_uses_that_bear_few_bits_leave_the_pair_shared(use):
    rows, _ = plan(used(USES[use]), image())
    assert codecs(rows) == ("blpa4", "blpa4")
    assert rows["relu::relu"].bytes_after == 0


def test_a_relu_that_the_caller_holds_is_not_made_again():
    rows, report = plan(used(USES["relu returned"]), image())
    assert rows["conv::convolution"].codec == "blpa4"
    (relu,) = [row for row in report.saved if row.op == "aten.relu"]
    assert (relu.kind, relu.codec) == ("output", "keep")


def test_a_relu_with_an_exact_use_is_kept_and_the_norms_input_has_its_code():
    rows, _ = plan(used(USES["relu as a divisor"]), image())
    assert codecs(rows) == ("blpa4", "keep")


def normed_relu(*, then_relu):
    """A ReLU that a convolution and a norm read; no gradient comes from the norm, so the first bias's is of the mask alone."""

    def forward(net, x):
        h = net.relu(net.conv(x))
        normed = net.norm(h)
        return net.other(h), net.head(F.relu(normed) if then_relu else normed)

    net = Net(forward)
    nn.init.zeros_(net.head.weight)
    return net


@pytest.mark.parametrize("policy", ["blpa8", "blpa4"])
@pytest.mark.parametrize("then_relu", [False, True])
def test_a_norm_after_a_relu_keeps_that_relus_mask(policy, then_relu):
    assert_same_mask(normed_relu(then_relu=then_relu), image(), policy, bias="conv.bias")


@pytest.mark.parametrize("combine", [torch.mul, torch.add])
def test_a_vector_along_the_width_is_no_parameter_of_the_norm(combine):
    def along_width(net, x):
        return net.head(F.relu(combine(net.norm(net.conv(x)), net.scale)))

    assert error(Net(along_width, nn.BatchNorm2d(8, affine=False)), image(side=8), policy="blpa8") < 0.02


def test_a_sum_with_a_factor_is_right():
    def scaled(net, x):
        return net.head(F.relu(torch.add(net.norm(net.conv(x)), net.shift.view(1, -1, 1, 1), alpha=3)))

    assert error(Net(scaled, nn.BatchNorm2d(8, affine=False)), image(), policy="blpa8") < 0.02


class Conditional(nn.Module):
    """A batch norm whose scale and shift are made by linear layers, before the norm or after it."""

    def __init__(self, *, before, width=256):
        super().__init__()
        self.before = before
        self.conv, self.norm, self.head = nn.Conv2d(3, width, 1), nn.BatchNorm2d(width, affine=False), nn.Conv2d(width, 4, 1)
        self.scale, self.bias, self.told = nn.Linear(5, width), nn.Linear(5, width), nn.Parameter(torch.randn(1, 5))

    def forward(self, x):
        normed = None if self.before else self.norm(self.conv(x))
        scale, bias = (layer(self.told).view(1, -1, 1, 1) for layer in (self.scale, self.bias))
        normed = self.norm(self.conv(x)) if normed is None else normed
        return self.head(F.relu(normed * scale + bias))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("policy", ["blpa8", "blpa4"])
def test_a_scale_that_is_itself_compressed_does_not_move_the_mask(policy, before):
    assert_same_mask(Conditional(before=before), image(side=8), policy, bias="bias.bias")


def test_a_zero_channel_harms_no_other_reader_of_the_norms_input():
    net, x = used(USES["convolution of the input"]), image()
    with torch.no_grad():
        net.norm.weight[::2] = 0
    assert error(net, x, policy="blpa8") < 0.02


@pytest.mark.parametrize("policy", ["blpa8", "blpa4"])
def test_two_forwards_before_a_backward_are_apart(policy):
    net, first, second = Net(), image(), image()
    call = compiled(net, policy)
    together = weighed(call(first)) + weighed(call(second))
    together.backward()
    got = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    apart = [gradients(net, x, policy) for x in (first, second)]
    for name, gradient in got.items():
        expected = apart[0][name] + apart[1][name]
        assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item() + 1e-4)


def test_backward_twice_gives_the_same_twice():
    net = Net()
    loss = weighed(compiled(net, "blpa4")(image()))
    once, twice = (torch.autograd.grad(loss, list(net.parameters()), retain_graph=True, allow_unused=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True) if a is not None)


def batches(call, _, inputs):
    for x in inputs:
        weighed(call(x)).backward()
    return {}, {}


@pytest.mark.parametrize("policy", ["blpa8", "blpa4"])
def test_other_batch_sizes_compile_no_more_often_than_without_us(policy):
    scenario = Scenario("batches", lambda: (Net(), [image(n) for n in (4, 6, 7, 9)]), batches)
    plain = calls_of_backend(scenario, torch._dynamo.lookup_backend("aot_eager"))
    assert calls_of_backend(scenario, fx_actcomp.actcomp, options=options(policy)) == plain


@pytest.mark.parametrize("policy", ["blpa8", "blpa4"])
def test_dynamic_batches_keep_the_mask_and_share(policy):
    net, found = Net(), {}
    for arm in ("none", policy):
        torch._dynamo.reset()
        call = torch.compile(net, backend="actcomp", options=options(arm), dynamic=True)
        for batch in (4, 7, 9):
            net.zero_grad()
            torch.manual_seed(batch)
            weighed(call(image(batch))).backward()
            found[arm, batch] = net.norm.bias.grad.clone(), net.head.weight.grad.clone()
    for batch in (4, 7, 9):
        (exact_bias, exact), (bias, got) = found["none", batch], found[policy, batch]
        assert torch.equal(bias, exact_bias)
        assert (got - exact).norm() < {"blpa8": 0.02, "blpa4": 0.2}[policy] * exact.norm()
    relus = [row for row in fx_actcomp.report(call).saved if row.op == "aten.relu"]
    assert relus
    assert all(row.bytes_after == 0 for row in relus)
