"""Layers that are compiled one by one share compiled code; a report counts each."""

import pytest
import torch
import torch.nn.functional as F
from scenarios.running import options
from torch import nn

import fx_actcomp

# Dynamo asks a layer's input for .grad
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Layer(nn.Module):
    def __init__(self, inner=nn.Identity):
        super().__init__()
        self.up, self.down, self.inner = nn.Linear(32, 32), nn.Linear(32, 32), inner()

    def forward(self, x):
        return x + self.inner(self.down(F.gelu(self.up(x))))


def trained(layers, rows=64):
    for layer in layers:
        layer.compile(backend="actcomp", options=options("int8"))
    layers(torch.randn(rows, 32)).sum().backward()
    return layers


def test_equal_layers_run_one_graph_and_save_each_their_own():
    layers = trained(nn.Sequential(*(Layer() for _ in range(3))))
    one, all_three = fx_actcomp.report(layers[1]), fx_actcomp.report(layers)
    assert (one.graphs, all_three.graphs) == (1, 3)
    assert all_three.bytes_before == 3 * one.bytes_before == 3 * 2 * 64 * 32 * 4
    assert all_three.bytes_after == 3 * one.bytes_after


def test_layers_that_differ_are_no_alternatives():
    layers = trained(nn.Sequential(Layer(), Layer(nn.ReLU)))
    parts = [fx_actcomp.report(layer).bytes_before for layer in layers]
    assert fx_actcomp.report(layers).bytes_before == sum(parts)
    assert parts[1] == parts[0] + 64 * 32  # the ReLU's mask


def test_a_layer_compiled_anew_for_other_sizes_counts_once():
    layers = trained(nn.Sequential(Layer(), Layer()))
    layers(torch.randn(65, 32)).sum().backward()
    report = fx_actcomp.report(layers)
    assert (report.graphs, report.bytes_before) == (2, 2 * 2 * 65 * 32 * 4)


def test_a_layer_that_is_gone_is_not_counted():
    layers = trained(nn.Sequential(Layer(), Layer()))
    del layers[0]
    assert fx_actcomp.report(layers).graphs == 1
