"""Runs scenarios: under eager, under torch's own backends, and under a policy of ours."""

import contextlib
import functools
from dataclasses import dataclass

import torch
import torch.distributed

import fx_actcomp


@dataclass(frozen=True)
class Outcome:
    """What a run gave: tensors that must be exact, tensors that may be lossy, and the module to ask for its report."""

    exact: dict
    lossy: dict
    module: torch.nn.Module

    @functools.cached_property
    def report(self):
        return fx_actcomp.report(self.module)


def options(policy, **others):
    return {"compiler": "aot_eager", "min_bytes": 0, "strict": True, "policy": policy, **others}


@functools.cache
def reference(scenario):
    """The scenario without us."""
    return _run(scenario, {"backend": scenario.reference} if scenario.reference else None)


@functools.cache
def outcome(scenario, policy):
    """The scenario under a policy; it runs once a session."""
    return _run(scenario, {"backend": "actcomp", "options": options(policy)})


def run_again(scenario, policy, **others):
    """The scenario under a policy, with further options, whatever ran before."""
    return _run(scenario, {"backend": "actcomp", "options": options(policy, **others)})


def _run(scenario, compiling):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, inputs = scenario.make()
    call = torch.compile(module, **compiling) if compiling else module
    torch.manual_seed(1)
    exact, lossy = scenario.drive(call, module, inputs)
    return Outcome(exact, lossy, module)


def calls_of_backend(scenario, backend, **kwargs):
    """How many graphs a backend is asked to compile while the scenario is driven."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, inputs = scenario.make()
    calls = []

    def counting(gm, example_inputs):
        calls.append(gm)
        return backend(gm, example_inputs, **kwargs)

    scenario.drive(torch.compile(module, backend=counting), module, inputs)
    return len(calls)


@contextlib.contextmanager
def process_group(folder):
    """A group of this process alone."""
    store = torch.distributed.FileStore(str(folder / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
