from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typeguard
from parsl.jobs.states import JobState, JobStatus

from parsl_freetrain.core.errors import BadInput, FreeTrainError
from parsl_freetrain.core.words import BlockRequest
from parsl_freetrain.sites.local import LocalSite
from parsl_freetrain.sites.provider import BackfillProvider
from parsl_freetrain.sites.schedule import IdleInterval, Schedule
from parsl_freetrain.sites.slot_provider import SlotProvider
from tests.support.waiting import wait_until


class Moody(SlotProvider):
    """A real provider whose scheduler stops answering."""

    def __init__(self) -> None:
        super().__init__()
        self.mood = 'well'
        self.asked: list[list[str]] = []

    def status(self, job_ids: Sequence[Any]) -> list[JobStatus]:
        self.asked.append(list(job_ids))
        if self.mood == 'raises':
            raise OSError('the scheduler does not answer')
        answers: list[Any] = super().status(job_ids)
        if self.mood == 'forgets one':
            return answers[1:]
        if self.mood == 'shrugs':
            return [None] * len(answers)  # type: ignore[list-item]
        return answers

    def cancel(self, job_ids: Sequence[Any]) -> list[bool]:
        if self.mood == 'raises':
            raise OSError('the scheduler does not answer')
        return super().cancel(job_ids)


@pytest.fixture
def moody(tmp_path: Path) -> Iterator[tuple[Moody, BackfillProvider, list[str]]]:
    site, wrapped = LocalSite(3), Moody()
    site.start()
    provider = BackfillProvider(site, wrapped, min_hole_s=0)
    provider.script_dir = str(tmp_path)
    jobs = [provider.open_block('sleep 600', BlockRequest(1), f'block{i}') for i in range(2)]
    yield wrapped, provider, jobs
    wrapped.mood = 'well'
    provider.cancel(jobs)


@pytest.mark.parametrize('mood', ['raises', 'forgets one', 'shrugs'])
def test_could_not_ask_is_unknown_and_never_over(moody: tuple[Moody, BackfillProvider, list[str]], mood: str) -> None:
    wrapped, provider, jobs = moody
    wrapped.mood = mood
    for status in provider.status(jobs):
        assert status.state == JobState.UNKNOWN
        assert not status.terminal
    assert sum(hole.nodes for hole in provider.holes()) == 1
    wrapped.mood = 'well'
    assert [status.state for status in provider.status(jobs)] == [JobState.RUNNING] * 2


def test_a_failed_cancel_is_told_and_the_block_stays_open(moody: tuple[Moody, BackfillProvider, list[str]]) -> None:
    wrapped, provider, jobs = moody
    wrapped.mood = 'raises'
    assert provider.cancel(jobs) == [False, False]
    wrapped.mood = 'well'
    assert [status.state for status in provider.status(jobs)] == [JobState.RUNNING] * 2
    assert provider.cancel(jobs) == [True, True]
    assert [status.state for status in provider.status(jobs)] == [JobState.CANCELLED] * 2


def test_what_is_over_is_not_asked_about_again(moody: tuple[Moody, BackfillProvider, list[str]]) -> None:
    wrapped, provider, jobs = moody
    provider.cancel(jobs[:1])
    wrapped.asked.clear()
    provider.status([*jobs, 'not ours'])
    assert wrapped.asked == [jobs[1:]]
    assert provider.status(['not ours'])[0].state == JobState.UNKNOWN
    assert provider.cancel(['not ours']) == [False]
    assert provider.cancel(jobs[:1]) == [True]


def test_the_end_of_a_block_is_passed_to_the_site(tmp_path: Path) -> None:
    site = LocalSite(2, Schedule([IdleInterval(0, 600, 'a'), IdleInterval(0, 600, 'b')]), taken='known')
    site.start()
    provider = BackfillProvider(site)
    provider.script_dir = str(tmp_path)
    end = provider.holes()[0].until_s
    job = provider.open_block('true', BlockRequest(1, names=('a',)), 'block')
    assert provider.end_of(job) == end
    assert provider.holes()[0].names == ('b',)
    wait_until(lambda: provider.status([job])[0].terminal)
    assert sum(hole.nodes for hole in provider.holes()) == 2


def test_short_holes_and_more_blocks_than_allowed_are_left_out(tmp_path: Path) -> None:
    schedule = Schedule([IdleInterval(0, 100, 'a'), IdleInterval(0, 400, 'b'), IdleInterval(0, 500, 'c'), IdleInterval(0, 500, 'd')])
    site = LocalSite(4, schedule, taken='known')
    site.start()
    provider = BackfillProvider(site, min_hole_s=200, max_blocks=1)
    provider.script_dir = str(tmp_path)
    assert [hole.names for hole in provider.holes()] == [('c', 'd')]
    job = provider.open_block('sleep 600', BlockRequest(1, names=('c',)), 'block')
    assert provider.holes() == ()
    with pytest.raises(FreeTrainError, match='max_blocks'):
        provider.open_block('sleep 600', BlockRequest(1, names=('d',)), 'block')
    provider.cancel([job])
    assert len(provider.holes()) == 1


def test_parsls_strategy_cannot_scale_it() -> None:
    provider = BackfillProvider(LocalSite(2))
    assert (provider.init_blocks, provider.min_blocks, provider.parallelism, provider.nodes_per_block) == (0, 0, 0, 1)
    assert (provider.cores_per_node, provider.mem_per_node) == (None, None)
    assert provider.status_polling_interval == provider.site.poll_s
    with pytest.raises(FreeTrainError, match='open_block'):
        provider.submit('true', 1)


def test_it_shows_how_it_was_made() -> None:
    text = repr(BackfillProvider(LocalSite(2), max_blocks=3))
    assert text.startswith('BackfillProvider(')
    assert 'LocalSite(nodes=2' in text
    assert 'max_blocks=3' in text


def test_bad_arguments() -> None:
    with pytest.raises(BadInput, match='max_blocks'):
        BackfillProvider(LocalSite(2), max_blocks=0)
    with pytest.raises(BadInput, match='min_hole_s'):
        BackfillProvider(LocalSite(2), min_hole_s=-1)
    with pytest.raises(typeguard.TypeCheckError):
        BackfillProvider('local')  # type: ignore[arg-type]
