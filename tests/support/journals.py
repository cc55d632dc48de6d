"""A realistic journal without training: holes open and close, and fragments use them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model import types
from parsl_freetrain.executor.stream import Stream, Subscriber
from parsl_freetrain.journal.append import JournalWriter

TICK_S = 0.25
BOOT_S = 1.0
START_S = 0.5
CURVE = types.ScalingCurve((0, 1, 2, 4, 8, 64), (0.0, 300.0, 570.0, 1050.0, 1800.0, 9000.0))


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


def demo_journal(
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
    beside: Sequence[Subscriber] = (),
) -> Path:
    """As of a run of ``seconds`` on ``nodes``; ``beside`` get its events, too."""
    rng = random.Random(seed)
    jobs = [_Trainer(name, total) for name in trainers]
    for run in range(runs):
        journal = JournalWriter(path)
        stream = Stream(beside, [journal])
        start = begun_at + run * (seconds + 500.0)
        journal.begin_run(ev.RunBegan(start, f'run-{run}', 'runinfo/000', 'python demo.py'))
        _one_run(stream, rng, jobs, nodes, start, seconds, hole_s, end=ended or run < runs - 1)
        stream.flush()
        journal.close()
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
    stream: Stream,
    rng: random.Random,
    jobs: list[_Trainer],
    nodes: int,
    start: float,
    seconds: float,
    hole_s: tuple[float, float],
    *,
    end: bool,
) -> None:
    blocks = _holes(rng, nodes, start, seconds, hole_s)
    offers = tuple(types.NodeOffer(n, b.start, b.end) for b in blocks for n in b.nodes)
    stream.emit(ev.OffersSeen(start, offers))
    for job in jobs:
        trainer = types.Trainer(job.name, 1, nodes, job.total, CURVE)
        stream.emit(ev.TrainerSubmitted(start, trainer, job.samples))
    free: list[str] = []
    at = start
    while at < start + seconds:
        changed = False
        for block in blocks:
            changed |= _move_block(stream, block, free, jobs, at)
        for job in jobs:
            changed |= _train(stream, job, at, rng)
        if changed:
            _share(stream, jobs, free, at)
        at += TICK_S
    stream.flush()
    if end:
        for job in jobs:
            _end(stream, job, at, 'stopped')
        for block in blocks:
            if block.state in ('booting', 'up'):
                stream.emit(ev.BlockClosed(at, block.name, 'returned'))
        stream.emit(ev.RunEnded(at, 'done'))


def _move_block(
    stream: Stream, block: _Block, free: list[str], jobs: list[_Trainer], at: float
) -> bool:
    if block.state == 'offered' and block.start <= at:
        wall = block.end - at if block.how == 'expired' else None
        request = types.BlockRequest(len(block.nodes), wall, names=tuple(block.nodes))
        stream.emit(ev.BlockOpened(at, block.name, request, '4711'))
        block.state = 'booting'
    elif block.state == 'booting' and block.start + BOOT_S <= at:
        joined = tuple(f'{block.name}/{name}' for name in block.nodes)
        stream.emit(ev.NodesJoined(at, block.name, joined, hosts=tuple(block.nodes)))
        free += joined
        block.state = 'up'
        return True
    elif block.state == 'up' and block.end <= at:
        gone = {f'{block.name}/{n}' for n in block.nodes}
        for job in jobs:
            if job.running and gone & set(job.running.nodes):
                _end(stream, job, at, 'preempted' if block.how == 'taken' else 'stopped')
        stream.emit(ev.NodesLeft(at, tuple(sorted(gone)), block.how))
        stream.emit(ev.BlockClosed(at, block.name, block.how))
        for node in gone:
            free.remove(node)
        block.state = 'over'
        return True
    return False


def _train(stream: Stream, job: _Trainer, at: float, rng: random.Random) -> bool:
    running = job.running
    if running is None or at < running.decided + START_S:
        return False
    if not running.started:
        stream.emit(ev.FragmentStarted(at, job.name, running.number, running.from_samples))
        running.started, running.saved_at = True, at
        return False
    rate = 280.0 * len(running.nodes) ** 0.9
    running.samples = min(job.total, running.samples + rate * TICK_S)
    job.metrics = {'loss': 2.3 / (1.0 + 6.0 * running.samples / job.total) + rng.uniform(0.0, 0.02)}
    done = int(running.samples), rate, dict(job.metrics)
    stream.emit(ev.FragmentProgressed(at, job.name, running.number, *done))
    if at - running.saved_at > 6.0:
        _save(stream, job, running, at)
    if running.samples >= job.total:
        _end(stream, job, at, 'finished')
        job.state = 'finished'
        stream.emit(ev.Decided(at, (ev.EndTrainer(job.name, 'finished'),)))
        return True
    return False


def _save(stream: Stream, job: _Trainer, running: _Fragment, at: float) -> None:
    running.kept, running.saved_at = int(running.samples), at
    where = f'checkpoints/{job.name}/{running.number}'
    saved = types.Checkpoint(
        job.name, where, running.kept, running.number, dict(job.metrics), None, at, 0.2, 0.1
    )
    stream.emit(ev.CheckpointSaved(at, saved))


def _end(stream: Stream, job: _Trainer, at: float, ending: str) -> None:
    running = job.running
    if running is None:
        return
    if ending != 'preempted' and running.started:
        _save(stream, job, running, at)
    reached = max(int(running.samples), running.kept)
    how = running.kept, ev.Ending(ending)
    stream.emit(ev.FragmentEnded(at, job.name, running.number, *how, reached=reached))
    job.samples, job.running = running.kept, None


def _share(stream: Stream, jobs: list[_Trainer], free: list[str], at: float) -> None:
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
            _end(stream, job, at, 'stopped')
    for job in active:
        if job.running is None and wanted[job.name]:
            mine = tuple([n for n in free if n not in taken][: wanted[job.name]])
            if mine:
                taken |= set(mine)
                _start(stream, job, mine, at)
    allocation = {j.name: len(j.running.nodes) if j.running else 0 for j in active}
    stream.emit(
        ev.Decided(
            at, (), 'NodesJoined', len(free), 'optimal', 'milp', 1.0, None, 0.5, 0.002, current,
            allocation,
        )
    )  # fmt: skip


def _start(stream: Stream, job: _Trainer, nodes: tuple[str, ...], at: float) -> None:
    job.fragments += 1
    job.running = _Fragment(
        job.fragments, nodes, at, job.samples, samples=float(job.samples), kept=job.samples
    )
    start = nodes, None, job.samples
    stream.emit(ev.FragmentLaunched(at, job.name, job.fragments, *start, task=job.fragments))
