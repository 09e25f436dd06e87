"""What differs between ranks: sizes, when they recompile, which tensors are large enough, the order of sets, random draws."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fx_actcomp

from .data_parallel import WIDTH, mine
from .net import batch, build, compiled, gradients, loss_of, told

ROWS = ((4, 4), (6, 4), (6, 7))  # of rank 0 and of the others, step by step: rank 0 recompiles first, the others a step later


def piece(step, rank):
    """A rank's batch of a step."""
    return batch(rows=8)[: ROWS[step][min(rank, 1)]]


def _steps(policy, count, **others):
    ddp = DistributedDataParallel(build())
    call, found = compiled(ddp, policy, **others), {}
    torch._dynamo.utils.counters.clear()
    for step in range(count):
        ddp.zero_grad()
        output = call(piece(step, dist.get_rank()))
        loss_of(output).backward()
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found[f"step {step}"] = {"gradients": gradients(ddp.module), **told(ddp), "compiled": graphs}
    return {"exact": {"output": output.detach()}, **found, **found[f"step {count - 1}"]}


def sizes(policy):
    return _steps(policy, len(ROWS))


def thresholds(policy):
    """Six rows of the hidden layer are large enough to compress, four are not."""
    torch._dynamo.config.automatic_dynamic_shapes = False
    try:
        return _steps(policy, 2, min_bytes=5 * 4 * 64 * 4)
    finally:
        torch._dynamo.config.automatic_dynamic_shapes = True


class Outer(nn.Module):
    """Two small values whose decisions outweigh them; the second decision's other source can bear its bits."""

    def __init__(self, width):
        super().__init__()
        self.row, self.column, self.table = nn.Linear(width, 64), nn.Linear(width, 1), nn.Linear(width, 64)
        self.of_row, self.of_column, self.of_table = nn.Linear(64, 4), nn.Linear(1, 4), nn.Linear(64, 4)

    def forward(self, one, many):
        row, column, table = self.row(one), self.column(many), self.table(many)
        heads = self.of_row(row).sum() + self.of_column(column).sum() + self.of_table(table).sum()
        return heads + torch.where(row > column, table, 2 * table).sum() + torch.where(row > table, table, 3 * table).sum()


def order_of_sets(policy):
    """The order in which values are found too dear depends on the seed of Python's hashes."""
    inputs = [torch.randn(rows, 8).bfloat16() for rows in (1, 64)]
    report = fx_actcomp.explain(build(8, Outer).bfloat16(), *inputs, policy=policy, min_bytes=0, compiler="aot_eager")
    return {"codecs": {row.module: row.codec for row in report.saved if row.op == "aten.addmm"}}


def draws(policy):
    """Each rank rounds with numbers of its own; the gradients are averaged, so the ranks stay alike."""
    fx_actcomp.manual_seed(dist.get_rank())
    ddp = DistributedDataParallel(build(WIDTH), bucket_cap_mb=1)
    call = compiled(ddp, policy)
    with ddp.no_sync():
        loss_of(call(batch(WIDTH)[:2])).backward()
    alone = gradients(ddp.module)
    ddp.zero_grad()
    loss_of(call(mine(batch(WIDTH)))).backward()
    fx_actcomp.manual_seed(0)
    return {"alone": alone, "gradients": gradients(ddp.module), **told(ddp)}
