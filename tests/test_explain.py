import models
import pytest
import torch
from torch import nn

import fx_actcomp


class Broken(nn.Module):
    """Two graphs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        h = torch.relu(self.a(x)) * 2
        torch._dynamo.graph_break()
        return self.b(torch.tanh(self.b(h)))


def test_explain_runs_no_operator_of_the_model():
    model, inputs = models.resnet18(width=8, batch=4)
    before = {name: b.clone() for name, b in model.named_buffers()}
    drawn = torch.get_rng_state()
    fx_actcomp.explain(model, *inputs, compiler="aot_eager")
    assert all(torch.equal(before[name], b) for name, b in model.named_buffers())
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_explain_allocates_no_activations_even_of_a_model_without_memory():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10))
    found = fx_actcomp.explain(model, torch.empty(1_000_000, 4096, device="meta"), compiler="aot_eager")
    assert found.bytes_before == 2 * 1_000_000 * 4096 * 4


def test_explain_plans_what_is_compiled():
    model, inputs = models.gpt(layers=2, width=64, length=32, dropout=0.1)
    planned = fx_actcomp.explain(model, *inputs, policy="int4", min_bytes=0, compiler="aot_eager")
    call = torch.compile(model, backend="actcomp", options={"policy": "int4", "min_bytes": 0, "compiler": "aot_eager"})
    call(*inputs).backward()
    assert fx_actcomp.report(call).saved == planned.saved


def test_graphs_after_a_break_are_explained_too():
    found = fx_actcomp.explain(Broken(), torch.randn(32, 64), min_bytes=0, compiler="aot_eager")
    assert found.graphs == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own, at a graph break
def test_reports_of_several_graphs_add_up():
    model = Broken()
    call = torch.compile(model, backend="actcomp", options={"min_bytes": 0, "compiler": "aot_eager"})
    call(torch.randn(32, 64)).sum().backward()
    report = fx_actcomp.report(call)
    assert report.graphs == 2
    assert report.bytes_before == sum(row.bytes_before for row in report.saved) > 0


def test_a_recompiled_graph_replaces_the_former_one():
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8))
    call = torch.compile(model, backend="actcomp", options={"min_bytes": 0, "compiler": "aot_eager"})
    call(torch.randn(32, 64)).sum().backward()
    first = fx_actcomp.report(call)
    call(torch.randn(50, 64)).sum().backward()
    with torch.no_grad():
        call(torch.randn(50, 64))
    assert fx_actcomp.report(call).graphs == first.graphs == 1


def test_measuring_a_model_does_not_change_its_report():
    model, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)), torch.randn(32, 64)
    with pytest.raises(ValueError, match="nothing of this model was compiled"):
        fx_actcomp.report(model)
    fx_actcomp.explain(model, x, compiler="aot_eager")
    fx_actcomp.gradient_error(model, x, compiler="aot_eager")
    with pytest.raises(ValueError, match="nothing of this model was compiled"):
        fx_actcomp.report(model)


def test_what_is_saved_today_is_printed_with_names_and_sums(capsys):
    fx_actcomp.print_saved_activations(*(lambda m, i: (m, *i))(*models.gpt(layers=2, width=64, length=32)), compiler="aot_eager")
    printed = capsys.readouterr().out
    assert "layers.[0-1].up x2" in printed
    assert "saved for backward: " in printed
    assert "codec" not in printed


def test_shapes_of_other_models_leave_explain_static():
    for batch in (8, 12, 20):
        found = fx_actcomp.explain(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), torch.randn(batch, 64))
        assert all(isinstance(size, int) for row in found.saved for size in row.shape)


def test_every_tensor_left_alone_has_a_reason():
    model, inputs = models.gpt(layers=2, width=64, length=32, dropout=0.1)
    for policy in ("none", "lossless", "int8", "int4"):
        for row in fx_actcomp.explain(model, *inputs, policy=policy, compiler="aot_eager").saved:
            assert row.reason or row.codec not in ("keep", "drop"), row


def test_the_source_of_a_model_without_code_of_its_own_is_no_file_of_ours():
    rows = fx_actcomp.explain(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), torch.randn(8, 64)).saved
    assert not [row.source for row in rows if "fx_actcomp/" in row.source]
