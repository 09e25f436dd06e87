"""What ``torchrun`` starts: every case of a list on each rank, in one process group; what they give goes to a file a rank.

``torchrun ... -m distributed.worker FOLDER CASE/POLICY ...``
"""

import datetime
import os
import sys
import traceback
import warnings
from pathlib import Path

SEEDS = ("0", "4", "1", "2")
if os.environ.get("PYTHONHASHSEED") != SEEDS[int(os.environ["RANK"])]:  # no order of a set may matter: each rank has its own
    seeded = {**os.environ, "PYTHONHASHSEED": SEEDS[int(os.environ["RANK"])]}
    os.execve(sys.executable, [sys.executable, "-m", "distributed.worker", *sys.argv[1:]], seeded)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from . import data_parallel, pipeline, ranks, readme, sharded  # noqa: E402

MODULES = (data_parallel, pipeline, ranks, readme, sharded)


def main(folder, *names):
    warnings.filterwarnings("error", message=".*(fx_actcomp|overrides matched|pickle)")
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    cases = {f"{module.__name__.rpartition('.')[2]}.{name}": getattr(module, name) for module in MODULES for name in vars(module)}
    found = {}
    for name in names:
        case, _, policy = name.partition("/")
        torch._dynamo.reset()
        try:
            found[name] = cases[case](policy)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
        torch.save(found, Path(folder) / f"{dist.get_rank()}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
