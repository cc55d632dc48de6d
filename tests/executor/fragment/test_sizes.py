"""Several shapes on one number of nodes: each is tried, and the fastest one kept."""

import json
from pathlib import Path

import pytest

import parsl_freetrain as ft
from parsl_freetrain.cli.main import main
from tests.support.training import freetrain
from tests.support.waiting import LIMIT_S


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
