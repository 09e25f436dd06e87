import pytest
import torch
import torch.nn.functional as F
from inversion_cases import FUNCTIONS, WIDTH, Net, compiled, distance, error, explained, pair, rows
from share_cases import weighed
from torch import nn

SMOOTH = ["gelu", "gelu_tanh", "silu", "silu by hand", "quick_gelu", "gelu_new", "mish"]


def reason(net, *inputs):
    (row,) = [row for row in explained(net, *inputs)[0].values() if row.codec == "invert"]
    return row.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SMOOTH)
def test_the_derivative_of_every_form_is_taken_from_the_output(name, dtype):
    assert reason(Net(FUNCTIONS[name][0]).to(dtype), rows().to(dtype)).startswith("its derivative taken from")


def test_functions_whose_input_costs_no_more_are_restored():
    assert reason(Net(F.elu), rows()).startswith("restored from")


def gate_summed(net, x):
    h = net.up(x)
    gate = h.sigmoid()
    return net.down(h * gate) + gate.sum()


def test_where_two_gradients_meet_inside_the_function_its_input_is_restored():
    net, x = Net(forward=gate_summed), rows(256)
    assert reason(net, x).startswith("restored from")
    assert 0 < error(net, x) <= 2e-5


def test_a_gradient_that_is_scaled_twice_is_no_derivative_of_the_function():
    scaled = Net(forward=lambda net, x: net.down(F.gelu(net.up(x))) * 3)
    assert reason(scaled, rows()).startswith("its derivative taken from")
    assert error(scaled, rows(256)) <= 2e-5


class Doubled(torch.autograd.Function):
    """GELU with twice its gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 2 * torch.ops.aten.gelu_backward(dy, x)


class Squared(Doubled):
    """GELU with a gradient that is not proportional to the one it is given."""

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(dy * dy, x)


class Bent(Doubled):
    """GELU with another function's derivative, as straight-through estimators have."""

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy * torch.sigmoid(x)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
@pytest.mark.parametrize("own", [Doubled, Squared, Bent])
def test_a_gradient_of_the_users_own_stays_the_users(own):
    net, x = Net(own.apply), rows(256)
    exact, got = pair(net, x)
    assert distance(exact, got) <= 2e-5


def test_a_whole_number_on_the_way_is_no_rounding():
    def kept_where_whole(net, x):
        h = net.up(x)
        return net.down(F.silu(h) * (h.int() == h))

    net, x = Net(forward=kept_where_whole), rows()
    with torch.no_grad():
        net.up.weight.copy_(torch.randint(-2, 3, net.up.weight.shape))
        net.up.bias.zero_()
    x = torch.cat([x, x.round()])
    assert error(net, x) <= 2e-5


@pytest.mark.parametrize("name", ["gelu", "silu by hand"])
def test_gradients_of_several_steps_and_batches_are_right(name):
    net = Net(FUNCTIONS[name][0])
    for n in (32, 5, 1):
        x = rows(n)
        exact, got = pair(net, x)
        assert distance(exact, got) <= 2e-5


def test_a_dead_unit_has_no_gradient():
    net = Net()
    with torch.no_grad():
        net.up.bias.fill_(-60)
    weighed(compiled(net, "invert")(rows())).backward()
    assert torch.equal(net.up.weight.grad, torch.zeros_like(net.up.weight))


def test_equal_layers_are_shown_in_one_row():
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, WIDTH), nn.GELU(), nn.Linear(WIDTH, 8)) for _ in range(3)))
    saved, report = explained(layers, rows())
    assert [row.codec for row in saved.values()].count("invert") == 3
    assert sum(" invert " in line for line in report.table().splitlines()) == 1
