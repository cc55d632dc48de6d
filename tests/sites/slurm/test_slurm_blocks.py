"""Blocks on a real Slurm cluster: what they fit, and all the ways in which they end."""

import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from parsl.jobs.states import JobState

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.types import BlockRequest, NodeDemand
from parsl_freetrain.sites.batch import queue_watch
from parsl_freetrain.sites.batch.records import NodeReservation
from parsl_freetrain.sites.protocols import HoleGone
from parsl_freetrain.sites.slurm.scheduler import Slurm
from tests.sites.batch_blocks import Blocks
from tests.sites.slurm.conftest import slurm_site
from tests.support.programs import run_to_end
from tests.support.slurm import Cluster
from tests.support.waiting import under_load

pytestmark = pytest.mark.slurm

Make = Callable[..., Blocks]


def test_a_block_fits_between_the_jobs_of_others(slurm: Cluster, blocks: Make) -> None:
    """Three nodes are free until a wide job's turn; a block does not move that."""
    slurm.submit('--nodes=1', '--time=5')
    wide = slurm.submit('--nodes=4', '--time=5')
    slurm.wait(lambda: slurm.run('squeue', '-h', '-j', wide, '-o', '%Y').strip() == 'node[01-04]')
    short = slurm.submit('--nodes=4', '--time=2')
    slurm.wait(lambda: slurm.run('squeue', '-h', '-j', short, '-o', '%r').strip() == 'Priority')
    mine = blocks(margin_s=5.0, ending_s=3.0)
    [hole] = mine.holes()
    assert hole.nodes == 3
    assert hole.longest_s == 120, 'no longer than a job that could pass the wide one'
    assert hole.until_s is not None
    planned = float(start_of(slurm, wide))
    assert planned - 2 == hole.until_s
    job = mine.open(hole.nodes, hole.until_s - time.time(), lasts_s=hole.longest_s)
    slurm.wait(lambda: mine.status(job).state is JobState.RUNNING)
    words, form = ['squeue', '-h', '-j', job, '-o', '%e'], {'SLURM_TIME_FORMAT': '%s'}
    limit = float(run_to_end(words, more_env=form, check=True).stdout)
    assert limit <= min(hole.until_s, time.time() + hole.longest_s)
    assert mine.provider.end_of(job) == limit - 3
    assert mine.site.holes() == ()
    slurm.wait(lambda: start_of(slurm, wide) == planned)


def start_of(slurm: Cluster, job: str) -> float:
    shown = slurm.run('squeue', '-h', '-j', job, '-o', '%S').strip()
    return time.mktime(time.strptime(shown, '%Y-%m-%dT%H:%M:%S'))


def test_every_node_runs_the_command_in_private_files(slurm: Cluster, blocks: Make) -> None:
    mine = blocks()
    job = mine.open(2, command='echo "$FREETRAIN_NODE says $GREETING"')
    slurm.wait(lambda: mine.status(job).terminal)
    assert mine.status(job).state is JobState.COMPLETED
    assert sorted(mine.output().splitlines()) == ["node01 says it's 2", "node02 says it's 2"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in mine.folder.iterdir())


def test_nodes_of_each_class_are_holes_and_blocks_apart(slurm: Cluster, blocks: Make) -> None:
    slurm.run('scontrol', 'update', 'NodeName=node[01-02]', 'Features=fast')
    slurm.run('scontrol', 'update', 'NodeName=node03', 'Features=slow')
    try:
        with pytest.raises(BadInput, match="class 'none'.* no node"):
            slurm_site(node_classes={'none': 'nowhere'}).start()
        classes = {'fast': 'fast', 'slow': 'slow'}
        mine = blocks(node_classes=classes)
        found = {h.node_class: h.names for h in mine.holes()}
        assert found == {'fast': ('node01', 'node02'), 'slow': ('node03',)}
        job = mine.open(1, None, 'echo "$FREETRAIN_NODE"; sleep 600', node_class='slow')
        slurm.wait(lambda: mine.output() == 'node03\n')
        later = slurm_site(node_classes=classes, run=mine.site.run)
        assert [(j, b.node_class) for j, b in later.adopt().items()] == [(job, 'slow')]
    finally:
        none = 'AvailableFeatures=', 'ActiveFeatures='
        slurm.run('scontrol', 'update', 'NodeName=node[01-04]', *none)


def test_a_block_ends_itself_before_its_limit(slurm: Cluster, blocks: Make) -> None:
    mine = blocks(ending_s=54.0)
    job = mine.open(1, 63.0)
    slurm.wait(lambda: mine.status(job).terminal)
    assert mine.status(job).state is JobState.COMPLETED
    assert slurm.state(job) == 'COMPLETED'


def test_a_block_that_could_not_end_in_time_is_dropped(slurm: Cluster, blocks: Make) -> None:
    mine = blocks(start_s=0.0)
    slurm.submit('--nodes=4', '--time=5')
    job = mine.open(1, 62.0)
    slurm.wait(lambda: mine.status(job).terminal)
    assert mine.status(job).state is JobState.CANCELLED
    assert slurm.state(job) in ('DEADLINE', 'CANCELLED')


def test_a_block_that_does_not_start_is_withdrawn(slurm: Cluster, blocks: Make) -> None:
    mine = blocks(withdraw_s=2.0)
    slurm.submit('--nodes=4', '--time=5')
    job = mine.open(1, None)
    assert mine.status(job).state is JobState.PENDING
    slurm.wait(lambda: mine.status(job).terminal)
    assert 'withdrawn' in str(mine.status(job).message)
    assert slurm.state(job) == 'CANCELLED'


@pytest.mark.parametrize('by', ['plan', 'reservation'])
def test_a_block_that_is_longer_than_its_nodes_are_free_makes_room_for_a_shorter_one(
    slurm: Cluster, blocks: Make, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(queue_watch, 'RESERVATIONS_EVERY_S', 1e6)
    mine = blocks(withdraw_s=1e6, start_s=1.0)
    assert [hole.until_s for hole in mine.holes()] == [None]
    if by == 'plan':
        slurm.submit('--nodes=1', '--time=200')
        wide = slurm.submit('--nodes=4', '--time=5')
        slurm.wait(lambda: slurm.run('squeue', '-h', '-j', wide, '-o', '%Y').startswith('node'))
    else:
        set_aside(slurm, 'node[01-04]')
    try:
        job = mine.open(3, 18_000.0)  # the minimum would fit, but Slurm plans with all of it
        slurm.wait(lambda: (mine.site.holes(), mine.status(job).terminal)[1])
        assert 'withdrawn' in str(mine.status(job).message)
        [hole] = mine.holes()
        assert hole.until_s is not None
        job = mine.open(3, hole.until_s - time.time())
        slurm.wait(lambda: mine.status(job).state is JobState.RUNNING)
    finally:
        if by == 'reservation':
            slurm.run('scontrol', 'delete', 'reservationname=course')


def set_aside(slurm: Cluster, nodes: str) -> None:
    """In some hours."""
    begin = time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(time.time() + 12_000))
    slurm.run(
        *('scontrol', 'create', 'reservation', 'reservationname=course', 'users=root'),
        *(f'starttime={begin}', 'duration=9', f'nodes={nodes}'),
    )


def test_what_is_set_aside_with_the_first_job_that_waits_is_known_before_nodes_are_given(
    slurm: Cluster, blocks: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_watch, 'RESERVATIONS_EVERY_S', 1e6)
    ask = Slurm.reservations

    def slow(self: Slurm) -> tuple[NodeReservation, ...]:
        time.sleep(2.5)  # longer than a look waits: the queue is known, and what is set aside not
        return ask(self)

    monkeypatch.setattr(Slurm, 'reservations', slow)
    mine = blocks(waiting_poll_s=1e5)
    job = mine.running(4)
    slurm.wait(lambda: mine.site.needed() == ((), ()) and mine.site.holes() == ())
    set_aside(slurm, 'node[01-02]')
    try:
        other = slurm.submit('--nodes=1', '--time=250')
        slurm.wait(lambda: mine.status(job) and mine.site.needed()[0])
        [demand], _ = mine.site.needed()
        assert demand == NodeDemand(other, 1, frozenset({'node03', 'node04'}))
    finally:
        slurm.run('scontrol', 'delete', 'reservationname=course')


def test_a_block_gives_a_node_to_a_waiting_job_and_goes_on(slurm: Cluster, blocks: Make) -> None:
    mine = blocks(poll_s=3.0, waiting_poll_s=0.2, shrink_blocks=True)
    job = mine.running(4, command='while true; do echo "$FREETRAIN_NODE runs"; sleep 1; done')
    names = {f'node0{number}' for number in range(1, 5)}
    assert mine.site.needed() == ((), ())
    assert mine.site.poll_s == 3.0
    other = slurm.submit('--nodes=2', '--time=1')
    slurm.wait(lambda: mine.status(job) and mine.site.needed()[0])
    assert mine.site.poll_s == 0.2
    [demand], [held] = mine.site.needed()
    assert demand == NodeDemand(other, 2, frozenset(names))
    assert (held.block, set(held.nodes)) == (job, names)
    leave = sorted(held.releasable)[1:]
    assert len(leave) == 2
    mine.provider.release(job, leave)
    slurm.wait(lambda: slurm.state(other) == 'RUNNING')
    slurm.wait(lambda: mine.status(job) and mine.site.needed() == ((), ()))
    before = mine.output().count('node01 runs')
    slurm.wait(lambda: mine.output().count('node01 runs') > before + 2)
    assert slurm.state(job) == 'RUNNING'
    slurm.submit('--nodes=1', '--time=1')
    slurm.wait(lambda: mine.status(job) and mine.site.needed()[0])
    # Without an accounting database, Slurm does this once for each job.
    with pytest.raises(FreeTrainError, match='does not take'):
        mine.provider.release(job, sorted(names - set(leave))[1:])
    assert mine.site.needed()[1][0].releasable == frozenset()
    mine.site.leaving([job])  # it counts as ending before Slurm says so
    slurm.wait(lambda: mine.status(job) and mine.site.needed() == ((), ()))
    assert mine.site.holes() == ()
    assert slurm.state(job) == 'RUNNING'


@pytest.mark.parametrize(
    ('partition', 'mode', 'before', 'options'),
    [
        # The debug partition goes first, whatever the priority: there is nothing left for a job
        # with three nodes.
        ('batch', 'backfill', ('--nodes=3',), ('--partition=batch,debug', '--nodelist=node02')),
        ('scavenger', 'preemptible', ('--hold',), ('--partition=scavenger',)),
    ],
)
def test_jobs_that_the_scheduler_takes_no_nodes_for_are_waited_for(
    slurm: Cluster,
    blocks: Make,
    partition: str,
    mode: str,
    before: tuple[str, ...],
    options: tuple[str, ...],
) -> None:
    mine = blocks(partition, mode=mode)
    job = mine.running(4)
    for other in (('--begin=now+1hour',), (f'--dependency=afterok:{job}',), before):
        slurm.submit('--nodes=1', '--time=1', f'--partition={partition}', *other)
    wanted = slurm.submit('--nodes=2', '--time=1', *options)
    slurm.wait(lambda: mine.status(job) and wanted in {d.job for d in mine.site.needed()[0]})
    demands, _ = mine.site.needed()
    assert {demand.job for demand in demands} == {wanted}
    assert sum(demand.nodes for demand in demands) == 2


def test_a_node_fails(slurm: Cluster, blocks: Make) -> None:
    mine = blocks()
    job = mine.running()
    node = slurm.run('squeue', '-h', '-j', job, '-o', '%N').strip()
    slurm.run(
        'scontrol', 'update', f'nodename={node}', 'state=down', 'reason=test'
    )  # it comes back by itself
    slurm.wait(lambda: mine.status(job).terminal)
    assert mine.status(job).state is JobState.TIMEOUT
    assert 'lost a node' in str(mine.status(job).message)


def test_drained_nodes_are_no_hole_and_their_blocks_go_on(slurm: Cluster, blocks: Make) -> None:
    mine = blocks()
    job = mine.running()
    slurm.run('scontrol', 'update', 'nodename=node[01-04]', 'state=drain', 'reason=test')
    try:
        slurm.wait(lambda: mine.site.holes() == ())
        assert mine.status(job).state is JobState.RUNNING
    finally:
        slurm.run('scontrol', 'update', 'nodename=node[01-04]', 'state=resume')


def test_an_administrator_moves_the_end(slurm: Cluster, blocks: Make) -> None:
    mine = blocks()
    job = mine.running()
    before = mine.provider.end_of(job)
    assert before is not None
    slurm.run('scontrol', 'update', f'jobid={job}', 'timelimit=2')
    slurm.wait(lambda: mine.status(job) and (mine.provider.end_of(job) or before) <= before - 120)
    slurm.run('scontrol', 'update', f'jobid={job}', 'timelimit=20')
    slurm.wait(lambda: mine.status(job) and (mine.provider.end_of(job) or before) >= before + 900)


@pytest.mark.parametrize('requeue', [False, True])
def test_a_preemption_is_told_and_ends_or_requeues(
    slurm: Cluster, blocks: Make, requeue: bool
) -> None:
    mine = blocks('requeue' if requeue else 'scavenger', mode='preemptible', requeue=requeue)
    job = mine.running(
        4,
        walltime_s=None,
        command='trap "echo told; sleep 2; exit 143" TERM; echo ready; while true; do sleep 600; '
        'done',
    )
    slurm.wait(lambda: mine.output().count('ready') == 4)
    before = mine.provider.end_of(job)
    assert before is not None
    other = slurm.submit('--nodes=4', '--time=1', '--partition=batch', seconds=1)
    slurm.wait(lambda: mine.status(job) and (mine.provider.end_of(job) or 0.0) < before - 600)
    if requeue:
        slurm.wait(lambda: 'waits in the queue again' in str(mine.status(job).message))
        assert mine.status(job).state is JobState.PENDING
        assert mine.provider.end_of(job) is None
    else:
        slurm.wait(lambda: mine.status(job).terminal)
        assert mine.status(job).state is JobState.TIMEOUT
        # Slurm calls a job that has ended by itself within the grace time PREEMPTED now and then.
        message = str(mine.status(job).message)
        assert 'gave them back in time' in message or 'was preempted' in message
    assert mine.output().count('told') >= 4  # those that a second SIGTERM still finds say it again
    slurm.wait(lambda: slurm.state(other) == 'COMPLETED')


def test_nodes_that_slurm_preempts_are_asked_for_too(slurm: Cluster, blocks: Make) -> None:
    """It may have chosen the wrong ones, or too few. The block keeps them for the grace time."""
    mine = blocks('scavenger', mode='preemptible')
    stays = 'trap "" TERM; echo ready; sleep 600 & wait; wait'
    job = mine.running(4, walltime_s=None, command=stays)
    slurm.wait(lambda: mine.output().count('ready') == 4)
    other = slurm.submit('--nodes=3', '--time=1', '--partition=batch', seconds=1)
    slurm.wait(lambda: mine.status(job) and mine.site.needed()[0])
    [demand], [held] = mine.site.needed()
    assert demand == NodeDemand(other, 3, frozenset(held.nodes))
    slurm.run('scancel', job)
    slurm.wait(lambda: slurm.state(other) == 'COMPLETED')


def test_a_block_that_is_taken_while_it_starts_has_not_failed(slurm: Cluster, blocks: Make) -> None:
    mine = blocks('scavenger', mode='preemptible')
    told, failed = (mine.open(1, command=f'exit {status}') for status in (143, 3))
    slurm.wait(lambda: all(mine.status(job).terminal for job in (told, failed)))
    assert mine.status(told).state is JobState.TIMEOUT
    assert mine.status(failed).state is JobState.FAILED


@contextmanager
def hung(slurm: Cluster) -> Iterator[None]:
    """slurmctld does not answer, and does not refuse either."""
    pid = slurm.scheduler()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_hanging_scheduler_holds_nobody_up_and_ends_nothing(slurm: Cluster, blocks: Make) -> None:
    mine = blocks(command_s=3.0, unreachable_s=2.0, longest_backoff_s=1.0)
    job = mine.running()
    end = mine.provider.end_of(job)
    with hung(slurm):
        states = set()
        begun = time.monotonic()
        while JobState.UNKNOWN not in states:
            asked = time.monotonic()
            states.add(mine.status(job).state)
            assert time.monotonic() - asked < under_load(4.0)
            assert time.monotonic() - begun < under_load(20.0)
        assert states == {JobState.RUNNING, JobState.UNKNOWN}
        assert mine.provider.end_of(job) == end
        slurm_is_silent = [mine.site.holes() for _ in range(3)]
        assert slurm_is_silent[-1] == ()
    slurm.wait(lambda: mine.status(job).state is JobState.RUNNING)
    with hung(slurm):
        assert mine.provider.cancel([job]) == [
            False
        ]  # which Slurm may still do when it wakes up, so that it is the last thing


def test_the_scheduler_is_asked_beside_and_once_also_for_new_reservations(
    slurm: Cluster, blocks: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ('RESERVATIONS_EVERY_S', 'NODES_EVERY_S'):
        monkeypatch.setattr(queue_watch, name, 60.0)
    ahead_s = [0.0]
    mine = blocks(poll_s=90.0, withdraw_s=1e6, clock=lambda: time.time() + ahead_s[0])
    answered = threading.Event()
    assert not mine.site.ask(answered.set), 'nothing was looked at'
    job = mine.open(4, None)
    slurm.wait(lambda: slurm.state(job) == 'RUNNING')

    def look() -> None:
        mine.status(mine.jobs[0])
        mine.site.needed()
        mine.site.holes()

    look()
    ahead_s[0] = 90.0
    begin = time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(time.time() + 90.0))
    slurm.run(
        *('scontrol', 'create', 'reservation', 'reservationname=course', 'users=root'),
        *('flags=ignore_jobs', f'starttime={begin}', 'duration=9', 'nodes=node01,node02'),
    )
    asked = mine.site.client.commands.copy()
    with hung(slurm):
        assert mine.site.ask(answered.set)
        assert not mine.site.ask(answered.set), 'one question at a time'
        assert not answered.is_set()
    slurm.wait(answered.is_set)
    look()
    assert mine.site.client.commands - asked == {'squeue': 1, 'sinfo': 1, 'scontrol': 1}
    slurm.run('scontrol', 'delete', 'reservationname=course')
    demand = NodeDemand('reservation course', 2, frozenset({'node01', 'node02'}), shared=True)
    assert mine.site.needed()[0] == (demand,), 'it was made after the block had begun'


def test_a_submission_without_an_answer_leaves_no_block_behind(
    slurm: Cluster, blocks: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch was heard, but its answer was lost: the job is found by its name and cancelled."""
    from parsl_freetrain.sites.batch.scheduler_commands import SchedulerSilent

    mine = blocks()
    submit = Slurm.submit

    def lost(self: Slurm, script: object) -> str:
        submit(self, script)  # type: ignore[arg-type]
        raise SchedulerSilent('sbatch did not answer within 10 s')

    monkeypatch.setattr(Slurm, 'submit', lost)
    with pytest.raises(FreeTrainError, match='did not answer'):
        mine.open(1)
    assert len(mine.site.find_blocks()) == 1
    slurm.wait(lambda: mine.site.holes() is not None and not mine.site.find_blocks())


def test_it_is_polite(slurm: Cluster, blocks: Make) -> None:
    mine = blocks(submit_every_s=1000.0, max_waiting=1, poll_s=1000.0)
    mine.site.holes()
    before = mine.site.client.commands.total()
    for _ in range(20):
        assert mine.site.holes()
    assert mine.site.client.commands.total() == before
    mine.open(1)
    assert mine.site.holes() == ()
    with pytest.raises(HoleGone, match='one submission at a time'):
        mine.open(1)
    assert mine.site.client.commands['sbatch'] == 2  # the test at the beginning, and one


def test_what_the_machine_does_not_give_is_refused_before_anything_is_submitted(
    slurm: Cluster,
) -> None:
    batch = {'partition': 'batch'}
    for settings, sentence in (
        ({'partition': 'nosuch'}, r"no partition 'nosuch'; it has batch, debug, requeue, scaven"),
        ({**batch, 'mode': 'preemptible'}, 'not preemptible'),
        ({'partition': 'debug', 'longest_s': 7200}, 'time limit of 600 s'),
        ({**batch, 'constraint': 'h100'}, 'would refuse every block.*feature'),
        ({**batch, 'sbatch_options': ('--nosuch=1',)}, 'would refuse every block.*nosuch'),
    ):
        with pytest.raises(BadInput, match=sentence):
            slurm_site(**settings).start()
    assert slurm.run('squeue', '-h', '-a', '--name=freetrain') == ''


def test_requests_that_can_never_be_met(slurm: Cluster, blocks: Make) -> None:
    mine = blocks('debug')
    for request, sentence in (
        (BlockRequest(3, 300.0), '1 to 2 nodes'),
        (BlockRequest(1, 59.0), '60 s or more'),
        (BlockRequest(0, 300.0), 'at least one node'),
        (BlockRequest(2, 300.0, names=('node01',)), 'as many names'),
    ):
        with pytest.raises(BadInput, match=sentence):
            mine.provider.open_block(request, 'true', 'never')
