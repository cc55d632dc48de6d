"""What the end of a block means for its nodes."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any, cast

import pytest
from parsl.jobs.states import JobState, JobStatus

from parsl_freetrain import BackfillProvider, LocalSite
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import BlockNodes, BlockRequest, NodeDemand
from parsl_freetrain.executor.block.adoption import AdoptedBlock
from parsl_freetrain.executor.block.block_record import LeavingJobs
from parsl_freetrain.executor.block.blocks import BlockManager
from parsl_freetrain.executor.fragment.worker_tasks import Greeting
from parsl_freetrain.executor.interchange import PIN
from parsl_freetrain.executor.stream import Stream
from parsl_freetrain.sites.batch.life import BlockLife, status_of
from parsl_freetrain.sites.batch.scheduler_commands import SchedulerSilent
from tests.support.parsl_sides import NoParsl


class Told:
    """A subscriber that remembers."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []

    def take(self, event: ev.Event) -> None:
        self.events.append(event)

    def flush(self) -> None:
        pass


def managed(
    site: LocalSite, *subscribers: Told, submit: Any = None, nodes: int = 1, **jobs: str
) -> BlockManager:
    """The blocks of these jobs, by name; given back if their nodes say nothing for 60 s."""
    provider, nobody = BackfillProvider(site, max_blocks=2), cast(Any, None)
    provider._jobs |= dict.fromkeys(jobs.values(), None)
    parsl = NoParsl(submit) if submit else NoParsl()
    made = BlockManager(provider, Stream(subscribers), nobody, '', parsl, join_s=60.0)
    for name, job in jobs.items():
        made.adopt(AdoptedBlock(name, job, BlockRequest(nodes, 600.0)), 0.0)
    return made


def test_the_nodes_of_a_job_that_ran_out_of_memory_are_gone_for_that_reason() -> None:
    for life, how in ((BlockLife.OUT_OF_MEMORY, ev.OUT_OF_MEMORY), (BlockLife.PREEMPTED, 'taken')):
        told = Told()
        blocks = managed(LocalSite(nodes=1), told, b1='7')
        blocks.blocks['b1'].nodes['n1'] = 'node01'
        blocks.poll({'b1': status_of('7', life)}, 1.0)
        assert [event.how for event in told.events if isinstance(event, ev.NodesLeft)] == [how]


class Shared(LocalSite):
    """A site with other people's jobs, which notes what ends."""

    def __init__(self) -> None:
        super().__init__(nodes=1)
        self.told: list[str] = []
        self.cancelled: list[str] = []
        self.asked: list[list[str]] = []
        self.silent = False

    def statuses(self, job_ids: Sequence[str]) -> list[JobStatus]:
        return [JobStatus(JobState.RUNNING) for _ in job_ids]

    def cancel(self, job_ids: Sequence[str]) -> None:
        self.asked.append(list(job_ids))
        if self.silent:
            raise SchedulerSilent('scancel did not answer within 10 s')
        self.cancelled += job_ids

    def ask(self, done: Callable[[], None]) -> bool:
        return False

    def needed(self) -> tuple[tuple[NodeDemand, ...], tuple[BlockNodes, ...]]:
        return (), ()

    def leaving(self, job_ids: Sequence[str]) -> None:
        self.told += job_ids

    def release(self, job_id: str, names: Sequence[str]) -> None:
        pass


def test_an_answer_of_before_its_nodes_joined_does_not_say_that_a_block_is_queued_again() -> None:
    site = Shared()
    blocks = managed(site, b1='7')
    block = blocks.blocks['b1']
    block.nodes['n1'], block.heard_at = 'node01', 5.0
    for asked_at, nodes in ((4.0, {'n1'}), (6.0, set[str]())):
        setattr(site, 'asked_at', asked_at)  # noqa: B010
        blocks.poll({'b1': JobStatus(JobState.PENDING)}, 7.0)
        assert block.nodes.keys() == nodes


def test_nodes_of_others_are_told_to_end_as_soon_as_nothing_of_them_is_awaited() -> None:
    sent: list[dict[str, Any]] = []

    def submit(context: dict[str, Any], _: bytes) -> Any:
        sent.append(context)

    blocks = managed(Shared(), submit=submit, b1='7')
    blocks.blocks['b1'].greeted.add('n1')
    blocks.blocks['b1'].nodes['n1'] = 'node01'
    blocks.result_arrived('n1')
    assert not sent
    blocks.noticed('n1', 1.0)
    blocks.result_arrived('n1')
    assert [context['resource_spec'] for context in sent] == [{PIN: 'n1'}]
    assert sent[0]['task_executor']['f'].endswith('.leave')
    blocks.close(['b1'], 2.0)
    assert sent[1:] == sent[:1]


def test_jobs_have_a_second_to_end_by_themselves_and_failed_cancellations_are_repeated() -> None:
    """Those whose nodes have all joined. The others would take up ``max_blocks`` to their ends."""
    site, now = Shared(), 2.0

    def leaving(silent: bool) -> BlockManager:
        site.told, site.cancelled, site.asked, site.silent = [], [], [], silent
        made = managed(site, joined='7', starting='8')
        made.leaving = LeavingJobs(made._provider, NoParsl(), lambda: now)
        made.blocks['joined'].nodes['n1'] = 'node01'
        made.close(['joined', 'starting'], now)
        return made

    blocks = leaving(silent=False)
    assert (site.told, site.cancelled) == (['7'], ['8'])
    for more_s, cancelled in ((0.5, ['8']), (0.5, ['8', '7']), (1e9, ['8', '7'])):
        now += more_s
        blocks.leaving.cancel(now)
        assert site.cancelled == cancelled
    now = 2.0
    blocks = leaving(silent=True)
    provider, tried = blocks._provider, list[float]()
    while now < 200:
        now += 1
        before = len(site.asked)
        blocks.leaving.cancel(now)
        tried += [now] * (len(site.asked) - before)
    pauses = [later - earlier for earlier, later in pairwise(tried)]
    assert pauses == [10, 20, 30, 30, 30, 30, 30], 'not at once: each may take long'
    assert {len(jobs) for jobs in site.asked[2:]} == {2}, 'one command for all'
    assert (site.cancelled, provider.holes()) == ([], ())
    site.silent = False
    for _ in range(30):
        now += 1
        blocks.leaving.cancel(now)
    blocks.leaving.cancel(math.inf)
    assert sorted(site.cancelled) == ['7', '8'], 'each once'
    assert provider._jobs.keys() == {'7', '8'} and None not in provider._jobs.values()


@pytest.mark.parametrize('heard', ['nothing', 'greeted', 'unusable', 'lost', 'left'])
def test_a_block_whose_nodes_say_nothing_is_given_back(heard: str) -> None:
    """Its first process hangs, a firewall is between, or it was queued again: it would be idle."""
    told, site = Told(), Shared()
    blocks = managed(site, told, nodes=2, b1='7')
    block = blocks.blocks['b1']
    waits, runs = JobStatus(JobState.PENDING), JobStatus(JobState.RUNNING)
    blocks.poll({'b1': waits}, 100.0)
    blocks.poll({'b1': runs}, 200.0)
    if heard in ('greeted', 'unusable'):
        block.greeted.add('n1')
    if heard == 'greeted':
        block.answering['n1'] = 250.0
    elif heard == 'unusable':
        block.unusable.add('n1')
    elif heard in ('lost', 'left'):
        block.managers['node01'] = 'n1'
        block.left |= {'n1'} if heard == 'left' else set()
    if heard == 'left':  # it had answered just before
        (answered := Future[Greeting]()).set_result(Greeting('node01', 0))
        blocks.greeted('b1', 'n1', answered, 201.0)
    blocks.poll({'b1': runs}, 260.0)
    assert 'b1' in blocks.blocks
    blocks.poll({'b1': runs}, 261.0)
    useless = heard in ('nothing', 'unusable', 'left')
    assert ('b1' in blocks.blocks) == (not useless)
    refused = [event.error for event in told.events if isinstance(event, ev.BlockRefused)]
    if useless:
        assert site.cancelled == ['7']
        assert refused and 'no node of block b1 has joined within 60 s of its start' in refused[0]
    else:
        assert not site.cancelled and not refused


def test_a_node_whose_worker_never_answers_holds_no_block() -> None:
    """A worker is stopped, or a file system hangs, on it and on one that is behind its end."""
    told, site = Told(), Shared()
    blocks = managed(site, told, b1='7')
    block, runs = blocks.blocks['b1'], {'b1': JobStatus(JobState.RUNNING)}
    block.greeted |= {'n1', 'n2'}
    block.answering.update(n1=100.0, n2=100.0)
    blocks.poll(runs, 160.0)
    assert not site.cancelled
    blocks.poll(runs, 161.0)
    assert site.cancelled == ['7']
    (why,) = [event.error for event in told.events if isinstance(event, ev.NodeUnusable)]
    assert why == 'its worker has not answered its first task within 60 s'
