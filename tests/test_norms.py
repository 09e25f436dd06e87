import pytest
import torch
import torch.nn.functional as F
from share_cases import OPTIONS, Net, image, prenorm, watch
from torch import nn

import fx_actcomp


@pytest.fixture
def boundary_of(monkeypatch):
    """What crosses to backward in a model, as stage 2 finds it."""
    boundaries, _ = watch(monkeypatch)

    def find(model, *inputs):
        fx_actcomp.explain(model, *inputs, policy="none", **OPTIONS)
        (boundary,) = boundaries
        return boundary

    return find


def modules(boundary):
    """The saved tensors' names and the modules that made them."""
    return {saved.name: f"{saved.module}::{saved.op}" for saved in boundary.saved}


def norms_of(boundary):
    """Inputs of norms, each with its ReLU."""
    known = modules(boundary)
    return [(known[norm.name], norm.rectified and known[norm.rectified]) for norm in boundary.norms]


def test_a_norms_input_is_found_with_its_statistics_parameters_and_relu(boundary_of):
    boundary = boundary_of(Net(), image())
    (norm,) = boundary.norms
    assert norms_of(boundary) == [("conv::aten.convolution", "relu::aten.relu")]
    assert len(norm.references) == 4
    assert None not in norm.references


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(8, affine=False),
        nn.BatchNorm2d(8, track_running_stats=False),
        nn.BatchNorm2d(8, affine=False, track_running_stats=False),
        nn.BatchNorm2d(8, eps=0.1, momentum=0.5),
    ],
    ids=["no affine", "no running statistics", "neither", "other numbers"],
)
def test_every_kind_of_batch_norm_in_training_is_found(boundary_of, norm):
    boundary = boundary_of(Net(norm=norm), image())
    assert norms_of(boundary) == [("conv::aten.convolution", "relu::aten.relu")]
    assert (boundary.norms[0].weight is None) == (boundary.norms[0].bias is None) == (not norm.affine)


@pytest.mark.parametrize(("rank", "shape"), [(0, (6, 5)), (1, (6, 5, 9)), (2, (6, 5, 9, 9)), (3, (4, 5, 6, 6, 6))])
def test_norms_of_every_rank_are_found(boundary_of, rank, shape):
    layer = nn.Linear(5, 7) if rank == 0 else [nn.Conv1d, nn.Conv2d, nn.Conv3d][rank - 1](5, 7, 3)
    norm = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][rank](7)
    last = nn.Linear(7, 3) if rank == 0 else [nn.Conv1d, nn.Conv2d, nn.Conv3d][rank - 1](7, 3, 1)
    boundary = boundary_of(nn.Sequential(layer, norm, nn.ReLU(), last), torch.randn(shape))
    ((_, relu),) = norms_of(boundary)
    assert relu == "2::aten.relu"


def test_in_place_relu_is_found(boundary_of):
    boundary = boundary_of(Net(lambda net, x: net.head(F.relu_(net.norm(net.conv(x))))), image())
    assert norms_of(boundary) == [("conv::aten.convolution", "::aten.relu")]


def test_a_relu_after_a_skip_is_not_the_norms(boundary_of):
    def block(net, x):
        h = net.conv(x)
        return net.head(net.relu(net.norm(h) + h))

    assert norms_of(boundary_of(Net(block), image())) == [("conv::aten.convolution", None)]


def test_a_relu_that_is_not_saved_is_not_the_norms(boundary_of):
    def saturated(net, x):
        return net.head(torch.tanh(net.relu(net.norm(net.conv(x)))))

    assert norms_of(boundary_of(Net(saturated), image())) == [("conv::aten.convolution", None)]


def test_casts_between_the_parts_are_looked_through(boundary_of):
    net = Net(lambda net, x: net.head(net.relu(net.norm(net.conv(x).float()).bfloat16()))).bfloat16()
    net.norm.float()
    boundary = boundary_of(net, image().bfloat16())
    assert norms_of(boundary) == [("conv::aten.convolution", "relu::aten.relu")]


def test_evaluation_has_no_norms(boundary_of):
    assert boundary_of(Net().eval(), image()).norms == ()


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 8), nn.InstanceNorm2d(8), nn.LayerNorm([8, 16, 16])], ids=type)
def test_norms_over_other_dimensions_are_no_batch_norms(boundary_of, norm):
    boundary = boundary_of(Net(norm=norm), image())
    assert "conv::aten.convolution" not in [name for name, _ in norms_of(boundary)]


def test_a_norm_written_out_is_found_as_well(boundary_of):
    def by_hand(net, x):
        h = net.conv(x)
        var, mean = torch.var_mean(h, (0, 2, 3), correction=0, keepdim=True)
        normed = (h - mean) * (var + 1e-5).rsqrt()
        return net.head(F.relu(normed * net.scale.view(1, -1, 1, 1) + net.shift.view(1, -1, 1, 1)))

    boundary = boundary_of(Net(by_hand), image())
    assert norms_of(boundary) == [("conv::aten.convolution", "::aten.relu")]
    assert len(boundary.norms[0].references) == 4


@pytest.mark.parametrize("combine", [torch.mul, torch.add])
def test_a_vector_along_another_dimension_is_no_parameter_of_the_norm(boundary_of, combine):
    def along_width(net, x):
        return net.head(F.relu(combine(net.norm(net.conv(x)), net.scale)))

    boundary = boundary_of(Net(along_width, nn.BatchNorm2d(8, affine=False)), image(side=8))
    (norm,) = boundary.norms
    assert (norm.weight, norm.bias, norm.rectified) == (None, None, None)


def test_a_sum_with_a_factor_is_no_bias(boundary_of):
    def scaled_sum(net, x):
        return net.head(F.relu(torch.add(net.norm(net.conv(x)), net.shift.view(1, -1, 1, 1), alpha=3)))

    (norm,) = boundary_of(Net(scaled_sum, nn.BatchNorm2d(8, affine=False)), image()).norms
    assert (norm.bias, norm.rectified) == (None, None)


def affine_images(boundary):
    return tuple(image for image in boundary.images if image.affine)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_the_deeper_norms_outputs_are_images_of_their_inputs(boundary_of, norm):
    boundary = boundary_of(prenorm(norm), torch.randn(4, 16, 32))
    known = modules(boundary)
    assert [known[image.name].split("::")[0] for image in affine_images(boundary)] == ["2.up"]


def test_an_image_names_its_chain_and_what_it_reads_beside(boundary_of):
    boundary = boundary_of(prenorm(nn.LayerNorm), torch.randn(4, 16, 32))
    (found,) = affine_images(boundary)
    assert found.chain[-1] == found.name
    assert found.source not in found.chain
    assert len(found.carried) == 2  # weight and bias
    assert {saved.name for saved in boundary.saved} >= {found.source, found.name}


def test_views_alone_are_no_images(boundary_of):
    def transposed(net, x):
        h = F.gelu(net.conv(x)).flatten(2)
        return h @ h.transpose(1, 2)

    assert affine_images(boundary_of(Net(transposed), image())) == ()


@pytest.mark.parametrize(
    "function",
    [lambda h, _: torch.tanh(h), lambda h, _: h * h, lambda h, other: h * other, lambda h, other: h + other],
    ids=["tanh", "square", "product", "sum"],
)
def test_what_is_not_affine_in_one_saved_tensor_is_no_image(boundary_of, function):
    def two_products(net, x):
        h, other = torch.sigmoid(net.conv(x)), torch.tanh(net.conv(-x))
        return net.head(h), net.head(other), net.other(function(h, other))

    assert affine_images(boundary_of(Net(two_products), image())) == ()


def test_an_affine_function_of_a_saved_tensor_is_an_image(boundary_of):
    def scaled(net, x):
        h = torch.sigmoid(net.conv(x))
        return net.head(h), net.other(h * net.scale.view(1, -1, 1, 1) - 0.5)

    boundary = boundary_of(Net(scaled), image())
    (found,) = affine_images(boundary)
    assert modules(boundary)[found.source] == "::aten.sigmoid"
