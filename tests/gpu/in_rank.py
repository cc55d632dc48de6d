"""What the ranks of the runs on a device do: train one of the networks, measured or interrupted."""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from parsl_freetrain import FragmentContext
from parsl_freetrain.training.comm.devices import peak_memory
from parsl_freetrain.training.steps.determinism import demand_determinism
from tests.gpu.networks import WORKLOADS, Workload

WARM_UP, PROFILED, PROFILED_IN_PYTHON = 6, 2, 8
SAMPLES = TensorDataset(torch.arange(4096))


class Meter:
    """Milliseconds of a step, from its first ones on apart: ``steps`` steps and ``seconds`` at
    least. Then, on a device, how long it works in a step, and how often the host waits for it.
    """

    def __init__(self, device: torch.device, steps: int, seconds: float) -> None:
        self._device, self._steps, self._seconds = device, steps, seconds
        self._count, self._began, self._cpu = 0, 0.0, 0.0
        self._profile: Any = None
        self._python: Any = None
        self.figures: dict[str, Any] = {}

    def step_ends(self) -> bool:
        """Call after each step; returns whether all has been measured."""
        self._count += 1
        if self._python is not None:
            return self._count == PROFILED_IN_PYTHON and self._read_python()
        if self._profile is not None:
            return self._count == PROFILED and self._read_profile()
        timed = self._count - WARM_UP
        if timed == 0:
            self._synchronise()
            self._began, self._cpu = time.perf_counter(), time.thread_time()
        if timed < self._steps or time.perf_counter() - self._began < self._seconds:
            return False
        cpu_s = time.thread_time() - self._cpu
        self._synchronise()
        step_s = (time.perf_counter() - self._began) / timed
        self.figures = {'step_ms': 1e3 * step_s, 'steps': timed}
        if self._device.type == 'cpu':
            self.figures['python_ms'] = 1e3 * cpu_s / timed
            return True
        self.figures['peak_gb'] = peak_memory(self._device) / 1e9
        kinds = torch.profiler.ProfilerActivity
        self._profile = torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA])
        self._profile.__enter__()
        self._count, self._began = 0, time.perf_counter()
        return False

    def _read_profile(self) -> bool:
        self._synchronise()
        wall_us = 1e6 * (time.perf_counter() - self._began)
        self._profile.__exit__(None, None, None)
        busy_us, kernels, waits, wait_us = 0.0, 0, 0, 0.0
        for event in self._profile.key_averages():
            if 'CUDA' in str(event.device_type):
                if not getattr(event, 'is_user_annotation', False):
                    busy_us += event.self_device_time_total
                    kernels += event.count
            elif 'Synchronize' in event.key:
                waits += event.count
                wait_us += event.self_cpu_time_total
        self.figures.update(
            device_ms=busy_us / 1e3 / PROFILED,
            launches=kernels / PROFILED,
            waits=(waits - 1) / PROFILED,  # one is ours
            python_share=1 - wait_us / wall_us,
        )
        self._python, self._count = cProfile.Profile(), 0
        self._python.enable()
        return False

    def _read_python(self) -> bool:
        """The functions that take most of the time of the Python thread, in ms a step."""
        self._python.disable()
        rows = pstats.Stats(self._python).stats.items()  # type: ignore[attr-defined]
        top = sorted(((row[2], row[0], where) for where, row in rows), reverse=True)[:25]
        self.figures['python'] = [
            f'{Path(file).name}:{line}:{name} {1e3 * own_s / PROFILED_IN_PYTHON:.3f} ms, '
            f'{calls / PROFILED_IN_PYTHON:.0f} calls'
            for own_s, calls, (file, line, name) in top
        ]
        return True

    def _synchronise(self) -> None:
        if self._device.type != 'cpu':
            torch.accelerator.synchronize(self._device)


def speed(
    ctx: FragmentContext,
    workload: str,
    plain: int,
    compiled: bool,
    length: tuple[int, float],
    out: str,
) -> None:
    """Measure steps, write the figures to the file ``out``, and end. ``plain``: a loop without this
    package, with so many micro-batches (negative: with deterministic algorithms); 0: ours.
    """
    of, meter = WORKLOADS[workload], Meter(ctx.device, *length)
    began = time.perf_counter()
    steps = _plain(ctx.device, of, plain, compiled) if plain else _ours(ctx, of, compiled)
    first_s = 0.0
    for _ in steps:
        first_s = first_s or time.perf_counter() - began
        done = meter.step_ends()
        if meter.figures:  # also without what the profile says, should that fail
            rate = 1e3 * of.batch / meter.figures['step_ms']
            found = {'rate': rate, 'first_step_s': first_s, **meter.figures}
            if ctx.rank == 0:
                Path(out).write_text(json.dumps(found))
        if done:
            os._exit(0)


def _autocast(device: torch.device) -> Any:
    return nullcontext() if device.type == 'cpu' else torch.autocast(device.type, torch.bfloat16)


def _plain(device: torch.device, of: Workload, parts: int, compiled: bool) -> Iterator[None]:
    if parts < 0:
        demand_determinism(warn_only=False)
        # Here, as cloudpickle cannot pickle it.
        from torch.utils import deterministic

        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    model = of.network().to(device)
    optimizer = of.optimizer(model.parameters())
    run: Any = torch.compile(model) if compiled else model
    drawn = torch.Generator().manual_seed(0)
    while True:
        numbers = torch.randint(len(SAMPLES), (of.batch,), generator=drawn).to(device)
        optimizer.zero_grad()
        for part in numbers.chunk(abs(parts)):
            with _autocast(device):
                loss = of.loss(run, part)
            (loss * (len(part) / of.batch)).backward()
        optimizer.step()
        yield


def _ours(ctx: FragmentContext, of: Workload, compiled: bool) -> Iterator[None]:
    torch.manual_seed(0)
    model = of.network().to(ctx.device)
    model, optimizer = ctx.prepare(
        torch.compile(model) if compiled else model, of.optimizer(model.parameters())
    )
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


def train(ctx: FragmentContext, workload: str, pause_s: float = 0.0) -> None:
    """Train to the total."""
    steps = 1
    for _ in _ours(ctx, WORKLOADS[workload], compiled=False):
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
