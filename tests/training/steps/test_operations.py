"""How many operations (launches on a GPU) and reads (waits) the project adds to a step."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parsl_freetrain import Shape
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.steps.host_limit import HostLimit
from tests.support.ranks import all_finish, order

FROM, TO, BATCH = 18, 26, 16  # between the 16th and the 32nd step, in which data are compared
PER_MICRO_BATCH, PER_STEP = 12, 30


def counted(ctx: FragmentContext, layers: int, norm: bool, blocks: bool = False) -> None:
    """Reports operations and reads a step, beside the passes and the optimizer's own."""
    import sys
    from collections import ChainMap, Counter

    from torch.utils._python_dispatch import TorchDispatchMode

    from parsl_freetrain.training.comm import peers
    from parsl_freetrain.training.loop import wishes
    from parsl_freetrain.training.steps import nonfinite

    # What is done a few times a second: a look at the state, for whose answer nobody waits on a
    # device, and agreements and reports of the ranks, which are on the CPU.
    nonfinite.LOOK_EVERY_S = peers.EVERY_S = wishes.PROGRESS_EVERY_S = 1e9
    found: Any = ChainMap(Counter[str]())  # what it holds does not follow the first shard
    users = [False]

    def read(plain: Any) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:
            where = sys._getframe(1).f_globals.get('__name__', '')
            mine = where.startswith('parsl_freetrain') and '.comm.' not in where
            found['reads'] += mine and not users[0] and '.data.' not in where
            return plain(*args, **kwargs)

        return note

    for kind, names in (
        (torch.Tensor, ('tolist', 'item', '__bool__', '__float__', '__int__', 'cpu', 'numpy')),
        (torch, ('equal', 'allclose')),
    ):
        for name in names:
            setattr(kind, name, read(getattr(kind, name)))

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            launches = not (func.is_view or 'empty' in str(func) or 'lift_fresh' in str(func))
            if launches and func.namespace == 'aten':
                found['operations'] += not users[0]
            return func(*args, **(kwargs or {}))

    class Optimizer(torch.optim.SGD):
        elementwise = True

        def step(self, closure: Any = None) -> Any:
            before, users[0] = users[0], True
            try:
                return super().step(closure)
            finally:
                users[0] = before

    torch.manual_seed(0)
    model: Any = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), *[nn.BatchNorm1d(8)] * norm) for _ in range(layers))
    )
    if blocks:
        model = ctx.shard(model, blocks=(nn.Linear,))
    model, optimizer = ctx.prepare(
        model, Optimizer(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
    )
    if not blocks:
        ctx.ema(model, decay=0.9)
    mode: Any = Count()  # type: ignore[no-untyped-call]
    at = [ctx.samples, 0]
    for batch in ctx.loop(torch.randn(64, 8), BATCH):
        if ctx.samples != at[0]:
            at[:] = ctx.samples, at[1] + 1
            if at[1] == FROM:
                found.clear()
                mode.__enter__()
            if at[1] == TO:
                mode.__exit__(None, None, None)
                each = {name: number / (TO - FROM) for name, number in found.items()}
                ctx.report(**{'reads': 0.0, **each})
        found['micro_batches'] += 1
        users[0] = True
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        users[0] = False
        optimizer.step()


@pytest.mark.parametrize(
    ('mode', 'shards', 'count', 'norm', 'shape'),
    [
        pytest.param('reproducible', 4, 1, False, None, marks=pytest.mark.long),
        ('reproducible', 4, 2, True, None),
        ('throughput', 1, 1, True, None),
        pytest.param('reproducible', 4, 2, False, Shape(shard=2), marks=pytest.mark.long),
        pytest.param('throughput', 1, 2, False, Shape(shard=2), marks=pytest.mark.long),
    ],
)
def test_what_a_step_adds_is_the_same_for_any_network(
    fork_server: ForkClient,
    tmp_path: Path,
    mode: str,
    shards: int,
    count: int,
    norm: bool,
    shape: Shape | None,
) -> None:
    changes: dict[str, Any] = {'total_samples': BATCH * 30, 'mode': mode, 'shards': shards}
    if shape is not None:
        changes |= {'shape': shape, 'shapes': {2: shape, 4: Shape(shard=4)}}
    found = []
    for layers in (2, 6) if shape else (80,):  # of which one more for each is too many
        function = counted, layers, norm, shape is not None
        ordered = order(tmp_path / str(layers), **changes)
        found.append(all_finish(fork_server, ordered, count, tmp_path, *function)[0].metrics)
    small, large = found[0], found[-1]
    assert large['operations'] == pytest.approx(small['operations'], abs=2.0)
    assert large['operations'] <= PER_MICRO_BATCH * large['micro_batches'] + PER_STEP
    assert large['reads'] <= (mode == 'reproducible')


class Device:
    """Takes ``work_s`` for each micro-batch, and begins it when all before is done."""

    def __init__(self, work_s: float) -> None:
        self.work_s, self.now, self.done, self.slept = work_s, 0.0, 0.0, 0
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = max(device.now, device.done)

            def query(self) -> bool:
                return device.now >= self.at

            def elapsed_time(self, other: Any) -> float:
                return 1e3 * float(other.at - self.at)

        self.Event = Event

    def _sleep(self, cycles: int) -> None:
        self.slept += 1
        self.done = max(self.now, self.done) + cycles / 2e9

    def micro_batch(self, python_s: float) -> None:
        """Python launches ten operations."""
        for _ in range(10):
            self.now += python_s / 10
            self.done = max(self.now, self.done) + self.work_s / 10


def test_a_device_that_waits_for_python_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    for shards, passes, work_s, words in (
        (4, 4, 0.015, 'of 8 samples, |35 ms and the device 15 ms|shards=2)'),
        (8, 2, 0.003, 'shards=4)'),  # each rank has one then
        (1, 1, 0.015, '15 ms. What helps: torch.compile'),
        (4, 4, 0.025, ''),  # not much less than Python
        (4, 4, 0.1, ''),  # Python waits for the device, as it should
    ):
        device = Device(work_s)
        limit = HostLimit(shards, on=True, device=device, clock=partial(getattr, device, 'now'))
        for _ in range(200):
            limit.begin()
            device.micro_batch(max(0.035, work_s))
            limit.end(passes, 8)
        said = capsys.readouterr().out.splitlines()
        assert (len(said), device.slept) == (bool(words), 1), (work_s, said)
        assert all(word in ''.join(said) for word in words.split('|'))
