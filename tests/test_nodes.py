import operator

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from fx_actcomp import nodes


def trace(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def named(graph, prefix):
    (node,) = [node for node in graph.nodes if node.name == prefix]
    return node


def node_with(**meta):
    node = fx.Graph().placeholder("x")
    node.meta.update(meta)
    return node


def node_in(*paths):
    return node_with(nn_module_stack={str(i): (path, object) for i, path in enumerate(paths)})


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("L['self'].layers.0.attn", "layers.0.attn"),
        ("L['self'].layers[0].attn", "layers.0.attn"),
        ("L['model'].head", "head"),
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        ("L['self'].experts['left'].up", "experts.left.up"),
        ("L__self___layers", "layers"),
        ("self.layers.0", "layers.0"),
        ("layers.0", "layers.0"),
        ("L['self']._orig_mod.layers.0", "layers.0"),
        ("L['self'].layers.0._orig_mod.attn", "layers.0.attn"),
        ("L['self']._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.attn", "layers.0.attn"),
        ("L['self']._orig_mod", ""),
        ("L['self']", ""),
        ("", ""),
    ],
)
def test_module_path_is_as_named_modules_spells_it(written, path):
    assert nodes.module_path(node_in(written)) == path


def test_module_path_is_of_the_innermost_module():
    assert nodes.module_path(node_in("L['self'].layers.0", "L['self'].layers.0.attn")) == "layers.0.attn"


def test_module_path_is_empty_at_top_level():
    assert nodes.module_path(node_with()) == ""


def test_module_path_of_a_backward_node_is_that_of_its_forward():
    forward, mine = {"0": ("L['self'].up", object)}, {"0": ("L['self'].down", object)}
    assert nodes.module_path(node_with(fwd_nn_module_stack=forward, nn_module_stack=mine)) == "up"


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.by_name = nn.ModuleDict({"left": nn.Linear(4, 4), "0": nn.Linear(4, 4)})
        self._private = nn.Linear(4, 4)
        self.self_attn = nn.Linear(4, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        for layer in self.by_name.values():
            x = layer(x)
        return self.self_attn(self._private(x))


def compiled_graphs(model, *inputs):
    """The forward and backward graphs of a training step."""
    graphs = []

    def keep(gm, _):
        graphs.append(gm.graph)

        def boxed(args):
            return fx.Interpreter(gm).run(*args)

        boxed._boxed_call = True
        return boxed

    torch.compile(model, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))(*inputs).sum().backward()
    return graphs


@pytest.mark.parametrize("wrap", [lambda model: model, torch.compile], ids=["plain", "compiled twice"])
def test_each_linear_of_a_compiled_model_is_found_by_its_name(wrap):
    model = Nested()
    forward, backward = compiled_graphs(wrap(model), torch.randn(3, 4, requires_grad=True))
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {nodes.module_path(node) for node in forward.nodes if nodes.packet(node) == "aten.addmm"} == linears
    assert {nodes.module_path(node) for node in backward.nodes if nodes.packet(node) == "aten.mm"} == linears


def test_source_line_is_the_users():
    forward, _ = compiled_graphs(Nested(), torch.randn(3, 4, requires_grad=True))
    (*_, last) = [node for node in forward.nodes if nodes.packet(node) == "aten.addmm"]
    line = Nested.forward.__code__.co_firstlineno + 5
    assert nodes.source_line(last) == f"{__file__}:{line}"


def test_source_line_is_the_innermost_frame():
    trace = '  File "a.py", line 1, in f\n    g()\n  File "b.py", line 22, in g\n    x + 1\n'
    assert nodes.source_line(node_with(stack_trace=trace)) == "b.py:22"


@pytest.mark.parametrize("trace", [None, "", "no frame"])
def test_source_line_is_empty_where_unknown(trace):
    assert nodes.source_line(node_with(stack_trace=trace)) == ""


@pytest.mark.parametrize(
    ("x", "stored"),
    [
        (torch.zeros(3, 5), 60),
        (torch.zeros(3, 5, dtype=torch.bfloat16), 30),
        (torch.zeros(3, 5, dtype=torch.bool), 15),
        (torch.zeros(3, 5).t(), 60),
        (torch.zeros(3, 1).expand(3, 500), 12),
        (torch.zeros(1).expand(7, 9), 4),
        (torch.zeros(4, 1, 6).expand(4, 9, 6), 96),
        (torch.zeros(4, 1, 6).expand(4, 1, 6), 96),
        (torch.zeros(8, 6)[::2], 96),
        (torch.zeros(()), 4),
        (torch.zeros(0, 3), 0),
    ],
)
def test_stored_bytes_are_those_of_distinct_elements(x, stored):
    assert nodes.stored_bytes(x) == stored


def test_bytes_and_elements_of_a_node():
    relu = named(trace(lambda x: x.relu(), torch.zeros(3, 5)), "relu")
    assert (nodes.numel(relu), nodes.nbytes(relu)) == (15, 60)


def test_what_is_no_tensor_has_no_bytes():
    node = node_with(val=3)
    assert (nodes.numel(node), nodes.nbytes(node), nodes.value(node)) == (0, 0, None)


def test_symbolic_sizes_count_as_seen_at_compile_time():
    graph = make_fx(lambda x: x.relu(), tracing_mode="symbolic")(torch.zeros(3, 5)).graph
    relu = named(graph, "relu")
    assert (nodes.numel(relu), nodes.nbytes(relu)) == (15, 60)


def test_symbols_are_told_from_tensors():
    graph = make_fx(lambda x: x.new_zeros(x.shape[0] + 1), tracing_mode="symbolic")(torch.zeros(3, 5)).graph
    symbols = {node.name for node in graph.nodes if nodes.is_symbol(node)}
    assert "sym_size_int" in symbols
    assert not symbols & {node.name for node in graph.nodes if nodes.value(node) is not None}


VIEWS = {
    "view": lambda x: x.view(-1),
    "transpose": lambda x: x.t(),
    "permute": lambda x: x.permute(1, 0),
    "slice": lambda x: x[1:],
    "select": lambda x: x[1],
    "expand": lambda x: x.unsqueeze(0).expand(3, 4, 6),
    "detach": lambda x: x.detach(),
    "split": lambda x: x.split(2)[1],
    "unbind": lambda x: x.unbind()[2],
    "as_strided": lambda x: x.as_strided((2,), (1,)),
    "_unsafe_view": lambda x: torch.ops.aten._unsafe_view(x, [24]),
    "alias": lambda x: torch.ops.aten.alias(x),
    "real": lambda x: torch.view_as_complex(x.view(4, 3, 2)),
    "chain": lambda x: x.view(2, 12).t()[3:].unsqueeze(1).split(2)[0].squeeze(),
}
OWNERS = {
    "clone": lambda x: x.clone(),
    "relu": lambda x: x.relu(),
    "contiguous": lambda x: x.t().contiguous(),
    "cast": lambda x: x.double(),
    "sum": lambda x: x.sum(0),
    "maxima": lambda x: x.max(0).values,
    "cat": lambda x: torch.cat([x, x]),
    "add_": lambda x: x.clone().add_(1),
    "index": lambda x: x[torch.tensor([0, 1])],
    "repeat": lambda x: x.repeat(2, 1),
}


def result(graph):
    (node,) = nodes.outputs(graph)
    return node


@pytest.mark.parametrize("name", VIEWS)
def test_views_share_the_storage_of_their_base(name):
    graph = trace(lambda x: VIEWS[name](x.sin()), torch.randn(4, 6))
    assert nodes.is_view(result(graph))
    assert nodes.storage_base(result(graph)) is named(graph, "sin")


@pytest.mark.parametrize("name", OWNERS)
def test_what_is_no_view_owns_its_storage(name):
    graph = trace(lambda x: OWNERS[name](x.sin()), torch.randn(4, 6))
    assert not nodes.is_view(result(graph))
    assert nodes.storage_base(result(graph)) is result(graph)


def test_inputs_own_their_storage():
    graph = trace(lambda x: x.sin(), torch.randn(4))
    (x,) = graph.find_nodes(op="placeholder")
    assert not nodes.is_view(x)
    assert nodes.storage_base(x) is x


def test_is_view_agrees_with_storages():
    for name, function in {**VIEWS, **OWNERS}.items():
        if name not in {"_unsafe_view", "add_"}:
            x = torch.randn(4, 6)
            shares = function(x).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            assert shares == nodes.is_view(result(trace(function, x))), name


def test_aliases_are_the_base_and_every_view_of_it():
    graph = trace(lambda x: [(s := x.sin()).view(-1), s.t()[1:], s.split(2)[1], s.cos().t()], torch.randn(4, 6))
    found = {node.name for node in nodes.aliases(named(graph, "sin"))}
    assert {"sin", "view", "t", "slice_1", "getitem_1"} <= found
    assert not found & {"cos", "t_1"}


def test_packet_names_the_operator_without_its_overload():
    graph = trace(lambda x: torch.add(x, x).max(0).values, torch.randn(4, 6))
    assert nodes.packet(named(graph, "add")) == "aten.add"
    assert named(graph, "getitem").target is operator.getitem
    assert nodes.packet(named(graph, "getitem")) == "aten.max"


def test_original_is_what_the_user_called():
    node = node_with(original_aten=torch.ops.aten.silu.default)
    assert nodes.original(node) == "aten.silu"


def test_original_is_the_operator_itself_where_that_is_not_known():
    graph = trace(lambda x: x.sin(), torch.randn(4))
    assert nodes.original(named(graph, "sin")) == "aten.sin"


@pytest.mark.parametrize(
    ("source", "target", "widening"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float16, torch.float32, True),
        (torch.float32, torch.float64, True),
        (torch.int32, torch.int64, True),
        (torch.bool, torch.float32, True),
        (torch.float32, torch.bfloat16, False),
        (torch.float32, torch.float16, False),
        (torch.float16, torch.bfloat16, False),
        (torch.float32, torch.int64, False),
        (torch.int64, torch.int32, False),
    ],
)
def test_a_widening_cast_loses_nothing(source, target, widening):
    cast = result(trace(lambda x: x.to(target), torch.zeros(4, dtype=source)))
    assert nodes.is_cast(cast)
    assert nodes.is_widening(cast) == widening


def test_a_cast_that_rounds_large_integers_is_not_widening():
    largest = torch.tensor([2**31 - 2])
    assert largest.float().long() != largest
    assert not nodes.is_widening(result(trace(lambda x: x.float(), largest)))


def test_a_copy_is_widening():
    assert nodes.is_widening(result(trace(lambda x: x.clone(), torch.zeros(4))))


def test_a_sum_is_no_cast():
    node = result(trace(lambda x: x.sum(), torch.zeros(4)))
    assert not nodes.is_cast(node)
    assert not nodes.is_widening(node)


def test_tangents_are_told_by_name():
    graph = fx.Graph()
    assert nodes.is_tangent(graph.placeholder("tangents_1"))
    assert not nodes.is_tangent(graph.placeholder("primals_1"))


def test_outputs_of_one_value_and_of_several():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(x)
    assert nodes.outputs(graph) == (x,)
    several = fx.Graph()
    x = several.placeholder("x")
    several.output((x, None))
    assert nodes.outputs(several) == (x, None)
