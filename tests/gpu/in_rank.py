"""What the ranks of the runs on a device do: train one of the networks, measured or interrupted."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from parsl_freetrain import FragmentContext
from parsl_freetrain.training.comm.devices import peak_memory
from parsl_freetrain.training.steps.determinism import demand_determinism
from tests.gpu.networks import WORKLOADS, Workload
from tests.support.plain_steps import plain_step

WARM_UP, BLOCK, PROFILED = 5, 3, 2
SAMPLES = TensorDataset(torch.arange(4096))
GRAPH = 'reduce-overhead'  # torch.compile's name for CUDA graphs
Steps = Callable[[], None]
"""Takes a step. An iterator would be a variable of the training that cannot be saved."""


class Meter:
    """Measures the steps of a training and of another one, in turns on the same machine."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device, self._seconds = device, seconds

    def figures(self, steps: Steps, beside: Steps | None) -> Iterator[dict[str, Any]]:
        """Figures: ms of a step, speed relative to ``beside``; on a device its work and waits."""
        began = time.perf_counter()
        steps()
        found: dict[str, Any] = {'first_step_s': time.perf_counter() - began}
        found |= self._timed(steps, beside)
        yield found
        if self._device.type != 'cpu':
            found['peak_gb'] = peak_memory(self._device) / 1e9
            yield found
            found |= self._profiled(steps)
            yield found

    def _timed(self, steps: Steps, beside: Steps | None) -> dict[str, Any]:
        turns = [steps] if beside is None else [steps, beside]
        for turn in turns:
            self._run(turn, WARM_UP)
        times: list[list[tuple[float, float]]] = [[] for _ in turns]
        until = time.perf_counter() + self._seconds * len(turns)
        while time.perf_counter() < until or len(times[0]) < 2:
            order = range(len(turns)) if len(times[0]) % 2 else reversed(range(len(turns)))
            for which in order:
                times[which].append(self._run(turns[which], BLOCK))
        ms, python_ms = zip(*times[0], strict=True)
        found = {'step_ms': median(ms), 'steps': BLOCK * len(ms)}
        if self._device.type == 'cpu':
            found['python_ms'] = median(python_ms)
        if beside is not None:
            pairs = list(zip(times[1], times[0], strict=True))
            found['beside_ms'] = median(plain for plain, _ in times[1])
            found['speed'] = median(plain / ours for (plain, _), (ours, _) in pairs)
            found['python_speed'] = median(plain / ours for (_, plain), (_, ours) in pairs)
        return found

    def _run(self, steps: Steps, count: int) -> tuple[float, float]:
        """Milliseconds of a step, and of the Python thread in it (with its waiting)."""
        self._synchronise()
        wall, cpu = time.perf_counter(), time.thread_time()
        for _ in range(count):
            steps()
        cpu_s = time.thread_time() - cpu
        self._synchronise()
        return 1e3 * (time.perf_counter() - wall) / count, 1e3 * cpu_s / count

    def _profiled(self, steps: Steps) -> dict[str, Any]:
        self._synchronise()
        kinds = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
            wall_ms = PROFILED * self._run(steps, PROFILED)[0]
        busy_us, kernels, waits, wait_us = 0.0, 0, 0, 0.0
        for event in profile.key_averages():
            if 'CUDA' in str(event.device_type):
                if not getattr(event, 'is_user_annotation', False):
                    busy_us += event.self_device_time_total
                    kernels += event.count
            elif 'Synchronize' in event.key:
                waits += event.count
                wait_us += event.self_cpu_time_total
        return {
            'device_ms': busy_us / 1e3 / PROFILED,
            'launches': kernels / PROFILED,
            'waits': (waits - 2) / PROFILED,  # two are ours
            'python_share': 1 - wait_us / 1e3 / wall_ms,
        }

    def _synchronise(self) -> None:
        if self._device.type != 'cpu':
            torch.accelerator.synchronize(self._device)


def speed(
    ctx: FragmentContext,
    workload: str,
    plain: int,
    beside: int,
    compiled: str,
    seconds: float,
    out: str,
) -> None:
    """Measure steps, and write the figures to ``out``. ``plain``: a loop without this package, with
    so many micro-batches (negative: deterministic); 0: ours, in turns with ``beside``.
    """
    of, device = WORKLOADS[workload], ctx.device
    steps = (_plain(device, of, plain, compiled) if plain else _ours(ctx, of, compiled)).__next__
    other = _plain(device, of, beside, compiled).__next__ if beside else None
    for found in Meter(device, seconds).figures(steps, other):
        found['rate'] = 1e3 * of.batch / found['step_ms']
        if ctx.rank == 0:
            Path(out).write_text(json.dumps(found))
    os._exit(0)


def _autocast(device: torch.device) -> Any:
    return nullcontext() if device.type == 'cpu' else torch.autocast(device.type, torch.bfloat16)


def _compiled(model: Any, mode: str) -> Any:
    return torch.compile(model, mode=mode) if mode else model


def _plain(device: torch.device, of: Workload, parts: int, compiled: str) -> Iterator[None]:
    if parts < 0:
        demand_determinism(warn_only=False)
        # Here, as cloudpickle cannot pickle it.
        from torch.utils import deterministic

        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    model = of.network().to(device)
    optimizer = of.optimizer(model.parameters())
    run, graph = _compiled(model, compiled), compiled == GRAPH
    for parameter in model.parameters():  # a graph's own memory cannot hold sums
        parameter.grad = torch.zeros_like(parameter) if graph else None
    pin = device.type != 'cpu'
    loader = DataLoader(SAMPLES, of.batch, shuffle=True, drop_last=True, pin_memory=pin)
    while True:
        for (numbers,) in loader:
            with plain_step():
                optimizer.zero_grad(set_to_none=not graph)
                for part in numbers.to(device, non_blocking=True).chunk(abs(parts)):
                    with _autocast(device):
                        loss = of.loss(run, part)
                    (loss * (len(part) / of.batch)).backward()
                optimizer.step()
            yield


def _ours(ctx: FragmentContext, of: Workload, compiled: str) -> Iterator[None]:
    torch.manual_seed(0)
    model = of.network().to(ctx.device)
    model, optimizer = ctx.prepare(_compiled(model, compiled), of.optimizer(model.parameters()))
    position = ctx.samples
    for (numbers,) in ctx.loop(SAMPLES, of.batch):
        if ctx.samples != position:
            yield
            position = ctx.samples
        optimizer.zero_grad()
        with _autocast(ctx.device):
            loss = of.loss(model, numbers)
        loss.backward()
        optimizer.step()


def train(ctx: FragmentContext, workload: str, pause_s: float = 0.0, compiled: str = '') -> None:
    """Train to the total."""
    steps = 1
    for _ in _ours(ctx, WORKLOADS[workload], compiled):
        steps += 1
        time.sleep(pause_s)
    ctx.report(steps=steps)


def page_locked(ctx: FragmentContext) -> None:
    """Check that batches are page-locked until they are on the device."""
    from parsl_freetrain.training.data.loader import MicroBatch, make_loader, to_device
    from parsl_freetrain.training.data.loader_settings import LoaderSettings
    from tests.support.ranks import finish

    micro_batches = [MicroBatch((0, 1), 0, 0, 1.0)]
    (batch,) = make_loader(list(torch.arange(2.0)), micro_batches, 7, LoaderSettings(), ctx.device)
    assert batch.is_pinned()
    moved = to_device(batch, ctx.device)
    assert (moved.device, moved.tolist()) == (ctx.device, [0.0, 1.0])
    finish(ctx)
