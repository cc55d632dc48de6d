"""Several runs of one user on one computer ask a scheduler as often as one."""

import fcntl
import os
from pathlib import Path
from typing import Any, cast

import pytest

from parsl_freetrain.sites.batch.options import BatchOptions
from parsl_freetrain.sites.batch.queue_watch import QueueWatch
from parsl_freetrain.sites.batch.records import BatchJob, JobState
from parsl_freetrain.sites.batch.scheduler_commands import Commands
from parsl_freetrain.sites.batch.shared_answers import shared


class Counted:
    """A scheduler whose commands write down that they were asked."""

    label = 'Counted'
    nodes_every_s = 1e9

    def __init__(self, log: Path, *beside: str) -> None:
        self._log, self._client, self._beside = log, Commands('Slurm', 30.0), beside

    def _ask(self, what: str) -> str:
        return self._client.ask(('sh', '-c', 'echo $1 >> $0; wc -l < $0', str(self._log), what))

    def jobs(self) -> tuple[BatchJob, ...]:
        for what in self._beside:
            self._ask(what)
        return (BatchJob(self._ask('jobs').strip(), JobState.RUNNING, 'batch', 1),)

    def nodes(self) -> tuple[()]:
        self._ask('nodes')
        return ()

    def reservations(self) -> tuple[()]:
        self._ask('reservations')
        return ()


@pytest.fixture
def now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.setenv('XDG_RUNTIME_DIR', str(tmp_path))
    return [1000.0]


def test_three_runs_ask_at_most_twice_in_an_interval(tmp_path: Path, now: list[float]) -> None:
    log = tmp_path / 'log'
    options = BatchOptions()
    watches = [QueueWatch(cast(Any, Counted(log)), options, lambda: now[0]) for _ in range(3)]
    for second in range(240):
        now[0] += 1.0
        for place, watch in enumerate(watches):
            if second % 12 == 5 * place:
                watch.look(with_nodes=True)
                # What another run was told is at most half an interval old, and known to be.
                assert now[0] - watch.last.jobs_at <= options.poll_s / 2
    asked = log.read_text().split()
    assert 20 <= asked.count('jobs') <= 3 + 2 * 20
    own = watches[0]
    own.look(with_nodes=True, newer_than=now[0])
    assert own.last.jobs[0].job_id == str(len(asked) + 1), 'what it did itself must be in it'


def test_what_is_asked_beside_makes_questions_fewer(tmp_path: Path, now: list[float]) -> None:
    for name, *beside in (['alone'], ['both', 'gpus']):
        counted = Counted(log := tmp_path / name, *beside)
        watch = QueueWatch(cast(Any, counted), BatchOptions(), lambda: now[0])
        for _ in range(20):
            watch.look(with_nodes=False, wait_s=30.0)
            now[0] += 12.0
        assert len(log.read_text().split()) == 20


@pytest.mark.parametrize(
    'why', ['', 'old', 'other cluster', 'open', 'cut off', 'foreign lock', 'no folder']
)
def test_an_answer_of_another_run_is_taken_only_where_it_may_be(
    tmp_path: Path, now: list[float], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    scheduler = Counted(tmp_path / 'log')
    if why == 'no folder':
        monkeypatch.setenv('XDG_RUNTIME_DIR', str(tmp_path / 'none'))

    def ask(not_before: float) -> tuple[str, float]:
        with shared(lambda: now[0], not_before) as told:
            return scheduler.jobs()[0].job_id, told.asked_at

    assert ask(0.0) == ('1', 1000.0)
    now[0] = 1005.0
    for path in tmp_path.glob('freetrain-*'):
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o644 if why == 'open' else 0o600)
        os.truncate(path, path.stat().st_size - (why == 'cut off'))
    if why == 'other cluster':
        monkeypatch.setenv('SLURM_CONF', '/other')
    with next(tmp_path.glob('freetrain-*'), tmp_path / 'log').open('rb') as file:
        if why == 'foreign lock':  # of a run that was stopped
            fcntl.flock(file, fcntl.LOCK_EX)
        found = ask(1000.0 if why == 'old' else 999.0)
    assert found == (('2', 1005.0) if why else ('1', 1000.0))
    assert scheduler.jobs()[0].job_id == ('3' if why else '2'), 'a question that is not shared'
