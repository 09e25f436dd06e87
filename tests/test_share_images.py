import pytest
import torch
import torch.nn.functional as F
from scenarios.base import Scenario
from scenarios.running import calls_of_backend, options
from share_cases import Net, compiled, error, image, plan, prenorm, weighed
from torch import nn

import fx_actcomp

EXACT = fx_actcomp.Policy("images", None, images=True)
by_norm = pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])


def tokens(batch=4):
    return torch.randn(batch, 16, 32)


def images(report):
    """Rows that are made again from another one."""
    return [row for row in report.saved if "made again" in row.reason]


@by_norm
def test_the_deeper_norms_outputs_take_no_bytes(norm):
    _, report = plan(prenorm(norm), tokens(), policy="blpa8")
    (row,) = images(report)
    assert (row.module, row.codec, row.bytes_after) == ("2.up", "int8", 0)
    source = row.reason.split()[-1]
    assert [other.bytes_after > 0 for other in report.saved if other.name == source] == [True]


@by_norm
def test_images_cost_little_error_and_save_their_bytes(norm):
    net, x = prenorm(norm), tokens()
    assert error(net, x, policy="blpa8") < 1.2 * error(net, x, policy="int8")
    with_images, without = (plan(net, x, policy=policy)[1] for policy in ("blpa8", "int8"))
    (row,) = images(with_images)
    (same,) = [other for other in without.saved if other.name == row.name]
    assert same.bytes_after > 0
    assert with_images.bytes_after == without.bytes_after - same.bytes_after


@by_norm
def test_images_of_exact_tensors_are_exact(norm):
    net, x = prenorm(norm), tokens()
    assert error(net, x, policy=EXACT) < 1e-6
    _, report = plan(net, x, policy=EXACT)
    (row,) = images(report)
    assert (row.codec, row.bytes_after) == ("image", 0)
    assert report.bytes_after == report.bytes_before - row.bytes_before


@by_norm
def test_four_bits_make_images_too(norm):
    net, x = prenorm(norm), tokens()
    (row,) = images(plan(net, x, policy="blpa4")[1])
    assert (row.codec, row.bytes_after) == ("int4" if norm is nn.LayerNorm else "int8", 0)  # RMSNorm's is a factor, too
    assert error(net, x, policy="blpa4") < 1.2 * error(net, x, policy="int4")


def test_without_the_policy_nothing_is_made_again():
    for policy in ("none", "lossless", "int8", "int4"):
        assert images(plan(prenorm(nn.LayerNorm), tokens(), policy=policy)[1]) == []


@by_norm
@pytest.mark.parametrize(
    "overrides", [{"2.up": None}, {"2.norm": None, "1": None}, {"2.norm": "int4"}, {"2.up": "int4"}], ids=str
)
def test_overrides_of_either_side_stay_right(norm, overrides):
    net, x = prenorm(norm), tokens()
    _, report = plan(net, x, policy="blpa8", overrides=overrides)
    if "2.up" in overrides:
        (row,) = [row for row in report.saved if row.name in ("view_8",)]
        assert row.bytes_after > 0
    assert error(net, x, policy="blpa8", overrides=overrides) < 0.15


def scale_changed_in_between(policy):
    net = prenorm(nn.LayerNorm)
    loss = weighed(compiled(net, policy)(tokens()))
    with torch.no_grad():
        net[2].norm.weight.mul_(2)
    loss.backward()


@pytest.mark.parametrize("policy", ["none", "blpa8", EXACT], ids=lambda policy: getattr(policy, "name", policy))
def test_a_norms_weight_changed_before_backward_is_an_error_as_without_us(policy):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scale_changed_in_between(policy)


def gated(net, x):
    """As in a squeeze-and-excitation block: a gate for each channel of each image."""
    h = torch.tanh(net.conv(x))
    gate = F.conv2d(h.mean((2, 3), keepdim=True), net.head.weight[:, :, :1, :1])
    return net.head(h), net.other(h * gate)


@pytest.mark.parametrize("overrides", [{}, {"re:^$::aten.tanh": None}], ids=["all", "source kept"])
@pytest.mark.parametrize("policy", ["blpa8", EXACT], ids=["blpa8", "exact"])
def test_a_factor_that_is_itself_saved_and_compressed_is_right(policy, overrides):
    net, x = Net(gated), image(batch=64, side=8)
    plan(net, x, policy=policy, overrides=overrides)
    assert error(net, x, policy=policy, overrides=overrides) < 0.02


def test_images_of_one_source_are_each_made_again():
    def two(net, x):
        h = torch.sigmoid(net.conv(x))
        return net.head(h * net.scale.view(1, -1, 1, 1)), net.other(h + net.shift.view(1, -1, 1, 1)), net.head(h)

    net, x = Net(two), image()
    rows = images(plan(net, x, policy=EXACT)[1])
    assert len(rows) == 2
    assert error(net, x, policy=EXACT) < 1e-6


def test_an_images_own_decision_is_forwards_own():
    def shifted(net, x):
        h = F.gelu(net.conv(x))
        moved = h * net.scale.view(1, -1, 1, 1)
        return net.head(h), net.other(moved), torch.where(moved > 0.1, moved, net.shift.view(1, -1, 1, 1))

    net, x = Net(shifted), image()
    assert error(net, x, policy=EXACT) < 1e-6
    assert error(net, x, policy="blpa8") < 0.02


def steps(call, _, inputs):
    for x in inputs:
        weighed(call(x)).backward()
    return {}, {}


@by_norm
@pytest.mark.parametrize("policy", ["blpa8", "blpa4"])
def test_other_batch_sizes_compile_no_more_often_than_without_us(norm, policy):
    scenario = Scenario("batches", lambda: (prenorm(norm), [tokens(n) for n in (4, 6, 7, 9)]), steps)
    plain = calls_of_backend(scenario, torch._dynamo.lookup_backend("aot_eager"))
    assert calls_of_backend(scenario, fx_actcomp.actcomp, options=options(policy)) == plain


@by_norm
@pytest.mark.parametrize(("policy", "bound"), [(EXACT, 1e-6), ("blpa8", 0.02)], ids=["exact", "blpa8"])
def test_dynamic_batches_are_right_and_still_make_images(norm, policy, bound):
    net, found = prenorm(norm), {}  # on rows, since views of symbolic sizes end an image's chain
    for arm in ("none", policy):
        torch._dynamo.reset()
        call = torch.compile(net, backend="actcomp", options=options(arm), dynamic=True)
        for batch in (4, 7, 9):
            net.zero_grad()
            torch.manual_seed(batch)
            weighed(call(torch.randn(16 * batch, 32))).backward()
            found[arm, batch] = torch.cat([p.grad.flatten() for p in net.parameters()])
    for batch in (4, 7, 9):
        exact, got = found["none", batch], found[policy, batch]
        assert (got - exact).norm() < bound * exact.norm()
    assert images(fx_actcomp.report(call))


@by_norm
def test_dynamic_batches_of_sequences_are_right(norm):
    net, found = prenorm(norm), {}
    for arm in ("none", "blpa8"):
        torch._dynamo.reset()
        net.zero_grad()
        torch.manual_seed(0)
        for batch in (4, 7):
            weighed(torch.compile(net, backend="actcomp", options=options(arm), dynamic=True)(tokens(batch))).backward()
        found[arm] = torch.cat([p.grad.flatten() for p in net.parameters()])
    assert (found["blpa8"] - found["none"]).norm() < 0.02 * found["none"].norm()


def test_backward_twice_gives_the_same_twice():
    net = prenorm(nn.LayerNorm)
    loss = weighed(compiled(net, "blpa8")(tokens()))
    once, twice = (torch.autograd.grad(loss, list(net.parameters()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
