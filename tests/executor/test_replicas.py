"""A training in replicas is one training to its user."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import parsl
import pytest
from msgspec import structs
from parsl.config import Config

import parsl_freetrain as ft
from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.executor.fragment.trainer_record import TrainerRecord
from parsl_freetrain.executor.progress import FutureUpdater
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.cells import in_shape
from parsl_freetrain.report.figures import Figures
from parsl_freetrain.report.page import report_page
from parsl_freetrain.report.status import snapshot
from parsl_freetrain.report.summary import summary
from parsl_freetrain.sites.protocols import Site
from parsl_freetrain.testing import Fault, with_faults
from tests.support.training import freetrain
from tests.support.waiting import LIMIT_S, wait_until

MODE = ft.DiLoCo(replicas=2, steps=2, inner=ft.Reproducible(shards=2, seed=1))
FOUR = structs.replace(MODE, replicas=4)


def train(ctx: ft.FragmentContext, fails: bool | str = False) -> float:
    import torch

    model = torch.nn.Linear(2, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in ctx.loop(data(), 8):
        if fails in (True, ctx.trainer) and ctx.samples >= 16:
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


def app(function: Any = train, **changes: Any) -> Any:
    given = {'total_samples': 32, 'mode': MODE, 'checkpoints': ft.Checkpoints(every_s=0.5)}
    return ft.freetrain_app(**{**given, **changes})(function)


def test_a_training_in_replicas_is_one_to_its_user(tmp_path: Path) -> None:
    with freetrain(tmp_path, ft.LocalSite(nodes=2, poll_s=0.2)) as executor:
        future = app()()
        found = future.result(LIMIT_S)
    assert (found.trainer, found.samples) == ('train', 32) and found.metrics['loss'] > 0
    progress = future.progress()
    assert (progress.samples, progress.fragments, progress.nodes) == (32, 5, 0)
    history = Journal(executor.ledger_path).history()
    (seen,) = snapshot(history, time.time()).trainers
    assert (seen.name, seen.rounds) == ('train', (2, 0, 2))
    assert in_shape(seen).startswith(' (all 2 rounds, 4 pieces; last outer step by replica ')
    row = summary(history)['trainers']['train']
    assert (row['samples'], row['samples_expected'], row['fragments']) == (32, 32, 5)
    assert (row['rounds'], row['pieces']) == (2, 4)
    assert '<html' in report_page(Figures(history, time.time(), DpAllocator()))
    assert app().debug().metrics['loss'] > 0  # without rounds


def submit(folder: str) -> None:
    """Train until a rank kills this process, in an outer step."""
    strike = partial(os.kill, os.getpid(), signal.SIGKILL)
    fault = Fault(None, None, strike, stage='outer-before-commit', checkpoint=0)
    with freetrain(Path(folder), ft.LocalSite(nodes=2, poll_s=0.2)):
        app(function=with_faults(train, fault))().result(LIMIT_S)


@pytest.mark.long
@pytest.mark.usefixtures('nodes_share_a_template')
def test_a_submitter_killed_in_an_outer_step_changes_no_bit(tmp_path: Path) -> None:
    code = f'from tests.executor.test_replicas import submit; submit({str(tmp_path)!r})'
    ended = subprocess.run([sys.executable, '-c', code], timeout=LIMIT_S)
    assert ended.returncode == -signal.SIGKILL
    with freetrain(tmp_path, ft.LocalSite(nodes=2, poll_s=0.2)):
        both = app()(), app()(trainer_name='calm')  # at once
        assert ft.same_weights(*(future.result(LIMIT_S) for future in both))


@pytest.mark.long
def test_its_failure_and_continuation_are_those_of_one_trainer(tmp_path: Path) -> None:
    with freetrain(tmp_path, ft.LocalSite(nodes=2, poll_s=0.2)):
        with pytest.raises(ValueError, match='no more'):
            app()(fails=True, trainer_name='fails').result(LIMIT_S)
        found = app()().result(LIMIT_S)
    with freetrain(tmp_path, ft.LocalSite(nodes=1, poll_s=0.2), resume='require'):
        again = app()().result(LIMIT_S)
        assert (again.path, again.result) == (found.path, found.result)
        for changes in ({'replicas': 4}, {'steps': 1}, {'outer': None}, {'compress': 'int8'}):
            with pytest.raises(ft.BadInput, match=f'which had {next(iter(changes))} .* .here '):
                app(mode=structs.replace(MODE, **changes))(trainer_name='fails')
        with pytest.raises(ft.BadInput, match='which had total 32 .here 64.: put that back'):
            app(total_samples=64)(trainer_name='fails')
    with freetrain(tmp_path, ft.LocalSite(nodes=1, poll_s=0.2), resume='never'):
        mean = app(mode=structs.replace(MODE, outer=None))().result(LIMIT_S)
    assert mean.samples == 32 and mean.result != found.result
    folders = [folder / 'old-1' for folder in (tmp_path / 'checkpoints' / 'train').rglob('1')]
    assert [folder.is_dir() for folder in folders] == [True]


def test_what_replicas_cannot_have_is_refused() -> None:
    none: list[tuple[dict[str, Any], str]] = [
        ({'replicas': 0}, 'DiLoCo: replicas is 0; it must be at least 1'),
        ({'steps': 0}, 'DiLoCo: steps is 0'),
        ({'outer': 'adam'}, "DiLoCo: outer is 'adam'; it must be a Nesterov or None"),
        ({'inner': ft.Scaled()}, 'inner is .*; it must be a Reproducible'),
        ({'overlap': 2}, 'DiLoCo: overlap is 2; it must be from 0 to 1'),
        ({'inner': ft.Throughput(on_nan='rollback')}, 'a replica cannot go back behind the round'),
    ]
    for settings, sentence in none:
        with pytest.raises(ft.BadInput, match=sentence):
            ft.DiLoCo(**settings)
    for outer, sentence in (({'lr': 0}, 'lr is 0'), ({'momentum': 1}, 'momentum is 1')):
        with pytest.raises(ft.BadInput, match=f'Nesterov: {sentence}; it must be'):
            ft.Nesterov(**outer)
    with pytest.raises(ft.BadInput, match=r'no whole number of rounds .*: say 32 or 34'):
        app(total_samples=33)
    with pytest.raises(ft.BadInput, match='hold whole models'):
        app(sizes={1: 'auto', 2: 'auto'})
    for settings in ({'mode': 'diloco'}, {'mode': MODE.inner, 'executor': ('here', 'there')}):
        with pytest.raises(ft.BadInput, match='mode'):
            app(**settings)


@contextmanager
def several(folder: Path, **sites: tuple[Site, str]) -> Iterator[list[ft.FreeTrainExecutor]]:
    """A Parsl configuration with an executor on each site, for which this host has an address."""
    executors = [
        ft.FreeTrainExecutor(
            provider=ft.BackfillProvider(site, min_hole_s=1.0),
            label=label,
            checkpoint_dir=str(folder / label),
            max_workers_per_node=0,
            htex=ft.HtexOptions(address=address),
        )
        for label, (site, address) in sites.items()
    ]
    with parsl.load(Config(executors=executors, strategy='none', run_dir=str(folder / 'runinfo'))):
        yield executors


def one_node_each(*labels: str) -> dict[str, tuple[Site, str]]:
    return {label: (ft.LocalSite(nodes=1, poll_s=0.2), '127.0.0.1') for label in labels}


@pytest.mark.long
def test_sites_without_a_common_folder_train_one_training(tmp_path: Path) -> None:
    """Replicas have kills, and their run ends in the middle and goes on: the bits are the same."""
    mode = structs.replace(MODE, compress='int8')
    there = ft.Folder(str(tmp_path / 'exchange'))
    strike = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    struck = with_faults(train, Fault(0, 2, strike, stage='before-commit'))
    how: Any = {'mode': structs.replace(mode, transport=there), 'total_samples': 64}
    apart = app(struck, executor=('here', 'there'), **how)
    with several(tmp_path, **one_node_each(*apart.executor)):
        begun = apart()
        wait_until(lambda: begun.progress().samples >= 16)
    with several(tmp_path, **one_node_each(*apart.executor)):
        alone = app(executor='here', mode=mode, total_samples=64)(trainer_name='alone')
        found = apart().result(LIMIT_S)
        assert ft.same_weights(found, alone.result(LIMIT_S))
    replicas = [p.relative_to(tmp_path) for p in tmp_path.glob('*/train/replicas/*')]
    assert replicas == [Path('there/train/replicas/1')]


def test_the_end_of_a_replica_elsewhere_is_told_whatever_another_one_here_survived() -> None:
    spec = app().spec
    futures = {name: ft.TrainingFuture(name) for name in ('t', 't.replica1')}
    records = {
        name: TrainerRecord(spec.trainer('t'), spec, '', Any, future, ft.Checkpoint(name, '', 0, 0))  # type: ignore[arg-type]
        for name, future in futures.items()
    }
    records['t.replica1'].failure = lambda: ValueError('once')
    updater, why = FutureUpdater(records), "its replica 't.replica2' has ended: no more"
    updater.take(ev.TrainerAborted(1.0, 't', why))
    updater.take(ev.Decided(1.0, (ev.EndTrainer('t', 'failed', why),)))
    with pytest.raises(ft.TrainerFailed, match='replica2'):
        futures['t'].result(LIMIT_S)


@pytest.mark.long
def test_replicas_of_one_training_are_in_several_executors(tmp_path: Path) -> None:
    both = app(mode=FOUR, executor=('here', 'there'))
    with several(tmp_path, **one_node_each(*both.executor)) as executors:
        found = both().result(LIMIT_S)
        alone = app(mode=FOUR, executor='here')(trainer_name='alone').result(LIMIT_S)
        assert ft.same_weights(found, alone)
        with pytest.raises(ft.TrainerFailed, match="its replica 'fails.replica1' has ended"):
            both('fails.replica1', trainer_name='fails').result(LIMIT_S)
        long = both.with_options(total_samples=32 * 10**6)(trainer_name='long')
        wait_until(lambda: long.progress().fragments > 4)
        assert long.cancel()
        wait_until(lambda: all(one.done() for one in (long, *long._replicas)))
        with pytest.raises(ft.BadInput, match="labelled 'nowhere'"):
            app(executor=('here', 'nowhere'))()
    history = Journal(executors[1].ledger_path).history()
    rows = {row.name: row for row in snapshot(history, time.time()).trainers}
    states = {name.partition('.')[0]: row.state for name, row in rows.items()}
    assert states == {'train': 'finished', 'fails': 'failed', 'long': 'cancelled'}
    assert rows['train.replica1'].rounds == (2, 0, 4)
