"""Trainers on the local site, real processes. Kills and rescales are in tests/test_demo.py."""

import io
import logging
import os
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from parsl.app.app import python_app

import parsl_freetrain as ft
from parsl_freetrain.integrations.metric_logger import LoggedTraining, MetricLogger, OpenLog
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.summary import summary
from parsl_freetrain.sites.idle_schedule import Schedule
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S, wait_until

SCALING = {1: 1.0, 2: 1.9, 4: 3.5}


def site(nodes: int, schedule: Schedule | None = None, **settings: object) -> ft.LocalSite:
    return ft.LocalSite(nodes=nodes, schedule=schedule, poll_s=0.2, **settings)  # type: ignore[arg-type]


def test_two_trainers_finish_and_their_checkpoints_feed_an_ordinary_app(tmp_path: Path) -> None:
    trainer = ft.freetrain_app(max_nodes=2, total_epochs=2, scaling=ft.Scaling(rate=SCALING))(fit)

    @python_app
    def samples(one: ft.Checkpoint, other: ft.Checkpoint) -> int:
        return one.samples + other.samples

    slowness = [0.0]

    @ft.freetrain_app(max_nodes=1, total_epochs=1)
    def closure(ctx, bonus: float = 1.0):  # type: ignore[no-untyped-def]
        fit(ctx, pause_s=slowness[0])
        ctx.report(bonus=bonus)

    folder = tmp_path / 'the $HOME of "me" & co'
    with freetrain(folder, site(2), max_workers_per_node=1) as executor:
        first, second = trainer(), trainer(trainer_name='other')
        assert samples(first, second).result(LIMIT_S) == 2 * 192
        assert (first.name, first.state, first.progress().total_samples) == ('fit', 'finished', 192)
        assert first.result().metrics.keys() == {'loss'}
        assert ft.same_weights(first.result(), second.result())
        assert all(f.result().samples <= 192 for f in first.checkpoints)
        assert closure(bonus=2).result(LIMIT_S).metrics['bonus'] == 2
    found = summary(Journal(executor.ledger_path).history())
    assert (
        found['trainers']['fit']['samples'] == found['trainers']['fit']['samples_expected'] == 192
    )
    seconds = found['node_s']
    assert seconds['trained'] > 0
    assert seconds['offered'] == pytest.approx(sum(v for k, v in seconds.items() if k != 'offered'))


class Held(Exception):
    """Cannot be loaded in one process before a file is there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return held, self.args


def held(gate: str, process: int) -> ValueError:
    while os.getpid() == process and not Path(gate).exists():
        time.sleep(0.05)
    return ValueError('held')


def raises(ctx: ft.FragmentContext, gate: str, process: int) -> None:
    raise Held(gate, process)


_LOOPS = ('FreeTrain-EventLoop', 'FreeTrain-Output', 'FreeTrain-MetricExport')


class Stuck(io.StringIO, logging.Handler, MetricLogger):
    """A terminal, a handler and a logger that do not return when our threads call."""

    def __init__(self, over: threading.Event) -> None:
        logging.Handler.__init__(self)
        super().__init__()
        self.over, self.reached = over, set[str]()

    def createLock(self) -> None:  # or it would hold up all of Parsl's threads
        self.lock = None

    def isatty(self) -> bool:
        return True

    def _stick(self, what: str) -> None:
        if threading.current_thread().name in _LOOPS:
            self.reached.add(what)
            self.over.wait(LIMIT_S)

    def write(self, text: str) -> int:
        self._stick('terminal')
        return len(text)

    def emit(self, record: logging.LogRecord) -> None:
        self._stick('handler')

    def open(self, training: LoggedTraining) -> OpenLog:
        self._stick('metrics')
        raise OSError


@pytest.mark.parametrize('what', ['terminal', 'handler'])
def test_what_users_do_is_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Callbacks of futures, exceptions that are loaded, loggers and the terminal: each may take for
    ever, or wait for the next training. Other trainers, and other people's jobs, wait for the loop.
    """
    over, found, gate = threading.Event(), Queue[ft.Checkpoint](), tmp_path / 'gate'
    stuck = Stuck(over)
    if what == 'terminal':
        monkeypatch.setattr('sys.stderr', stuck)
    monkeypatch.setattr('parsl_freetrain.executor.ledger_exports.LAST_S', 0.1)
    train = ft.freetrain_app(max_nodes=1, total_epochs=1)(fit)
    try:
        with freetrain(
            tmp_path, site(1), recording=ft.Recording(loggers=[stuck]), min_rescale_s=0.0
        ):
            if what == 'handler':
                logging.getLogger('parsl').addHandler(stuck)

            def then(_: object) -> None:
                found.put(train().result(LIMIT_S))
                over.wait(LIMIT_S)

            first = train(trainer_name='first', pause_s=0.05)
            wait_until(lambda: bool(first.checkpoints), 'no fragment')
            for future in (first, first.checkpoints[0]):
                future.add_done_callback(then)
            assert {found.get(timeout=LIMIT_S).trainer for _ in range(2)} == {'fit', 'fit-2'}
            bad = ft.freetrain_app(max_nodes=1, total_epochs=1)(raises)(str(gate), os.getpid())
            wait_until(lambda: bad.state == 'failed', 'it did not fail')
            assert not bad.done()
            train(trainer_name='last').result(LIMIT_S)
            gate.touch()
            with pytest.raises(ValueError, match='held'):
                bad.result(LIMIT_S)
        assert stuck.reached >= {what, 'metrics'}
    finally:
        over.set()
        logging.getLogger('parsl').removeHandler(stuck)


def leave(ctx: ft.FragmentContext) -> None:
    """Leave the process as scripts do."""
    sys.exit(f'enough after {ctx.samples}')


def test_an_exception_ends_its_trainer_alone(tmp_path: Path) -> None:
    """At once: Parsl's retries are for its own tasks; ours is Policy(retries=). So does an exit."""
    trainer = ft.freetrain_app(max_nodes=1, total_epochs=3, scaling=ft.Scaling(rate=SCALING))(fit)
    with freetrain(tmp_path, site(2), parsl_retries=2):
        bad, good = trainer(fail_at=40, trainer_name='bad'), trainer(trainer_name='good')
        with pytest.raises(ValueError, match='no more after 40 samples') as caught:
            bad.result(LIMIT_S)
        left = ft.freetrain_app(max_nodes=1, total_epochs=2)(leave)()
        said = r"called sys\.exit\('enough after 0'\); let it return instead"
        with pytest.raises(ft.FreeTrainError, match=said):
            left.result(LIMIT_S)
        assert good.result(LIMIT_S).samples == 288
    [note] = caught.value.__notes__
    assert "fragment 1 of trainer 'bad'" in note
    log = Path(note.partition('output is in ')[2].partition(';')[0].partition('.log')[0] + '.log')
    assert 'no more after 40 samples' in log.read_text()
    assert 'in fit' in note
    assert (bad.state, bad.progress().fragments) == ('failed', 1)


def test_cancel_and_leaving_stop_with_a_checkpoint_and_the_same_call_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = ft.freetrain_app(
        max_nodes=1,
        total_epochs=20,
        scaling=ft.Scaling(rate=SCALING),
        checkpoints=ft.Checkpoints(every_s=0.2),
    )(fit)
    with freetrain(tmp_path, site(1)):
        future = trainer(pause_s=0.05)
        begun = threading.Event()
        while future.checkpoint is None and not future.done():
            begun.wait(0.05)
        assert future.cancel()
        with pytest.raises(CancelledError):
            future.result(LIMIT_S)
        assert future.state == 'cancelled'
        assert not future.cancel()
        assert future.checkpoint is not None
        assert 0 < future.checkpoint.samples < 20 * 96
        left = trainer.with_options(total_epochs=1000)(pause_s=0.05, trainer_name='left')
        wait_until(lambda: left.progress().samples > 0)
    with pytest.raises(ft.TrainerFailed, match=r'interrupted at .* the same call continues'):
        left.result(0)
    assert left.checkpoint is not None and left.checkpoint.samples > 0
    with freetrain(tmp_path, site(1), resume='require'):
        resumed = trainer()
        assert resumed.result(LIMIT_S).samples == 20 * 96
        assert resumed.progress().fragments >= 1
        undisturbed = ft.freetrain_app(
            max_nodes=1, total_epochs=20, checkpoints=ft.Checkpoints(resume='never')
        )(fit)
        alone = undisturbed(trainer_name='alone')
        assert ft.same_weights(resumed.result(), alone.result(LIMIT_S))
    assert 'by an earlier run' not in caplog.text
    with freetrain(tmp_path, site(1)):
        assert trainer().result(LIMIT_S).path == resumed.result().path
    assert (
        "Trainer 'fit' was trained to its end by an earlier run, and its result is" in caplog.text
    )
