"""The life of blocks and what is known of them: pure."""

from __future__ import annotations

import pytest
from parsl.jobs.states import JobState

from parsl_freetrain.sites.batch.book import Block, Book
from parsl_freetrain.sites.batch.life import Life, Seen, is_over, life_of, status_of
from parsl_freetrain.sites.batch.offers import OfferLog
from parsl_freetrain.sites.batch.records import Job
from parsl_freetrain.sites.batch.shape import Place


def job(state: str, job_id: str = '1', end_s: float | None = 500.0) -> Job:
    return Job(job_id, state, 'batch', 2, 10.0, end_s, (), ('a', 'b'))


@pytest.fixture
def book() -> Book:
    made = Book()
    made.add(Block('1', 2, submitted_s=0.0, start_by_s=100.0, latest_end_s=400.0, place=Place('n', '/o', '/e')))
    return made


@pytest.mark.parametrize(('seen', 'life', 'state'), [
    (Seen(), Life.PENDING, JobState.PENDING),
    (Seen('PENDING'), Life.PENDING, JobState.PENDING),
    (Seen('CONFIGURING'), Life.PENDING, JobState.PENDING),
    (Seen('PENDING', ran=True), Life.REQUEUED, JobState.PENDING),
    (Seen('RUNNING', ran=True), Life.RUNNING, JobState.RUNNING),
    (Seen('SUSPENDED', ran=True), Life.RUNNING, JobState.RUNNING),
    (Seen('COMPLETING', ran=True), Life.ENDING, JobState.RUNNING),
    (Seen('COMPLETED', ran=True), Life.COMPLETED, JobState.COMPLETED),
    (Seen('FAILED', ran=True), Life.FAILED, JobState.FAILED),
    (Seen('TIMEOUT', ran=True), Life.TIME_LIMIT, JobState.TIMEOUT),
    (Seen('PREEMPTED', ran=True), Life.PREEMPTED, JobState.TIMEOUT),
    (Seen('FAILED', ran=True, shortened=True), Life.GIVEN_BACK, JobState.TIMEOUT),
    (Seen('NODE_FAIL', ran=True), Life.NODE_FAILED, JobState.TIMEOUT),
    (Seen('BOOT_FAIL'), Life.BOOT_FAILED, JobState.FAILED),
    (Seen('OUT_OF_MEMORY', ran=True), Life.OUT_OF_MEMORY, JobState.FAILED),
    (Seen('DEADLINE'), Life.DEADLINE, JobState.CANCELLED),
    (Seen('CANCELLED', ran=True), Life.CANCELLED_BY_OTHERS, JobState.CANCELLED),
    (Seen('CANCELLED', ran=True, cancelled=True), Life.CANCELLED, JobState.CANCELLED),
    (Seen('CANCELLED', cancelled=True, withdrawn=True), Life.WITHDRAWN, JobState.CANCELLED),
    (Seen('A_NEW_STATE', ran=True), Life.UNREACHABLE, JobState.UNKNOWN),
])
def test_states_are_told_apart(seen: Seen, life: Life, state: JobState) -> None:
    assert life_of(seen) is life
    status = status_of('17', life)
    assert status.state is state
    assert status.message == f'job 17 {life.value}'
    assert is_over(life) == status.terminal


def test_every_life_has_a_sentence_of_its_own() -> None:
    assert len({life.value for life in Life}) == len(Life)


def test_a_running_block_has_the_end_that_the_scheduler_says(book: Book) -> None:
    assert book.end_of('1') is None
    book.take_in([job('PENDING')], 1.0)
    assert book.end_of('1') is None
    book.take_in([job('RUNNING', end_s=300.0)], 2.0)
    assert book.end_of('1') == 300.0
    book.take_in([job('RUNNING', end_s=30.0)], 3.0)     # shortened, or preempted
    assert book.end_of('1') == 30.0
    book.take_in([job('COMPLETING', end_s=4.0)], 4.0)
    assert book.end_of('1') is None
    book.take_in([job('COMPLETED', end_s=4.0)], 5.0)
    assert 'gave them back' in str(book.status('1', 6.0).message)
    assert book.end_of('unknown') is None


def test_a_job_that_is_not_in_the_answer_is_not_over(book: Book) -> None:
    book.take_in([job('RUNNING', end_s=450.0)], 1.0)
    for at in (10.0, 20.0, 30.0, 449.0):
        book.take_in([], at)
        assert book.status('1', at).state is JobState.UNKNOWN
    assert book.missing() == ['1']
    # Its time is up, and many answers agree.
    assert book.status('1', 451.0).state is JobState.TIMEOUT
    book.take_in([job('RUNNING', end_s=900.0)], 452.0)   # an administrator had extended it
    assert book.status('1', 453.0).state is JobState.RUNNING


def test_one_answer_without_a_job_never_ends_it(book: Book) -> None:
    book.take_in([job('RUNNING', end_s=450.0)], 1.0)
    book.take_in([], 1000.0)
    assert book.status('1', 1001.0).state is JobState.UNKNOWN


def test_an_answer_from_before_the_submission_says_nothing(book: Book) -> None:
    book.take_in([], -1.0)
    assert book.missing() == []


def test_silence_makes_blocks_unreachable_but_never_revives_or_ends_them(book: Book) -> None:
    book.take_in([job('RUNNING')], 1.0)
    status = book.status('1', 2.0, 'squeue did not answer')
    assert status.state is JobState.UNKNOWN
    assert 'squeue did not answer' in str(status.message)
    book.take_in([job('TIMEOUT')], 3.0)
    assert book.status('1', 4.0, 'squeue did not answer').state is JobState.TIMEOUT


def test_the_accounting_database_settles_it(book: Book) -> None:
    book.take_in([job('RUNNING')], 1.0)
    book.take_in([], 2.0)
    book.take_in_history({'1': 'NODE_FAIL', 'other': 'COMPLETED'})
    assert book.status('1', 3.0).state is JobState.TIMEOUT
    assert 'lost a node' in str(book.status('1', 3.0).message)
    assert book.missing() == []


def test_only_blocks_that_have_not_started_are_late(book: Book) -> None:
    assert book.late(99.0) == []
    assert book.late(101.0) == ['1']
    book.mark(['1'], withdrawn=True)
    assert book.late(101.0) == []
    book.take_in([job('CANCELLED')], 102.0)
    assert 'withdrawn' in str(book.status('1', 103.0).message)


def test_running_blocks_are_not_late(book: Book) -> None:
    book.take_in([job('RUNNING')], 50.0)
    assert book.late(101.0) == []
    assert book.waiting() == []


def test_looks_become_offers() -> None:
    log = OfferLog(gap_s=30.0)
    log.note(0.0, ['a', 'b'])
    log.note(10.0, ['a'])
    log.note(20.0, ['a'])
    log.note(100.0, ['a'])       # nobody looked for long
    log.note(110.0, ['a'])
    assert {(o.node, o.start, o.end) for o in log.between(0, 200)} == {('a', 0, 20), ('b', 0, 10), ('a', 100, 110)}
    assert {(o.node, o.start, o.end) for o in log.between(5, 105)} == {('a', 5, 20), ('b', 5, 10), ('a', 100, 105)}
