"""Real models, unchanged; what the bars ask of them. ``benchmarks/real_models.py`` prints the figures."""

import pytest

torchvision = pytest.importorskip("torchvision", exc_type=ImportError, reason="torchvision is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import real_models  # noqa: E402 - it needs both

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
