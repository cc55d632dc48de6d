"""A scheduler that does not answer, an interchange that has ended, a budget that is spent."""

import re
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
from parsl.app.app import python_app
from parsl.jobs.states import JobState, JobStatus

import parsl_freetrain as ft
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.journal.read import Journal
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S, wait_until


def test_a_scheduler_that_does_not_answer_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is silent, or knows nothing of the job, the block counts as running, to the end."""
    silent_until = [0.0]
    asked = threading.Event()
    answer = ft.BackfillProvider.status

    def status(self: ft.BackfillProvider, job_ids: list[str]) -> list[JobStatus]:
        if time.monotonic() < silent_until[0]:
            asked.set()
            return [JobStatus(JobState.UNKNOWN) for _ in job_ids]
        return answer(self, job_ids)

    monkeypatch.setattr(ft.BackfillProvider, 'status', status)
    with freetrain(tmp_path, ft.LocalSite(nodes=1, poll_s=0.2)) as executor:
        future = ft.freetrain_app(max_nodes=1, total_epochs=10)(fit)(pause_s=0.03)
        wait_until(lambda: future.progress().samples)
        silent_until[0] = time.monotonic() + 3.0
        assert asked.wait(LIMIT_S)
        assert future.result(LIMIT_S).samples == 960
        assert future.progress().fragments == 1
        assert len(executor.blocks_to_job_id) == 1


def test_without_an_interchange_all_futures_fail_and_the_workflow_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @python_app
    def ordinary(mark: str) -> None:
        import pathlib
        import time

        pathlib.Path(mark).touch()
        time.sleep(10_000)

    mark = tmp_path / 'runs'
    # A site that is asked so seldom does not delay the news.
    with freetrain(
        tmp_path, ft.LocalSite(nodes=1, poll_s=300.0), stop_grace_s=1.0, max_workers_per_node=1
    ) as executor:
        future = ft.freetrain_app(max_nodes=1, total_epochs=1000)(fit)(pause_s=0.1)
        running = ordinary(str(mark))
        wait_until(lambda: future.progress().samples)
        wait_until(mark.exists)
        assert executor.interchange_proc is not None
        interchange = psutil.Process(executor.interchange_proc.pid)
        subprocess.run(['kill', str(interchange.pid)], check=True)  # as to all of a job or terminal
        with pytest.raises(psutil.TimeoutExpired):
            interchange.wait(0.5)

        def end_behind_the_look(*_: object) -> bool:
            assert executor.interchange_proc is not None
            executor.interchange_proc.kill()
            return executor.interchange_proc.wait(LIMIT_S) != 0

        monkeypatch.setattr(executor.outgoing_q.zmq_socket, 'poll', end_behind_the_look)
        later = ordinary(str(mark))  # nobody takes it any more, and Parsl's send would wait
        said = r'interchange has ended.*interchange\.log'
        for training in (future, ft.freetrain_app(total_epochs=1)(fit)(trainer_name='later')):
            with pytest.raises(ft.TrainerFailed, match=said):
                training.result(LIMIT_S)
        for app_future in (running, later, ordinary(str(mark))):
            assert re.search(said, str(app_future.exception(LIMIT_S)))


def test_a_spent_budget_stops_a_trainer_and_holds_in_the_next_run(tmp_path: Path) -> None:
    budgets = {'trainer fit': 3.0}
    trainer = ft.freetrain_app(max_nodes=1, total_epochs=1000)(fit)
    with freetrain(tmp_path, ft.LocalSite(nodes=1, poll_s=0.2), budgets=budgets) as executor:
        future = trainer(pause_s=0.1)
        with pytest.raises(ft.TrainerFailed, match='the budget of trainer fit, 3 node-seconds, is'):
            future.result(LIMIT_S)
    with (
        freetrain(tmp_path, ft.LocalSite(nodes=1, poll_s=0.2), budgets=budgets) as executor,
        pytest.raises(ft.TrainerFailed, match='budget of trainer fit'),
    ):
        trainer(pause_s=0.1).result(LIMIT_S)
    with (
        pytest.raises(BadInput, match='budget of all trainers is 3 node-seconds, and earlier runs'),
        freetrain(tmp_path, ft.LocalSite(nodes=1, poll_s=0.2), budgets={'total': 3.0}),
    ):
        pass
    with Journal(executor.ledger_path) as ledger:
        assert len({fragment.run for fragment in ledger.history().fragments}) == 1
