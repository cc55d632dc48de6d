"""What the benchmarks train: a network of 0.3 million weights on random data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BATCH = 256


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 10))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8192, 128, generator=generator), torch.randint(10, (8192,), generator=generator)
