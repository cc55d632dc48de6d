"""Memory and traffic of reproducible mode's exchange, by number of ranks on this computer.

``python -m tests.benchmarks.exchange [MILLIONS_OF_PARAMETERS]`` prints a table.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from parsl_freetrain.training.loop.context import FragmentContext
from tests.support import template
from tests.support.ranks import order, ranks, running_fork_server

RANKS = (1, 2, 4, 8)


def train(ctx: FragmentContext, parameters: int) -> None:
    """Reports the rank's largest memory beyond that before the first step, in bytes."""

    def peak(which: str) -> int:
        lines = Path('/proc/self/status').read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(which)).split()[1])

    model: Any = torch.nn.Linear(parameters // 100, 100, bias=False)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    before = 0
    for batch in ctx.loop(torch.ones(32, parameters // 100), 8):
        before = before or peak('VmRSS:')
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
    ctx.report(peak=peak('VmHWM:') - before)


def main() -> None:
    """Print the table."""
    parameters = int(float(sys.argv[1] if len(sys.argv) > 1 else 10) * 1e6)
    print(f'{platform.machine()}, torch {torch.__version__}, {parameters} parameters in float32')
    print('| ranks | largest memory of rank 0 during steps, in sizes of the gradient |\n|---|---|')
    with (
        tempfile.TemporaryDirectory() as name,
        template.shared(Path(name) / 'template.log'),
        running_fork_server(Path(name)) as fork_server,
    ):
        for count in RANKS:
            folder = Path(name) / str(count)
            ordered = order(folder, shards=8, total_samples=24)
            with ranks(fork_server, ordered, count, folder, train, parameters) as gang:
                outcome = gang.run()[0]
            print(f'| {count} | {outcome.metrics["peak"] / 4 / parameters:.1f} |', flush=True)


if __name__ == '__main__':
    main()
