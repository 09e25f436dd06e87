import pytest
import torch
import torch.nn.functional as F
from inversion_cases import (
    FUNCTIONS,
    ROWS,
    UNMOVED,
    WIDTH,
    Net,
    compiled,
    distance,
    error,
    explained,
    held,
    pair,
    restored,
    rows,
    saved_bytes,
    weighed,
)
from scenarios.base import Scenario
from scenarios.running import calls_of_backend, options
from torch import nn

import fx_actcomp

by_function = pytest.mark.parametrize("name", FUNCTIONS)
BITS = ROWS * WIDTH // 8


@by_function
def test_the_report_says_that_the_pre_activation_takes_a_bit_or_nothing(name):
    f, branch, pins = FUNCTIONS[name]
    saved, report = explained(Net(f), rows())
    assert (saved["up::aten.addmm"].codec, saved["up::aten.addmm"].bytes_after) == ("invert", branch * BITS)
    decided = [row.bytes_after for row in report.saved if row.kind == "decision"]
    assert len(decided) == pins
    assert all(nbytes <= 2 * BITS for nbytes in decided)
    assert report.bytes_after == ROWS * WIDTH * 4 + branch * BITS + sum(decided)


@by_function
def test_autograd_holds_no_pre_activation_and_what_the_report_says(name):
    net, x = Net(FUNCTIONS[name][0]), rows()
    call = compiled(net, "invert")
    assert not held(call, net.up(x).detach(), x)
    assert saved_bytes(call, net, x) == fx_actcomp.report(call).bytes_after


def test_without_a_policy_autograd_holds_the_pre_activation():
    net, x = Net(), rows()
    assert held(compiled(net, "none"), net.up(x).detach(), x)


@by_function
def test_the_gradient_in_fp32_is_within_2e_5(name):
    assert 0 <= error(Net(FUNCTIONS[name][0]), rows(1024)) <= 2e-5


@by_function
def test_the_gradient_in_bf16_is_as_good_as_bf16(name):
    assert error(Net(FUNCTIONS[name][0]).bfloat16(), rows(256).bfloat16()) <= 0.01


def test_what_is_in_bf16_is_restored_too():
    assert restored(Net().bfloat16(), rows().bfloat16()) == ["up::aten.addmm"]


@pytest.mark.parametrize("name", ["gelu", "quick_gelu", "mish", "elu", "softsign"])
def test_the_gradient_under_autocast_is_as_good_as_bf16(name):
    net, x = Net(FUNCTIONS[name][0]), rows(256)
    with torch.autocast("cpu", torch.bfloat16):
        exact, got = pair(net, x)
        before, after = (explained(net, x, policy=policy)[1].bytes_after for policy in ("none", "invert"))
    assert distance(exact, got) <= 0.01
    assert after <= before


@pytest.mark.parametrize("name", UNMOVED)
def test_where_torch_saves_a_mask_or_the_output_nothing_is_worse(name):
    net, x = Net(UNMOVED[name]), rows()
    assert explained(net, x)[1].bytes_after <= explained(net, x, policy="none")[1].bytes_after
    assert error(net, x) == 0


class Images(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.first, self.second, self.f = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3), f

    def forward(self, x):
        return self.second(self.f(self.first(x)))


@pytest.mark.parametrize("name", ["silu", "hardswish", "elu", "quick_gelu"])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
def test_images_of_either_layout_are_restored(name, form):
    net, x = Images(FUNCTIONS[name][0]).to(memory_format=form), torch.randn(2, 3, 9, 7).to(memory_format=form)
    assert restored(net, x) == ["first::aten.convolution"]
    assert error(net, x) <= 2e-5


VIEWS = {
    "rows of three": lambda net, x: net.down(F.silu(net.up(x.view(4, -1, 8)))),
    "view between": lambda net, x: net.down(F.silu(net.up(x).view(-1, 2, 12)).view(-1, WIDTH)),
    "unsqueezed": lambda net, x: net.down(F.silu(net.up(x).unsqueeze(0)).squeeze(0)),
    "transposed": lambda net, x: net.down(F.silu(net.up(x).t()).t()),
    "transposed after": lambda net, x: net.side.weight @ F.silu(net.up(x)).t(),
    "permuted": lambda net, x: net.down(F.silu(net.up(x.view(4, -1, 8)).permute(1, 0, 2)).permute(1, 0, 2)),
    "transposed copy": lambda net, x: net.down(F.silu(net.up(x).t().contiguous()).t()),
    "sliced": lambda net, x: net.down(F.silu(net.up(x)[::2])),
    "half of it": lambda net, x: F.silu(net.up(x)[:, :12]) @ net.down.weight[:, :12].t(),
    "both halves": lambda net, x: torch.cat([F.silu(h) @ net.down.weight[:, :12].t() for h in net.up(x).chunk(2, -1)]),
    "expanded": lambda net, x: net.down(F.silu(net.up(x)[:1].expand(5, -1))),
    "flipped": lambda net, x: net.down(F.silu(net.up(x)).flip(0)),
    "twice": lambda net, x: net.down(F.silu(net.up(x))) + net.down(F.silu(net.up(x))),
    "two functions": lambda net, x: net.down(F.silu(net.up(x)) + F.gelu(net.up(x))),
    "chained": lambda net, x: net.down(F.gelu(net.side(F.silu(net.up(x))))),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_on_the_way_leave_the_gradient_right(name):
    net, x = Net(forward=VIEWS[name]), rows()
    assert error(net, x) <= 2e-5
    assert explained(net, x)[1].bytes_after <= explained(net, x, policy="none")[1].bytes_after


@pytest.mark.parametrize("name", ["rows of three", "view between", "unsqueezed", "chained"])
def test_views_on_the_way_do_not_keep_the_pre_activation(name):
    net, x = Net(forward=VIEWS[name]), rows()
    assert restored(net, x)
    assert not held(compiled(net, "invert"), net.up(x).detach(), x)


@pytest.mark.parametrize("name", ["gelu", "mish", "elu"])
def test_other_batch_sizes_are_right_and_compile_no_more_often(name):
    def steps(call, _, inputs):
        for x in inputs:
            weighed(call(x)).backward()
        return {}, {}

    scenario = Scenario("batches", lambda: (Net(FUNCTIONS[name][0]), [rows(n) for n in (4, 6, 7, 9)]), steps)
    plain = calls_of_backend(scenario, torch._dynamo.lookup_backend("aot_eager"))
    assert calls_of_backend(scenario, fx_actcomp.actcomp, options=options("invert")) == plain


@pytest.mark.parametrize("name", ["gelu", "mish", "elu", "softsign"])
def test_symbolic_sizes_are_restored_and_right(name):
    net, found = Net(FUNCTIONS[name][0]), {}
    for arm in ("none", "invert"):
        torch._dynamo.reset()
        call = torch.compile(net, backend="actcomp", options=options(arm), dynamic=True)
        for batch in (4, 7, 9):
            net.zero_grad()
            torch.manual_seed(batch)
            weighed(call(rows(batch))).backward()
            found[arm, batch] = torch.cat([p.grad.flatten() for p in (*net.up.parameters(), *net.down.parameters())])
    assert all(distance(found["none", batch], found["invert", batch]) <= 2e-5 for batch in (4, 7, 9))
    assert {"invert", "image"} & {row.codec for row in fx_actcomp.report(call).saved}


def test_backward_twice_gives_the_same_twice():
    net = Net()
    loss = weighed(compiled(net, "invert")(rows()))
    leaves = [net.up.weight, net.down.weight]
    once, twice = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


def test_two_forwards_before_backward_keep_their_own():
    net, x, y = Net(), rows(), rows()
    call = compiled(net, "invert")
    first, second = (weighed(call(z)) for z in (x, y))
    second.backward()
    first.backward()
    got = net.up.weight.grad.clone()
    net.zero_grad()
    for z in (x, y):
        weighed(net(z)).backward()
    assert distance(net.up.weight.grad, got) <= 2e-5


@pytest.mark.parametrize("name", ["gelu", "mish", "elu"])
def test_evaluation_and_no_grad_give_the_same_outputs(name):
    net, x = Net(FUNCTIONS[name][0]), rows()
    exact, call = compiled(net, "none")(x), compiled(net, "invert")
    assert torch.equal(call(x), exact)
    net.eval()
    assert torch.equal(call(x), exact)
    with torch.no_grad():
        assert torch.equal(call(x), exact)
    with torch.inference_mode():
        assert torch.equal(call(x), exact)
