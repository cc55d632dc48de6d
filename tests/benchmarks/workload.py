"""What the benchmarks train: a network of 0.35 million weights (2.3 million with width 1,024) on
random data.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BATCH = 256


def network(width: int = 384) -> nn.Module:
    return nn.Sequential(
        nn.Linear(128, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8192, 128, generator=generator), torch.randint(
        10, (8192,), generator=generator
    )
