import models
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fx_actcomp

EAGER = {"compiler": "aot_eager", "min_bytes": 0}


def test_error_is_the_distance_to_the_exact_gradient():
    model, x = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)), torch.randn(64, 64)
    found = fx_actcomp.gradient_error(model, x, policy="int8", loss=lambda y: y.square().sum(), **EAGER)

    def gradient(policy):
        torch._dynamo.reset()
        model.zero_grad()
        torch.compile(model, backend="actcomp", options={**EAGER, "policy": policy})(x).square().sum().backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters()])

    exact, lossy = gradient("none"), gradient("int8")
    assert found.relative == pytest.approx(((lossy - exact).norm() / exact.norm()).item(), rel=1e-4)
    assert found.cosine == pytest.approx(F.cosine_similarity(exact, lossy, dim=0).item(), abs=1e-7)
    assert set(found.per_parameter) == {name for name, _ in model.named_parameters()}
    assert found.loss_equal


def test_it_leaves_the_model_as_it_was():
    model, inputs = models.resnet18(width=8, batch=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(*inputs).backward()
    optimizer.step()
    model.blocks[0].eval()
    hooked = []
    model.fc.weight.register_post_accumulate_grad_hook(lambda _: hooked.append(1))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters()]
    objects = [id(b) for b in model.buffers()]
    modes = [m.training for m in model.modules()]
    drawn = torch.get_rng_state()
    fx_actcomp.gradient_error(model, *inputs, **EAGER)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))
    assert objects == [id(b) for b in model.buffers()]
    assert modes == [m.training for m in model.modules()]
    assert torch.equal(drawn, torch.get_rng_state())
    assert not hooked


def test_dropout_draws_the_same_in_both_runs():
    model, inputs = models.gpt(layers=1, width=64, length=32, dropout=0.5)
    assert fx_actcomp.gradient_error(model, *inputs, policy="lossless", **EAGER).relative == 0


def test_inputs_that_the_model_writes_into_are_not_changed():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(16, 16)

        def forward(self, x, cache):
            cache += 1
            return self.lin(x + cache)

    cache = torch.zeros(4, 16)
    fx_actcomp.gradient_error(Writes(), torch.randn(4, 16), cache, **EAGER)
    assert not cache.any()


def test_a_model_with_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="no parameter and no input of the model requires a gradient"):
        fx_actcomp.gradient_error(nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4), **EAGER)


def test_gradients_of_inputs_count_where_there_are_no_parameters():
    found = fx_actcomp.gradient_error(nn.Softplus(), torch.randn(64, 64, requires_grad=True), **EAGER)
    assert list(found.per_parameter) == ["inputs[0]"]


def test_an_unknown_policy_lists_what_there_is():
    with pytest.raises(ValueError, match="unknown policy 'int9'; there are: none, lossless, int8, int4"):
        fx_actcomp.gradient_error(nn.Linear(4, 4), torch.randn(2, 4), policy="int9")


@pytest.mark.parametrize(("policy", "bound", "saving"), [("int8", 0.01, 3.7), ("int4", 0.08, 7.0)])
def test_resnet_holds_its_bars(policy, bound, saving):
    model, inputs = models.resnet18()
    assert fx_actcomp.gradient_error(model, *inputs, policy=policy, compiler="aot_eager").relative <= bound
    found = fx_actcomp.explain(model, *inputs, policy=policy, compiler="aot_eager")
    assert found.bytes_before / found.bytes_after >= saving


def test_gpt_holds_its_bars():
    model, inputs = models.gpt()
    assert fx_actcomp.gradient_error(model, *inputs, policy="int8", compiler="aot_eager").relative <= 0.01
    rows = [r for r in fx_actcomp.explain(model, *inputs, policy="int8").saved if r.codec != "keep"]
    assert sum(r.bytes_before for r in rows) / sum(r.bytes_after for r in rows) >= 3.7


def test_every_dropout_mask_of_the_gpt_takes_one_bit():
    model, inputs = models.gpt(layers=2, dropout=0.1)
    for compiler in ("aot_eager", "inductor"):
        found = fx_actcomp.explain(model, *inputs, policy="lossless", compiler=compiler)
        masks = [row for row in found.saved if row.dtype == "bool"]
        assert len(masks) == 4
        assert all(row.codec == "bits" and row.bytes_after * 8 == row.bytes_before for row in masks)
