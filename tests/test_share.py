import pytest
import torch
import torch.nn.functional as F
from share_cases import Net, assert_same_mask, error, gradients, image, plain, plan, watch
from torch import nn

BITS = {"blpa8": 8, "blpa4": 4}
BOUND = {"blpa8": 0.02, "blpa4": 0.2}
by_policy = pytest.mark.parametrize("policy", BITS)


def conv_bn_relu_of_twice(net, x):
    return net.other(net.relu(net.norm(net.head(net.relu(net.norm(net.conv(x)))))))


@by_policy
def test_a_norms_input_and_its_relu_share_one_code(policy):
    rows, report = plan(Net(), image(), policy=policy)
    source, relu = rows["conv::convolution"], rows["relu::relu"]
    assert (source.codec, relu.codec) == (policy, policy)
    assert source.bytes_after * 8 == 4 * 8 * 16 * 16 * BITS[policy]
    assert relu.bytes_after == 0
    assert source.name in relu.reason
    statistics = sum(row.bytes_after for row in report.saved if row.kind == "statistic")
    assert report.bytes_after == source.bytes_after + statistics


@by_policy
def test_the_gradient_is_near_and_forward_exact(policy):
    assert 0 < error(Net(), image(), policy=policy) < BOUND[policy]


NORMS = {
    "default": {},
    "negative": {"weight": [-1.0, -0.3, -2.0, 1.0, 0.5, -5.0, 1.0, -1.0]},
    "zero weight": {"weight": [0.0, 1.0] * 4, "bias": [0.5, 0.1] * 4},
    "far off": {"bias": [9.0, -3.1, 3.0, -3.0, 2.7, -2.7, 4.3, -1.0]},
    "negative and far off": {"weight": [-0.1], "bias": [0.29, -0.29, 0.31, -0.25, 0.0, 0.1, 0.42, -0.1]},
}


@by_policy
@pytest.mark.parametrize("kind", NORMS)
def test_the_relus_mask_is_forwards_own(policy, kind):
    assert_same_mask(plain(**NORMS[kind]), image(), policy)


@by_policy
@pytest.mark.parametrize("kind", NORMS)
def test_the_gradient_is_near_whatever_the_norms_parameters(policy, kind):
    assert error(plain(**NORMS[kind]), image(), policy=policy) < BOUND[policy]


@by_policy
def test_no_gradient_passes_where_the_relu_is_zero_everywhere(policy):
    net, x = plain(bias=[-50.0, 0.0] * 4), image()
    found = gradients(net, x, policy)
    for name in ("conv.weight", "norm.weight", "norm.bias"):
        assert not found[name][::2].any()
        assert found[name][1::2].all()
    assert not found["head.weight"][:, ::2].any()


def rank_of(rank):
    layers = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d]
    norms = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]
    extra = (3,) if rank else ()
    net = Net(norm=norms[rank](8))
    net.conv, net.head = layers[rank](3, 8, *extra), layers[rank](8, 5, *extra)
    return net, torch.randn(32 if rank == 0 else 5, 3, *[9] * rank)


@by_policy
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_norms_of_every_rank_share(policy, rank):
    net, x = rank_of(rank)
    rows, _ = plan(net, x, policy=policy)
    assert rows["relu::relu"].bytes_after == 0
    assert error(net, x, policy=policy) < BOUND[policy]
    assert_same_mask(net, x, policy)


@pytest.mark.parametrize("batch", [1, 2, 3, 7])
@by_policy
def test_batches_of_any_size_share(policy, batch):
    net, x = Net(), image(batch, side=7)
    assert plan(net, x, policy=policy)[0]["relu::relu"].bytes_after == 0
    assert_same_mask(net, x, policy)


@by_policy
def test_channels_last_shares(policy):
    net, x = Net().to(memory_format=torch.channels_last), image().contiguous(memory_format=torch.channels_last)
    assert plan(net, x, policy=policy)[0]["relu::relu"].bytes_after == 0
    assert error(net, x, policy=policy) < BOUND[policy]
    assert_same_mask(net, x, policy)


@pytest.mark.parametrize("side", [8, 16])
@pytest.mark.parametrize("first", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_relu_in_another_memory_format_than_the_norms_input_is_right(first, side):
    other = torch.channels_last if first is torch.contiguous_format else torch.contiguous_format
    net = Net(lambda net, x: net.head(net.relu(net.norm(net.conv(x)).contiguous(memory_format=other))))
    net, x = net.to(memory_format=first), image(side=side).contiguous(memory_format=first)
    plan(net, x, policy="blpa8")
    assert_same_mask(net, x, "blpa8")
    assert error(net, x, policy="blpa8") < BOUND["blpa8"]


@by_policy
@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(8, affine=False), nn.BatchNorm2d(8, track_running_stats=False), nn.BatchNorm2d(8, momentum=0.3, eps=0.1)],
    ids=["no affine", "no running statistics", "other numbers"],
)
def test_every_kind_of_batch_norm_shares(policy, norm):
    net, x = Net(norm=norm), image()
    assert plan(net, x, policy=policy)[0]["relu::relu"].bytes_after == 0
    assert error(net, x, policy=policy) < BOUND[policy]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_mean_over_all_batches_breaks_the_graph_and_keeps_the_gradient():
    net, x = Net(norm=nn.BatchNorm2d(8, momentum=None)), image()
    assert plan(net, x)[0]["::relu"].codec == "int4"
    assert_same_mask(net, x, "blpa4")


@by_policy
def test_in_place_relu_shares(policy):
    net, x = Net(lambda net, x: net.head(F.relu_(net.norm(net.conv(x))))), image()
    assert plan(net, x, policy=policy)[0]["::relu"].bytes_after == 0
    assert_same_mask(net, x, policy)


@by_policy
def test_bf16_autocast_shares(policy):
    def autocast(net, x):
        with torch.autocast("cpu", torch.bfloat16):
            return net.head(net.relu(net.norm(net.conv(x))))

    net, x = Net(autocast), image()
    rows, _ = plan(net, x, policy=policy)
    assert rows["conv::convolution"].dtype == "bfloat16"
    assert rows["relu::relu"].bytes_after == 0
    assert error(net, x, policy=policy) < BOUND[policy]
    assert_same_mask(net, x, policy)


@by_policy
def test_evaluation_has_no_batch_statistics_and_says_so(policy):
    net, x = Net().eval(), image()
    rows, _ = plan(net, x, policy=policy)
    for name in ("conv::convolution", "relu::relu"):
        assert rows[name].codec == {"blpa8": "int8", "blpa4": "int4"}[policy]
        assert "batch norm in training" in rows[name].reason
    assert_same_mask(net, x, policy)


@by_policy
def test_a_blocks_output_takes_a_sign_exact_code_of_its_own(policy):
    def block(net, x):
        h = net.conv(x)
        return net.head(net.relu(net.norm(net.conv(-x)) + h))

    net, x = Net(block), image()
    rows, report = plan(net, x, policy=policy)
    codecs = [row.codec for row in report.saved if row.op == "aten.convolution"]
    assert policy in codecs
    assert rows["relu::relu"].codec == {"blpa8": "int8", "blpa4": "int4"}[policy]
    assert not [row for row in report.saved if row.kind == "decision"]
    assert_same_mask(net, x, policy)


@by_policy
def test_a_norm_applied_twice_shares_at_each_place(policy):
    net, x = Net(conv_bn_relu_of_twice), image()
    _, report = plan(net, x, policy=policy)
    relus = [row for row in report.saved if row.op == "aten.relu"]
    assert [row.bytes_after for row in relus] == [0, 0]
    assert len({row.reason for row in relus}) == 2
    assert error(net, x, policy=policy) < 1.5 * BOUND[policy]


def test_a_range_of_ones_own():
    rows, _ = plan(Net(), image(), policy="blpa4:sigmas=4.25")
    assert rows["conv::convolution"].codec == rows["relu::relu"].codec == "blpa4:sigmas=4.25"
    assert rows["relu::relu"].bytes_after == 0
    assert_same_mask(Net(), image(), "blpa4:sigmas=4.25")


def test_each_of_the_two_is_restored_right_before_its_own_first_use(monkeypatch):
    _, backwards = watch(monkeypatch)
    gradients(Net(), image(), "blpa4")
    (graph,) = backwards
    order = list(graph.nodes)
    (codes,) = [node for node in order if node.op == "placeholder" and node.name.startswith("convolution_blpa4")]
    heads, convs = (i for i, node in enumerate(order) if node.target is torch.ops.aten.convolution_backward.default)
    masked = next(i for i, node in enumerate(order) if node.target is torch.ops.aten.le.Scalar)
    decodes = sorted(order.index(user) for user in codes.users)
    assert decodes[0] < heads < masked
    assert [i for i in decodes if masked < i < convs]


def test_inductor_has_the_error_of_aot_eager():
    net, x = Net(), image()
    eager, inductor = error(net, x), error(net, x, compiler="inductor")
    assert abs(inductor - eager) < 0.1 * eager
