"""The two models that figures are given for: a ResNet-18 for 32x32 images and a small GPT, with their inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_actcomp.demo import GPT


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
