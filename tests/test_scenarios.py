"""Every scenario against its reference: "none" against torch, the other policies against "none"."""

import contextlib

import pytest
import torch
from scenarios import SCENARIOS
from scenarios.running import outcome, process_group, reference

pytestmark = [
    # Dynamo makes an object of an autograd.Function's class, and asks tensors after a graph break for .grad
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(params=SCENARIOS, ids=lambda scenario: scenario.name)
def scenario(request, tmp_path):
    with process_group(tmp_path) if request.param.distributed else contextlib.nullcontext():
        yield request.param


def differing(expected, got):
    """Names of the tensors that aren't the same to the last bit; NaN equals NaN."""
    assert expected.keys() == got.keys()
    return [name for name, x in expected.items() if not torch.equal(*(without_nan(y) for y in (x, got[name])))
            or not torch.equal(x.isnan(), got[name].isnan())]  # fmt: skip


def without_nan(x):
    return torch.where(x.isnan(), 0.0, x)


def worst_difference(expected, got):
    """The largest relative difference, each against the tensor's own norm and a hundredth of the largest value of all."""
    tensors = expected.exact | expected.lossy
    scale = max(x.abs().max().item() for x in tensors.values() if x.is_floating_point() and x.isfinite().all())
    worst = 0.0
    for name, x in expected.lossy.items():
        finite = x.isfinite()
        distance = (got.lossy[name][finite] - x[finite]).norm()
        worst = max(worst, (distance / (x[finite].norm() + 0.01 * scale)).item())
    return worst


def test_none_agrees_with_torch(scenario):
    expected, got = reference(scenario), outcome(scenario, "none")
    tolerances = {"rtol": scenario.rtol, "atol": scenario.atol, "equal_nan": True}
    torch.testing.assert_close(got.exact, expected.exact, **tolerances)
    torch.testing.assert_close(got.lossy, expected.lossy, **tolerances)


def test_lossless_is_none_to_the_last_bit(scenario):
    expected, got = outcome(scenario, "none"), outcome(scenario, "lossless")
    assert differing(expected.exact | expected.lossy, got.exact | got.lossy) == []


def test_int8_leaves_forward_as_it_is(scenario):
    assert differing(outcome(scenario, "none").exact, outcome(scenario, "int8").exact) == []


def test_int8_gradients_are_near(scenario):
    assert worst_difference(outcome(scenario, "none"), outcome(scenario, "int8")) <= scenario.bound


def test_int8_is_finite_where_none_is(scenario):
    expected, got = outcome(scenario, "none").lossy, outcome(scenario, "int8").lossy
    assert [name for name, x in expected.items() if not torch.equal(x.isfinite(), got[name].isfinite())] == []


def test_int8_keeps_shapes_strides_and_types(scenario):
    expected, got = outcome(scenario, "none").lossy, outcome(scenario, "int8").lossy
    described = [{name: (x.shape, x.stride(), x.dtype) for name, x in run.items()} for run in (expected, got)]
    assert described[0] == described[1]


@pytest.mark.parametrize("policy", ["lossless", "int8"])
def test_no_graph_fell_back(scenario, policy):
    assert outcome(scenario, policy).report.failures == ()


@pytest.mark.parametrize("policy", ["none", "lossless", "int8"])
def test_what_is_left_alone_has_a_reason(scenario, policy):
    assert [row.name for row in outcome(scenario, policy).report.saved if row.codec == "keep" and not row.reason] == []


def test_int8_saves_no_more_than_lossless_and_lossless_no_more_than_none(scenario):
    sizes = [outcome(scenario, policy).report.bytes_after for policy in ("int8", "lossless", "none")]
    assert sizes == sorted(sizes)


def test_only_floating_point_values_are_lossy(scenario):
    rows = outcome(scenario, "int8").report.saved
    assert [row.name for row in rows if row.codec == "int8" and "float" not in row.dtype] == []


def test_statistics_and_random_states_stay_exact(scenario):
    rows = outcome(scenario, "int8").report.saved
    assert {row.codec for row in rows if row.kind in {"statistic", "random state"}} <= {"keep", "drop"}


def test_what_someone_else_holds_is_left_alone(scenario):
    rows = outcome(scenario, "int8").report.saved
    assert {row.codec for row in rows if row.kind in {"parameter or buffer", "input", "output"}} <= {"keep"}


def test_no_tensor_takes_more_bytes_than_before(scenario):
    rows = outcome(scenario, "int8").report.saved
    assert [row.name for row in rows if row.kind != "decision" and row.bytes_after > row.bytes_before] == []
