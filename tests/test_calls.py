"""What a call needs: settings, seeds, the arguments of before, the best checkpoint, an end."""

import _thread
import cProfile
import logging
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import parsl_freetrain as ft
from parsl_freetrain.executor.trainer.arguments import compare
from parsl_freetrain.host.processes import StopSignals
from parsl_freetrain.sites.idle_schedule import IdleInterval, Schedule
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.spec.retention import Retention
from tests.support.examples import equal, in_this_process
from tests.support.programs import run_to_end
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S, wait_until

DATA = TensorDataset(torch.arange(32.0).reshape(16, 2) / 16)


@ft.freetrain_app(max_nodes=2, total_epochs=2, mode=ft.Reproducible(shards=4))
def train(ctx: Any, lr: float = 0.1, grows: bool = False) -> list[float]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))

    def end() -> None:
        ctx.report(accuracy=abs(ctx.epoch - 1.0))
        ctx.checkpoint(best=abs(ctx.epoch - 1.0))

    ctx.each_epoch(end)
    seen: list[float] = []
    for (x,) in ctx.loop(DATA, 4):
        seen.extend(x[:, 0].tolist())
        model(x).square().mean().backward()
        optimizer.step()
    return seen


def test_other_settings_of_the_same_function() -> None:
    spec = train.with_options(total_samples=8, mode=ft.Throughput(), name='other').spec
    assert (spec.goal, spec.mode, spec.max_nodes) == (ft.Samples(8), ft.Throughput(), 2)
    assert train.with_options(name='other').name == 'other' and train.name == 'train'
    assert train.with_options(name='other').spec == train.spec
    shaped = train.with_options(sizes={2: ft.Shape(data=2)}, total_epochs=3)
    assert shaped.spec.min_nodes == 2 and shaped.spec.goal == ft.Epochs(3)
    assert shaped.with_options(max_nodes=4).spec.shapes == {}
    assert shaped.with_options(mode=ft.Reproducible(seed=4)).spec.shapes == shaped.spec.shapes
    with pytest.raises(ft.BadInput, match='total_epoch'):
        train.with_options(total_epoch=3)
    with pytest.raises(ft.BadInput, match='The seed given .* 0.5; it must be a whole number'):
        train.debug(seed=0.5)


def test_data_order_and_dropout_follow_the_seed_of_the_call() -> None:
    runs = [train.debug(seed=seed) for seed in (3, 3, 4)]
    assert runs[0].result == runs[1].result != runs[2].result
    gets_it = ft.freetrain_app(total_epochs=1)(lambda ctx, seed: seeds(ctx, seed))
    assert gets_it.debug(seed=5).result == [5, 5] and gets_it.debug(5).result == [5, 0]


def seeds(ctx: Any, seed: int) -> list[int]:
    model = nn.Linear(2, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in ctx.loop(DATA, 16):
        model(x).mean().backward()
        optimizer.step()
    return [seed, ctx.spec.mode.seed]


def test_best_checkpoint_and_arguments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = train.with_options(total_epochs=4, checkpoints=ft.Checkpoints(keep=1))
    with freetrain(tmp_path, ft.LocalSite(nodes=1)):
        result = app(lr=0.1, trainer_name='a').result(LIMIT_S)
    assert result.best is not None and result.best.metrics['best'] == 0 < result.metrics['accuracy']
    folder = Path(result.path).parent
    for source in (folder, result):
        best = ft.load_weights(source, best=True)
        assert all(torch.equal(best[k], v) for k, v in ft.load_weights(result.best).items())
    ft.export_weights(folder, tmp_path / 'best.safetensors', best=Retention(best='accuracy'))
    assert (tmp_path / 'best.safetensors').stat().st_size
    with pytest.raises(ft.BadInput, match="no checkpoint with the metric 'loss'"):
        ft.load_weights(folder, best=Retention(best='loss'))
    with freetrain(tmp_path, ft.LocalSite(nodes=1)), caplog.at_level(logging.WARNING):
        app.with_options(total_epochs=5)(lr=0.01, trainer_name='a').result(LIMIT_S)
    said = [record.getMessage() for record in caplog.records]
    assert [one for one in said if 'lr was 0.1 and is 0.01' in one and 'learning rates' in one]


def test_other_arguments_hold_from_a_checkpoint_on(tmp_path: Path) -> None:
    """From it on, the first step need not be the one that was foreseen; also after a kill."""
    steps = [
        (None, 0.1, False),
        ('c1', 0.1, False),
        ('c1', 0.2, True),
        ('c1', 0.2, True),  # it was killed before it had written a checkpoint
        ('c2', 0.2, False),
        (None, 0.3, False),
        ('c3', 0.3, False),
    ]
    for path, lr, changed in steps:
        checkpoint = None if path is None else ft.Checkpoint('a', path, 8, 1)
        assert compare(tmp_path, checkpoint, {'lr': lr}) is changed, (path, lr)


def test_a_schedule_that_is_over_fails_who_waits_and_may_repeat(tmp_path: Path) -> None:
    schedule = Schedule([IdleInterval(0.0, 1.0, 'a')])
    site = ft.LocalSite(nodes=1, schedule=schedule)
    with freetrain(tmp_path, site), pytest.raises(ft.TrainerFailed, match='repeat=True'):
        train.with_options(total_epochs=10**6)().result(LIMIT_S)
    now = [100.0]
    again = ft.LocalSite(nodes=1, schedule=Schedule([IdleInterval(2, 4, 'a')]), repeat=True)
    again._clock = lambda: now[0]
    again.start()
    idle = []
    for now[0] in (100.0, 103.0, 105.0, 106.5, 109.0, 110.5):
        idle.append(bool(again.holes()))
    assert idle == [False, True, False, True, False, True]
    offers = [(one.start - 100, one.end - 100) for one in again.offers(100.0, 111.0)]
    assert offers == [(2, 4), (6, 8), (10, 11)] and again.over_at is None and not again.over


def test_a_call_asks_the_file_system_little_and_looks_at_modules_once(tmp_path: Path) -> None:
    site = ft.LocalSite(nodes=1, schedule=Schedule([IdleInterval(1e6, 1e6 + 1.0, 'a')]))
    with freetrain(tmp_path, site), cProfile.Profile() as profile:
        profile.disable()
        train(), train()  # the first call imports modules
        profile.enable()
        train()
        profile.disable()
    calls = {getattr(e.code, 'co_name', e.code): e.callcount for e in profile.getstats()}
    others = 'path>', 'pid>'  # that ask no file system
    files = {k: n for k, n in calls.items() if 'posix.' in str(k) and not str(k).endswith(others)}
    assert calls['_home'] == 1, 'that of the function; modules were looked at'
    assert '<built-in method posix.fsync>' not in files, 'the first fragment waits for the disk'
    assert sum(files.values()) <= 20, files


PROGRAM = """
import sys
from pathlib import Path
from parsl_freetrain import Checkpoints, LocalSite, Reproducible, freetrain_app
from tests.support.training import fit, freetrain

mode, often = Reproducible(shards=4, seed=7), Checkpoints(every_s=0.1)
app = freetrain_app(max_nodes=1, total_epochs=float(sys.argv[2]), mode=mode, checkpoints=often)(fit)
with freetrain(Path(sys.argv[1]), LocalSite(nodes=1)):
    print(app(pause_s=0.01, trainer_name='t').result().path)
"""


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_comes_as_the_wait_begins_ends_it(number: signal.Signals) -> None:
    """It is noted, and does not interrupt the wait."""
    stopping, before = StopSignals(), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    stopping.begin()
    noting = threading.Timer(0.1, _thread.interrupt_main, [number])
    noting.start()
    try:
        with pytest.raises(SystemExit):
            ft.TrainingFuture('t').result()
    finally:
        noting.join()
        stopping.end()
        signal.signal(signal.SIGHUP, before)


def test_a_future_is_settled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads may cancel it at once, and the run may end at this moment."""
    work, future = list[object](), ft.TrainingFuture('t')
    monkeypatch.setattr(f'{ft.TrainingFuture.__module__}.in_thread', lambda do, _: work.append(do))
    for settle in (future._settle_cancelled, future._settle_cancelled):
        settle()
    future._settle_failed(ValueError())
    assert (future.state, len(work)) == ('cancelled', 1)


@pytest.mark.long
@pytest.mark.usefixtures('nodes_share_a_template')
def test_a_program_that_is_ended_by_a_signal_goes_on_when_it_is_started_again(
    tmp_path: Path,
) -> None:
    """To the weights of one that was not; killed ones are in executor/test_replicas.py."""
    words = [sys.executable, '-c', PROGRAM, str(tmp_path)]
    store = PosixCheckpointStore(tmp_path / 'checkpoints' / 't', 't')

    def newest() -> int:
        return 0 if (found := store.newest()) is None else found.samples

    with subprocess.Popen([*words, '1e6']) as program:
        wait_until(newest)
        program.terminate()
        program.terminate()
        assert program.wait(LIMIT_S) == 128 + signal.SIGTERM
    epochs = newest() // 96 + 2
    ended = run_to_end([*words, epochs])
    assert ended.returncode == 0, ended.stderr
    _, alone = in_this_process(fit, total_epochs=epochs)
    assert equal(ft.load_weights(ended.stdout.split()[-1]), alone)
