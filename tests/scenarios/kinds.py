"""Saved tensors that are no plain activations: masks, random state, statistics, indices."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .base import DECOMPOSED, Scenario, flag, gradients, one_step


# the zeros of a dropout's gradient are the zeros of its output: pytorch #190758, #190717, #198333
class TwoDropouts(nn.Module):
    def __init__(self, width=56):
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.4)

    def forward(self, x):
        return self.dropout(x + 2), self.dropout(F.gelu(self.linear(x)))


def two_dropouts():
    return TwoDropouts(), [torch.rand(30, 56, requires_grad=True)]


def and_compares_zeros(call, module, inputs):
    shifted, activated = call(*inputs)
    (grad,) = torch.autograd.grad(shifted.sum(), inputs[0], retain_graph=True)
    activated.square().mean().backward()
    same_zeros = flag(((grad == 0) == (shifted == 0)).all())
    exact = {"shifted": shifted.detach(), "activated": activated.detach(), "same zeros": same_zeros}
    return exact | {"next random numbers": torch.rand(5)}, gradients(module, inputs)


# checkpointed blocks draw the same dropout again: OLMo-core #828, DeepSpeed #6811, pytorch #121966, peft #3020
class CheckpointedDropout(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        block = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)]
        self.blocks = nn.ModuleList(block)

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def checkpointed_dropout():
    return CheckpointedDropout(), [torch.randn(22, 40, requires_grad=True)]


# bf16 norms with fp32 statistics over rows of very different size: helion #2273, pytorch #188955, #150859
class Bf16Norms(nn.Module):
    def __init__(self, width=80):
        super().__init__()
        self.norm, self.weight, self.linear = nn.LayerNorm(width), nn.Parameter(torch.ones(width)), nn.Linear(width, width)

    def forward(self, x):
        normed = self.norm(x)
        wide = normed.float()
        root = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + 1e-6)
        return self.linear((wide * root).to(normed.dtype) * self.weight) + x


def bf16_norms():
    x = torch.randn(20, 80) * torch.logspace(-3, 3, 20).unsqueeze(1)
    return Bf16Norms().bfloat16(), [x.bfloat16().requires_grad_()]


# attention saves q, k, v, its output and a logsumexp: pytorch #99905, Fuser #4065, torchtitan #610
class Attention(nn.Module):
    def __init__(self, width=48, heads=3):
        super().__init__()
        self.heads, self.qkv, self.projection = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))


def attention():
    return Attention(), [torch.randn(2, 20, 48, requires_grad=True)]


# token ids, masks, indices of top-k, sort and pooling: onnxruntime #11534, mxnet #15968, torchtitan #3513, axolotl #3833
class IntegersAndBools(nn.Module):
    def __init__(self, vocabulary=45, width=12):
        super().__init__()
        self.embedding, self.gate = nn.Embedding(vocabulary, width), nn.Linear(width, 5)

    def forward(self, ids, padding):
        hidden = self.embedding(ids).masked_fill(padding.unsqueeze(-1), 0.0)
        score, chosen = self.gate(hidden).topk(3, dim=-1)
        hidden = F.relu(hidden.sort(dim=1).values)
        hidden = F.max_pool1d(hidden.mT, 2).mT
        return torch.where(hidden > 0.1, hidden, hidden / 2), score.softmax(dim=-1).gather(-1, chosen % 3)


def integers_and_bools():
    return IntegersAndBools(), [torch.randint(45, (3, 14)), torch.arange(14).expand(3, 14) > 10]


# running statistics move once a step, whatever is recomputed: pytorch #96136, YOLO-Master #262, fairscale #1035
class BatchNormBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10, momentum=0.2)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


def batch_norm_buffers():
    return BatchNormBuffers(), [torch.randn(4, 3, 11, 11, requires_grad=True)]


def three_steps_with_buffers(call, module, inputs):
    for _ in range(3):
        exact, lossy = one_step(call, module, inputs)
    return exact | {name: buffer.clone() for name, buffer in module.named_buffers()}, lossy


# batch norm in eval mode, with gradients, saves statistics without elements: torch 2.13's fp8 pass, like FBGEMM #3448
class FrozenBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10), nn.Conv2d(10, 4, 1)

    def forward(self, x):
        return self.out(F.relu(self.norm(self.conv(x))))


def frozen_batch_norm():
    return FrozenBatchNorm().eval(), [torch.randn(2, 3, 10, 10, requires_grad=True)]


SCENARIOS = [
    Scenario("two_dropouts", two_dropouts, and_compares_zeros, reference=DECOMPOSED),
    Scenario("checkpointed_dropout", checkpointed_dropout, one_step, reference=DECOMPOSED),
    Scenario("bf16_norms", bf16_norms, one_step, reference=DECOMPOSED),
    Scenario("attention", attention, one_step),
    Scenario("integers_and_bools", integers_and_bools, one_step),
    Scenario("batch_norm_buffers", batch_norm_buffers, three_steps_with_buffers),
    Scenario("frozen_batch_norm", frozen_batch_norm, one_step),
]
