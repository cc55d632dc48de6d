"""A realistic ledger without training: holes open and close, and fragments use them one after the
other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from parsl_freetrain.ledger.writer import Ledger

TICK_S = 0.25
BOOT_S = 1.0
START_S = 0.5
CURVE = {'nodes': [0, 1, 2, 4, 8, 64], 'rate': [0.0, 300.0, 570.0, 1050.0, 1800.0, 9000.0]}


@dataclass
class _Block:
    name: str
    start: float
    end: float
    nodes: list[str]
    how: str
    state: str = 'offered'


@dataclass
class _Fragment:
    number: int
    nodes: tuple[str, ...]
    decided: float
    from_samples: int
    started: bool = False
    samples: float = 0.0
    kept: int = 0
    saved_at: float = 0.0


@dataclass
class _Trainer:
    name: str
    total: int
    samples: int = 0
    fragments: int = 0
    running: _Fragment | None = None
    state: str = 'queued'
    metrics: dict[str, float] = field(default_factory=dict)


def demo_ledger(
    path: Path,
    *,
    nodes: int = 6,
    seconds: float = 100.0,
    trainers: Sequence[str] = ('cnn', 'mlp'),
    total: int = 60_000,
    hole_s: tuple[float, float] = (8.0, 30.0),
    begun_at: float = 1_790_000_000.0,
    runs: int = 1,
    ended: bool = True,
    seed: int = 0,
) -> Path:
    """Write a ledger like a run of ``seconds`` on ``nodes`` nodes; with ``ended=False`` the last
    run counts as running.
    """
    rng = random.Random(seed)
    ledger = Ledger(path)
    jobs = [_Trainer(name, total) for name in trainers]
    for run in range(runs):
        start = begun_at + run * (seconds + 500.0)
        _one_run(
            ledger,
            rng,
            f'run-{run}',
            jobs,
            nodes,
            start,
            seconds,
            hole_s,
            end=ended or run < runs - 1,
        )
    ledger.close()
    return path


def _holes(
    rng: random.Random, nodes: int, start: float, seconds: float, hole_s: tuple[float, float]
) -> list[_Block]:
    blocks: list[_Block] = []
    free_from = {f'node{i:02d}': start + rng.uniform(0, hole_s[0] / 2) for i in range(nodes)}
    while any(t < start + seconds for t in free_from.values()):
        first = min(free_from.values())
        names = sorted(n for n, t in free_from.items() if t <= first + 2.0)[
            : rng.choice((1, 2, 3, max(3, nodes // 8)))
        ]
        begin = max(free_from[n] for n in names)
        end = begin + rng.uniform(*hole_s)
        blocks.append(
            _Block(f'block-{len(blocks)}', begin, end, names, rng.choice(('taken', 'expired')))
        )
        for name in names:
            free_from[name] = end + rng.uniform(0.5, hole_s[0])
    return blocks


def _one_run(
    ledger: Ledger,
    rng: random.Random,
    run: str,
    jobs: list[_Trainer],
    nodes: int,
    start: float,
    seconds: float,
    hole_s: tuple[float, float],
    *,
    end: bool,
) -> None:
    ledger.begin_run(run, at=start, parsl_run_dir='runinfo/000', command='python demo.py')
    blocks = _holes(rng, nodes, start, seconds, hole_s)
    ledger.nodes.offered((n, b.start, b.end) for b in blocks for n in b.nodes)
    for job in jobs:
        spec = {'min_nodes': 1, 'max_nodes': nodes, 'curve': CURVE}
        ledger.trainers.submitted(
            name=job.name, at=start, spec=spec, total_samples=job.total, samples=job.samples
        )
    free: list[str] = []
    at = start
    while at < start + seconds:
        changed = False
        for block in blocks:
            changed |= _move_block(ledger, block, free, jobs, at)
        for job in jobs:
            changed |= _train(ledger, job, at, rng)
        if changed:
            _share(ledger, jobs, free, at)
        at += TICK_S
    ledger.commit()
    if end:
        for job in jobs:
            _end(ledger, job, at, 'stopped')
        for block in blocks:
            if block.state in ('booting', 'up'):
                ledger.nodes.block_closed(block.name, at=at, how='returned')
        ledger.end_run(run, at=at, how='done')


def _move_block(
    ledger: Ledger, block: _Block, free: list[str], jobs: list[_Trainer], at: float
) -> bool:
    if block.state == 'offered' and block.start <= at:
        wall = block.end - at if block.how == 'expired' else None
        ledger.nodes.block_opened(
            block.name,
            at=at,
            job_id='4711',
            nodes=len(block.nodes),
            walltime_s=wall,
            names=block.nodes,
        )
        block.state = 'booting'
    elif block.state == 'booting' and block.start + BOOT_S <= at:
        for name in block.nodes:
            ledger.nodes.joined(f'{block.name}/{name}', at=at, block=block.name, name=name)
            free.append(f'{block.name}/{name}')
        block.state = 'up'
        return True
    elif block.state == 'up' and block.end <= at:
        gone = {f'{block.name}/{n}' for n in block.nodes}
        for job in jobs:
            if job.running and gone & set(job.running.nodes):
                _end(ledger, job, at, 'preempted' if block.how == 'taken' else 'stopped')
        for node in sorted(gone):
            ledger.nodes.left(node, at=at, how=block.how)
            free.remove(node)
        ledger.nodes.block_closed(block.name, at=at, how=block.how)
        ledger.event(at=at, kind='BlockClosed', block=block.name, detail={'how': block.how})
        block.state = 'over'
        return True
    return False


def _train(ledger: Ledger, job: _Trainer, at: float, rng: random.Random) -> bool:
    running = job.running
    if running is None or at < running.decided + START_S:
        return False
    if not running.started:
        ledger.trainers.fragment_started(
            job.name, running.number, at=at, samples=running.from_samples
        )
        running.started, running.saved_at = True, at
        return False
    rate = 280.0 * len(running.nodes) ** 0.9
    running.samples = min(job.total, running.samples + rate * TICK_S)
    job.metrics = {'loss': 2.3 / (1.0 + 6.0 * running.samples / job.total) + rng.uniform(0.0, 0.02)}
    ledger.trainers.fragment_progress(
        job.name,
        running.number,
        at=at,
        samples=int(running.samples),
        rate=rate,
        metrics=job.metrics,
    )
    if at - running.saved_at > 6.0:
        _save(ledger, job, running, at)
    if running.samples >= job.total:
        _end(ledger, job, at, 'finished')
        job.state = 'finished'
        ledger.trainers.state(job.name, at=at, state='finished')
        return True
    return False


def _save(ledger: Ledger, job: _Trainer, running: _Fragment, at: float) -> None:
    running.kept, running.saved_at = int(running.samples), at
    where = f'checkpoints/{job.name}/{running.number}'
    ledger.trainers.checkpoint(
        job.name,
        running.number,
        at=at,
        samples=running.kept,
        path=where,
        seconds=0.2,
        pause_s=0.1,
        metrics=job.metrics,
    )


def _end(ledger: Ledger, job: _Trainer, at: float, ending: str) -> None:
    running = job.running
    if running is None:
        return
    if ending != 'preempted' and running.started:
        _save(ledger, job, running, at)
    reached = max(int(running.samples), running.kept)
    ledger.trainers.fragment_ended(
        job.name, running.number, at=at, ending=ending, samples=running.kept, reached=reached
    )
    job.samples, job.running = running.kept, None


def _share(ledger: Ledger, jobs: list[_Trainer], free: list[str], at: float) -> None:
    active = [j for j in jobs if j.state != 'finished']
    if not active:
        return
    wanted = {j.name: 0 for j in active}
    for i in range(len(free)):
        wanted[active[i % len(active)].name] += 1
    current = {j.name: len(j.running.nodes) if j.running else 0 for j in active}
    taken = {n for j in active if j.running for n in j.running.nodes}
    for job in active:
        now = len(job.running.nodes) if job.running else 0
        if job.running and (now > wanted[job.name] or wanted[job.name] >= 1.5 * now):
            taken -= set(job.running.nodes)
            _end(ledger, job, at, 'stopped')
    for job in active:
        if job.running is None and wanted[job.name]:
            mine = tuple([n for n in free if n not in taken][: wanted[job.name]])
            if mine:
                taken |= set(mine)
                _start(ledger, job, mine, at)
    allocation = {j.name: len(j.running.nodes) if j.running else 0 for j in active}
    ledger.decisions.decision(
        at=at,
        trigger='NodesJoined',
        nodes=len(free),
        status='optimal',
        solver='milp',
        objective=1.0,
        seconds=0.002,
        staying=0.5,
        current=current,
        allocation=allocation,
        actions=[],
    )


def _start(ledger: Ledger, job: _Trainer, nodes: tuple[str, ...], at: float) -> None:
    job.fragments += 1
    job.running = _Fragment(
        job.fragments, nodes, at, job.samples, samples=float(job.samples), kept=job.samples
    )
    ledger.trainers.state(job.name, at=at, state='running')
    ledger.trainers.fragment_decided(
        job.name,
        job.fragments,
        at=at,
        task_id=job.fragments,
        nodes=nodes,
        deadline=None,
        from_samples=job.samples,
    )
