"""A training in replicas is one training to its user."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from parsl_freetrain import (
    BadInput,
    Checkpoints,
    DiLoCo,
    FragmentContext,
    LocalSite,
    Reproducible,
    Throughput,
    freetrain_app,
)
from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.cells import in_shape
from parsl_freetrain.report.figures import figures
from parsl_freetrain.report.page import report_page
from parsl_freetrain.report.status import snapshot
from parsl_freetrain.report.summary import summary
from tests.support.training import freetrain
from tests.support.waiting import LIMIT_S, wait_until

MODE = DiLoCo(replicas=2, steps=2, inner=Reproducible(shards=2, seed=1))


def train(ctx: FragmentContext, fails: bool = False) -> float:
    import torch

    model = torch.nn.Linear(2, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in ctx.loop(data(), 8):
        if fails and ctx.samples >= 16:
            raise ValueError('no more')
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss.item())
    return float(model.weight.detach().sum())


def data() -> Any:
    import torch

    x = torch.randn(32, 2, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x)


def app(**changes: Any) -> Any:
    given = {'total_samples': 32, 'mode': MODE, 'checkpoints': Checkpoints(every_s=0.5)}
    return freetrain_app(**{**given, **changes})(train)


def test_a_training_in_replicas_is_one_to_its_user(tmp_path: Path) -> None:
    with freetrain(tmp_path, LocalSite(nodes=2, poll_s=0.2)) as executor:
        future = app()()
        found = future.result(LIMIT_S)
    assert (found.trainer, found.samples) == ('train', 32) and found.metrics['loss'] > 0
    progress = future.progress()
    assert (progress.samples, progress.fragments, progress.nodes) == (32, 5, 0)
    history = Journal(executor.ledger_path).history()
    (seen,) = snapshot(history, time.time()).trainers
    assert (seen.name, seen.rounds) == ('train', (2, 0, 2))
    assert in_shape(seen) == ' (round 3, 0 of 2 pieces done)'
    row = summary(history)['trainers']['train']
    assert (row['samples'], row['samples_expected'], row['fragments']) == (32, 32, 5)
    assert '<html' in report_page(figures(history, time.time(), DpAllocator()))
    assert app().debug().metrics['loss'] > 0  # without rounds


@pytest.mark.long
def test_its_failure_cancellation_and_continuation_are_those_of_one_trainer(tmp_path: Path) -> None:
    with freetrain(tmp_path, LocalSite(nodes=2, poll_s=0.2)) as executor:
        with pytest.raises(ValueError, match='no more'):
            app()(fails=True, trainer_name='fails').result(LIMIT_S)
        found = app()().result(LIMIT_S)
        long = app(total_samples=32 * 10**6)(trainer_name='long')
        wait_until(lambda: long.progress().samples > 0)
        assert long.cancel()
        wait_until(long.done)
    history = Journal(executor.ledger_path).history()
    states = {row.name: row.state for row in snapshot(history, time.time()).trainers}
    assert states == {'fails': 'failed', 'train': 'finished', 'long': 'cancelled'}
    with freetrain(tmp_path, LocalSite(nodes=1, poll_s=0.2), resume='require'):
        again = app()().result(LIMIT_S)
        assert (again.path, again.result) == (found.path, found.result)
        for changes in ({'replicas': 4}, {'steps': 1}, {'outer': None}):
            with pytest.raises(BadInput, match="had diloco .*'?replicas"):
                app(mode=structs.replace(MODE, **changes))(trainer_name='long')
    with freetrain(tmp_path, LocalSite(nodes=1, poll_s=0.2), resume='never'):
        mean = app(mode=structs.replace(MODE, outer=None))().result(LIMIT_S)
    assert mean.samples == 32 and mean.result != found.result
    folders = [folder / 'old-1' for folder in (tmp_path / 'checkpoints' / 'train').rglob('1')]
    assert [folder.is_dir() for folder in folders] == [True]


@pytest.mark.parametrize(
    ('settings', 'sentence'),
    [
        ({'replicas': 0}, 'DiLoCo: replicas is 0; it must be at least 1'),
        ({'steps': 0}, 'DiLoCo: steps is 0'),
        ({'outer': 'adam'}, "DiLoCo: outer is 'adam'; it must be a Nesterov or None"),
        ({'inner': Throughput(on_nan='rollback')}, 'a replica cannot go back behind the round'),
    ],
)
def test_settings_that_replicas_cannot_have_are_refused(
    settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(BadInput, match=sentence):
        DiLoCo(**settings)


def test_totals_and_shapes_that_replicas_cannot_have_are_refused() -> None:
    with pytest.raises(BadInput, match=r'no whole number of rounds .*: say 32 or 34'):
        app(total_samples=33)
    with pytest.raises(BadInput, match='hold whole models'):
        app(sizes={1: 'auto', 2: 'auto'})
    with pytest.raises(BadInput, match='mode'):
        app(mode='diloco')
