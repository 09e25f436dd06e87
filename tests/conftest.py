import pytest
import torch

from fx_actcomp.codecs import CODECS


@pytest.fixture(autouse=True)
def fresh_torch(tmp_path, monkeypatch):
    """No compiled code of another test, no cache of another run, no luck in the draws."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.delenv("ACTCOMP_DISABLE", raising=False)
    torch._dynamo.reset()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        cuda = pytest.param("cuda", marks=pytest.mark.cuda)
        metafunc.parametrize("device", ["cpu", cuda] if torch.cuda.is_available() else ["cpu"])


@pytest.fixture
def codecs_as_they_were():
    """What a test registers is gone after it."""
    before = dict(CODECS)
    yield
    CODECS.clear()
    CODECS.update(before)
