"""Trainers that run on certain node counts only, in a shape of their own at each, under an executor's caps."""

from __future__ import annotations

from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.app import Shape, freetrain_app
from parsl_freetrain.cli.main import main
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.sites.local import LocalSite
from parsl_freetrain.sites.schedule import IdleInterval, Schedule
from parsl_freetrain.training.context import FragmentContext
from tests.support.training import freetrain

LONG = 300   # seconds; a bound for what takes a few


def halves(ctx: FragmentContext) -> None:
    """Adds up a weight over the halves of each sample; slow on one node."""
    import time

    import torch
    import torch.distributed as dist

    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    parts, group = ctx.shape.spatial[2], ctx.mesh.get_group('width')
    mine = dist.get_rank(group)

    def whole(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=group)
        return gradient
    model.weight.register_hook(whole)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.001))
    for x in ctx.loop([torch.ones(4)] * 1000, batch_size=10):
        part = torch.zeros(4)
        part[mine * 4 // parts:(mine + 1) * 4 // parts] = 1.0
        optimizer.zero_grad()
        model(x * part).mean().backward()
        optimizer.step()
        ctx.report(**{f'on {ctx.nodes} nodes': parts, 'weight': model.weight.mean().item()})
        time.sleep(0.05 * (ctx.nodes == 1))


@pytest.mark.slow
def test_fragments_have_allowed_counts_and_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two nodes, then four, one of which is kept free; anna may have no more than three, and the trainer runs on one, two or four."""
    schedule = Schedule([IdleInterval(after_s, 900, node) for after_s, node in ((0, 'a'), (0, 'b'), (3, 'c'), (3, 'd'))])
    trainer = freetrain_app(
        shapes={1: Shape(), 2: Shape(spatial=(1, 1, 2)), 4: Shape(data=2, spatial=(1, 1, 2))}, mode='throughput', total_samples=2000,
        scaling={1: 1.0, 4: 4.0}, rescale_up_s=0.1, rescale_down_s=0.1, user='anna')(halves)
    settings: dict[str, Any] = {'min_rescale_s': 0.5, 'keep_free': 1, 'max_nodes': 4, 'caps': {'user anna': 3}}
    said = ''
    with freetrain(tmp_path, LocalSite(nodes=4, schedule=schedule, poll_s=0.2), **settings) as executor:
        assert executor._planner is not None
        arrived = executor._planner._controller.settings
        assert {name: getattr(arrived, name) for name in settings} == settings
        future = trainer()
        while not future.done() and 'node (data 1 x spatial 1x1x1 x pipeline 1)' not in said:
            if main(['why', 'halves', '--ledger', str(executor.ledger_path)]) == 0:
                said += capsys.readouterr().out
            wait([future], 0.2)
        done = future.result(LONG)
    assert 'halves is running: fragment 1 on 1 node (data 1 x spatial 1x1x1 x pipeline 1)' in said
    assert done.samples == 2000
    assert abs(done.metrics['weight'] + 0.2) < 1e-4   # each of 200 steps takes off 0.001, whoever worked it out
    assert {name: value for name, value in done.metrics.items() if name.startswith('on')} == {'on 1 nodes': 1, 'on 2 nodes': 2}
    with Reader(executor.ledger_path) as ledger:
        assert {len(fragment.nodes) for fragment in ledger.story().fragments} == {1, 2}
