"""Run by test_caches.py in processes of their own: compiles one small model in several ways and says what the caches did.

python cache_process.py '{"steps": [{"options": {...}, "annotate": "int4", "codec": "path.py", "autograd": true}, ...],
                          "load": "path", "save": "path"}'
"""

import hashlib
import importlib.util
import json
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.utils import counters

import fx_actcomp
from fx_actcomp.codecs import codec_sources
from fx_actcomp.options import parse_options
from fx_actcomp.partition import ActcompPartitioner

TYPED = """
from fx_actcomp import Codec, register_codec

@register_codec
class Typed(Codec):
    name, bits = "typed", 8
    def fits(self, layout, traits): return None if str(layout.dtype) in {"torch.float32", "torch.float64", "other"} else "no"
    def compress(self, x, traits, to=torch.float16): return (x.to(to),)
    def decompress(self, parts, layout, traits): return layout.restore(parts[0].to(layout.dtype))
"""


class Model(nn.Module):
    def __init__(self, codec=None):
        super().__init__()
        self.a, self.b, self.codec = nn.Linear(16, 64), nn.Linear(64, 8), codec

    def forward(self, x):
        if self.codec is None:
            return self.b(torch.relu(self.a(x)))
        with fx_actcomp.annotate(self.codec):
            return self.b(torch.relu(self.a(x)))


def load_codec(path):
    spec = importlib.util.spec_from_file_location("users_codec", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["users_codec"] = module
    spec.loader.exec_module(module)


def run(step):
    if "codec" in step:
        load_codec(step["codec"])
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model, x = Model(step.get("annotate")), torch.randn(32, 16)
    call = torch.compile(model, backend="actcomp", options=step["options"])
    with torch._functorch.config.patch(enable_autograd_cache=step.get("autograd", True)):
        y = call(x)
        y.square().mean().backward()
    counted = {**counters["aot_autograd"], **counters["inductor"]}
    gradients = b"".join(p.grad.numpy().tobytes() for p in model.parameters())
    return {
        "gradients": hashlib.sha256(y.detach().numpy().tobytes() + gradients).hexdigest(),
        "counted": {name: number for name, number in counted.items() if "cache" in name and ("hit" in name or "miss" in name)},
        "bypassed": [name for name in counted if "bypass" in name],
        "report": fx_actcomp.report(call).to_dict(),
    }


def key(**options):
    return ActcompPartitioner(parse_options(options), ("3:int4",)).uuid()


def main():
    job = json.loads(sys.argv[1])
    warnings.filterwarnings("ignore", message="overrides matched no saved activation")
    if "load" in job:
        assert torch.compiler.load_cache_artifacts(Path(job["load"]).read_bytes()) is not None
    steps = [run(step) for step in job["steps"]]
    if "save" in job:
        artifacts, _ = torch.compiler.save_cache_artifacts()
        Path(job["save"]).write_bytes(artifacts)
    exec(TYPED, {"__name__": "__console__", "torch": torch})
    keys = [
        key(),
        key(policy="blpa4", min_bytes=1),
        key(overrides={"b.*": "int4", "a": None, "re:c": "typed"}),
        codec_sources(["typed"]),
    ]
    print(json.dumps({"steps": steps, "keys": keys, "package": str(Path(fx_actcomp.__file__).parent)}))


if __name__ == "__main__":
    main()
