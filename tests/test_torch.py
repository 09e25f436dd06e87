import warnings

import pytest
import torch

from fx_actcomp import _torch


@pytest.mark.parametrize("path", _torch.PRIVATE_NAMES)
def test_torch_has_every_private_name_that_we_use(path):
    assert _torch.private(path) is not None


def test_an_untested_torch_warns_once(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    _torch.warn_untested.cache_clear()
    with pytest.warns(UserWarning, match=r"tested on torch 2\.13 and 2\.14, not on 9\.9\.0"):
        _torch.warn_untested()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _torch.warn_untested()
    _torch.warn_untested.cache_clear()


def test_a_size_hint_adds_no_guard():
    seen = []

    def backend(gm, _):
        (placeholder,) = [n for n in gm.graph.nodes if n.op == "placeholder" and n.name.startswith("l_")]
        seen.append(_torch.size_hint(placeholder.meta["example_value"].shape[0]))
        return gm.forward

    call = torch.compile(lambda x: x * 2, backend=backend, dynamic=True)
    call(torch.ones(6))
    call(torch.ones(7))
    assert seen == [6]
