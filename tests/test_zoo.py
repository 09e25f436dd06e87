"""One architecture of each kind that ``benchmarks/zoo.py`` goes through; and that it notices what is wrong."""

import copy
import json
from dataclasses import asdict

import pytest
import torch

import fx_actcomp

pytest.importorskip("torchvision", exc_type=ImportError, reason="torchvision is not installed")
for library in ("transformers", "timm"):
    pytest.importorskip(library, reason=f"{library} is not installed")

import zoo  # noqa: E402 - it needs them

pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("default"),  # the libraries' own deprecations are theirs
]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("transformers/mixtral", "bfloat16"),
        ("transformers/mamba2", "float32"),
        ("transformers/wav2vec2", "bfloat16"),
        ("transformers/clip", "float32"),
        ("torchvision/r3d", "float32"),
        ("timm/test_vit", "bfloat16"),
    ],
)
def test_it_passes(name, dtype):
    row = zoo.measure(name, dtype)
    assert row.status == "passed", row.reasons
    assert row.outcomes["int8"].after < row.outcomes["int8"].before


@pytest.fixture
def steps():
    gradient = {"weight": torch.linspace(-1, 1, 64), "bias": torch.full((4,), 0.1)}
    report = fx_actcomp.Report("none", (), 1)
    return zoo.Steps([torch.tensor(2.0), torch.tensor(1.0)], [gradient, copy.deepcopy(gradient)], report)


def compare(exact, given, policy):
    _, wrong = zoo.compare(exact, given, policy, "float32", slack=1.0)
    return wrong


@pytest.mark.parametrize("policy", zoo.POLICIES)
def test_equal_steps_are_right(steps, policy):
    assert compare(steps, copy.deepcopy(steps), policy) == []


@pytest.mark.parametrize("step", [0, 1])
def test_a_last_bit_is_noticed_under_lossless_alone(steps, step):
    given = copy.deepcopy(steps)
    given.gradients[step]["bias"][0] = torch.nextafter(torch.tensor(0.1), torch.tensor(1.0))
    assert compare(steps, given, "lossless") == ["lossless: not the same to the last bit: bias"]
    assert compare(steps, given, "int8") == []


@pytest.mark.parametrize(("policy", "error"), [("int8", 0.04), ("int4", 0.4)])
def test_an_error_above_the_bound_is_noticed(steps, policy, error):
    given = copy.deepcopy(steps)
    given.gradients[0]["weight"] *= 1 + error
    (said,) = compare(steps, given, policy)
    assert f"error {error:.3g}" in said


@pytest.mark.parametrize("policy", zoo.POLICIES)
def test_another_first_loss_is_noticed(steps, policy):
    given = copy.deepcopy(steps)
    given.losses[0] += 1e-6
    assert any("first loss" in said for said in compare(steps, given, policy))


@pytest.mark.parametrize("step", [0, 1])
def test_a_gradient_that_is_not_finite_is_noticed_unless_it_is_not_under_none(steps, step):
    given = copy.deepcopy(steps)
    given.gradients[step]["weight"][3] = torch.nan
    assert any("isn't finite" in said for said in compare(steps, given, "int8"))
    exact = copy.deepcopy(given)
    assert compare(exact, given, "int8") == []


def test_a_missing_gradient_is_noticed(steps):
    given = copy.deepcopy(steps)
    del given.gradients[0]["bias"]
    assert compare(steps, given, "int8") == ["int8: other parameters have gradients"]


def test_what_none_does_otherwise_when_run_again_is_not_ours(steps, monkeypatch):
    def train(_name, _dtype, _policy):
        given = copy.deepcopy(steps)
        given.gradients[0]["weight"] *= 1 + len(runs)
        runs.append(given)
        return given

    runs = []
    monkeypatch.setattr(zoo, "train", train)
    row = zoo.measure("timm/resnet10t", "float32")
    assert row.status == "not ours"
    assert row.reasons[0] == "'none' differs from itself: not the same to the last bit: weight"


def test_what_none_does_alike_when_run_again_is_ours(steps, monkeypatch):
    def train(_name, _dtype, policy):
        given = copy.deepcopy(steps)
        given.gradients[0]["weight"] *= 1 + (policy == "int8")
        return given

    monkeypatch.setattr(zoo, "train", train)
    row = zoo.measure("timm/resnet10t", "float32")
    assert row.status == "failed"
    assert len(row.reasons) == 1


@pytest.mark.parametrize(("status", "code"), [("passed", 0), ("not ours", 0), ("failed", 1)])
def test_a_run_goes_on_from_its_results(tmp_path, monkeypatch, capsys, status, code):
    measured = []

    def measure(_, name, dtype):
        measured.append((name, dtype))
        return zoo.Row(name, "timm", "convolution", dtype, status, outcomes={"int8": zoo.Outcome(8, 2, 0.01, 1.0)})

    monkeypatch.setattr(zoo.Worker, "__call__", measure)
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(asdict(measure(None, "timm/resnet10t", "float32"))) + "\n")
    assert zoo.main(["--only", "resnet10t", "test_vit4", "--dtype", "float32", "--results", str(results)]) == code
    assert measured == [("timm/resnet10t", "float32"), ("timm/test_vit4", "float32")]
    assert len(results.read_text().splitlines()) == 2
    assert "4.00" in capsys.readouterr().out
