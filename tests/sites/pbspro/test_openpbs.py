"""Blocks on a real OpenPBS: what they fit, how they end, and that nothing of them stays."""

import pwd
import re
import shlex
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from parsl.jobs.states import JobState

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.sites.pbspro import PbsSite
from tests.sites.batch_blocks import QUICK, Blocks
from tests.sites.giving import LASTS, two_users
from tests.support.openpbs import PbsCluster
from tests.support.other_user import needs_root
from tests.support.waiting import under_load

pytestmark = pytest.mark.pbs

Make = Callable[..., Blocks]
AGENT = f'{sys.executable} -P -m parsl_freetrain.training.process.node_agent'
# As a node agent whose command has started things of its own.
WORK = f'{AGENT} /bin/sh -c ' + shlex.quote('sleep 9876 & echo ready; sleep 9876')
REQUEUED = 'waits in the queue again'


@pytest.fixture
def blocks(openpbs: PbsCluster, tmp_path: Path) -> Iterator[Make]:
    """Makes sites on the server, with their blocks in a folder that a shell would stumble on."""
    made: list[Blocks] = []

    def make(queue: str = 'batch', **settings: Any) -> Blocks:
        site = PbsSite(queue=queue, **{**QUICK, **settings})
        made.append(Blocks(tmp_path / f'a run with $HOME %j {len(made)}', site))
        return made[-1]

    yield make
    for each in made:
        each.provider.cancel(each.jobs)


@contextmanager
def managed(openpbs: PbsCluster, change: str, undo: str) -> Iterator[None]:
    openpbs.manage(change)
    try:
        yield
    finally:
        openpbs.manage(undo)


def at_work(
    openpbs: PbsCluster,
    mine: Blocks,
    nodes: int,
    walltime_s: float | None = 300.0,
    command: str = WORK,
) -> str:
    """A block whose nodes are all ready; a short walltime is doubled where the computer is slow."""
    before = mine.output().count('ready')
    job = mine.open(nodes, walltime_s, command)

    def ready() -> bool:
        return mine.output().count('ready') == before + nodes

    openpbs.wait(lambda: ready() or mine.status(job).terminal)
    if ready() and not mine.status(job).terminal:
        return job
    assert walltime_s is not None and walltime_s < 300.0, mine.status(job)
    return at_work(openpbs, mine, nodes, 2 * walltime_s, command)


def working(openpbs: PbsCluster, node: str) -> list[str]:
    """What a block has on a node that goes on: not stopped."""
    return [line for line in openpbs.processes(node) if not line.startswith('T')]


# --- nobody is delayed


def empty(openpbs: PbsCluster, nodes: set[str]) -> bool:
    """Whether nothing of :data:`WORK` is left on these nodes."""
    return not any('9876' in line for node in nodes for line in openpbs.processes(node))


def test_a_block_gives_a_node_to_a_waiting_job_and_goes_on(
    openpbs: PbsCluster, blocks: Make
) -> None:
    mine = blocks(shrink_blocks=True)
    job = at_work(openpbs, mine, 4)
    other = openpbs.submit()
    openpbs.wait(lambda: mine.status(job) and mine.site.needed()[0])
    [demand], [held] = mine.site.needed()
    assert (demand.job, demand.nodes, held.block) == (other, 1, job)
    assert len(held.nodes) == 4 and len(held.releasable) == 3
    left = max(held.releasable)
    openpbs.wait(lambda: openpbs.job(job)['substate'] == 42)
    mine.provider.release(job, [left])
    openpbs.wait(lambda: openpbs.state(other) == 'R')
    openpbs.wait(lambda: empty(openpbs, {left}))
    openpbs.wait(lambda: mine.status(job) and mine.site.needed() == ((), ()))
    assert openpbs.state(job) == 'R'
    assert all(working(openpbs, node) for node in set(held.nodes) - {left})
    # Not without its first node: PBS runs the script there.
    with pytest.raises(FreeTrainError, match='does not take'):
        mine.provider.release(job, [min(held.nodes)])


def test_each_of_two_runs_gives_its_part(openpbs: PbsCluster, blocks: Make) -> None:
    # Not so short that a job which waits for the other run counts as held back by something else.
    runs = [blocks(shrink_blocks=False, start_s=30.0) for _ in range(2)]
    jobs = [at_work(openpbs, mine, 2) for mine in runs]

    def parts(job: str) -> list[int]:
        """What each run finds that it has to give for a job."""
        return [
            sum(demand.nodes for demand in mine.site.needed()[0] if demand.job == job)
            for mine, own in zip(runs, jobs, strict=True)
            if mine.status(own)
        ]

    narrow = openpbs.submit(1)
    openpbs.wait(lambda: sorted(parts(narrow)) == [0, 1])
    openpbs.run('qdel', narrow)
    wide = openpbs.submit(4)
    openpbs.wait(lambda: parts(wide) == [2, 2])
    runs[0].provider.cancel(jobs[:1])
    openpbs.wait(lambda: openpbs.free() == 2 and parts(wide) == [0, 2])
    assert [mine.site.holes() for mine in runs] == [(), ()], 'neither takes back what was given'
    runs[1].provider.cancel(jobs[1:])
    openpbs.wait(lambda: openpbs.state(wide) == 'R')


@needs_root
def test_a_job_that_needs_nodes_of_two_users_gets_them(openpbs: PbsCluster) -> None:
    other = pwd.getpwnam('daemon').pw_uid  # it has a home, as PBS wants, and no shell
    settings = {**QUICK, **LASTS, 'pbs_options': ('-S /bin/bash',)}
    with two_users(openpbs, lambda: PbsSite(queue='batch', **settings), other):
        narrow = openpbs.submit(1, seconds=5)
        openpbs.wait(lambda: openpbs.state(narrow) in ('R', 'F'))
        assert len(openpbs.run('qselect', '-s', 'R').split()) >= 3, 'one of them gave, not both'
        wide = openpbs.submit(4, seconds=1)
        openpbs.wait(lambda: openpbs.state(wide) == 'F')


@pytest.mark.parametrize('end', ['itself', 'qdel', 'qdel -W force'])
def test_nothing_of_a_block_outlives_its_job(openpbs: PbsCluster, blocks: Make, end: str) -> None:
    mine = blocks('preemptable', mode='preemptible', ending_s=1.0, shrink=1.0)
    job = at_work(openpbs, mine, 2, walltime_s=12.0 if end == 'itself' else 300.0)
    nodes = openpbs.nodes_of(job)
    assert len(nodes) == 2 and all(working(openpbs, node) for node in nodes)
    if end != 'itself':
        openpbs.run(*end.split(), job)
    openpbs.wait(lambda: openpbs.state(job) in ('F', '') and empty(openpbs, nodes))
    # One task for each node, and none for the end: PBS waits long for one that is spawned then.
    spawned = [line for line in openpbs.log_of(job) if re.search(r'task \w+ started, ', line)]
    assert len(spawned) == 2, spawned


def test_a_suspended_block_does_not_work_and_is_deleted(openpbs: PbsCluster, blocks: Make) -> None:
    mine = blocks('preemptable', mode='preemptible')
    job = at_work(openpbs, mine, 2, walltime_s=None)
    nodes = openpbs.nodes_of(job)
    with managed(openpbs, 'set sched preempt_order = "SCR"', 'set sched preempt_order = "R"'):
        other = openpbs.submit(4)
        openpbs.wait(lambda: openpbs.state(job) == 'S')
        openpbs.wait(lambda: not any('9876' in line for n in nodes for line in working(openpbs, n)))
        held = mine.status(job)  # the first look since; it also deletes the job
        while held.state is JobState.RUNNING:
            held = mine.status(job)
        assert held.state is JobState.HELD
        assert 'its nodes are taken' in str(held.message)
        openpbs.wait(lambda: mine.status(job).terminal)
        assert mine.status(job).state is JobState.TIMEOUT
        assert openpbs.state(job) == 'F' and openpbs.state(other) != 'Q'


@pytest.mark.parametrize('order', ['R', 'D'])
def test_a_preemption_takes_the_nodes_in_any_way(
    openpbs: PbsCluster, blocks: Make, order: str
) -> None:
    """The same for every preempt_order: what was deleted without us counts as preempted."""
    mine = blocks('preemptable', mode='preemptible')
    job = at_work(openpbs, mine, 2, walltime_s=None)
    nodes = openpbs.nodes_of(job)
    with managed(openpbs, f'set sched preempt_order = "{order}"', 'set sched preempt_order = "R"'):
        other = openpbs.submit(4)
        openpbs.wait(lambda: openpbs.state(other) == 'R' and empty(openpbs, nodes))
        openpbs.wait(lambda: mine.status(job).terminal)
        assert mine.status(job).state is JobState.TIMEOUT
        assert 'preempted' in str(mine.status(job).message)
        openpbs.wait(lambda: openpbs.state(job) == 'F')


def test_a_block_may_wait_again_after_a_preemption(openpbs: PbsCluster, blocks: Make) -> None:
    mine = blocks('preemptable', mode='preemptible', requeue=True)
    job = mine.running(2, walltime_s=None, command=WORK)
    other = openpbs.submit(4, seconds=1)
    openpbs.wait(lambda: mine.status(job).state is JobState.PENDING)
    assert REQUEUED in str(mine.status(job).message)
    assert mine.provider.end_of(job) is None
    openpbs.wait(lambda: openpbs.state(other) == 'F')
    openpbs.wait(lambda: mine.status(job).state is JobState.RUNNING)


@pytest.mark.parametrize(('end', 'nodes'), [('its time is up', 3), ('qdel', 1)])
def test_an_end_is_told_to_the_nodes(
    openpbs: PbsCluster, blocks: Make, tmp_path: Path, end: str, nodes: int
) -> None:
    """At a qdel PBS kills all nodes but the first at once."""
    mine = blocks(shrink=1.0)
    # PBS may end the process that collects the output before those that write it.
    wait = (
        f'trap "echo told >{tmp_path}/told.$(hostname); sleep 1; exit 143" TERM; echo ready; '
        'while true; do sleep 0.1; done'
    )
    job = at_work(openpbs, mine, 3, 300.0 if end == 'qdel' else 10.0, wait)
    if end == 'qdel':
        openpbs.run('qdel', job)
    openpbs.wait(lambda: mine.status(job).terminal)
    assert len(list(tmp_path.glob('told.*'))) >= nodes


def test_a_block_that_waits_makes_nobody_wait_for_long(openpbs: PbsCluster, blocks: Make) -> None:
    """What comes after a block starts after it, although its priority is the lowest."""
    first = openpbs.submit(3, walltime_s=3000)
    mine = blocks(withdraw_s=2.0)
    job = mine.open(2, 3000.0)
    behind = openpbs.submit(1, walltime_s=40000)
    openpbs.wait(lambda: mine.status(job).terminal)
    assert 'withdrawn' in str(mine.status(job).message)
    openpbs.wait(lambda: openpbs.state(behind) == 'R')
    assert openpbs.state(first) == 'R'


# --- holes


def test_a_block_fits_between_the_jobs_of_others(openpbs: PbsCluster, blocks: Make) -> None:
    """Three nodes are free until a wide job's turn; a block there does not move that."""
    openpbs.submit(1, walltime_s=300)
    wide = openpbs.submit(4, walltime_s=300)
    openpbs.wait(lambda: 'estimated' in openpbs.job(wide))
    mine = blocks(margin_s=4.0, ending_s=2.0)

    def planned_s() -> float:
        """When the wide job starts; the plan is renewed, and moves by a second or so."""
        planned = openpbs.job(wide)['estimated']['start_time']
        return time.mktime(time.strptime(planned, '%a %b %d %H:%M:%S %Y'))

    def ends_with_the_plan() -> bool:
        start = planned_s()
        return [hole.until_s for hole in mine.site.holes()] == [start - 2]

    openpbs.wait(ends_with_the_plan)
    [hole] = mine.holes()
    assert hole.nodes == 3 and hole.until_s is not None
    job = mine.open(hole.nodes, hole.until_s - time.time())
    openpbs.wait(lambda: mine.status(job).state is JobState.RUNNING)
    end = mine.provider.end_of(job)
    assert end is not None
    assert end <= hole.until_s
    openpbs.wait(lambda: mine.site.holes() == ())
    assert abs(planned_s() - 2 - hole.until_s) <= 5


def test_a_reservation_ends_a_hole_and_the_block_asks(openpbs: PbsCluster, blocks: Make) -> None:
    start = int(time.time()) + 70  # PBS plans in minutes
    said = openpbs.run(
        'pbs_rsub',
        '-R' + time.strftime('%Y%m%d%H%M.%S', time.localtime(start)),
        '-D60',
        '-lselect=4:ncpus=4',
        '-lplace=scatter:excl',
    )
    resv = said.split()[0]
    try:
        openpbs.wait(lambda: 'RN' in openpbs.run('pbs_rstat') or 'CO' in openpbs.run('pbs_rstat'))
        mine = blocks(margin_s=4.0, ending_s=2.0, shrink=0.05)
        openpbs.wait(lambda: [(h.nodes, h.until_s) for h in mine.site.holes()] == [(4, start - 2)])
        job = mine.open(1, 300.0)
        # PBS may call it running before it says since when.
        openpbs.wait(lambda: mine.status(job) and mine.provider.end_of(job))
        end = mine.provider.end_of(job)
        assert end is not None and end <= start
    finally:
        openpbs.run('pbs_rdel', resv)


def test_sizes_are_compared_as_sizes(openpbs: PbsCluster) -> None:
    for mem, nodes in (('1gb', 4), ('800tb', 0), ('2048mw', 4)):
        change = f'set queue batch default_chunk.mem = {mem}'
        with managed(openpbs, change, 'unset queue batch default_chunk.mem'):
            site = PbsSite(queue='batch', **QUICK)
            assert sum(hole.nodes for hole in site.holes_now()) == nodes


def test_the_nodes_of_a_queue_are_for_its_jobs_alone(openpbs: PbsCluster) -> None:
    others = {'node02', 'node03', 'node04'}
    with managed(openpbs, 'set node node01 queue = debug', 'unset node node01 queue'):
        for queue, names in (('debug', {'node01'}), ('batch', others), ('prod', others)):
            found = PbsSite(queue=queue, **QUICK).holes_now()
            assert {name for hole in found for name in hole.names} == names


def test_an_array_that_has_begun_keeps_its_plan(openpbs: PbsCluster, blocks: Make) -> None:
    openpbs.submit(1, walltime_s=200)
    array = openpbs.submit(2, '-J0-1', walltime_s=400)
    openpbs.wait(lambda: openpbs.state(array) == 'B' and 'estimated' in openpbs.job(array))
    [hole] = PbsSite(queue='batch', **QUICK).holes_now()
    assert hole.nodes == 1
    assert hole.until_s is not None and hole.until_s < time.time() + 300


def test_nodes_that_blocks_cannot_use_are_no_hole(openpbs: PbsCluster, blocks: Make) -> None:
    openpbs.run('pbsnodes', '-o', 'node01')
    openpbs.manage(
        'set node node02 resources_available.ngpus = 0',
        'set node node03 resources_available.system = other',
    )
    try:
        mine = blocks(gpus_per_node=2, node_resources={'system': 'polaris'})
        assert [hole.names for hole in mine.holes()] == [('node04',)]
    finally:
        openpbs.run('pbsnodes', '-r', 'node01')
        openpbs.manage(
            'set node node02 resources_available.ngpus = 2',
            'set node node03 resources_available.system = polaris',
        )


# --- blocks and their ends


def test_every_node_runs_the_command_with_the_blocks_environment_in_private_files(
    openpbs: PbsCluster, blocks: Make
) -> None:
    mine = blocks(gpus_per_node=2, ncpus=2)
    job = mine.open(2, command='echo "$FREETRAIN_NODE says $GREETING to $PBS_JOBID"')
    openpbs.wait(lambda: mine.status(job).terminal)
    assert mine.status(job).state is JobState.COMPLETED
    said = sorted(mine.output().splitlines())
    assert [line.split(' ', 1)[1] for line in said] == [f"says it's 2 to {job}"] * 2
    assert {line.split()[0] for line in said} == openpbs.nodes_of(job)
    # What held the environment is gone.
    assert {path.suffix for path in mine.folder.iterdir()} == {'.out', '.err', '.sh'}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in mine.folder.iterdir())


def test_a_block_that_starts_after_its_hole_ends_at_once(openpbs: PbsCluster, blocks: Make) -> None:
    mine = blocks(shrink=1.0, start_s=0.0, withdraw_s=600.0)
    first = openpbs.submit(4)
    job = mine.open(1, 3.0, command='echo trained')
    time.sleep(3.0)
    openpbs.run('qdel', first)
    openpbs.wait(lambda: mine.status(job).terminal)
    assert 'trained' not in mine.output()


@pytest.mark.parametrize('ours', [False, True])
def test_a_block_is_deleted_by_us_or_others(openpbs: PbsCluster, blocks: Make, ours: bool) -> None:
    mine = blocks()
    # A job that is deleted before its script has begun may seem to have ended by itself.
    job = at_work(openpbs, mine, 1)
    if ours:
        assert mine.provider.cancel([job]) == [True]
        assert mine.provider.cancel([job]) == [True]
    else:
        openpbs.run('qdel', job)
        openpbs.wait(lambda: mine.status(job).terminal)
        assert 'somebody else' in str(mine.status(job).message)
    assert mine.status(job).state is JobState.CANCELLED


def test_a_job_that_has_vanished_is_not_over(openpbs: PbsCluster, blocks: Make) -> None:
    """Without a job history a job counts as ended when its time is up, not before."""
    mine = blocks()
    job = mine.running()
    with managed(
        openpbs, 'set server job_history_enable = False', 'set server job_history_enable = True'
    ):
        openpbs.run('qdel', '-W', 'force', job)
        openpbs.wait(lambda: mine.status(job).state is JobState.UNKNOWN)
        for _ in range(5):
            assert mine.status(job).state is JobState.UNKNOWN
            time.sleep(0.2)


@pytest.mark.parametrize('how', ['down', 'silent'])
def test_a_silent_server_ends_nothing(openpbs: PbsCluster, blocks: Make, how: str) -> None:
    mine = blocks(command_s=5.0, unreachable_s=1.0, longest_backoff_s=0.5)
    job = mine.running()
    end = mine.provider.end_of(job)
    with getattr(openpbs, how)():
        states = set()
        begun = time.monotonic()
        while JobState.UNKNOWN not in states:
            states.add(mine.status(job).state)
            assert time.monotonic() - begun < under_load(20.0)
            time.sleep(0.05)
        assert states <= {JobState.RUNNING, JobState.UNKNOWN}
        assert mine.provider.end_of(job) == end
        assert mine.site.holes() == ()
        assert mine.provider.cancel([job]) == [False]
    openpbs.wait(lambda: mine.status(job).state is JobState.RUNNING)


def test_a_later_process_goes_on_with_blocks_of_its_run(openpbs: PbsCluster, blocks: Make) -> None:
    mine, other = blocks(run='my run/1'), blocks(run='my run/2')
    job = mine.running()
    other.running()
    again = PbsSite(queue='batch', run='my run/1', **QUICK)
    assert list(again.adopt()) == [job]
    assert again.end_of(job) is not None


# --- refusals


def test_what_the_machine_does_not_give_is_refused_before_anything_is_submitted(
    openpbs: PbsCluster,
) -> None:
    for settings, sentence in (
        ({'queue': 'nosuch'}, r"no queue 'nosuch'; it has batch, closed, debug, .*small, "),
        ({'queue': 'closed'}, 'takes no jobs'),
        ({'queue': 'small'}, 'takes jobs only from prod'),
        ({'queue': 'debug', 'least_nodes': 3}, 'takes 0 to 2 nodes, and the site config'),
        ({'queue': 'debug', 'shortest_s': 1200.0}, 'shortest block'),
    ):
        with pytest.raises(BadInput, match=sentence):
            PbsSite(**{**QUICK, **settings}).start()
    assert openpbs.run('qstat') == ''


def test_qsubs_own_words_are_passed_on(openpbs: PbsCluster, blocks: Make) -> None:
    mine = blocks()
    with (
        managed(
            openpbs, 'set queue batch acl_user_enable = True', 'unset queue batch acl_user_enable'
        ),
        pytest.raises(FreeTrainError, match=r'qsub refused the script /.*\.sh: Unauthorized'),
    ):
        mine.open(1)
