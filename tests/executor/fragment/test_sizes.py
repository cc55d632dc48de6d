"""Trainers on certain node counts only, in a shape of their own at each, under limits."""

import json
from pathlib import Path
from typing import Any

import pytest

import parsl_freetrain as ft
from parsl_freetrain.cli.main import main
from parsl_freetrain.journal.read import Journal
from tests.support.training import freetrain
from tests.support.waiting import LIMIT_S, wait_until


def halves(ctx: ft.FragmentContext) -> None:
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
        part[mine * 4 // parts : (mine + 1) * 4 // parts] = 1.0
        optimizer.zero_grad()
        model(x * part).mean().backward()
        optimizer.step()
        ctx.report(**{f'on {ctx.nodes} nodes': parts, 'weight': model.weight.mean().item()})
        time.sleep(0.2 * (ctx.nodes == 1))


def holds(ctx: ft.FragmentContext, go: str) -> None:
    """Keeps its nodes until there is a file ``go``."""
    import time

    import torch

    model = torch.nn.Linear(1, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x in ctx.loop([torch.ones(1)] * 4, batch_size=4):
        while not Path(go).exists():
            time.sleep(0.05)
        model(x).mean().backward()
        optimizer.step()


def shaped(ctx: ft.FragmentContext, folder: str) -> None:
    """Needs too much memory in copies, and is slow with tensor parallelism."""
    import time

    import torch
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if ctx.shape.data == 2:
        torch.empty(2**50)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 1))
    model = ctx.shard(layers, plan={'0': ColwiseParallel(), '1': RowwiseParallel()})
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.001))
    for x in ctx.loop([torch.ones(4)] * 10000, batch_size=10):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        time.sleep(0.2 if ctx.shape.tensor == 2 else 0.1)
        if ctx.shape.shard == 2 and Path(folder, 'tensor').exists():
            ctx.finish_early('it is back in the fastest shape')
        elif ctx.shape.tensor == 2:
            Path(folder, 'tensor').touch()


@pytest.mark.long
def test_the_fastest_shape_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of them has too little memory, which is no error of the function."""
    shapes = ft.Shape(data=2), ft.Shape(shard=2), ft.Shape(tensor=2)
    trainer = ft.freetrain_app(sizes={2: shapes}, mode=ft.Throughput(), total_samples=10000)(shaped)
    with freetrain(tmp_path, ft.LocalSite(nodes=2), retries=0) as executor:
        trainer(str(tmp_path)).result(LIMIT_S)
    assert main(['why', 'shaped', '--json', '--ledger', str(executor.ledger_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one['shape'], one['rate'] is None, one['newest']) for one in found['shapes']] == [
        ('data 2 x spatial 1x1x1 x pipeline 1', True, False),
        ('data 1 x shard 2', False, True),
        ('data 1 x tensor 2', False, False),
    ]
    assert found['short_of_memory_on'] == [2]
    assert found['memory'] == {'2': max(one['memory'] for one in found['shapes'])}
    assert min(one['memory'] for one in found['shapes']) > 10_000_000
    assert main(['why', 'shaped', '--ledger', str(executor.ledger_path)]) == 0
    said = capsys.readouterr().out
    assert (
        'On 2 nodes it has tried the shapes data 2 x spatial 1x1x1 x pipeline 1 (not meas' in said
    )
    out = '--out', str(tmp_path / 'r.html')
    assert main(['report', '--ledger', str(executor.ledger_path), *out]) == 0
    page = (tmp_path / 'r.html').read_text()
    assert 'Shapes that were tried' in page
    assert 'GB per rank' in page


@pytest.mark.long
def test_fragments_have_allowed_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of five nodes three may be used, and one more is kept free. Otto has two of the three; when
    they are his no more, two are used. He may have no more than two at all.
    """
    go = tmp_path / 'go'
    first = ft.freetrain_app(
        min_nodes=2,
        max_nodes=4,
        total_epochs=1,
        mode=ft.Throughput(),
        scaling=ft.Scaling(rate={2: 4.0, 4: 8.0}),
        owner=ft.Owner(user='otto'),
    )(holds)
    trainer = ft.freetrain_app(
        max_nodes=5,
        sizes={
            1: ft.Shape(),
            2: ft.Shape(spatial=(1, 1, 2)),
            4: ft.Shape(data=2, spatial=(1, 1, 2)),
        },
        mode=ft.Throughput(),
        total_samples=2000,
        scaling=ft.Scaling(rate={1: 1.0, 4: 4.0}, rescale_up_s=0.1, rescale_down_s=0.1),
        owner=ft.Owner(user='anna'),
    )(halves)
    limits: Any = {'keep_free': 1, 'max_nodes': 3, 'caps': {'user otto': 2}, 'min_rescale_s': 0.5}
    with freetrain(tmp_path, ft.LocalSite(nodes=5, poll_s=0.2), **limits) as executor:

        def why() -> str:
            status = main(['why', 'halves', '--ledger', str(executor.ledger_path)])
            said = capsys.readouterr().out
            return said if status == 0 else ''

        def nodes_here() -> int:
            with Journal(executor.ledger_path) as ledger:
                return sum(node.left_at is None for node in ledger.history().nodes)

        before = first(str(go))
        wait_until(lambda: before.progress().nodes == 2, 'the first one does not start')
        future = trainer()
        running = "'halves' is running: fragment 1 on 1 node (data 1 x spatial 1x1x1 x pipeline 1)"
        wait_until(lambda: running in why())
        assert before.progress().nodes == 2
        assert main(['status', '--json', '--ledger', str(executor.ledger_path)]) == 0
        assert [t['shape'] for t in json.loads(capsys.readouterr().out)['trainers']] == [
            None,
            'data 1 x spatial 1x1x1 x pipeline 1',
        ]
        wait_until(lambda: nodes_here() == 3 + 1, 'none is kept free')
        go.touch()
        done = future.result(LIMIT_S)
    assert done.samples == 2000
    assert (
        abs(done.metrics['weight'] + 0.2) < 1e-4
    )  # each of 200 steps takes off 0.001, whoever worked it out
    assert {name: value for name, value in done.metrics.items() if name.startswith('on')} == {
        'on 1 nodes': 1,
        'on 2 nodes': 2,
    }
    with Journal(executor.ledger_path) as ledger:
        history = ledger.history()
    assert [
        len(fragment.nodes) for fragment in history.fragments if fragment.trainer == 'halves'
    ] == [1, 2]
    own = history.runs[0].trainers['halves'].trainer
    assert (*own.counts(),) == own.sizes == (1, 2, 4)
    assert own.stated_costs == ('up', 'down')
