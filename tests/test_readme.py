"""The README's example of a codec of one's own, run as it stands there."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fx_actcomp
from fx_actcomp.codecs import CODECS

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def topk(tmp_path):
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "register_codec" in block]
    lines = [line for line in code.splitlines() if line.strip()]
    path = tmp_path / "mine.py"
    path.write_text(code)
    exec(compile(code, str(path), "exec"), {"__name__": "mine"})
    yield lines
    del CODECS["topk"]


def test_the_example_takes_about_twenty_lines(topk):
    assert len(topk) <= 22


@pytest.mark.usefixtures("topk")
def test_the_example_saves_the_largest_values():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(32, 16)
    options = {"policy": "topk:keep=0.25", "min_bytes": 0, "compiler": "aot_eager"}
    call = torch.compile(model, backend="actcomp", options=options)
    call(x).sum().backward()
    (row,) = [row for row in fx_actcomp.report(call).saved if row.codec == "topk:keep=0.25"]
    assert row.bytes_after == 32 * 64 // 4 * (4 + 4)
    hidden = model[1](model[0](x)).detach()
    least = hidden.flatten().topk(32 * 64 // 4).values[-1]
    kept = torch.where(hidden >= least, hidden, 0)
    torch.testing.assert_close(model[2].weight.grad, torch.ones(32, 8).T @ kept)
    masked = (torch.ones(32, 8) @ model[2].weight.detach()) * (hidden > 0)  # decisions are forward's own
    torch.testing.assert_close(model[0].weight.grad, masked.T @ x)
