"""The two models that figures are given for: a ResNet-18 for 32x32 images and a small GPT, with their inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a skip."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)) + self.skip(x))


class ResNet18(nn.Module):
    """3x3 stem, widths ``width`` to 8 ``width``, two blocks each."""

    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        inputs = width
        for stage, outputs in enumerate((width, 2 * width, 4 * width, 8 * width)):
            blocks += [BasicBlock(inputs, outputs, 2 if stage else 1), BasicBlock(outputs, outputs, 1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy of images (N, 3, H, W) and labels (N,)."""
        h = self.blocks(F.relu(self.bn(self.stem(x))))
        return F.cross_entropy(self.fc(h.mean((2, 3))), labels)


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.proj(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A small decoder on bytes."""

    def __init__(self, layers: int = 4, width: int = 256, heads: int = 4, length: int = 256, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of the next byte; ids and targets are (batch, length)."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def resnet18(width: int = 32, batch: int = 64, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The ResNet-18 with random images."""
    torch.manual_seed(seed)
    return ResNet18(width), (torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,)))


def gpt(
    dropout: float = 0.0, batch: int = 8, length: int = 256, seed: int = 0, **sizes: int
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The GPT with random bytes."""
    torch.manual_seed(seed)
    model = GPT(length=length, dropout=dropout, **sizes)
    ids = torch.randint(0, 256, (batch, length + 1))
    return model, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
