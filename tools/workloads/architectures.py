"""Parts of models that no library here has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """Block of a ResNet: three convolutions beside a shortcut; four times ``width`` channels."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        last = nn.BatchNorm2d(4 * width)
        # Begun with all of its weight, sixteen blocks on a batch this small turn a rounding error
        # into tenths of a gradient, and no two ways could be compared.
        nn.init.constant_(last.weight, 0.1)
        self.path = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            last,
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            convolution = nn.Conv2d(channels, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


class Dlrm(nn.Module):
    """Embeddings of categories and an MLP of numbers, their products, and an MLP on top. The
    embeddings' gradients are dense: DDP sends all of them in each step."""

    CATEGORIES = 8
    NUMBERS = 13

    def __init__(self, entries: int, width: int) -> None:
        super().__init__()
        tables = [nn.Embedding(entries, width) for _ in range(self.CATEGORIES)]
        self.tables = nn.ModuleList(tables)
        self.bottom = nn.Sequential(
            nn.Linear(self.NUMBERS, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.ReLU()
        )
        features = self.CATEGORIES + 1
        pairs = features * (features - 1) // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, 8 * width), nn.ReLU(), nn.Linear(8 * width, 8 * width)
        )
        self.top.extend([nn.ReLU(), nn.Linear(8 * width, 1)])
        self.pairs: Tensor
        self.register_buffer("pairs", torch.triu_indices(features, features, 1), persistent=False)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        looked_up = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([dense, *looked_up], dim=1)
        products = features @ features.transpose(1, 2)
        pairs = products[:, self.pairs[0], self.pairs[1]]
        chances: Tensor = self.top(torch.cat([dense, pairs], dim=1))
        return chances
