"""Pipeline stages, each compiled, with several microbatches between forward and backward at once."""

import torch
import torch.distributed as dist
from scenarios.running import options
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from .net import batch, build, loss_of, told

MICROBATCHES = 4


def stage_of(net, index, count):
    """The layers of one stage, and their names in the whole model."""
    layers = {f"layers.{i}": layer for i, layer in enumerate(net.layers)} | {"head": net.head}
    names = list(layers)[index * len(layers) // count : (index + 1) * len(layers) // count]
    return nn.Sequential(*map(layers.__getitem__, names)), names


def _pipeline(policy, kind, stages_each=1):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = {index: stage_of(build(), index, ranks * stages_each) for index in range(rank, ranks * stages_each, ranks)}
    for module, _ in parts.values():
        module.compile(backend="actcomp", options=options(policy))
    stages = [PipelineStage(module, i, ranks * stages_each, torch.device("cpu")) for i, (module, _) in parts.items()]
    schedule = kind(stages if stages_each > 1 else stages[0], MICROBATCHES, loss_fn=lambda output, _: loss_of(output))
    losses = []
    if rank == 0:
        schedule.step(batch())
    elif rank == ranks - 1:
        schedule.step(target=batch(), losses=losses)
    else:
        schedule.step()
    gradients = {}
    for module, names in parts.values():
        for name, parameter in module.named_parameters():
            place, _, rest = name.partition(".")
            gradients[f"{names[int(place)]}.{rest}"] = parameter.grad.clone()
    exact = {f"loss {i}": loss.detach() for i, loss in enumerate(losses)}
    return {"exact": exact, "gradients": gradients, **told(nn.ModuleList(module for module, _ in parts.values()))}


def gpipe(policy):
    return _pipeline(policy, ScheduleGPipe)


def one_forward_one_backward(policy):
    return _pipeline(policy, Schedule1F1B)


def interleaved(policy):
    return _pipeline(policy, ScheduleInterleaved1F1B, stages_each=2)
