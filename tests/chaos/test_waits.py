"""Every wait of the table is for somebody that a test stops, and none is longer than it says."""

import contextlib
import socket
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from parsl.executors.high_throughput.executor import HTEXFuture
from torch.utils.data import TensorDataset

import parsl_freetrain as ft
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.executor import stream
from parsl_freetrain.executor.fragment.member_order import ControlEndpoint
from parsl_freetrain.executor.fragment.runner import FragmentRunner
from parsl_freetrain.executor.fragment.trainer_record import TrainerRecord
from parsl_freetrain.executor.parsl_side import ParslSide
from parsl_freetrain.executor.stream import Stream
from parsl_freetrain.journal.append import JournalWriter
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.training.comm.inbox import Inbox
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.spec.messages import Decoder, ToRank
from tests.chaos.waits import waits
from tests.support.parsl_sides import NoParsl
from tests.support.processes import Started, command_line, victims
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
STOPPED_BY = """
the scheduler to answer a command | sites/tracker | a_silent_scheduler_is_asked_again_soon_while_blo
the scheduler to answer at all | executor/endings | a_scheduler_that_does_not_answer_ends_nothing
a block to get its nodes | sites/tracker | whatever_runs_for_parsl_has_an_end
a cancelled job to be accepted as such | executor/block/blocks | jobs_have_a_second_to_end_by_themse
the first node of a block that runs | executor/block/blocks | a_block_whose_nodes_say_nothing_is_giv
a node's worker to answer its first task | chaos/waits | a_worker_that_is_stopped_before_its_first_t
the first step of a fragment | chaos/waits | a_task_that_parsl_never_passes_on_ends_with_a_sentence
a first word of a node whose fragment is ended | executor/fragment/fragment_state | a_node_that_neve
the next step of a fragment | executor/hangs | an_endless_loop_ends_its_fragment_with_a_sentence
a sign of life of a node | executor/hangs | a_node_that_is_stopped_is_lost_in_time_and_the_others_go
a node that others have lost touch with | executor/fragment/fragment_state | node_that_does_not_ans
the result of a node whose ranks have ended | executor/fragment/fragment_state | ranks_that_ended_wi
a rank to end after SIGKILL | executor/fragment/fragment_state | a_rank_that_does_not_end_after_sigk
the other ranks when one has failed | executor/fragment/fragment_state | a_survivor_gets_time_to_fin
a fragment that was asked to stop | chaos/waits | a_fragment_that_does_not_stop_is_killed
ranks that are to run ahead | executor/fragment/standby | why_no_rank_runs_ahead_on_a_free_node_is_l
files beside its ledger | chaos/waits | a_file_system_that_stalls_holds_up_no_training
Parsl's interchange | executor/endings | without_an_interchange_all_futures_fail_and_the
its fork server | training/process/fork_server | a_failed_parent_shows_its_log
the executor to take a message | training/process/liveness | a_rank_of_a_stopped_client_does_not_go
a rank that is stopped | executor/hangs | a_rank_that_dies_or_stops_ends_its_fragment_in_time_and_is
a new run, when the submitting process is gone | training/process/block_lease | a_node_that_nobody_c
the address of rank 0 | chaos/waits | a_rank_that_is_not_told_where_to_meet_ends_with_a_sentence
the acknowledgement of what it has sent | training/process/liveness | a_cut_network_ends_all_ranks_i
another rank in an exchange | training/comm/peer_loss | a_rank_behind_the_next_one_notices_it
all others, which wait as well | executor/hangs | ranks_that_wait_for_each_other_for_ever_are_ended
a file system in trouble | training/faults | trouble_that_lasts_ends_a_trainer_with_its_sen
another run that begins in the same folder | executor/run_lock | a_run_killed_as_it_began_costs
a sign of life of a run on another computer | executor/run_lock | a_run_on_another_computer_lives_as
"""
"""Whom a wait is for, the file of a test that stops it, and how the name of the test begins."""


def test_each_wait_has_a_limit_and_a_test_that_stops_the_partner() -> None:
    rows = [row.split(' | ') for row in STOPPED_BY.strip().splitlines()]
    assert {wait.waits_for for wait in waits()} == {row[0] for row in rows}
    assert all(0 < wait.limit_s <= 3600 and wait.then for wait in waits())
    for _, path, name in rows:
        folder, _, file = path.rpartition('/')
        text = (ROOT / 'tests' / folder / f'test_{file}.py').read_text()
        assert f'\ndef test_{name}' in text, f'{path}: {name}'


def _stop_at_greeting(started: Started, stopped: set[psutil.Process], most: int) -> bool:
    """Stop workers as soon as they are there; the first child serves multiprocessing's locks."""
    for server in victims('worker', started.processes()):
        with contextlib.suppress(psutil.Error):
            if 'block.manager' not in command_line(server.parent() or server):
                continue
            for worker in sorted(server.children(), key=lambda child: child.pid)[1:]:
                if len(stopped) < most and worker not in stopped:
                    worker.suspend()
                    stopped.add(worker)
    return len(stopped) >= most


def test_a_worker_that_is_stopped_before_its_first_task_holds_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, stopped, submit = Started(), set[psutil.Process](), ParslSide.submit

    def after_the_stop(side: ParslSide, context: dict[str, Any], buffer: bytes) -> HTEXFuture:
        if context['task_executor']['f'].endswith('.greet'):
            wait_until(lambda: _stop_at_greeting(started, stopped, 1))
        return submit(side, context, buffer)

    monkeypatch.setattr(ParslSide, 'submit', after_the_stop)
    trainer = ft.freetrain_app(max_nodes=1, total_epochs=2)(fit)
    with freetrain(tmp_path, ft.LocalSite(nodes=1, poll_s=0.2), join_s=10.0) as executor:
        trainer().result(LIMIT_S)
        unusable = [e for _, e in Journal(executor.ledger_path).events(ev.NodeUnusable)]
    assert [e.error for e in unusable if isinstance(e, ev.NodeUnusable)][:1] == [
        'its worker has not answered its first task within 10 s'
    ]


def sleeps(ctx: ft.FragmentContext) -> None:
    import time

    model = torch.nn.Linear(1, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in ctx.loop(TensorDataset(torch.ones(8, 1)), 4):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        time.sleep(1000)


def test_a_fragment_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    with freetrain(tmp_path, ft.LocalSite(nodes=1), stop_s=2.0) as executor:
        future = ft.freetrain_app(max_nodes=1, total_epochs=100)(sleeps)()
        wait_until(lambda: future.progress().nodes == 1 and _began(executor.ledger_path))
        future.cancel()
        wait_until(future.done)
        wait_until(lambda: _errors(executor.ledger_path))
        assert _errors(executor.ledger_path) == ['it did not stop within 2 s']


@pytest.mark.parametrize('raises', [False, True])
def test_a_task_that_parsl_never_passes_on_ends_with_a_sentence(raises: bool) -> None:
    said, ended = list[ev.Event](), ft.Checkpoint('cnn', '', 0, 0)

    def launch(*_: object) -> Future[ft.Checkpoint]:
        if raises:
            raise ft.FreeTrainError('Parsl is shut down')
        return Future()

    spec = ft.freetrain_app(max_nodes=1, total_epochs=1)(fit).spec
    record = TrainerRecord(spec.trainer('c'), spec, '/store', launch, ft.TrainingFuture('c'), ended)
    told: Any = SimpleNamespace(send=lambda *_: None, forget=lambda *_: None, post=said.append)
    told.take, told.flush = said.append, lambda: None
    endpoint = ControlEndpoint([], 0, None, None, '')
    runner = FragmentRunner(
        told, Stream([told]), endpoint, ft.Timeouts(), NoParsl(), {'cnn': record}
    )
    runner.start(ev.StartFragment('cnn', 1, ('n0',), None, 0), 10.0)
    for at in (10.0, 131.0, 132.0):
        runner.look(at)
    assert not runner.running
    errors = [event.error for event in said if isinstance(event, ev.FragmentEnded)]
    assert errors == [
        'it could not be submitted: Parsl is shut down'
        if raises
        else 'it did not start within 120 s; nothing was heard from n0'
    ]


def test_a_file_system_that_stalls_holds_up_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stalls, goes_on, plain = threading.Event(), threading.Event(), JournalWriter._write
    monkeypatch.setattr(stream, 'STALLED_S', 1.0)

    def write(journal: JournalWriter, data: bytes) -> None:
        if stalls.is_set():
            goes_on.wait(LIMIT_S)
        plain(journal, data)

    monkeypatch.setattr(JournalWriter, '_write', write)
    with freetrain(tmp_path, ft.LocalSite(nodes=1, poll_s=0.2)) as executor:
        first = ft.freetrain_app(max_nodes=1, total_epochs=1000)(fit)(trainer_name='first')
        wait_until(lambda: first.progress().samples > 0)
        stalls.set()
        first.cancel()
        assert ft.freetrain_app(max_nodes=1, total_epochs=2)(fit)().result(LIMIT_S).samples
        wait_until(lambda: 'has not answered for 1 s' in caplog.text)
        assert not _errors(executor.ledger_path)
        goes_on.set()
    ended = [event for _, event in Journal(executor.ledger_path).events(ev.FragmentEnded)]
    assert len(ended) >= 2 and Journal(executor.ledger_path).history().runs[0].ended_at


def _began(ledger: str | Path) -> bool:
    return any(f.started_at is not None for f in Journal(ledger).history().fragments)


def _errors(ledger: str | Path) -> list[str]:
    return [f.ended.error for f in Journal(ledger).history().fragments if f.ended is not None]


def test_a_rank_that_is_not_told_where_to_meet_ends_with_a_sentence() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.closing(theirs):
        inbox = Inbox(Channel(ours, Decoder(ToRank, 'the node agent')))
        with pytest.raises(
            ft.FreeTrainError, match='has not heard within 0.1 s where to meet rank 0'
        ):
            inbox.wait_for_rendezvous(0.1)
        ours.close()
