"""How often the scheduler is asked while it does not answer, and what waits for it."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
from parsl.jobs.states import JobState as ParslState

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites.batch import tracker as tracking
from parsl_freetrain.sites.batch.block_shape import Output
from parsl_freetrain.sites.batch.block_table import BatchBlock
from parsl_freetrain.sites.batch.node_windows import Wanted
from parsl_freetrain.sites.batch.options import BatchOptions
from parsl_freetrain.sites.batch.queue_watch import QUEUE_EVERY_S, QueueWatch
from parsl_freetrain.sites.batch.records import BatchJob, JobState, NodeReservation, Nodes
from parsl_freetrain.sites.batch.records import Partition as Queue
from parsl_freetrain.sites.batch.scheduler_commands import SchedulerSilent, own_name
from parsl_freetrain.sites.batch.tracker import BlockTracker
from tests.support.waiting import LIMIT_S, wait_until

BLOCK = BatchBlock('1', 1, 0.0, 100.0, 10_000.0, Output('n', '/o', '/e'))


class Scripted:
    """A scheduler with a clock of its own."""

    label = 'Scripted'
    step_s = 60
    nodes_every_s = 0.0
    history_every_s = 60.0

    def __init__(self) -> None:
        self.now = 0.0
        self.silent_s: float | None = None  # then it gives no answer, after so many seconds
        self.asked: list[float] = []
        self.answered = threading.Event()
        self.asked_in: list[threading.Thread] = []
        self.queue: tuple[BatchJob, ...] = ()
        self.there: tuple[Nodes, ...] = ()
        self.cancels = False  # else it does not answer
        self.cancelled: list[tuple[float, list[str]]] = []

    def clock(self) -> float:
        return self.now

    def wanted(self) -> Wanted:
        return Wanted('batch')

    def jobs(self) -> tuple[BatchJob, ...]:
        self.asked.append(self.now)
        if self.silent_s is not None:
            self.now += self.silent_s
            raise SchedulerSilent('squeue did not answer')
        return self.queue

    def nodes(self) -> tuple[Nodes, ...]:
        return self.there

    def reservations(self) -> tuple[NodeReservation, ...]:
        return ()

    def cancel(self, job_ids: Sequence[str]) -> None:
        self.cancelled.append((self.now, list(job_ids)))
        if not self.cancels:
            raise SchedulerSilent('scancel did not answer')

    def history(self, places: dict[str, Output]) -> dict[str, JobState]:
        self.asked_in.append(threading.current_thread())
        if threading.current_thread() is not threading.main_thread():
            assert self.answered.wait(LIMIT_S)
        return dict.fromkeys(places, JobState.COMPLETED)


@pytest.fixture
def scheduler() -> Iterator[Scripted]:
    yield (made := Scripted())
    made.answered.set()
    for thread in set(made.asked_in) - {threading.current_thread()}:
        thread.join()


@pytest.fixture
def tracker(scheduler: Scripted) -> BlockTracker:
    made = BlockTracker(cast(Any, scheduler), BatchOptions(), scheduler.clock, set())
    made.add([BLOCK])
    return made


@pytest.mark.parametrize('silent_s', [0.0, 10.0])
def test_a_silent_scheduler_is_asked_again_soon_while_blocks_are_open(
    scheduler: Scripted, tracker: BlockTracker, silent_s: float
) -> None:
    """Someone may wait for their nodes when it answers again: that is seen a poll later."""

    def pauses() -> list[float]:
        """Between the end of a question and the next one, in two hours of asking every 10 s."""
        scheduler.asked.clear()
        end = scheduler.now + 7200
        while scheduler.now < end:
            scheduler.now += 10
            tracker.statuses(['1'])
        return [later - earlier - silent_s for earlier, later in pairwise(scheduler.asked)]

    scheduler.silent_s = silent_s
    assert max(pauses()) <= 10
    tracker.remove('1')
    assert max(pauses()) >= 300
    tracker.add([BLOCK])
    assert max(pauses()[1:]) <= 10


@pytest.mark.parametrize('state', [JobState.RUNNING, JobState.ENDING])
def test_whatever_runs_for_parsl_has_an_end(
    scheduler: Scripted, tracker: BlockTracker, state: JobState
) -> None:
    """An end that is unknown would count as none."""
    scheduler.now = 10.0
    scheduler.queue = (BatchJob('1', state, 'batch', 1, 0.0, 300.0, names=('n1',)),)
    assert tracker.statuses(['1'])[0].state is ParslState.RUNNING
    assert tracker.end_of('1') == 300.0


def test_a_slow_database_holds_nothing_up(
    scheduler: Scripted, tracker: BlockTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, 'HISTORY_S', 0.0)
    for _ in range(20):
        scheduler.now += 10
        [status] = tracker.statuses(['1'])
        assert status.state is ParslState.UNKNOWN
    [thread] = scheduler.asked_in  # and not a second one while it has not answered
    assert thread is not threading.current_thread()
    scheduler.answered.set()
    wait_until(lambda: tracker.statuses(['1'])[0].state is ParslState.COMPLETED)


@pytest.mark.parametrize('stray', [False, True])
def test_a_job_that_cannot_be_cancelled_is_tried_less_often(
    scheduler: Scripted, stray: bool
) -> None:
    """A block that did not start in time, or whose submission got no answer in ``command_s``."""
    unanswered = {'lost'} if stray else set()
    tracker = BlockTracker(cast(Any, scheduler), BatchOptions(), scheduler.clock, unanswered)
    tracker.add([] if stray else [BLOCK])
    name = 'lost' if stray else BLOCK.place.name
    scheduler.queue = (BatchJob('1', JobState.PENDING, 'batch', 1, user=own_name(), name=name),)

    def look(hours: float) -> list[float]:
        scheduler.cancelled.clear()
        end = scheduler.now + hours * 3600
        while scheduler.now < end:
            scheduler.now += 10
            tracker.statuses([] if stray else ['1'])
        assert all(job_ids == ['1'] for _, job_ids in scheduler.cancelled)
        return [at for at, _ in scheduler.cancelled]

    pauses = [later - earlier for earlier, later in pairwise(look(2))]
    assert pauses == sorted(pauses) and pauses[0] <= 20 and 300 <= pauses[-1] <= 310
    scheduler.cancels = True
    assert len(look(1)) == 1
    assert not unanswered


def test_clock_that_was_set_back_makes_no_pause(scheduler: Scripted, tracker: BlockTracker) -> None:
    """The times of the last answers are still to come then, and those of the next tries."""

    def asked() -> int:
        scheduler.asked.clear()
        for _ in range(20):
            scheduler.now += 10
            tracker.statuses(['1'])
        return len(scheduler.asked)

    name = BLOCK.place.name
    scheduler.now = 10_000.0
    scheduler.queue = (BatchJob('1', JobState.PENDING, 'batch', 1, user=own_name(), name=name),)
    before = asked()
    scheduler.now -= 3600
    tries = len(scheduler.cancelled)
    assert asked() == before >= 10
    assert len(scheduler.cancelled) > tries


def test_the_queue_is_played_before_an_answer(scheduler: Scripted, tracker: BlockTracker) -> None:
    """Not by the event loop, which that may hold up for a second."""
    tracker.snapshot()
    scheduler.now += 60.0
    answered = threading.Event()
    assert tracker.ask(answered.set)
    assert answered.wait(LIMIT_S)
    assert tracker.snapshot() is tracker._needs[0]


def test_partly_used_nodes_on_which_a_job_does_not_start_do_not_suit_it(
    scheduler: Scripted, tracker: BlockTracker
) -> None:
    """What it lacks there is not told. Nodes of ours serve it before it is ignored."""
    there = ('a', 'mixed'), ('b', 'allocated')
    scheduler.there = tuple(Nodes('batch', (name,), state, cpus=4) for name, state in there)
    running = BatchJob('5', JobState.RUNNING, 'batch', 1, 0.0, 9e9, names=('a',), cpus=1)
    mine = replace(running, job_id=BLOCK.job_id, names=('b',), user=own_name(), cpus=0)
    scheduler.queue = running, mine, BatchJob('7', JobState.PENDING, 'batch', 1, cpus=1)
    given = []
    while scheduler.now < 4 * BatchOptions().start_s:
        scheduler.now += 15.0
        snapshot = tracker.watch.look(True, newer_than=scheduler.now - 1.0)
        given.append(sum(demand.nodes for demand in tracker.needs(snapshot).demands))
    assert given == [0, 0, 0, 0, 0, 0, 1, 1]


def test_why_a_block_never_starts_is_said(
    scheduler: Scripted, tracker: BlockTracker, caplog: pytest.LogCaptureFixture
) -> None:
    job = BatchJob(BLOCK.job_id, JobState.PENDING, 'batch', 1, reason='QOSMaxNodePerUserLimit')
    scheduler.queue, scheduler.now = (replace(job, blocked=True),), BLOCK.start_by_s + 1.0
    tracker.statuses([BLOCK.job_id])
    assert 'did not start: Scripted says QOSMaxNodePerUserLimit' in caplog.text


def test_how_long_a_start_takes_is_measured(scheduler: Scripted, tracker: BlockTracker) -> None:
    """After three blocks, and never longer than was assumed."""
    took = [4.0, 6.0, 5.0, 1000.0]
    for number, seconds in enumerate(took):
        assert tracker.start_s == (30.0 if number < 3 else 8.0)
        job = str(number + 10)
        tracker.add([replace(BLOCK, job_id=job, submitted_s=scheduler.now)])
        start_s = scheduler.now + seconds
        running = BatchJob(job, JobState.RUNNING, 'batch', 1, start_s, names=(job,))
        scheduler.queue = (*scheduler.queue, running)
        scheduler.now = start_s + 20.0
        tracker.statuses([job])
        tracker.statuses([job])
    assert tracker.start_s == 30.0


def test_a_queue_that_is_stopped_for_a_while_is_used_again_afterwards() -> None:
    """It was looked up once: a run that began in a maintenance was idle for ever."""
    scheduler: Any = Scripted()
    watch = QueueWatch(scheduler, BatchOptions(poll_s=1.0), scheduler.clock)
    stopped = Queue('q', up=False)
    told: list[Any] = [stopped, stopped, Queue('q'), BadInput('It takes no jobs.')]

    def queue() -> Any:
        if isinstance(found := told.pop(0), BadInput):
            raise found
        return found

    scheduler.jobs, scheduler.queue = tuple, queue
    watch.queue()
    for starts in (False, True, False):
        scheduler.now += QUEUE_EVERY_S
        watch.look(with_nodes=True, wait_s=LIMIT_S)
        assert watch.starts_jobs is starts and not watch.failures
