"""Parameters in pieces: FSDP2 a layer, tensor parallel with DTensor, and both."""

import torch
import torch.distributed as dist
from scenarios.running import options
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .data_parallel import mine
from .net import batch, build, gradients, loss_of, told, whole


def layers_of(net):
    return (*net.layers, net.head)


def _step(net, x, times=2):
    for _ in range(times):  # the second step reuses what the first one gathered into
        net.zero_grad()
        output = net(x)
        loss_of(output.float()).backward()
    return {"exact": {"output": whole(output)}, "gradients": gradients(net), **told(net)}


def _fsdp(policy, prepare=None, **arguments):
    """Each layer compiled, then sharded: its parameters are gathered outside of its graph."""
    net = build()
    for layer in layers_of(net):
        if prepare is not None:
            prepare(layer)
        layer.compile(backend="actcomp", options=options(policy))
        fully_shard(layer, **arguments)
    return _step(fully_shard(net, **arguments), mine(batch()))


def resharded(policy):
    return _fsdp(policy, reshard_after_forward=True)


def kept(policy):
    return _fsdp(policy, reshard_after_forward=False)


def bfloat16(policy):
    return _fsdp(policy, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def checkpointed(policy):
    return _fsdp(policy, prepare=checkpoint)


def held(policy):
    """Bytes that wait for backward, of a model whose parameters are whole and of one whose parameters are gathered."""
    found = {}
    for name, shard in (("whole", lambda layer: None), ("gathered", fully_shard)):  # noqa: ARG005
        torch._dynamo.reset()
        net = build()
        for layer in layers_of(net):
            layer.compile(backend="actcomp", options=options(policy))
            shard(layer)
        for _ in range(2):  # the parameters are gathered first in the first step
            output, storages = _saved_by(net, mine(batch()))
            owned = {p.untyped_storage().data_ptr() for p in net.parameters()}
            found[name] = sum(held.nbytes() for held in storages if held.data_ptr() not in owned)
            loss_of(output).backward()
    return found


def _saved_by(net, x):
    """The output, and the storages that autograd holds for it."""
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = net(x)
    return output, saved.values()


COLUMNS_AND_ROWS = {
    "layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel(),
    "head.first": ColwiseParallel(), "head.last": RowwiseParallel(),
}  # fmt: skip
SEQUENCE = {
    "layers.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
    "layers.*.norm": SequenceParallel(),
    "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "head.first": ColwiseParallel(input_layouts=Shard(1)),
    "head.last": RowwiseParallel(),
}


def _tensor_parallel(plan, policy):
    net = parallelize_module(build(), init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    net.compile(backend="actcomp", options=options(policy))
    return _step(net, batch())


def columns_and_rows(policy):
    return _tensor_parallel(COLUMNS_AND_ROWS, policy)


def sequence(policy):
    return _tensor_parallel(SEQUENCE, policy)


def rows_and_shards(policy):
    """Tensor parallel within pairs of ranks, FSDP2 across these."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
    net = parallelize_module(build(), mesh["tensor"], COLUMNS_AND_ROWS)
    for layer in layers_of(net):
        layer.compile(backend="actcomp", options=options(policy))
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(net, mesh=mesh["data"])
    return _step(net, batch().chunk(2)[mesh["data"].get_local_rank()])
