import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import fx_actcomp
from fx_actcomp.backend import annotations_of

EAGER = {"compiler": "aot_eager", "min_bytes": 0, "strict": True}


def mlp(width=64):
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 8))


def gradients(call, model, x):
    model.zero_grad()
    call(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def run(program, **environment):
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program],
        capture_output=True, text=True, env={**os.environ, **environment}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_backend_is_found_in_a_process_that_never_imports_us():
    printed = run(
        "import torch, sys\n"
        "assert 'actcomp' in torch._dynamo.list_backends()\n"
        "model = torch.nn.Linear(64, 64)\n"
        "call = torch.compile(model, backend='actcomp', options={'compiler': 'aot_eager'})\n"
        "call(torch.randn(8, 64)).sum().backward()\n"
        "print(model.weight.grad is not None)\n"
    )
    assert printed.strip() == "True"


def test_a_module_compiles_itself():
    model, x = mlp(), torch.randn(32, 64)
    expected = gradients(model, model, x)
    model.compile(backend="actcomp", options={**EAGER, "policy": "none"})
    got = gradients(model, model, x)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(expected, got, strict=True))


def test_the_callable_is_a_backend_too():
    model, x = mlp(), torch.randn(32, 64)
    call = torch.compile(model, backend=fx_actcomp.actcomp, options=EAGER)
    gradients(call, model, x)
    assert fx_actcomp.report(call).bytes_after < fx_actcomp.report(call).bytes_before


def test_mode_is_passed_on_to_inductor_and_checked():
    with pytest.raises(Exception, match="option 'mode' is 'fast'; there are: default, "):
        torch.compile(mlp(), backend="actcomp", options={**EAGER, "mode": "fast"})(torch.randn(2, 64))


def test_an_unknown_option_lists_what_there_is():
    with pytest.raises(Exception, match="unknown option 'polcy'; there are: policy, overrides, min_bytes"):
        torch.compile(mlp(), backend="actcomp", options={"polcy": "int8"})(torch.randn(2, 64))


def test_none_equals_plain_aot_autograd_bit_for_bit():
    model, x = mlp(), torch.randn(32, 64)
    plain = gradients(torch.compile(model, backend="aot_eager_decomp_partition"), model, x)
    torch._dynamo.reset()
    ours = gradients(torch.compile(model, backend="actcomp", options={**EAGER, "policy": "none"}), model, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_the_environment_turns_us_off():
    printed = run(
        "import torch, fx_actcomp\n"
        "model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))\n"
        "call = torch.compile(model, backend='actcomp', options={'min_bytes': 0})\n"
        "call(torch.randn(64, 64)).sum().backward()\n"
        "try:\n"
        "    fx_actcomp.report(call)\n"
        "except ValueError as error:\n"
        "    print(error)\n",
        ACTCOMP_DISABLE="1",
    )
    assert "nothing of this model was compiled" in printed


def test_an_error_of_ours_warns_with_its_cause_and_saves_as_torch_does(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("a planted fault")

    monkeypatch.setattr("fx_actcomp.partition.apply_plan", broken)
    model, x = mlp(), torch.randn(32, 64)
    call = torch.compile(model, backend="actcomp", options={**EAGER, "strict": False})
    with pytest.warns(UserWarning, match="ZeroDivisionError: a planted fault"):
        got = gradients(call, model, x)
    assert fx_actcomp.report(call).failures == ("ZeroDivisionError: a planted fault",)
    assert "a planted fault" in str(fx_actcomp.report(call))
    torch._dynamo.reset()
    expected = gradients(torch.compile(model, backend="actcomp", options={**EAGER, "policy": "none"}), model, x)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_strict_raises_an_error_of_ours(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("a planted fault")

    monkeypatch.setattr("fx_actcomp.partition.apply_plan", broken)
    with pytest.raises(Exception, match="a planted fault"):
        torch.compile(mlp(), backend="actcomp", options=EAGER)(torch.randn(32, 64))


def test_an_override_that_matches_nothing_warns_and_is_reported():
    model = mlp()
    call = torch.compile(model, backend="actcomp", options={**EAGER, "overrides": {"no.such.layer": "int4"}})
    with pytest.warns(UserWarning, match="'no.such.layer'"):
        gradients(call, model, torch.randn(32, 64))
    assert fx_actcomp.report(call).unmatched == ("no.such.layer",)
    assert "override 'no.such.layer' matched no saved activation" in str(fx_actcomp.report(call))


def test_a_model_without_trainable_parts_compiles_and_saves_nothing():
    model = mlp().requires_grad_(False)
    call = torch.compile(model, backend="actcomp", options=EAGER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(torch.randn(4, 64)).shape == (4, 8)
    assert fx_actcomp.report(call).saved == ()
    assert "saves anything" in str(fx_actcomp.report(call))


def test_torch_s_own_error_on_double_backward_survives():
    model, x = mlp(), torch.randn(32, 64, requires_grad=True)
    call = torch.compile(model, backend="actcomp", options=EAGER)
    (grad,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_complex_tensors_are_left_alone_with_a_reason():
    class Rotate(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))

        def forward(self, x):
            h = torch.exp(x @ self.w)
            return (h @ self.w).abs()

    model, x = Rotate(), torch.randn(32, 64, dtype=torch.complex64)
    rows = [row for row in fx_actcomp.explain(model, x, min_bytes=0, compiler="aot_eager").saved if row.dtype == "complex64"]
    assert rows
    assert all(row.codec == "keep" and row.reason for row in rows)


def test_a_report_file_is_written_after_the_compilation(tmp_path):
    model = mlp()
    call = torch.compile(model, backend="actcomp", options={**EAGER, "report": str(tmp_path / "saved.json")})
    gradients(call, model, torch.randn(32, 64))
    assert '"policy": "int8"' in (tmp_path / "saved.json").read_text()


def test_annotate_is_nearer_than_overrides_and_policy():
    class Marked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x):
            with fx_actcomp.annotate("int4"):
                h = torch.relu(self.a(x))
            return self.b(h)

    found = fx_actcomp.explain(Marked(), torch.randn(32, 64), overrides={"*": None}, min_bytes=0, compiler="aot_eager")
    assert {row.codec for row in found.saved if row.kind == "activation"} == {"int4"}


def test_the_cache_key_holds_what_changes_the_graphs_and_nothing_else():
    from fx_actcomp.options import parse_options
    from fx_actcomp.partition import ActcompPartitioner

    def key(annotations=(), **options):
        return ActcompPartitioner(parse_options(options), annotations).uuid()

    assert key() == key(policy="int8") == key(report="somewhere.txt")
    assert len({key(), key(policy="int4"), key(min_bytes=1), key(overrides={"a": None}), key(annotations=("1:int4",))}) == 5


def test_the_cache_key_is_the_same_in_another_process():
    program = (
        "from fx_actcomp.options import parse_options\n"
        "from fx_actcomp.partition import ActcompPartitioner\n"
        "print(ActcompPartitioner(parse_options({'overrides': {'a.*': 'int4', 'b': None}})).uuid())\n"
    )
    assert run(program, PYTHONHASHSEED="1") == run(program, PYTHONHASHSEED="2")


def saving_relu():
    return torch.utils.checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.relu.default])


class Checkpointed(nn.Module):
    """A region that Dynamo traces into a graph of its own, with an annotation inside."""

    def __init__(self, codec):
        super().__init__()
        self.a, self.b, self.codec = nn.Linear(64, 256), nn.Linear(256, 64), codec

    def region(self, x):
        h = self.a(x)
        with fx_actcomp.annotate(self.codec):
            h = torch.relu(h)
        return self.b(h)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.region, x, use_reentrant=False, context_fn=saving_relu)


def annotations(model, x):
    found = []

    def backend(gm, _):
        found.append(annotations_of(gm))
        return gm.forward

    torch.compile(model, backend=backend)(x)
    return found


def test_annotations_inside_a_checkpoint_are_part_of_the_cache_key():
    x = torch.randn(32, 64)
    one, other = (annotations(Checkpointed(codec), x) for codec in ("int4", "int2"))
    assert len(one) == len(other) == 1
    assert one[0]
    assert one != other


def test_an_annotation_inside_a_checkpoint_can_round_at_random():
    model, x = Checkpointed("int4:rounding=stochastic"), torch.randn(32, 64)
    call = torch.compile(model, backend="actcomp", options={**EAGER, "policy": "none"})
    one, two = gradients(call, model, x), gradients(call, model, x)
    assert {row.codec for row in fx_actcomp.report(call).saved} >= {"int4:rounding=stochastic"}
    assert not torch.equal(one[2], two[2])


def test_an_unknown_annotation_inside_a_checkpoint_lists_what_there_is():
    with pytest.raises(Exception, match=r"fx_actcomp.annotate: unknown codec 'int5'; there are"):
        torch.compile(Checkpointed("int5"), backend="actcomp", options=EAGER)(torch.randn(32, 64))


@pytest.mark.parametrize("policy", ["lossless", "int8", "int4"])
def test_sizes_that_are_powers_and_quotients_of_symbols(policy):
    class Pairs(nn.Module):
        def forward(self, x):
            return torch.tanh(nn.functional.dropout(x.reshape(-1, 2), 0.3)).t().contiguous().sin()

    model = Pairs()
    for shape in ((2, 6, 5, 5), (3, 4, 7, 7), (5, 2, 3, 3)):
        results = []
        for name in ("none", policy):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
            torch.manual_seed(0)
            call = torch.compile(model, backend="actcomp", dynamic=True, options={**EAGER, "policy": name})
            y = call(x)
            results.append((y, *torch.autograd.grad(y.square().sum(), x)))
        (y, exact), (z, got) = results
        assert torch.equal(y, z)
        assert (got - exact).norm() <= {"lossless": 0.0, "int8": 0.02, "int4": 0.02}[policy] * exact.norm()
