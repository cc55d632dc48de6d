"""Blocks on a machine with PBS: what they fit, and all the ways in which they end."""

from __future__ import annotations

import stat
import subprocess
import time
from collections.abc import Callable

import pytest
from parsl.jobs.states import JobState

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.sites.batch.commands import SchedulerSilent
from parsl_freetrain.sites.pbspro import PbsSite
from parsl_freetrain.sites.pbspro.scheduler import Pbs
from tests.sites.batch_blocks import QUICK, Blocks
from tests.support.batch_tests import Rehearsal

Make = Callable[..., Blocks]


def running(pbs: Rehearsal, mine: Blocks, nodes: int = 1, **more: object) -> str:
    job = mine.open(nodes, **more)  # type: ignore[arg-type]
    pbs.wait(lambda: mine.status(job).state is JobState.RUNNING)
    return job


def test_a_block_fits_between_the_jobs_of_others(pbs: Rehearsal, blocks: Make) -> None:
    """Three nodes are free until a wide job's turn; a block there does not move that."""
    pbs.others(1, walltime_s=300)
    wide = pbs.others(4, walltime_s=300)
    planned = pbs.job(wide)['planned']['start']
    mine = blocks()
    [hole] = mine.holes()
    assert (hole.nodes, hole.names) == (3, ('x0002', 'x0003', 'x0004'))
    assert hole.until_s == int(planned) - 2  # qstat writes whole seconds
    job = mine.open(hole.nodes, hole.until_s - time.time())
    pbs.wait(lambda: mine.status(job).state is JobState.RUNNING)
    end = mine.provider.end_of(job)
    assert end is not None
    assert end <= hole.until_s
    pbs.wait(lambda: mine.site.holes() == ())
    assert pbs.job(wide)['planned']['start'] == planned


def test_the_scheduler_shrinks_a_block_and_the_block_asks_how_long_it_has(
    pbs: Rehearsal, blocks: Make
) -> None:
    pbs.reserve(['x0001', 'x0002', 'x0003', 'x0004'], time.time() + 15, time.time() + 600)
    mine = blocks(shrink=0.1)
    job = mine.open(1, 40.0)
    pbs.wait(lambda: mine.status(job).state is JobState.RUNNING)
    assert pbs.job(job)['walltime_s'] < 16
    pbs.wait(lambda: mine.status(job).terminal)
    assert mine.status(job).state is JobState.COMPLETED  # it ended itself, and was not killed
    assert pbs.job(job)['how'] == ''


def test_a_reservation_ends_a_hole(pbs: Rehearsal, blocks: Make) -> None:
    start = int(time.time()) + 500
    pbs.reserve(['x0003'], start, start + 100)
    mine = blocks()
    assert [(hole.nodes, hole.until_s) for hole in mine.holes()] == [(3, None), (1, start - 2)]


def test_every_node_runs_the_command_in_private_files(pbs: Rehearsal, blocks: Make) -> None:
    mine = blocks(gpus_per_node=2, ncpus=8)
    job = mine.open(2, command='echo "$FREETRAIN_NODE says $GREETING"')
    pbs.wait(lambda: mine.status(job).terminal)
    assert mine.status(job).state is JobState.COMPLETED
    assert sorted(mine.output().splitlines()) == ["x0001 says it's 2", "x0002 says it's 2"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in mine.folder.iterdir())


def test_a_command_that_fails_fails_its_block_with_the_place_of_its_output(
    pbs: Rehearsal, blocks: Make
) -> None:
    mine = blocks()
    job = mine.open(1, command='exit 3')
    pbs.wait(lambda: mine.status(job).terminal)
    assert mine.status(job).state is JobState.FAILED
    assert str(mine.folder) in str(mine.status(job).message)


def test_a_block_at_its_limit_is_not_a_failure(pbs: Rehearsal, blocks: Make) -> None:
    mine = blocks(ending_s=0.0)
    job = running(pbs, mine, walltime_s=60.0)
    pbs.move_clock(100)
    pbs.wait(lambda: mine.status(job).terminal)
    assert mine.status(job).state is JobState.TIMEOUT
    assert 'time limit' in str(mine.status(job).message)


def test_a_block_that_does_not_start_is_withdrawn(pbs: Rehearsal, blocks: Make) -> None:
    mine = blocks(withdraw_s=1.0)
    pbs.others(4)
    job = mine.open(1, None)
    assert mine.status(job).state is JobState.PENDING
    pbs.wait(lambda: mine.status(job).terminal)
    assert 'withdrawn' in str(mine.status(job).message)
    assert pbs.job(job)['how'] == 'deleted'


def test_a_block_that_starts_after_its_hole_ends_at_once(pbs: Rehearsal, blocks: Make) -> None:
    mine = blocks(shrink=1.0, start_s=0.0)
    first = pbs.others(4, walltime_s=600)
    job = mine.open(1, 3.0, command='echo trained')
    time.sleep(3.0)
    pbs.finish(first)  # the scheduler is free to start it now
    pbs.wait(lambda: mine.status(job).terminal)
    assert 'trained' not in mine.output()


@pytest.mark.parametrize('requeue', [False, True])
def test_a_preemption_is_told_and_ends_or_requeues_the_block(
    pbs: Rehearsal, blocks: Make, requeue: bool
) -> None:
    mine = blocks('preemptable', mode='preemptible', requeue=requeue)
    job = running(
        pbs,
        mine,
        4,
        walltime_s=None,
        command='trap "echo told; sleep 1; exit 143" TERM; echo ready; while true; do sleep 0.1; '
        'done',
    )
    pbs.wait(lambda: mine.output().count('ready') == 4)
    other = pbs.others(4, seconds=2)
    if requeue:
        pbs.wait(lambda: mine.status(job).state is JobState.PENDING)
        assert 'waits in the queue again' in str(mine.status(job).message)
        assert mine.provider.end_of(job) is None
        pbs.wait(lambda: mine.status(job).state is JobState.RUNNING)  # its turn comes
    else:
        pbs.wait(lambda: mine.status(job).terminal)
        assert mine.status(job).state is JobState.TIMEOUT
        assert 'preempted' in str(mine.status(job).message)
    assert mine.output().count('told') >= 4
    pbs.wait(lambda: pbs.job(other)['state'] == 'over')


def test_somebody_else_deletes_a_block(pbs: Rehearsal, blocks: Make) -> None:
    mine = blocks()
    job = running(pbs, mine)
    subprocess.run(['qdel', job], check=True)
    pbs.wait(lambda: mine.status(job).terminal)
    assert mine.status(job).state is JobState.CANCELLED
    assert 'somebody else' in str(mine.status(job).message)


def test_what_is_deleted_by_us_counts_as_that(pbs: Rehearsal, blocks: Make) -> None:
    mine = blocks()
    job = running(pbs, mine)
    assert mine.provider.cancel([job]) == [True]
    assert mine.provider.cancel([job]) == [True]
    assert mine.status(job).state is JobState.CANCELLED


def test_a_job_that_has_vanished_is_not_over(pbs: Rehearsal, blocks: Make) -> None:
    """Without a job history the end of a job is unknown: it counts as ended when its time is up,
    not before.
    """
    mine = blocks()
    job = running(pbs, mine)
    with pbs.fault('no_history'):
        pbs.finish(pbs.running()[0])
        pbs.wait(lambda: pbs.job(job)['state'] == 'over')
        pbs.wait(lambda: mine.status(job).state is JobState.UNKNOWN)
        for _ in range(5):
            assert mine.status(job).state is JobState.UNKNOWN
            time.sleep(0.2)


@pytest.mark.parametrize(
    'fault',
    [
        {
            'status': 35,
            'says': 'qstat: 1.pbs Job has finished, use -x or -H to obtain historical job '
            'information',
        },
        {
            'status': 255,
            'says': 'Connection timed out\nqstat: cannot connect to server pbs (errno=15010)',
        },
        {'status': 0, 'says': ''},  # and no document either
        {'hang': True},
    ],
)
def test_a_scheduler_that_does_not_answer_ends_nothing(
    pbs: Rehearsal, blocks: Make, fault: dict[str, object]
) -> None:
    mine = blocks(command_s=5.0, unreachable_s=1.0, longest_backoff_s=0.5)
    job = running(pbs, mine)
    end = mine.provider.end_of(job)
    with pbs.fault('all', **fault):  # type: ignore[arg-type]
        states = set()
        begun = time.monotonic()
        while JobState.UNKNOWN not in states:
            states.add(mine.status(job).state)
            assert time.monotonic() - begun < 60
            time.sleep(0.05)
        assert states <= {JobState.RUNNING, JobState.UNKNOWN}
        assert mine.provider.end_of(job) == end
        pbs.wait(lambda: mine.site.holes() == ())
        if fault.get('status') not in (
            0,
            35,
        ):  # to qdel, 35 says that there is nothing left to delete
            assert mine.provider.cancel([job]) == [False]
    pbs.wait(lambda: mine.status(job).state is JobState.RUNNING)


def test_a_submission_without_an_answer_leaves_no_block_behind(
    pbs: Rehearsal, blocks: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = blocks()
    submit = Pbs.submit

    def lost(self: Pbs, script: object) -> str:
        submit(self, script)  # type: ignore[arg-type]
        raise SchedulerSilent('qsub did not answer within 10 s')

    monkeypatch.setattr(Pbs, 'submit', lost)
    with pytest.raises(FreeTrainError, match='did not answer'):
        mine.open(1)
    assert len(mine.site.find_blocks()) == 1
    pbs.wait(lambda: mine.site.holes() is not None and not mine.site.find_blocks())


def test_a_later_process_finds_the_blocks_of_its_run_and_goes_on_with_them(
    pbs: Rehearsal, blocks: Make
) -> None:
    mine, other = blocks(run='my run/1'), blocks(run='my run/2')
    job = running(pbs, mine)
    running(pbs, other)
    again = PbsSite(queue='batch', run='my run/1', **QUICK)
    assert [found.job_id for found in again.adopt()] == [job]
    assert again.end_of(job) is not None


def test_nodes_that_blocks_cannot_use_are_no_hole(pbs: Rehearsal, blocks: Make) -> None:
    pbs.set_node('x0001', up=False)
    pbs.set_node('x0002', has={'ngpus': 0, 'system': 'rehearsal'})
    pbs.set_node('x0003', has={'ngpus': 2, 'system': 'other'})
    mine = blocks(gpus_per_node=2, node_resources={'system': 'rehearsal'})
    assert [hole.names for hole in mine.holes()] == [('x0004',)]


def test_it_is_polite(pbs: Rehearsal, blocks: Make) -> None:
    mine = blocks(submit_every_s=1000.0, max_waiting=1, poll_s=1000.0)
    pbs.wait(mine.site.holes)
    before = pbs.calls()
    for _ in range(20):
        assert mine.site.holes()
    assert pbs.calls() == before
    assert before == {
        'qstat': 2,
        'pbsnodes': 1,
        'pbs_rstat': 1,
    }  # the queue once at the beginning, then one of each
    mine.open(1)
    assert mine.site.holes() == ()
    assert pbs.calls()['qsub'] == 1


@pytest.mark.parametrize(
    ('settings', 'sentence'),
    [
        ({'queue': 'nosuch'}, r"no queue 'nosuch'; it has batch, closed, debug, preemptable\."),
        ({'queue': 'closed'}, 'takes no jobs'),
        (
            {'queue': 'debug', 'least_nodes': 3},
            'takes 0 to 2 nodes, and the site config asks for 3',
        ),
        ({'queue': 'debug', 'shortest_s': 1200.0}, 'shortest block'),
        ({'queue': 'batch', 'pin_nodes': True}, 'number of nodes'),
        ({'queue': 'batch', 'priority': 5000}, 'priority'),
        ({'queue': 'batch', 'filesystems': ('a:b',)}, 'filesystems'),
        ({'queue': 'batch', 'pbs_options': ('l x=y',)}, 'is not an option'),
    ],
)
def test_what_the_machine_does_not_give_is_refused_before_anything_is_submitted(
    pbs: Rehearsal, settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(BadInput, match=sentence):
        PbsSite(**{**QUICK, **settings}).start()
    assert pbs.jobs() == {}


@pytest.mark.parametrize(
    ('request_', 'sentence'),
    [
        (BlockRequest(3, 300.0), '1 to 2 nodes'),
        (BlockRequest(1, 1.0), '2 s or more'),
        (BlockRequest(0, 300.0), 'at least one node'),
    ],
)
def test_requests_that_can_never_be_met(
    pbs: Rehearsal, blocks: Make, request_: BlockRequest, sentence: str
) -> None:
    mine = blocks('debug')
    with pytest.raises(BadInput, match=sentence):
        mine.provider.open_block(request_, 'true', 'never')


def test_qsubs_own_words_are_passed_on(pbs: Rehearsal, blocks: Make) -> None:
    mine = blocks()
    with pbs.state() as state:
        state['queues']['batch']['needs_account'] = True
    with pytest.raises(FreeTrainError, match=r'qsub refused the script /.*\.sh: .*no account'):
        mine.open(1)


def test_without_pbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('PATH', '/nowhere')
    with pytest.raises(BadInput, match='There is no PBS here'):
        PbsSite(queue='batch').start()
