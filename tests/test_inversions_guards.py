import pytest
import torch
import torch.nn.functional as F
from inversion_cases import WIDTH, Net, compiled, distance, error, explained, held, pair, restored, rows, saved_bytes, weighed
from torch import nn

import fx_actcomp


def beside(read):
    """The pre-activation is read by another operator, too."""

    def forward(net, x):
        h = net.up(x)
        return net.down(net.f(h)) + net.down(read(net, h))

    return forward


def after(make):
    """What comes before the function isn't linear."""
    return lambda net, x: net.down(net.f(make(net.up(x))))


READ_ELSEWHERE = {
    "exp": beside(lambda _, h: (h / 4).exp()),
    "square": beside(lambda _, h: h * h),
    "softmax": beside(lambda _, h: h.softmax(-1)),
    "sine": beside(lambda _, h: torch.sin(h)),
    "tanh": beside(lambda _, h: torch.tanh(h)),
    "linear": beside(lambda net, h: net.side(h)),
    "layer norm": beside(lambda _, h: F.layer_norm(h, (WIDTH,))),
    "norm": beside(lambda _, h: h / h.norm()),
    "gate": beside(lambda net, h: h * torch.sigmoid(net.side.bias)),
    "its view": beside(lambda _, h: h.view(-1, 2, 12).exp().view(-1, WIDTH)),
    "a comparison": beside(lambda _, h: torch.where(h > 0.3, h, 0.0)),
    "maximum": beside(lambda _, h: h.amax(-1, keepdim=True).expand_as(h)),
}
FROM_ITS_OUTPUT = {
    "exp": after(lambda h: torch.exp(h / 4)),
    "sigmoid": after(torch.sigmoid),
    "tanh": after(torch.tanh),
    "relu": after(F.relu),
    "softmax": after(lambda h: h.softmax(-1)),
    "log softmax": after(lambda h: h.log_softmax(-1)),
    "square root": after(lambda h: torch.sqrt(h.square() + 1)),
    "relu seen through a view": after(lambda h: F.relu(h).view(-1, 2, 12).view(-1, WIDTH)),
}


@pytest.mark.parametrize("name", READ_ELSEWHERE)
def test_pre_activations_that_another_operator_reads_stay(name):
    net, x = Net(F.gelu, READ_ELSEWHERE[name]), rows()
    assert "up::aten.addmm" not in restored(net, x)
    assert error(net, x) <= 1e-6


@pytest.mark.parametrize("name", FROM_ITS_OUTPUT)
def test_pre_activations_that_their_producers_backward_reads_stay(name):
    net, x = Net(F.silu, FROM_ITS_OUTPUT[name]), rows()
    assert restored(net, x) == []
    assert error(net, x) <= 1e-6


THEIRS = {
    "output": lambda net, x: (net.down(F.silu(h := net.up(x))), h),
    "view of an output": lambda net, x: (net.down(F.silu(h := net.up(x))), h.view(-1, 2, 12)),
    "parameter": lambda net, x: x @ F.silu(net.down.weight),
}


@pytest.mark.parametrize("name", THEIRS)
def test_pre_activations_that_are_the_users_stay(name):
    net, x = Net(forward=THEIRS[name]), rows()
    assert restored(net, x) == []
    assert error(net, x) <= 1e-6


def test_an_input_of_the_user_stays():
    net, x = Net(forward=lambda net, x: F.silu(x) @ net.down.weight), rows().requires_grad_()
    assert restored(net, x) == []
    assert error(net, x) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_an_output_of_another_type_restores_nothing(dtype):
    net, x = Net(forward=lambda net, x: F.silu(net.up(x)).to(dtype) @ net.down.weight.t().to(dtype)), rows()
    assert restored(net, x) == []
    assert error(net, x) == 0


def test_an_output_that_was_rounded_on_the_way_restores_no_worse_than_stated():
    net, x = Net(lambda h: F.gelu(h).bfloat16().float()), rows(256)
    assert error(net, x) <= 2e-5


def test_an_output_that_is_compressed_itself_restores_nothing():
    net, x = Net(F.gelu), rows(256)
    saved, _ = explained(net, x, policy="int8", overrides={"up": "invert"})
    assert (saved["up::aten.addmm"].codec, saved["::aten.gelu"].codec) == ("keep", "int8")
    assert error(net, x, policy="int8", overrides={"up": "invert"}) <= 0.02


def test_an_output_that_only_decides_leaves_the_gradient_right():
    def forward(net, x):
        y = F.silu(net.up(x))
        return net.down(torch.where(y > 0.1, net.side(y.detach()), y))

    net, x = Net(forward=forward), rows()
    assert error(net, x) <= 2e-5


def residual(net, x):
    h = net.up(x)
    return net.down(net.side(F.gelu(h)) + h)


def test_a_residual_beside_the_function_does_not_keep_the_pre_activation():
    net, x = Net(forward=residual), rows()
    assert restored(net, x) == ["up::aten.addmm"]
    assert not held(compiled(net, "invert"), net.up(x).detach(), x)
    assert error(net, x) <= 2e-5


AFTER_A_SUM = {
    "sine": lambda h: torch.sin(h + 1),
    "sine of twice": lambda h: torch.sin(h + h),
    "product": lambda h: (h - 1) * (h + 1),
    "tanh": lambda h: torch.tanh(h - 30),
}


@pytest.mark.parametrize("name", AFTER_A_SUM)
def test_a_sum_that_another_function_reads_leaves_the_gradient_right(name):
    net, x = Net(F.gelu, beside(lambda _, h: AFTER_A_SUM[name](h))), 8 * rows()
    assert error(net, x) <= 2e-5


HAND_MADE = {
    "silu": lambda h: h * torch.sigmoid(h),
    "elu": lambda h: torch.where(h > 0, h, torch.expm1(h)),
    "softsign": lambda h: h / (1 + h.abs()),
}


@pytest.mark.parametrize("outer", HAND_MADE)
@pytest.mark.parametrize("inner", HAND_MADE)
def test_functions_of_functions_hold_what_the_report_says_and_are_right(inner, outer):
    net, x = Net(lambda h: HAND_MADE[outer](HAND_MADE[inner](h))), rows()
    assert error(net, x) <= 2e-5
    call = compiled(net, "invert")
    assert saved_bytes(call, net, x) == fx_actcomp.report(call).bytes_after


def returning(net, x):
    y = F.gelu(net.up(x))
    return net.down(y), y


def test_an_output_that_the_user_gets_restores_its_input():
    net, x = Net(forward=returning), rows()
    assert restored(net, x) == ["up::aten.addmm"]
    assert not held(compiled(net, "invert"), net.up(x).detach(), x)
    assert error(net, x) <= 2e-5


@pytest.mark.parametrize("policy", ["none", "invert"])
def test_an_output_that_the_user_changes_before_backward_is_torch_s_error(policy):
    net = Net(forward=returning)
    out, y = compiled(net, policy)(rows())
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weighed(out).backward()


class Mlp(nn.Module):
    def __init__(self, marked=False):
        super().__init__()
        self.up, self.act, self.down, self.marked = nn.Linear(8, WIDTH), nn.GELU(), nn.Linear(WIDTH, 8), marked

    def forward(self, x):
        if not self.marked:
            return self.down(self.act(self.up(x)))
        with fx_actcomp.annotate("invert"):
            h = self.act(self.up(x))
        return self.down(h)


@pytest.mark.parametrize("pattern", ["act::aten.gelu", "act", "up", "up::aten.addmm", "*"])
def test_an_override_of_either_side_restores(pattern):
    net, x = Mlp(), rows()
    options = {"policy": "none", "overrides": {pattern: "invert"}}
    assert restored(net, x, **options) == ["up::aten.addmm"]
    assert error(net, x, **options) <= 2e-5


@pytest.mark.parametrize("policy", ["none", "lossless"])
def test_an_annotation_restores_under_other_policies(policy):
    net, x = Mlp(marked=True), rows()
    assert restored(net, x, policy=policy) == ["up::aten.addmm"]
    assert distance(*pair(net, x, policy=policy)) <= 2e-5
    assert restored(Mlp(), x, policy=policy) == []


def test_an_override_that_leaves_the_pre_activation_alone_is_obeyed():
    net, x = Mlp(), rows()
    assert restored(net, x, overrides={"up": None}) == []


@pytest.mark.parametrize(("nbytes", "names"), [(32 * WIDTH * 4, ["up::aten.addmm"]), (32 * WIDTH * 4 + 1, [])])
def test_what_is_below_min_bytes_stays(nbytes, names):
    assert restored(Mlp(), rows(32), min_bytes=nbytes) == names


def plain_minimum(x):
    return torch.minimum(torch.maximum(x, -torch.ones(())), torch.ones(()))


def selu_by_hand(x):
    return torch.where(x < 0, 1.7580993 * (torch.exp(x) - 1), 1.0507010 * x)


HARD = {
    "falling sigmoid": (lambda x: x * torch.sigmoid(-x), torch.float32, 2),
    "clamp between tensors": (plain_minimum, torch.float32, 2),
    "selu by hand": (selu_by_hand, torch.bfloat16, 1e-3),
}


@pytest.mark.parametrize("name", HARD)
def test_functions_that_are_hard_to_invert_are_right_or_left_alone(name):
    f, dtype, scale = HARD[name]
    net, x = Net(f).to(dtype), scale * rows(256).to(dtype)
    with torch.no_grad():
        net.up.bias.zero_()
    assert error(net, x) <= (2e-5 if dtype is torch.float32 else 0.02)


class Scalar(nn.Module):
    """A function with a number that is learned, or a buffer."""

    def __init__(self, f, shape, learned):
        super().__init__()
        self.f, number = f, torch.full(shape, 1.5)
        self.number = nn.Parameter(number) if learned else nn.Buffer(number)

    def forward(self, x):
        return self.f(x, self.number)


SCALED = {
    "swish": (lambda x, b: x * torch.sigmoid(b * x), (), True),
    "swish with a buffer": (lambda x, b: x * torch.sigmoid(b * x), (1,), False),
    "scaled": (lambda x, b: F.gelu(x) * b, (1,), True),
    "scaled by a buffer": (lambda x, b: F.gelu(x) * b, (), False),
    "leaky": (lambda x, b: torch.where(x > 0, x, x * b / 8), (), True),
    "prelu": (F.prelu, (1,), True),
}


@pytest.mark.parametrize("policy", ["invert", "int8"])
@pytest.mark.parametrize("name", SCALED)
def test_numbers_in_tensors_are_no_obstacle(name, policy):
    net, x = Net(Scalar(*SCALED[name])), rows()
    assert distance(*pair(net, x, policy=policy)) <= (2e-5 if policy == "invert" else 0.02)
