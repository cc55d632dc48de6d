"""Events of one instant lead to one decision; after any failure no future waits for ever."""

import threading
import time
from collections import Counter
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest
from parsl.executors import HighThroughputExecutor

from parsl_freetrain import Checkpoint, LocalSite, Scaling, TrainerFailed, freetrain_app
from parsl_freetrain.core.allocation.problem import Answer, Problem
from parsl_freetrain.core.allocation.solvers.equal_share import EqualShareAllocator
from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.executor.block.blocks import GreetingReturned
from parsl_freetrain.executor.commands import gather
from parsl_freetrain.executor.fragment.control_channel import ControlServer
from parsl_freetrain.journal.read import Journal
from tests.support.processes import descendants
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S, wait_until


def test_nodes_that_come_at_once_get_one_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes' greetings are held until both have come, and passed on 10 ms apart."""
    post, held = ControlServer.post, list[GreetingReturned]()

    def hold(self: ControlServer, item: Any) -> None:
        if not isinstance(item, GreetingReturned):
            post(self, item)
            return
        held.append(item)
        if len(held) == 2:
            for greeting in held:
                post(self, greeting)
                time.sleep(0.01)

    monkeypatch.setattr(ControlServer, 'post', hold)
    # On a busy machine this thread may be held up for longer than the loop waits.
    monkeypatch.setitem(gather.__globals__, 'GATHER_S', LIMIT_S)
    monkeypatch.setitem(gather.__globals__, 'LONGEST_GATHER_S', LIMIT_S)
    with freetrain(tmp_path, LocalSite(nodes=2, poll_s=0.2)) as executor:
        trainer = freetrain_app(
            max_nodes=2, total_epochs=2, scaling=Scaling(rate={1: 1.0, 2: 2.0})
        )(fit)
        assert trainer().result(LIMIT_S).samples == 192
    with Journal(executor.ledger_path) as ledger:
        history = ledger.history()
        joined = [
            [len(event.nodes) for event in batch.events if isinstance(event, ev.NodesJoined)]
            for batch in ledger.batches(history.runs[0])
        ]
    assert [nodes for nodes in joined if nodes] == [[1, 1]]
    assert [len(fragment.nodes) for fragment in history.fragments] == [2]


def test_without_usable_nodes_trainers_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the nodes' logs is no folder: every node's first task fails."""
    start = LocalSite.start

    def spoil(self: LocalSite) -> None:
        logs = tmp_path / 'checkpoints' / 'logs'
        logs.rename(logs.with_name('logs of the template'))
        logs.touch()
        start(self)

    monkeypatch.setattr(LocalSite, 'start', spoil)
    with freetrain(tmp_path, LocalSite(nodes=3, poll_s=0.2), stop_grace_s=1.0) as executor:
        future = freetrain_app(max_nodes=3, total_epochs=2)(fit)()
        with pytest.raises(TrainerFailed, match='the first 3 nodes could not be used'):
            future.result(LIMIT_S)
        assert future.state == 'failed' and not future.cancelled()
    with Journal(executor.ledger_path) as ledger:
        (trainer,) = ledger.history().trainings
    assert trainer.state == 'failed' and 'the first 3 nodes' in trainer.why


def test_the_end_of_the_loop_fails_all_futures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, broken = Controller.handle_all, threading.Event()

    def call(*args: Any) -> Any:
        if broken.is_set():
            raise KeyboardInterrupt('a test')
        return works(*args)

    monkeypatch.setattr(Controller, 'handle_all', call)
    with freetrain(tmp_path, LocalSite(nodes=1, poll_s=0.2), stop_grace_s=1.0) as executor:
        app = freetrain_app(max_nodes=1, total_epochs=1000)(fit)
        running, waiting = app(pause_s=0.03), app(pause_s=0.03)
        wait_until(lambda: running.progress().samples, 'it does not train')
        broken.set()
        for future in (running, waiting):
            with pytest.raises(TrainerFailed, match='event loop.*ended with KeyboardInterrupt'):
                future.result(LIMIT_S)
        with pytest.raises(TrainerFailed, match='event loop.*ended with KeyboardInterrupt'):
            app().result(LIMIT_S)
        task: Future[Checkpoint] = running.checkpoints[-1]
        assert task.result(LIMIT_S).trainer == 'fit'  # what the fragment has saved, if anything
        wait_until(lambda: not executor.connected_managers(), 'its nodes are not given back')
    with Journal(executor.ledger_path) as ledger:
        history = ledger.history()
    assert history.runs[0].how == 'error' and history.runs[0].ended_at is not None
    assert {trainer.state for trainer in history.trainings} >= {'interrupted'}


def test_a_failed_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: HighThroughputExecutor) -> None:
        raise RuntimeError('no port is free')

    monkeypatch.setattr(HighThroughputExecutor, 'start', fail)
    before = descendants()
    with (
        pytest.raises(RuntimeError, match='no port is free'),
        freetrain(tmp_path, LocalSite(nodes=1)),
    ):
        pass
    with Journal(tmp_path / 'checkpoints' / 'ledger.journal') as ledger:
        (run,) = ledger.history().runs
    assert (run.how, run.ended_at is not None) == ('not started', True)
    wait_until(lambda: before >= descendants(), 'a process was left')


class Moody(EqualShareAllocator):
    """Fails at first."""

    asked = 0

    def allocate(self, problem: Problem) -> Answer:
        self.asked += 1
        if self.asked < 4:
            raise RuntimeError('not now')
        return super().allocate(problem)


def test_an_allocator_that_fails_is_asked_again_and_a_clock_set_back_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are asked about as before, and what waits for a time does not wait an hour longer."""
    site, now, back_s = LocalSite(nodes=1, poll_s=0.2), time.time, 0.0
    statuses, asked = site.statuses, Counter[float]()

    def counted(job_ids: Any) -> Any:
        asked[back_s] += 1
        return statuses(job_ids)

    def clock() -> float:
        return now() - back_s

    monkeypatch.setattr(site, 'statuses', counted)
    monkeypatch.setattr(time, 'time', clock)  # Parsl's own, too
    with freetrain(tmp_path, site, solver=Moody()):
        future = freetrain_app(max_nodes=1, total_epochs=10**6)(fit)(pause_s=0.1)
        wait_until(lambda: future.progress().samples > 0)
        back_s = 3600.0
        wait_until(lambda: asked[back_s] > 5)
        future.cancel()
        with pytest.raises(CancelledError):
            future.result(LIMIT_S)
