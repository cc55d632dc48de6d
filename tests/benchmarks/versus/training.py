"""The training that all systems do, and the log that its ranks write; needs nothing but torch."""

import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.benchmarks.versus.constants import (
    BATCH,
    DIGEST_STEPS,
    LOG_VARIABLE,
    NODE_VARIABLE,
    SAMPLES,
    WIDTH,
)


def network() -> nn.Module:
    """An MLP of 1.3 million weights."""
    torch.manual_seed(0)
    between = (layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    return nn.Sequential(nn.Linear(128, WIDTH), nn.ReLU(), *between, nn.Linear(WIDTH, 10))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 128, generator=generator)
    return x, torch.randint(10, (SAMPLES,), generator=generator)


class Batches:
    """The global batch after a number of samples, and a rank's part of it."""

    def __init__(self) -> None:
        self._x, self._y = data()
        self._epoch, self._order = -1, torch.empty(0)

    def part(self, position: int, rank: int, world: int) -> tuple[Tensor, Tensor, float]:
        """A rank's samples, their targets, and the factor that turns its loss into its share."""
        epoch, start = divmod(position, SAMPLES)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        bounds = [start + BATCH * r // world for r in (rank, rank + 1)]
        mine = self._order[bounds[0] : bounds[1]]
        return self._x[mine], self._y[mine], len(mine) * world / BATCH


class StepLog:
    """Each ended step, written at once: ``[begun, ended, CPU s, samples, ranks, digest]``."""

    def __init__(self, model: nn.Module) -> None:
        node = os.environ[NODE_VARIABLE]
        path = Path(os.environ[LOG_VARIABLE]) / f'{node}.{os.getpid()}.{time.time_ns()}.jsonl'
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._model = model
        self._begun = time.time()

    def step(self, position: int, world: int) -> None:
        """A step that began after ``position`` samples has ended."""
        ended = time.time()
        digest = None
        if (position // BATCH + 1) % DIGEST_STEPS == 0:
            found = hashlib.blake2b(digest_size=8)
            for parameter in self._model.parameters():
                found.update(parameter.detach().contiguous().view(-1).numpy().data)
            digest = found.hexdigest()
        line = [self._begun, ended, time.process_time(), position, world, digest]
        os.write(self._file, json.dumps(line).encode() + b'\n')
        self._begun = ended
