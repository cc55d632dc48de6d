"""What the benchmarks train, a network of 0.35 million weights (2.3 million with width 1,024)."""

import json
import os
import platform
import sys
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.programs import run_to_end

BATCH = 256
MACHINE = (
    f'{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, '
    f'torch {torch.__version__}'
)


def network(width: int = 384) -> nn.Module:
    sizes = (128, width, width, width)
    layers = [layer for k, n in pairwise(sizes) for layer in (nn.Linear(k, n), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8192, 128, generator=generator)
    return x, torch.randint(10, (8192,), generator=generator)


def under_torchrun(ranks: int, module: str, *args: object) -> Any:
    """What a module of this folder prints as JSON when it is run by torchrun."""
    words = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node']
    words += [str(ranks), '-m', f'tests.benchmarks.{module}', *map(str, args)]
    env = {'OMP_NUM_THREADS': '1', 'GLOO_SOCKET_IFNAME': 'lo'}
    done = run_to_end(words, more_env=env, timeout=None, check=True)
    return json.loads(done.stdout.splitlines()[-1])
