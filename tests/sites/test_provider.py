from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from parsl.executors import HighThroughputExecutor
from parsl.jobs.states import JobState, JobStatus

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.sites.idle_schedule import IdleInterval, Schedule
from parsl_freetrain.sites.local import LocalSite
from parsl_freetrain.sites.provider import BackfillProvider


class Moody(LocalSite):
    """A real site whose scheduler stops answering."""

    def __init__(self) -> None:
        super().__init__(3)
        self.mood = 'well'
        self.asked: list[list[str]] = []

    def statuses(self, job_ids: Sequence[str]) -> list[JobStatus]:
        self.asked.append(list(job_ids))
        if self.mood == 'raises':
            raise OSError('the scheduler does not answer')
        answers = super().statuses(job_ids)
        return answers[1:] if self.mood == 'forgets one' else answers

    def cancel(self, job_ids: Sequence[str]) -> None:
        if self.mood == 'raises':
            raise OSError('the scheduler does not answer')
        super().cancel(job_ids)


@pytest.fixture
def moody(tmp_path: Path) -> Iterator[tuple[Moody, BackfillProvider, list[str]]]:
    site = Moody()
    site.start()
    provider = BackfillProvider(site)
    provider.script_dir = str(tmp_path)
    jobs = [provider.open_block(BlockRequest(1), 'sleep 600', f'block{i}') for i in range(2)]
    yield site, provider, jobs
    site.mood = 'well'
    provider.cancel(jobs)


@pytest.mark.parametrize('mood', ['raises', 'forgets one'])
def test_could_not_ask_is_unknown(
    moody: tuple[Moody, BackfillProvider, list[str]], mood: str
) -> None:
    site, provider, jobs = moody
    site.mood = mood
    for status in provider.status(jobs):
        assert status.state == JobState.UNKNOWN
        assert not status.terminal
    assert sum(hole.nodes for hole in provider.holes()) == 1
    site.mood = 'well'
    assert [status.state for status in provider.status(jobs)] == [JobState.RUNNING] * 2


def test_a_failed_cancel_is_told_block_stays(
    moody: tuple[Moody, BackfillProvider, list[str]],
) -> None:
    site, provider, jobs = moody
    site.mood = 'raises'
    assert provider.cancel(jobs) == [False, False]
    site.mood = 'well'
    assert [status.state for status in provider.status(jobs)] == [JobState.RUNNING] * 2
    assert provider.cancel(jobs) == [True, True]
    assert [status.state for status in provider.status(jobs)] == [JobState.CANCELLED] * 2


def test_what_is_over_is_not_asked_again(moody: tuple[Moody, BackfillProvider, list[str]]) -> None:
    site, provider, jobs = moody
    provider.cancel(jobs[:1])
    site.asked.clear()
    provider.status([*jobs, 'not ours'])
    assert site.asked == [jobs[1:]]
    assert provider.status(['not ours'])[0].state == JobState.UNKNOWN
    assert provider.cancel(['not ours']) == [False]
    assert provider.cancel(jobs[:1]) == [True]


def test_no_more_blocks_than_allowed(tmp_path: Path) -> None:
    site = LocalSite(2)
    site.start()
    provider = BackfillProvider(site, max_blocks=1)
    provider.script_dir = str(tmp_path)
    job = provider.open_block(BlockRequest(1), 'sleep 600', 'block')
    assert provider.holes() == ()
    with pytest.raises(FreeTrainError, match='max_blocks'):
        provider.open_block(BlockRequest(1), 'sleep 600', 'block')
    provider.cancel([job])
    assert sum(hole.nodes for hole in provider.holes()) == 2


def test_how_short_a_hole_may_be_is_not_for_the_provider_to_say() -> None:
    """The controller measures it, and then uses holes that are shorter than ``min_hole_s``."""
    schedule = Schedule([IdleInterval(0, 50, 'a'), IdleInterval(0, 500, 'b')])
    site = LocalSite(2, schedule, taken='known')
    site.start()
    provider = BackfillProvider(site, min_hole_s=200)
    assert [hole.names for hole in provider.holes()] == [('a',), ('b',)]


def test_parsls_scaling_is_refused_with_a_sentence() -> None:
    provider = BackfillProvider(LocalSite(2))
    assert (provider.init_blocks, provider.min_blocks) == (0, 0)
    assert (provider.parallelism, provider.nodes_per_block) == (0, 1)
    assert (provider.cores_per_node, provider.mem_per_node) == (None, None)
    assert provider.status_polling_interval == provider.site.poll_s
    with pytest.raises(BadInput, match='FreeTrainExecutor, which calls open_block'):
        provider.submit('true', 1)


def test_another_executor_cannot_scale_with_it(tmp_path: Path) -> None:
    executor = HighThroughputExecutor(provider=BackfillProvider(LocalSite(2)))
    executor.launch_cmd = '{block_id}'
    assert executor.scale_out_facade(1) == []
    [status] = executor.status_facade.values()
    assert (status.state, 'give other executors' in str(status.message)) == (JobState.FAILED, True)


def test_bad_arguments() -> None:
    with pytest.raises(BadInput, match='max_blocks'):
        BackfillProvider(LocalSite(2), max_blocks=0)
    with pytest.raises(BadInput, match='min_hole_s'):
        BackfillProvider(LocalSite(2), min_hole_s=-1)
    with pytest.raises(BadInput, match='must be a Site'):
        BackfillProvider('local')  # type: ignore[arg-type]
