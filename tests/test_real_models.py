"""Real models, unchanged; what the bars ask of them. ``benchmarks/real_models.py`` prints the figures."""

import pytest

torchvision = pytest.importorskip("torchvision", exc_type=ImportError, reason="torchvision is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import real_models  # noqa: E402 - it needs both
import zoo  # noqa: E402

pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("default"),  # the libraries' own deprecations are theirs
]

BOUNDS = {"efficientnet_b0": 0.03}
"""Where the error is above 0.01; the README names the cause."""


@pytest.mark.parametrize("name", real_models.MODELS)
def test_it_trains_and_holds_its_bars(name):
    result = real_models.measure(name)
    assert result.report.failures == ()
    assert result.losses[1] < result.losses[0] * 1.2
    assert result.error.relative <= BOUNDS.get(name, 0.01)
    assert result.saving >= 3


TRANSFORMERS = ("bert", "gpt2", "llama", "t5", "vit")
TORCHVISION = ("convnext", "efficientnet_b0", "mobilenet_v2", "resnet18", "resnext", "swin", "vit")


@pytest.mark.parametrize("name", [f"transformers/{n}" for n in TRANSFORMERS] + [f"torchvision/{n}" for n in TORCHVISION])
def test_policies_without_loss_lose_nothing_and_save_no_more(name):
    exact = zoo.train(name, "float32", "none")
    for policy, bound in (("lossless", 0.0), ("invert", 2e-5)):
        given = zoo.train(name, "float32", policy)
        assert given.report.failures == ()
        assert given.report.bytes_after <= given.report.bytes_before
        error, _ = zoo.error_of(*(steps.flat() for steps in (exact, given)))
        assert error <= bound
