"""How fast fragments start and train, what waiting costs: ``make bench``; not asserted."""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from parsl_freetrain import Checkpoints, FragmentContext, LocalSite, Scaling, freetrain_app
from parsl_freetrain.journal.read import Journal
from tests.benchmarks.workload import MACHINE, under_torchrun
from tests.gpu import run
from tests.support.training import fit, freetrain

RANKS = 2
ROUNDS = 3
BLOCKS = 300
SCALING = {1: 1.0, 2: 1.9, 4: 3.5}


def cold_start(ranks: int) -> float:
    """Seconds from the command to the first step."""
    began = time.time()
    times: list[dict[str, float]] = under_torchrun(ranks, 'cold_start')
    return max(each['restore'] for each in times) - began


def fragment_starts(ledger: Path) -> list[float]:
    """Seconds from the decision to the first step, of every fragment."""
    with Journal(ledger) as reader:
        return [
            f.started_at - f.launched.at
            for f in reader.history().fragments
            if f.started_at is not None
        ]


@pytest.mark.timeout(1200)
def test_what_a_step_of_a_fragment_costs() -> None:
    """Blocks of steps of plain DDP and of a fragment in turns, in the same processes."""
    print(f'\nA fragment and plain DDP in turns, {RANKS} ranks, {BLOCKS} blocks ({MACHINE})')
    for width, steps in ((384, 8), (1024, 4)):
        modes = ('throughput', 'stop'), ('throughput', 'skip'), ('reproducible', 'stop')
        for mode, on_nan in modes:
            in_turns(f'{mode:12} on_nan={on_nan:5}', width, BLOCKS, steps, mode, on_nan)


def in_turns(what: str, width: int, blocks: int, steps: int, *how: str, ranks: int = RANKS) -> None:
    """Print the fragment's speed relative to the plain training (median, 95 % interval, CPU time,
    also beside the same micro-batches), and that of the plain training relative to itself.
    """
    found = under_torchrun(ranks, 'alternating', width, blocks, steps, *how)
    (low, high), (plain, (from_, to)) = found['interval'], found['plain_speed']
    print(
        f'  width {width:4} {what}: plain {found["plain_ms"]:7.2f} ms, speed {found["speed"]:.3f} '
        f'({low:.3f} to {high:.3f}), CPU time {found["cpu"]:.3f} ({found["cpu_of_parts"]:.3f}); '
        f'plain against itself: speed {plain:.3f} ({from_:.3f} to {to:.3f}), CPU time '
        f'{found["plain_cpu"]:.3f}',
        flush=True,
    )


@pytest.mark.timeout(1200)
def test_what_four_shards_cost() -> None:
    """As above, on one to four ranks."""
    print(f'\nReproducible mode with 4 shards and plain DDP in turns ({MACHINE})')
    for ranks in (1, 2, 3, 4):
        in_turns(f'{ranks} ranks', 1024, 40, 4, 'reproducible/4', 'stop', ranks=ranks)


@pytest.mark.timeout(1200)
def test_what_the_python_thread_takes_for_a_micro_batch(tmp_path: Path) -> None:
    """Beside a plain loop with the same micro-batches and deterministic algorithms, in turns."""
    cases = ('layers', 'gpt 1', 'gpt 2', 'gpt 8', 'resnet 1', 'resnet 8')
    run.main(['--out', str(tmp_path), '--device', 'cpu', '--seconds', '10', '--cases', *cases])
    print(f'\nTime of the Python thread, plain by ours ({MACHINE}, load {os.getloadavg()[0]:.0f})')
    for case, found in json.loads((tmp_path / 'gpu.json').read_text())['cases'].items():
        if 'python_speed' in found:
            ms, plain = found['python_ms'], found['python_ms'] * found['python_speed']
            print(f'  {case:18} {found["python_speed"]:.3f}: {ms:.1f} ms a step, plain {plain:.1f}')


def test_start_of_a_fragment_on_warm_nodes(tmp_path: Path) -> None:
    for ranks in (1, 2, 4):
        with freetrain(tmp_path / str(ranks), LocalSite(nodes=ranks, poll_s=0.5)) as executor:
            trainer = freetrain_app(
                min_nodes=ranks, max_nodes=ranks, total_epochs=1, scaling=Scaling(rate=SCALING)
            )(fit)
            for _ in range(8):
                trainer().result()
        warm = fragment_starts(executor.ledger_path)[1:]
        cold = [cold_start(ranks) for _ in range(ROUNDS)]
        if ranks == 1:
            print(f'\nDecision to first step, and a cold start of torchrun, s, median ({MACHINE})')
        print(
            f'  {ranks} ranks: fragment {statistics.median(warm):.3f} (from '
            f'{min(warm):.3f} to {max(warm):.3f}), '
            f'torchrun {statistics.median(cold):.3f}'
        )


def test_what_waiting_costs(tmp_path: Path) -> None:
    """CPU time of the submitting process while a trainer runs and nothing changes."""
    with freetrain(tmp_path, LocalSite(nodes=1)):
        future = freetrain_app(total_epochs=100_000, checkpoints=Checkpoints(every_s=1000))(fit)(
            pause_s=0.2
        )
        while future.progress().samples == 0:
            time.sleep(0.5)
        process, interchange = (
            psutil.Process(),
            next(c for c in psutil.Process().children() if 'interchange' in ' '.join(c.cmdline())),
        )
        before, begun = [sum(p.cpu_times()[:2]) for p in (process, interchange)], time.monotonic()
        time.sleep(20)
        share = [
            (sum(p.cpu_times()[:2]) - b) / (time.monotonic() - begun)
            for p, b in zip((process, interchange), before, strict=True)
        ]
    print(
        f'\nCPU while nothing changes, share of a core ({MACHINE})\n  submitting process '
        f'{share[0]:.2%}\n  interchange {share[1]:.2%}'
    )


def test_what_verification_adds_to_each_step() -> None:
    """Steps of one training with and without it, in turns; the digests are those of above."""

    def train(ctx: FragmentContext) -> list[float]:
        layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(20)]
        model = nn.Sequential(*layers)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        verification: Any = ctx._run.verification
        took: list[list[float]] = [[], []]
        began, on = time.process_time(), True
        for x in ctx.loop(torch.randn(64, 256), 64):
            took[on].append(time.process_time() - began)
            on = not on
            for name in ('begin', 'gradients', 'end', 'conclude'):
                vars(verification).pop(name, None)
                if not on:
                    setattr(verification, name, lambda *_: None)
            began = time.process_time()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [statistics.median(each[10:]) for each in took]

    app = freetrain_app(max_nodes=1, total_samples=64 * 400)(train)
    without, with_it = app.debug().result
    print(
        f'\nA step of {1e3 * without:.2f} ms takes {1e3 * with_it:.2f} ms with verification: '
        f'{with_it / without - 1:+.2%} ({MACHINE})'
    )
