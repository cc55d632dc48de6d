"""Trainers on the local site, with real processes and real ranks. Kills and rescales are in
tests/test_demo.py.
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from pathlib import Path
from queue import Queue

import parsl
import pytest
from parsl.app.app import python_app

from parsl_freetrain import (
    BadInput,
    Checkpoint,
    Checkpoints,
    LocalSite,
    Reproducible,
    Scaling,
    TrainerFailed,
    freetrain_app,
    same_weights,
)
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.summary import summary
from parsl_freetrain.sites.idle_schedule import Schedule
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S

SCALING = {1: 1.0, 2: 1.9, 4: 3.5}


def site(nodes: int, schedule: Schedule | None = None, **settings: object) -> LocalSite:
    return LocalSite(nodes=nodes, schedule=schedule, poll_s=0.2, **settings)  # type: ignore[arg-type]


def test_two_trainers_finish_and_their_checkpoints_feed_an_ordinary_app(tmp_path: Path) -> None:
    trainer = freetrain_app(max_nodes=2, total_epochs=2, scaling=Scaling(rate=SCALING))(fit)

    @python_app
    def samples(one: Checkpoint, other: Checkpoint) -> int:
        return one.samples + other.samples

    folder = tmp_path / 'the $HOME of "me" & co'
    with freetrain(folder, site(2), max_workers_per_node=1) as executor:
        first, second = trainer(), trainer(trainer_name='other')
        assert samples(first, second).result(LIMIT_S) == 2 * 192
        assert (first.name, first.state, first.progress().total_samples) == ('fit', 'finished', 192)
        assert first.result().metrics.keys() == {'loss'}
        assert same_weights(first.result(), second.result())
        assert all(f.result().samples <= 192 for f in first.checkpoints)
    found = summary(Journal(executor.ledger_path).history())
    assert (
        found['trainers']['fit']['samples'] == found['trainers']['fit']['samples_expected'] == 192
    )
    seconds = found['node_s']
    assert seconds['trained'] > 0
    assert seconds['offered'] == pytest.approx(sum(v for k, v in seconds.items() if k != 'offered'))


def test_a_callback_may_take_for_ever_and_wait_for_the_next_training(tmp_path: Path) -> None:
    """It does not run on the event loop, which other trainers and other people's jobs wait for."""
    over, found = threading.Event(), Queue[Checkpoint]()
    train = freetrain_app(max_nodes=1, total_epochs=1)(fit)
    with freetrain(tmp_path, LocalSite(nodes=1, poll_s=0.2)):

        def then(_: object) -> None:
            found.put(train(trainer_name='next').result(LIMIT_S))
            over.wait(LIMIT_S)

        first = train(trainer_name='first')
        first.add_done_callback(then)
        assert found.get(timeout=LIMIT_S).trainer == 'next'
        train(trainer_name='last').result(LIMIT_S)
        over.set()


def test_an_exception_ends_its_trainer_alone(tmp_path: Path) -> None:
    trainer = freetrain_app(max_nodes=1, total_epochs=3, scaling=Scaling(rate=SCALING))(fit)
    with freetrain(tmp_path, site(2)):
        bad, good = trainer(fail_at=40, trainer_name='bad'), trainer(trainer_name='good')
        with pytest.raises(ValueError, match='no more after 40 samples') as caught:
            bad.result(LIMIT_S)
        assert good.result(LIMIT_S).samples == 288
    [note] = caught.value.__notes__
    assert "fragment 1 of trainer 'bad'" in note
    log = Path(
        note.partition('its output is in ')[2].partition(';')[0].partition('.log')[0] + '.log'
    )
    assert 'no more after 40 samples' in log.read_text()
    assert 'in fit' in note
    assert bad.state == 'failed'


def test_errors_cost_retries_and_then_the_error_comes_out(tmp_path: Path) -> None:
    trainer = freetrain_app(
        max_nodes=1,
        total_epochs=3,
        scaling=Scaling(rate=SCALING),
        checkpoints=Checkpoints(every_s=0.01),
    )(fit)
    with freetrain(tmp_path, site(1), parsl_retries=2) as executor:
        executor  # noqa: B018
        future = trainer(fail_at=40)
        with pytest.raises(ValueError, match='no more'):
            future.result(LIMIT_S)
        assert (
            future.progress().fragments == 1
        )  # Parsl's retries are for its own tasks; ours is Policy(retries=)


def test_cancel_stops_with_a_checkpoint_and_the_same_call_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = freetrain_app(
        max_nodes=1,
        total_epochs=20,
        scaling=Scaling(rate=SCALING),
        checkpoints=Checkpoints(every_s=0.2),
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
    with freetrain(tmp_path, site(1), resume='require'):
        resumed = trainer()
        assert resumed.result(LIMIT_S).samples == 20 * 96
        assert resumed.progress().fragments >= 1
        undisturbed = freetrain_app(
            max_nodes=1, total_epochs=20, checkpoints=Checkpoints(resume='never')
        )(fit)
        alone = undisturbed(trainer_name='alone')
        assert same_weights(resumed.result(), alone.result(LIMIT_S))
    assert 'by an earlier run' not in caplog.text
    with freetrain(tmp_path, site(1)):
        assert trainer().result(LIMIT_S).path == resumed.result().path
    assert (
        "Trainer 'fit' was trained to its end by an earlier run, and its result is" in caplog.text
    )


def test_leaving_the_workflow_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    trainer = freetrain_app(
        max_nodes=1,
        total_epochs=1000,
        scaling=Scaling(rate=SCALING),
        checkpoints=Checkpoints(every_s=100),
    )(fit)
    with freetrain(tmp_path, site(1)):
        future = trainer(pause_s=0.05)
        while future.progress().samples == 0:
            threading.Event().wait(0.05)
    with pytest.raises(TrainerFailed, match=r'interrupted at .* the same call continues'):
        future.result(0)
    assert future.checkpoint is not None
    assert future.checkpoint.samples > 0


def test_arguments_that_are_futures_are_waited_for(tmp_path: Path) -> None:
    trainer = freetrain_app(max_nodes=1, total_epochs=1, scaling=Scaling(rate=SCALING))(fit)

    @python_app
    def pause() -> float:
        return 0.0

    @python_app
    def broken() -> float:
        raise KeyError('no pause')

    with freetrain(tmp_path, site(1), max_workers_per_node=1):
        good, bad = trainer(pause_s=pause()), trainer(pause_s=broken(), trainer_name='bad')
        assert good.result(LIMIT_S).samples == 96
        with pytest.raises(TrainerFailed, match=r'one of its arguments failed.*no pause'):
            bad.result(LIMIT_S)


def test_closures_and_defaults_travel(tmp_path: Path) -> None:
    slowness = [0.0]

    @freetrain_app(max_nodes=1, total_epochs=1)
    def closure(ctx, bonus: float = 1.0):  # type: ignore[no-untyped-def]
        fit(ctx, pause_s=slowness[0])
        ctx.report(bonus=bonus)

    with freetrain(tmp_path, site(1)):
        assert closure(bonus=2).result(LIMIT_S).metrics['bonus'] == 2


def test_a_checkpoint_folder_of_another_trainer_is_refused(tmp_path: Path) -> None:
    with freetrain(tmp_path, site(1)):
        freetrain_app(max_nodes=1, total_epochs=1)(fit)(trainer_name='x').result(LIMIT_S)
    with freetrain(tmp_path, site(1)), pytest.raises(BadInput, match='another'):
        freetrain_app(max_nodes=1, total_epochs=1, mode=Reproducible(seed=9))(fit)(trainer_name='x')
    parsl.clear()
