"""Numbers that a body changes count steps, and are the same for any number of ranks and cuts."""

import json
import os
import signal
import sys
import time
from collections import Counter, deque
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain import FragmentContext, same_weights
from parsl_freetrain.training.loop.enumerated import counts
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.cuts import cut, made, refused, step, trained
from tests.support.examples import refused_here

DATA = TensorDataset(torch.linspace(-1, 2, 48).reshape(24, 2))
EPOCHS, BATCH = 3, 4
TOTAL = EPOCHS * len(DATA)
STEPS = TOTAL // BATCH
seen, where = 0, None


class Line(nn.Linear):
    passes = 0


@dataclass
class Weight:
    """Of the loss: by a running mean of it, and by a counter."""

    mean: float = 1.0
    counts: dict[str, int] = field(default_factory=lambda: {'steps': 0})

    def of(self, loss: torch.Tensor) -> float:
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        self.counts['steps'] += 1
        return self.counts['steps'] / (10 + self.mean)


def train(ctx: FragmentContext, by_epochs: bool, stops: int) -> list[Any]:
    torch.manual_seed(1)
    model: Any = Line(2, 1)
    model.passes = 0
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    steps, weight, number = 0, Weight(), -1
    own: dict[str, int] = {}
    position, begun = None if by_epochs else -1, list[int]()

    def counted() -> None:
        nonlocal steps
        steps += 1

    def take(number: int, x: torch.Tensor) -> None:
        global seen, where
        nonlocal position
        counted()
        if ctx.samples != position:  # once a step, on each rank
            position = ctx.samples
            begun.append(position)
        seen, where = seen + 1, ctx.samples
        ctx.state['steps'] = ctx.state.get('steps', 0) + 1
        own['steps'] = own.get('steps', 0) + 1
        model.passes += 1
        loss = model(x).pow(2).mean() * (ctx.state['steps'] + own['steps'] + model.passes)
        loss = loss * weight.of(loss) * (1 + number / 20 + steps / 20 + seen / 20)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ctx.fragment == 1 and 0 < stops <= steps:
            if steps == stops and ctx.rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)  # ranks agree every quarter of a second

    if by_epochs:
        for _ in ctx.epochs():
            for number, (x,) in enumerate(ctx.loop(DATA, BATCH)):
                take(number, x)
    else:
        for number, (x,) in enumerate(ctx.loop(DATA, BATCH)):
            take(number, x)
    assert ctx.rank or len(begun) in (STEPS, 10 * STEPS), begun
    numbers = [steps, seen, number, weight.counts['steps'], weight.mean]
    return [*numbers, ctx.state['steps'], own['steps'], model.passes]


class Remembering(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)
        self.mean, self.means = torch.ones(2), list[float]()

    def forward(self, x: torch.Tensor) -> Any:
        self.means = [*self.means, float(x.mean())][-3:]
        self.mean = x.detach().mean(0) * self.mean
        return super().forward(x - self.mean) * (1 + sum(self.means) / 50)


def collect(ctx: FragmentContext, at: int) -> list[Any]:
    """What is not a number, in two loops; the second asks by hand, and begins its count late."""
    torch.manual_seed(1)
    log, model = list[Any](), nn.Sequential(nn.Linear(2, 2), Remembering())
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.005))
    losses, recent, counts = list[Any](), deque[float](maxlen=3), Counter[str]()
    history, seen, total, points = np.zeros(STEPS), set[float](), torch.zeros(()), torch.ones(2)

    def fit(x: torch.Tensor, factor: float) -> None:
        optimizer.zero_grad()
        (model(x).pow(2).mean() * factor).backward()
        optimizer.step()
        cut(ctx, at)

    for (x,), number in zip(ctx.loop(DATA, BATCH, samples=20), count(1), strict=False):
        fit(x, number)
        log.append((number, x.mean()))
    level = sum(n for n, _ in log) / len(log)
    batches, step = iter(ctx.loop(DATA, BATCH)), 0
    while (batch := next(batches, None)) is not None:
        points = torch.rand(2) if step % 4 == 3 else points
        known = len(losses) + sum(recent) + counts['n'] + history.sum() + len(seen)
        fit(batch[0], 1 / (1 + abs(known + level + float(total + points.sum()))))
        losses.append(loss := batch[0].mean())
        recent.append(loss.item())
        counts['n'] += 1
        history[step] = loss.item()
        seen.add(loss.item())
        total += loss
        step += 1
    return [step, len(losses), counts['n'], len(seen), level, float(total), float(history.sum())]


class Dice:
    """As a metric of MONAI: it has no ``state_dict``, and tensors in lists of lists."""

    __module__ = 'figures.of_batches'

    def __call__(self, value: torch.Tensor) -> None:
        self.buffers[0] += [value]
        self.sum += value

    def aggregate(self) -> list[float]:
        return [len(self.buffers[0]), float(self.sum), float(sum(self.buffers[0]))]

    def reset(self) -> None:
        self.buffers, self.sum = [list[torch.Tensor]()], torch.zeros(())


class Meter:
    """As a package's counters, callbacks and updates of targets: no ``state_dict``."""

    __module__ = 'figures.of_batches'

    def __init__(self, inner: 'Meter | None' = None) -> None:
        self.n, self.sum, self.values = 0, 0.0, list[float]()
        self.recent, self.inner = np.zeros(3), inner

    def update(self, value: float) -> None:
        self.recent[self.n % 3] = value
        self.n, self.sum = self.n + 1, self.sum + value
        self.values.append(value)
        if self.inner is not None:
            self.inner.update(value)

    def shrink(self, weight: torch.Tensor) -> None:
        self.update(1.0)
        if self.n % 7 == 0:
            weight.data *= 0.9


class Kept(Meter):
    __module__ = 'figures.of_batches'

    def state_dict(self) -> dict[str, Any]:
        return {'n': self.n, 'sum': self.sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def run(self, data: Any, passes: Any) -> None:
        for (x,) in data:
            passes(x)


def install() -> None:
    installed = ModuleType('figures.of_batches')
    installed.__file__ = '/lib/site-packages/figures/of_batches.py'
    sys.modules[installed.__name__] = installed


def measure_by_a_package(ctx: FragmentContext, at: int) -> list[Any]:
    install()
    model, optimizer = made(ctx)
    dice, meters, figures = Dice(), {'loss': Meter(Meter())}, list[float]()
    dice.reset()
    ctx.after_step(partial(Meter().shrink, model.weight))
    kept = ctx.keep(Kept())
    unused = torch.optim.SGD([model.weight], 1.0)
    ctx.after_step(torch.optim.lr_scheduler.LambdaLR(unused, lambda n: float(n)).step)
    for _ in ctx.epochs():
        for (x,) in ctx.loop(DATA, BATCH):
            dice(torch.tensor(loss := step(model, optimizer, x)))
            meters['loss'].update(loss)
            kept.update(loss)
            cut(ctx, at)
        figures += [*dice.aggregate(), unused.param_groups[0]['lr']]
        dice.reset()
        with torch.no_grad():
            model.weight += 0.01 * figures[-1]
    inner: Any = meters['loss'].inner
    figures += [kept.n, kept.sum]
    return [inner.n, len(inner.values), *figures, float(inner.recent.sum()), meters['loss'].sum]


@pytest.mark.parametrize(
    ('function', 'first'),
    [(collect, [*[STEPS - 5] * 4, 3.0]), (measure_by_a_package, [STEPS, STEPS, STEPS // EPOCHS])],
)
def test_containers_tensors_and_metrics_follow_too(
    fork_server: ForkClient, tmp_path: Path, function: Any, first: list[float]
) -> None:
    one, other = (
        trained(fork_server, tmp_path / str(at), sizes, function, at, total_samples=TOTAL)
        for sizes, at in (([1], 0), ([2, 2], 8 * BATCH))
    )
    assert json.loads(one.result)[: len(first)] == first
    assert one.result == other.result and same_weights(one.path, other.path)


def test_what_runs_the_loop_and_counts_its_passes_is_refused() -> None:
    def train(ctx: FragmentContext) -> None:
        install()
        passes = partial(step, *made(ctx))
        Kept().run(ctx.loop(DATA, BATCH), passes)

    assert 'ctx.loop is run by a Kept of figures.of_batches' in refused_here(train, total_epochs=1)


def test_a_name_that_no_checkpoint_holds(fork_server: ForkClient, tmp_path: Path) -> None:
    def train(ctx: FragmentContext) -> None:
        (model, optimizer), signals = made(ctx), {signal.SIGTERM: 0, signal.SIGINT: 0}
        for (x,) in ctx.loop(DATA, BATCH):
            signals[signal.SIGTERM] += signals.pop(signal.SIGINT) + 1
            step(model, optimizer, x)

    how = {'world_size': 2, 'total_samples': TOTAL}
    assert 'a Signals as a key' in refused(fork_server, tmp_path, train, **how)


@pytest.mark.parametrize('by_epochs', [False, True])
def test_counters_count_steps(fork_server: ForkClient, tmp_path: Path, by_epochs: bool) -> None:
    one, other = (
        trained(fork_server, tmp_path / name, sizes, train, by_epochs, stops, total_samples=TOTAL)
        for name, sizes, stops in (('1', [1], 0), ('2', [3, 2], 8))
    )
    last = (STEPS // EPOCHS if by_epochs else STEPS) - 1
    assert json.loads(one.result)[:4] == [STEPS, STEPS, last, STEPS]
    assert one.result == other.result and same_weights(one.path, other.path)
    log = (tmp_path / '1' / 'f1-r0.log').read_text()
    assert log.count('it counts steps') == 1 + 2 * by_epochs


def test_looking_for_enumerate_disturbs_no_thread() -> None:
    def make() -> None:
        while looking:
            tuple(i for i in range(50))  # SystemError, while something else refers to it

    looking = [[True] for _ in range(10**5)]
    with futures.ThreadPoolExecutor() as others:
        made = others.submit(make)
        found = [one for _ in range(5) for one in counts()]
        looking.clear()
    assert (made.result(), found) == (None, [])


def test_enumerate_goes_on_in_throughput_mode(fork_server: ForkClient, tmp_path: Path) -> None:
    how: Any = {'mode': 'throughput', 'total_samples': 10 * TOTAL}
    outcome = trained(fork_server, tmp_path, [2, 2], train, False, 8, **how)
    assert json.loads(outcome.result)[:4] == [10 * STEPS, 10 * STEPS, 10 * STEPS - 1, 10 * STEPS]


def note_at_ends(ctx: FragmentContext) -> list[int]:
    model, optimizer = made(ctx)
    recent, noted = list[int](), list[int]()

    def note() -> None:
        noted.append(len(recent))
        recent.clear()

    ctx.each_epoch(note)
    for (x,) in ctx.loop(DATA, BATCH):
        recent.append(ctx.samples)
        step(model, optimizer, x)
        if ctx.fragment == 1 and ctx.samples == len(DATA) - BATCH:
            os.kill(os.getpid(), signal.SIGTERM)
    return noted


def test_what_the_end_of_an_epoch_changes_stays(fork_server: ForkClient, tmp_path: Path) -> None:
    """Where a fragment ends with the epoch, the next one does its end."""
    outcome = trained(fork_server, tmp_path, [1, 1], note_at_ends, total_samples=TOTAL)
    assert json.loads(outcome.result) == [STEPS // EPOCHS] * EPOCHS
