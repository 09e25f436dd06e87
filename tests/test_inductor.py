"""What only Inductor can show. Each compilation takes C++ its time, so there are few, and a test uses each for all it shows."""

import models
import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import fx_actcomp
import fx_actcomp.partition as partition


def small_gpt():
    return models.gpt(layers=1, width=64, length=32, batch=4, dropout=0.1)


def compiled(model, policy, **others):
    torch._dynamo.reset()
    return torch.compile(model, backend="actcomp", options={"policy": policy, "min_bytes": 0, "strict": True, **others})


def gradient(call, model, inputs):
    torch.manual_seed(1)
    model.zero_grad()
    call(*inputs).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def relative(exact, got):
    return ((got - exact).norm() / exact.norm()).item()


def test_none_equals_plain_torch_compile_bit_for_bit():
    model, inputs = small_gpt()
    plain = gradient(torch.compile(model), model, inputs)
    assert torch.equal(plain, gradient(compiled(model, "none"), model, inputs))


def test_without_gradients_the_generated_code_is_that_of_plain_torch_compile():
    model, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), torch.randn(16, 64)
    with torch.no_grad():
        _, plain = run_and_get_code(torch.compile(model), x)
        _, ours = run_and_get_code(compiled(model, "invert"), x)
    assert plain
    assert [code.partition("\n")[2] for code in plain] == [code.partition("\n")[2] for code in ours]  # but for the graph's number


@pytest.mark.filterwarnings("ignore:.*cudagraphs.*")  # there are none on CPUs
def test_reduce_overhead_trains_as_the_default_mode_does():
    model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.2), nn.ReLU(), nn.Linear(128, 8))
    call_on = (torch.randn(16, 64),)
    exact = gradient(lambda x: compiled(model, "none")(x).sum(), model, call_on)
    calls = {policy: compiled(model, policy, mode="reduce-overhead") for policy in ("lossless", "int8")}
    for policy, call in calls.items():
        first, again = (gradient(lambda x, call=call: call(x).sum(), model, call_on) for _ in range(2))
        assert torch.equal(first, again)
        assert relative(exact, first) <= {"lossless": 1e-6, "int8": 0.01}[policy]


def test_policies_hold_their_bounds_and_autograd_holds_what_the_report_says(monkeypatch):
    model, inputs = small_gpt()
    exact = gradient(compiled(model, "none"), model, inputs)
    assert relative(exact, gradient(compiled(model, "lossless"), model, inputs)) <= 1e-6

    call = compiled(model, "int8")
    loss = call(*inputs)
    alive = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *inputs, loss)}
    saved = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in loss.grad_fn.saved_tensors}
    first = fx_actcomp.report(call)
    assert sum(size for pointer, size in saved.items() if pointer not in alive) == first.bytes_after
    assert relative(exact, gradient(call, model, inputs)) <= 0.01

    asked = []
    stock = partition.stock_partition
    monkeypatch.setattr(partition, "stock_partition", lambda *a, **k: (asked.append(1), stock(*a, **k))[1])
    warm = compiled(model, "int8")
    assert relative(exact, gradient(warm, model, inputs)) <= 0.01
    assert not asked, "the second compilation was not answered by the cache"
    again = fx_actcomp.report(warm)
    assert again.rederived
    assert again.saved == first.saved


def test_masks_of_relu_stay_exact_beside_packed_codes():
    model, inputs = models.resnet18(width=8, batch=4)
    exact = gradient(compiled(model, "none"), model, inputs)
    assert relative(exact, gradient(compiled(model, "int4"), model, inputs)) <= 0.15
