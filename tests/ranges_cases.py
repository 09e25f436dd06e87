import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.fx.experimental.proxy_tensor import make_fx

from fx_actcomp._torch import inductor_decompositions
from fx_actcomp.nodes import outputs
from fx_actcomp.ranges import nonnegative, upper_bound

property_test = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


TABLES = {"aten": dict, "inductor": inductor_decompositions}


by_table = pytest.mark.parametrize("table", TABLES)


def trace(function, *inputs, table="aten", mode="fake"):
    return make_fx(lambda *given: function(*given), tracing_mode=mode, decomposition_table=TABLES[table]())(*inputs)


def result(traced):
    (node,) = outputs(traced.graph)
    return node


def image():
    return torch.randn(2, 3, 8, 8)


def assert_true_on(traced, *inputs):
    """Run the graph and hold every node's value against what is claimed of it."""

    class Check(torch.fx.Interpreter):
        def run_node(self, n):
            held = super().run_node(n)
            if isinstance(held, torch.Tensor) and held.numel() and not held.is_complex():
                if n.op == "call_function" and nonnegative(n):
                    assert not (held < 0).any(), f"{n.format_node()} is claimed to be nonnegative"
                if (bound := upper_bound(n)) is not None:
                    assert held.min() >= 0, f"{n.format_node()} is claimed to be nonnegative"
                    assert held.max() <= bound, f"{n.format_node()} is claimed to be at most {bound}"
            return held

    Check(traced).run(*inputs)
