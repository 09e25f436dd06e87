"""DistributedDataParallel: Dynamo cuts the graph at the buckets."""

import contextlib
import functools

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .net import Head, Net, batch, build, compiled, gradients, loss_of, told

WIDTH = 256  # a layer fills the smallest bucket, of one MiB


def mine(x):
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def _steps(call, ddp, x, pieces=1):
    """One step over some pieces of the rank's batch; only the last one's backward reduces."""
    outputs = []
    for i, piece in enumerate(mine(x).chunk(pieces)):
        with ddp.no_sync() if i + 1 < pieces else contextlib.nullcontext():
            outputs.append(call(piece))
            (loss_of(outputs[-1]) / pieces).backward()
    return {f"output {i}": out.detach() for i, out in enumerate(outputs)}


def _ddp(policy, *, pieces=1, times=1, make=Net, **arguments):
    ddp = DistributedDataParallel(build(WIDTH, make), **arguments)
    call = compiled(ddp, policy)
    for _ in range(times):
        ddp.zero_grad()
        exact = _steps(call, ddp, batch(WIDTH), pieces)
    return {"exact": exact, "gradients": gradients(ddp.module), **told(ddp)}


def buckets(policy):
    return _ddp(policy, bucket_cap_mb=1)


def one_bucket(policy):
    return _ddp(policy, bucket_cap_mb=100)


def through_inductor(policy):
    ddp = DistributedDataParallel(build(WIDTH, functools.partial(Net, depth=1)), bucket_cap_mb=1)
    exact = _steps(compiled(ddp, policy, compiler="inductor"), ddp, batch(WIDTH))
    return {"exact": exact, "gradients": gradients(ddp.module), **told(ddp)}


def compiled_inside(policy):
    """The model is compiled first, and wrapped then."""
    ddp = DistributedDataParallel(compiled(build(WIDTH), policy), bucket_cap_mb=1)
    exact = _steps(ddp, ddp, batch(WIDTH))
    return {"exact": exact, "gradients": gradients(ddp.module._orig_mod), **told(ddp)}


def accumulation(policy):
    return _ddp(policy, bucket_cap_mb=1, pieces=2)


def static_graph(policy):
    return _ddp(policy, bucket_cap_mb=1, static_graph=True, times=3)


class Unused(Net):
    def __init__(self, width):
        super().__init__(width)
        self.idle = Head(width)


def unused_parameters(policy):
    return _ddp(policy, bucket_cap_mb=1, find_unused_parameters=True, make=Unused)
