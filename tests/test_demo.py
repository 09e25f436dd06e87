import json
import subprocess
import sys

import pytest
import torch

from fx_actcomp import demo, memory


def test_the_demo_trains_and_prints_what_was_saved():
    done = subprocess.run(
        [sys.executable, "-m", "fx_actcomp", "demo", "--steps", "2", "--compiler", "aot_eager", "--policy", "int4"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line in ("saved for backward, MiB", "peak memory of a step, MiB", "time of a step, s", "loss, last step"):
        assert line in done.stdout
    assert "layers.[0-3].up x4" in done.stdout
    assert "none: step 2/2" in done.stderr


def test_an_unknown_policy_lists_what_there_is():
    done = subprocess.run(
        [sys.executable, "-m", "fx_actcomp", "demo", "--policy", "int9"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "lossless" in done.stderr


def test_the_text_is_english_and_long_enough():
    text = bytes(demo.english()[:100_000].to(torch.uint8).tolist()).decode()
    assert text.count(" the ") > 500


def test_peak_memory_is_of_what_was_held_at_once():
    program = (
        "import json, torch\n"
        "from fx_actcomp import memory\n"
        "cpu = torch.device('cpu')\n"
        "torch.ones(50 * 2**20, dtype=torch.uint8)\n"
        "memory.mark(cpu)\n"
        "held = memory.held(cpu)\n"
        "x = torch.ones(30 * 2**20, dtype=torch.uint8)\n"
        "del x\n"
        "y = torch.ones(20 * 2**20, dtype=torch.uint8)\n"
        "print(json.dumps([memory.peak(cpu) - held, memory.held(cpu) - held]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=memory.environment())
    peak, held = json.loads(done.stdout)
    assert peak == pytest.approx(30 * 2**20, abs=4 * 2**20)
    assert held == pytest.approx(20 * 2**20, abs=4 * 2**20)
