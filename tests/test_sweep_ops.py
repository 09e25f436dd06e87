"""PyTorch's own operator and module data bases: a sample of them, and the smallest program of every fault that they found."""

import math
import random

import pytest
import sweep_stubs
import torch
from torch import nn

import fx_actcomp

op_cases = pytest.importorskip("op_cases", reason="torch's test utilities need expecttest")
from op_checks import Refusal, gradient_errors, same_bits, sweep  # noqa: E402 - they need it, too
from sweep_ops import Worker, summary  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the data bases' samples warn of all that is deprecated

ENTRIES = op_cases.entries()
DRAWN = random.Random(0).sample(sorted(ENTRIES), 24)


@pytest.mark.parametrize("name", DRAWN)
def test_a_sample_of_the_data_bases_runs_as_under_policy_none(name):
    result = sweep(ENTRIES[name], ["lossless", "int8"], most=1, beside=1, seed=0)
    assert result.failures == []


def test_samples_save_what_the_operator_reads_and_makes():
    result = sweep(ENTRIES["tanh"], ["int8"], most=1, beside=0, seed=0)
    assert (result.ran, result.saving, result.lossy) == (1, 1, 1)
    assert 0 < result.worst["int8"] < 1 / 32


def test_a_sample_that_torch_cannot_run_is_refused_with_a_reason():
    result = sweep(ENTRIES["sparse.sampled_addmm"], ["int8"], most=1, beside=0, seed=0)
    assert result.verdict == Refusal.NOT_CAPTURED.value


@pytest.mark.parametrize("policy", ["none", "int8"])
@pytest.mark.parametrize("work", [sweep_stubs.crashes, sweep_stubs.hangs])
def test_an_entry_that_ends_its_process_fails_unless_policy_none_does_so_too(work, policy):
    worker = Worker({"policy": policy}, timeout=5, work=work)
    result = worker.run("add")
    worker.stop()
    if policy == "none":
        assert result.verdict == Refusal.FAILS_WITHOUT_US.value
    else:
        assert result.failures == [f"add[float32 0]: policy int8: it {work.__name__}"]


def test_the_summary_counts_every_entry_once():
    refused = sweep(ENTRIES["sparse.sampled_addmm"], [], most=1, beside=0, seed=0)
    passed = sweep(ENTRIES["tanh"], ["int8"], most=1, beside=0, seed=0)
    lines = [line.split() for line in summary([refused, passed], ["int8"]).splitlines()]
    assert ["entries", "2"] in lines
    assert ["passed", "1"] in lines
    assert ["refused:", *Refusal.NOT_CAPTURED.value.split(), "1"] in lines


def test_same_bits_tells_negative_zero_and_sees_nan_as_itself():
    nan, zero = torch.tensor([math.nan, 0.0]), torch.tensor([math.nan, -0.0])
    assert same_bits([nan, None], [nan.clone(), None])
    assert not same_bits([nan], [zero])
    assert not same_bits([nan], [None])
    assert not same_bits([torch.zeros(2)], [torch.zeros(2, dtype=torch.float64)])
    assert same_bits([torch.ones(2, 3).t()], [torch.ones(3, 2)])


def test_gradient_errors_are_of_all_together_and_of_the_worst_and_infinite_where_an_infinity_moved():
    exact = [torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.5]), None]
    found = [torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.25]), None]
    whole, worst = gradient_errors(exact, found)
    assert whole == pytest.approx(0.25 / math.hypot(5, 0.5))
    assert worst == 0.5
    assert gradient_errors([torch.tensor([math.inf])], [torch.tensor([1.0])]) == (math.inf, math.inf)
    assert gradient_errors([torch.tensor([0.0])], [torch.tensor([1e-9])]) == (math.inf, math.inf)


class Two(nn.Module):
    """An operator of what two linear layers make."""

    def __init__(self, operator):
        super().__init__()
        self.left, self.right, self.operator = nn.Linear(32, 64), nn.Linear(32, 64), operator

    def forward(self, x):
        return self.operator(self.left(x), self.right(x)).sum()


def rows(operator):
    found = fx_actcomp.explain(Two(operator), torch.randn(48, 32), min_bytes=0, compiler="aot_eager")
    return {row.op: row for row in found.saved if not row.alive_anyway}


def test_a_rounded_quotient_that_forward_saves_stays_exact():
    saved = rows(torch.fmod)  # its second derivative is the quotient, rounded toward zero
    assert (saved["aten.div"].codec, saved["aten.div"].kind) == ("keep", "piecewise constant value")
    assert "stays exact" in saved["aten.div"].reason


def test_what_stands_in_a_matrix_beside_a_gradient_is_exact_where_that_matrix_is_exponentiated():
    saved = rows(lambda x, y: torch.linalg.matrix_exp((x * y).view(48, 8, 8)))
    (kept,) = [row for row in saved.values() if any("matrix_exp" in use for use in row.used_by)]
    assert kept.codec == "keep"
    assert "aten.linalg_matrix_exp of a gradient" in kept.reason


def attention(q, k):
    """Of 256 tokens, whose probabilities are nearly all nearly zero."""
    p = (3 * q @ k.t()).softmax(-1)
    return (p @ q).sin()


def test_many_small_probabilities_are_not_made_larger_together():
    torch.manual_seed(0)
    x = torch.randn(256, 32)
    error = fx_actcomp.gradient_error(Two(attention), x, policy="int8", min_bytes=0, compiler="aot_eager")
    assert 0 < error.relative < 1 / 32
