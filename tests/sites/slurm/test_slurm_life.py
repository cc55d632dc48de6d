"""The life of blocks and what is known of them: pure."""

import pytest
from parsl.jobs.states import JobState as ParslState

from parsl_freetrain.core.model.types import NodeOffer
from parsl_freetrain.sites.batch.block_shape import Output
from parsl_freetrain.sites.batch.block_table import BatchBlock, BlockTable
from parsl_freetrain.sites.batch.life import (
    BlockLife,
    Seen,
    is_over,
    life_of,
    ran_out_of_memory,
    status_of,
)
from parsl_freetrain.sites.batch.node_windows import OfferLog
from parsl_freetrain.sites.batch.records import BatchJob, JobState


def job(state: JobState, job_id: str = '1', end_s: float | None = 500.0) -> BatchJob:
    return BatchJob(job_id, state, 'batch', 2, 10.0, end_s, (), ('a', 'b'))


@pytest.fixture
def table() -> BlockTable:
    made = BlockTable()
    latest_end_s = 1000.0  # it may have begun later
    place = Output('n', '/o', '/e')
    made.add(BatchBlock('1', 2, 0.0, 100.0, latest_end_s, place, needs_s=120.0))
    return made


@pytest.mark.parametrize(
    ('seen', 'life', 'state'),
    [
        (Seen(), BlockLife.PENDING, ParslState.PENDING),
        (Seen(JobState.PENDING), BlockLife.PENDING, ParslState.PENDING),
        (Seen(JobState.STARTING), BlockLife.PENDING, ParslState.PENDING),
        (Seen(JobState.PENDING, ran=True), BlockLife.REQUEUED, ParslState.PENDING),
        (Seen(JobState.RUNNING, ran=True), BlockLife.RUNNING, ParslState.RUNNING),
        (Seen(JobState.SUSPENDED, ran=True), BlockLife.SUSPENDED, ParslState.HELD),
        (Seen(JobState.ENDING, ran=True), BlockLife.ENDING, ParslState.RUNNING),
        (Seen(JobState.COMPLETED, ran=True), BlockLife.COMPLETED, ParslState.COMPLETED),
        (Seen(JobState.FAILED, ran=True), BlockLife.FAILED, ParslState.FAILED),
        (Seen(JobState.TERMINATED), BlockLife.GIVEN_BACK, ParslState.TIMEOUT),
        (Seen(JobState.TIMED_OUT, ran=True), BlockLife.TIME_LIMIT, ParslState.TIMEOUT),
        (Seen(JobState.PREEMPTED, ran=True), BlockLife.PREEMPTED, ParslState.TIMEOUT),
        (Seen(JobState.FAILED, ran=True, shortened=True), BlockLife.GIVEN_BACK, ParslState.TIMEOUT),
        (Seen(JobState.NODE_FAILED, ran=True), BlockLife.NODE_FAILED, ParslState.TIMEOUT),
        (Seen(JobState.BOOT_FAILED), BlockLife.BOOT_FAILED, ParslState.FAILED),
        (Seen(JobState.OUT_OF_MEMORY, ran=True), BlockLife.OUT_OF_MEMORY, ParslState.FAILED),
        (Seen(JobState.DEADLINE), BlockLife.DEADLINE, ParslState.CANCELLED),
        (Seen(JobState.CANCELLED, ran=True), BlockLife.CANCELLED_BY_OTHERS, ParslState.CANCELLED),
        (
            Seen(JobState.CANCELLED, ran=True, cancelled=True),
            BlockLife.CANCELLED,
            ParslState.CANCELLED,
        ),
        (
            Seen(JobState.CANCELLED, cancelled=True, withdrawn=True),
            BlockLife.WITHDRAWN,
            ParslState.CANCELLED,
        ),
        (Seen(JobState.CANCELLED, ran=True, taken=True), BlockLife.PREEMPTED, ParslState.TIMEOUT),
        (Seen(JobState.UNKNOWN, ran=True), BlockLife.UNREACHABLE, ParslState.UNKNOWN),
    ],
)
def test_states_are_told_apart(seen: Seen, life: BlockLife, state: ParslState) -> None:
    assert life_of(seen) is life
    status = status_of('17', life)
    assert status.state is state
    assert status.message == f'job 17 {life.words}'
    assert is_over(life) == status.terminal
    assert ran_out_of_memory(status) == (life is BlockLife.OUT_OF_MEMORY)


def test_every_life_has_a_sentence_of_its_own() -> None:
    assert len({life.words for life in BlockLife}) == len(BlockLife)


def test_a_running_block_has_the_end_that_the_scheduler_says(table: BlockTable) -> None:
    assert table.end_of('1') is None
    table.take_in([job(JobState.PENDING)], 1.0)
    assert table.end_of('1') is None
    table.take_in([job(JobState.RUNNING, end_s=300.0)], 2.0)
    assert table.end_of('1') == 300.0
    assert not table.late(101.0) and not table.waiting()
    table.take_in([job(JobState.RUNNING, end_s=30.0)], 3.0)  # shortened, or preempted
    assert table.end_of('1') == 30.0
    table.take_in([job(JobState.ENDING, end_s=4.0)], 4.0)  # it has its nodes still
    assert table.end_of('1') == 4.0
    table.take_in([job(JobState.COMPLETED, end_s=4.0)], 5.0)
    assert 'gave them back' in str(table.status('1', 6.0).message)
    assert table.end_of('unknown') is None


def test_a_job_that_is_not_in_the_answer_is_not_over(table: BlockTable) -> None:
    table.take_in([job(JobState.RUNNING, end_s=450.0)], 1.0)
    for at in (10.0, 20.0, 30.0, 449.0):
        table.take_in([], at)
        assert table.status('1', at).state is ParslState.UNKNOWN
    assert list(table.missing()) == ['1']
    # Its time is up, and many answers agree.
    assert table.status('1', 451.0).state is ParslState.TIMEOUT
    table.take_in([job(JobState.RUNNING, end_s=900.0)], 452.0)  # an administrator had extended it
    assert table.status('1', 453.0).state is ParslState.RUNNING


def test_one_answer_without_a_job_never_ends_it(table: BlockTable) -> None:
    table.take_in([], -1.0)
    assert not table.missing(), 'it was asked before the submission'
    table.take_in([job(JobState.RUNNING, end_s=450.0)], 1.0)
    table.take_in([], 1000.0)
    assert table.status('1', 1001.0).state is ParslState.UNKNOWN


def test_silence_makes_blocks_unreachable_but_never_revives_or_ends_them(table: BlockTable) -> None:
    table.take_in([job(JobState.RUNNING)], 1.0)
    status = table.status('1', 2.0, 'squeue did not answer')
    assert status.state is ParslState.UNKNOWN
    assert 'squeue did not answer' in str(status.message)
    table.take_in([job(JobState.TIMED_OUT)], 3.0)
    assert table.status('1', 4.0, 'squeue did not answer').state is ParslState.TIMEOUT


def test_the_accounting_database_settles_it(table: BlockTable) -> None:
    table.take_in([job(JobState.RUNNING)], 1.0)
    table.take_in([], 2.0)
    table.take_in_history({'1': JobState.NODE_FAILED, 'other': JobState.COMPLETED})
    assert table.status('1', 3.0).state is ParslState.TIMEOUT
    assert 'lost a node' in str(table.status('1', 3.0).message)
    assert not table.missing()


def test_only_blocks_that_have_not_started_are_late(table: BlockTable) -> None:
    assert table.late(99.0) == []
    assert table.late(101.0) == ['1']
    table.mark(['1'], withdrawn=True)
    assert table.late(101.0) == []
    table.take_in([job(JobState.CANCELLED)], 102.0)
    assert 'withdrawn' in str(table.status('1', 103.0).message)


def test_a_block_that_waits_for_too_many_nodes_makes_room_for_another(table: BlockTable) -> None:
    assert table.stranded([200.0], 80.0, 3.0) == ['1']
    assert table.stranded([200.0], 80.0, 0.0) == [], 'it was submitted just now'
    assert table.stranded([200.0, 120.0], 80.0, 3.0) == table.stranded([], 80.0, 3.0) == []
    assert table.stranded([200.0, 119.0], 80.0, 3.0) == ['1'], 'one is free for too short a time'
    assert table.stranded([80.0, 80.0], 80.0, 3.0) == ['1'], 'a shorter one could start'
    assert table.stranded([79.0, 79.0], 80.0, 3.0) == []
    table.take_in([job(JobState.STARTING)], 1.0)
    assert table.stranded([200.0], 80.0, 3.0) == [], 'it has its nodes'


def test_blocks_whose_nodes_were_taken_are_deleted_once(table: BlockTable) -> None:
    table.take_in([job(JobState.RUNNING)], 1.0)
    assert table.taken(requeue=False) == []
    table.take_in([job(JobState.SUSPENDED)], 2.0)
    assert table.taken(requeue=True) == table.taken(requeue=False) == ['1']
    table.take_in([job(JobState.PENDING)], 3.0)
    assert (table.taken(requeue=True), table.taken(requeue=False)) == ([], ['1'])
    table.mark(['1'], taken=True)
    assert table.taken(requeue=False) == []
    for at in (4.0, 5.0, 6.0):
        table.take_in([], at)
    assert table.status('1', 7.0).state is ParslState.TIMEOUT, 'without a history, too'


def test_looks_become_offers() -> None:
    log = OfferLog(poll_s=10.0)
    log.note(0.0, ['a', 'b'])
    log.note(10.0, ['a'])
    log.note(20.0, ['a'])
    log.note(100.0, ['a'])  # nobody looked for long
    log.note(110.0, ['a'])
    whole = {(o.node, o.start, o.end) for o in log.between(0, 200)}
    assert whole == {('a', 0, 20), ('b', 0, 10), ('a', 100, 110)}
    part = {(o.node, o.start, o.end) for o in log.between(5, 105)}
    assert part == {('a', 5, 20), ('b', 5, 10), ('a', 100, 105)}
    # The end of a short run, before the next look: its trainings were on no offered nodes.
    assert log.between(105, 115) == (NodeOffer('a', 105, 115),)
