"""What is saved in each scenario, and how: what the public bug reports ask for beyond right numbers."""

import functools
import re
from math import prod

import pytest
import torch
from scenarios import BY_NAME
from scenarios.aliasing import OverwritesInBackward
from scenarios.base import one_step
from scenarios.peak import course_of_a_step
from scenarios.running import calls_of_backend, options, outcome, process_group, run_again

import fx_actcomp

pytestmark = [
    # Dynamo makes an object of an autograd.Function's class, and asks tensors after a graph break for .grad
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def saved(name, policy="int8", **wanted):
    """Rows of the scenario's report that have the wanted fields."""
    rows = outcome(BY_NAME[name], policy).report.saved
    return [row for row in rows if all(getattr(row, key) == value for key, value in wanted.items())]


def used_by(rows, op):
    return [row for row in rows if any(use.endswith(f"::{op}") for use in row.used_by)]


def test_a_saved_output_is_left_to_the_caller():
    (row,) = saved("returns_what_it_saves", kind="output")
    assert (row.op, row.codec, row.bytes_after) == ("aten.tanh", "keep", 0)
    assert "the caller holds it" in row.reason


def test_an_input_in_two_slots_is_left_to_the_caller():
    rows = saved("returns_views", kind="input")
    assert rows
    assert all(row.codec == "keep" and "alive anyway" in row.reason for row in rows)


def test_a_view_of_an_input_is_left_to_the_caller():
    rows = [row for row in saved("saves_view_of_input") if prod(row.shape) == 5 * 36 * 28]
    assert [(row.kind, row.codec, row.bytes_before) for row in rows] == [("input", "keep", 0)]


@pytest.mark.parametrize("policy", ["none", "int8"])
def test_the_input_may_be_overwritten_before_backward(policy):
    assert outcome(BY_NAME["saves_view_of_input"], policy).exact["right gradient or an error"]


def test_backward_that_writes_into_an_output_works_or_says_why():
    module, x = OverwritesInBackward(returns_hidden=True), torch.randn(48, 28, requires_grad=True)
    message = ""
    try:
        one_step(torch.compile(module, backend="actcomp", options=options("int8")), module, [x])
    except Exception as error:
        message = str(error)
    assert not message or re.search("writes|overwrit|mutat|in.place", message)


def test_a_tensor_and_its_transpose_are_saved_once():
    size = 40 * 40 * 4
    assert [row.bytes_before for row in saved("saves_its_transpose", op="aten.sin")] == [size]
    assert sum(row.bytes_before for row in saved("saves_its_transpose")) == 2 * size


def test_labels_stay_integers():
    rows = [row for row in saved("shifted_labels") if row.dtype == "int64"]
    assert rows
    assert {row.codec for row in rows} <= {"keep", "narrow"}


def test_nothing_is_saved_where_only_sizes_are_needed():
    assert saved("needs_only_sizes") == []


@pytest.mark.parametrize("name", ["needs_only_sizes", "other_lengths", "prepends_token", "modes_in_turns"])
def test_we_add_no_recompilation(name):
    plain = calls_of_backend(BY_NAME[name], torch._dynamo.lookup_backend("aot_eager"))
    assert calls_of_backend(BY_NAME[name], fx_actcomp.actcomp, options=options("int8")) == plain


def test_scalars_are_left_alone():
    assert {row.codec for row in saved("odd_sizes", shape=())} <= {"keep"}


@pytest.mark.parametrize("policy", ["none", "lossless", "int8"])
def test_strides_stay_channels_last(policy):
    exact = outcome(BY_NAME["channels_last"], policy).exact
    assert [exact[name].item() for name in exact if name.endswith("is channels last")] == [True, True]


def test_an_expanded_gate_is_not_saved_at_full_size():
    full = 3 * 20 * 28 * 4
    assert sum(row.bytes_before for row in saved("strided")) == full  # the linear layer's or tanh's output, and no gate


@pytest.mark.parametrize("policy", ["lossless", "int8"])
def test_dropout_masks_take_a_bit_an_element(policy):
    rows = saved("two_dropouts", policy, kind="mask")
    assert [(row.codec, row.bytes_before, row.bytes_after) for row in rows] == 2 * [("bits", 30 * 56, 30 * 56 // 8)]


@pytest.mark.parametrize("policy", ["none", "lossless", "int8"])
def test_zeros_of_a_dropouts_gradient_are_those_of_its_output(policy):
    assert outcome(BY_NAME["two_dropouts"], policy).exact["same zeros"]


def test_what_checkpointing_recomputes_is_not_saved():
    rows = [row for row in saved("checkpointed_dropout") if row.compressible and row.kind != "random state"]
    assert [(row.op, row.shape, row.codec) for row in rows] == 2 * [("aten.add", (22, 40), "int8")]


def test_norm_statistics_stay_in_fp32():
    rows = saved("bf16_norms", kind="statistic")
    assert len(rows) == 3
    assert {(row.codec, row.dtype) for row in rows} == {("keep", "float32")}


def test_no_fp32_copy_of_a_bf16_activation_is_saved():
    assert [row.name for row in saved("bf16_norms", dtype="float32") if prod(row.shape) >= 20 * 80] == []


def test_attention_saves_q_k_v_and_one_output():
    rows = saved("attention", kind="activation")
    assert sum(row.bytes_before for row in rows) == 4 * (2 * 20 * 48 * 4)
    assert {row.codec for row in rows} == {"int8"}


def test_logsumexp_stays_exact():
    (row,) = [row for row in saved("attention") if row.shape == (2, 3, 20)]
    assert (row.kind, row.dtype, row.codec) == ("statistic", "float32", "keep")


@pytest.mark.parametrize("op", ["aten.topk", "aten.sort", "aten.remainder"])
def test_indices_with_a_proved_bound_take_less_than_a_byte(op):
    (row,) = saved("integers_and_bools", kind="index", op=op)
    assert row.codec == "narrow"
    assert row.bytes_after * 8 < row.bytes_before


def test_bools_are_packed():
    rows = saved("integers_and_bools", kind="mask")
    assert rows
    assert {row.codec for row in rows} == {"bits"}


def test_token_ids_are_left_to_the_caller():
    (row,) = saved("integers_and_bools", kind="input", dtype="int64")
    assert row.codec == "keep"


@pytest.mark.parametrize("policy", ["none", "lossless", "int8"])
def test_batch_norm_counts_each_step_once(policy):
    assert outcome(BY_NAME["batch_norm_buffers"], policy).exact["norm.num_batches_tracked"] == 3


def test_batch_mean_and_deviation_stay_exact():
    rows = saved("batch_norm_buffers", kind="statistic")
    assert len(rows) == 2
    assert {row.codec for row in rows} == {"keep"}


def test_frozen_batch_norm_compresses_what_has_elements():
    rows = saved("frozen_batch_norm", codec="int8")
    assert [row.op for row in rows] == ["aten.convolution", "aten.relu"]


def test_scores_of_minus_infinity_stay_exact():
    (row,) = saved("masked_scores", op="aten.bmm")
    assert (row.kind, row.codec) == ("activation", "keep")


def test_saturating_outputs_are_left_to_the_caller():
    rows = saved("outputs_of_activations", kind="output")
    assert {row.op for row in rows} == {"aten.tanh", "aten.sigmoid"}
    assert {row.codec for row in rows} == {"keep"}


def test_training_repeats_exactly():
    first, again = outcome(BY_NAME["thirty_steps"], "int8"), run_again(BY_NAME["thirty_steps"], "int8")
    assert torch.equal(first.lossy["losses"], again.lossy["losses"])


@pytest.mark.parametrize(("policy", "band"), [("int8", 0.005), ("int4", 0.05)])
def test_training_follows_the_exact_losses(policy, band):
    exact, got = (outcome(BY_NAME["thirty_steps"], name).lossy["losses"] for name in ("none", policy))
    assert (got - exact).norm() <= band * exact.norm()


@pytest.mark.parametrize("policy", ["none", "int8", "int4"])
def test_a_second_backward_gives_the_same_gradient(policy):
    assert not outcome(BY_NAME["two_losses"], policy).exact["first gradient, twice"].any()


def test_nothing_is_packed_under_no_grad():
    module, inputs = BY_NAME["modes_in_turns"].make()
    with torch.no_grad():
        torch.compile(module, backend="actcomp", options=options("int8"))(*inputs)
    assert fx_actcomp.report(module).saved == ()


def test_eval_under_no_grad_leaves_the_report_of_training():
    module, inputs = BY_NAME["modes_in_turns"].make()
    call = torch.compile(module, backend="actcomp", options=options("int8"))
    call(*inputs)
    trained = fx_actcomp.report(module)
    module.eval()
    with torch.no_grad():
        call(*inputs)
    assert fx_actcomp.report(module) == trained


def test_the_input_of_two_adapters_is_saved_once():
    rows = [row for row in saved("frozen_base") if row.shape == (28, 40) and row.kind == "input"]
    assert [row.used_by for row in rows] in ([("v::aten.mm", "q::aten.mm")], [("q::aten.mm", "v::aten.mm")])


def test_the_input_of_a_frozen_layer_is_not_saved():
    rows = [row for row in saved("frozen_base") if any(use.startswith("frozen::") for use in row.used_by)]
    assert [(row.kind, row.shape) for row in rows] == [("parameter or buffer", (40, 40))]


def test_a_tied_weight_is_saved_once_and_left_alone():
    rows = [row for row in saved("tied_weights") if prod(row.shape) == 36 * 14]
    assert [(row.kind, row.codec) for row in rows] == [("parameter or buffer", "keep")]


def test_a_residual_over_a_graph_break_is_the_first_graphs():
    (row,) = [row for row in saved("broken_residual", graph=1) if row.kind == "input"]
    assert (row.shape, row.codec, row.bytes_before) == ((26, 28), "keep", 0)
    assert "alive anyway" in row.reason


# the first graph warns, since it can't know that the override is for the second one
@pytest.mark.filterwarnings("ignore:overrides matched no saved activation of the graph just compiled")
def test_overrides_reach_the_graph_after_a_break():
    rows = run_again(BY_NAME["broken_residual"], "int8", overrides={"after": None}).report.saved
    assert {(row.module, row.codec) for row in rows if row.op == "aten.addmm"} == {("before", "int8"), ("after", "keep")}


def test_overrides_reach_every_piece_of_a_data_parallel_model(tmp_path):
    with process_group(tmp_path):
        exact = outcome(BY_NAME["data_parallel"], "none").lossy
        spared = run_again(BY_NAME["data_parallel"], "int8", overrides={"blocks.*": None}).lossy
    assert all(torch.equal(x, spared[name]) for name, x in exact.items())


def test_a_data_parallel_model_reports_its_pieces(tmp_path):
    with process_group(tmp_path):
        report = outcome(BY_NAME["data_parallel"], "int8").report
    assert report.graphs == 3
    assert {row.module for row in report.saved if row.codec == "int8"} >= {"blocks.0.0", "blocks.1.0", "blocks.2.0"}


def test_the_report_predicts_a_small_gain_where_the_logits_weigh_most():
    report = outcome(BY_NAME["wide_vocabulary"], "int8").report
    assert max(report.saved, key=lambda row: row.bytes_after).module == "head"
    assert report.bytes_after > 0.95 * report.bytes_before


@functools.cache
def course(policy):
    module, inputs = BY_NAME["deep_stack"].make()
    return course_of_a_step(torch.compile(module, backend="actcomp", options=options(policy)), module, inputs)


@pytest.mark.parametrize("policy", ["none", "int8"])
def test_saved_bytes_are_those_of_the_report(policy):
    assert course(policy).saved == outcome(BY_NAME["deep_stack"], policy).report.bytes_after


@pytest.mark.parametrize("policy", ["none", "int8"])
def test_nothing_that_was_saved_outlives_backward(policy):
    assert course(policy).left < 10_000


def test_no_more_than_two_tensors_are_unpacked_at_once():
    plain, packed = course("none"), course("int8")
    assert packed.peak - packed.saved <= plain.peak - plain.saved + 2 * (256 * 192 * 4)
